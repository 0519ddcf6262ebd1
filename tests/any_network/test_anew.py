"""Norms that are put in anew must train as the old ones do; what fails is left as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from foreign_norms import MAPS, ROWS, TOKENS, C
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import normexp
from normexp.any_network import anew
from normexp.errors import UserError
from normexp.norms.site import names_as_built


def frozen_shift() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(C)
    norm.bias.requires_grad_(False)
    return norm


class Averaged(nn.Module):
    """A network beside an averaged copy of itself, which no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.target(x)
        return self.online(x), target


class Checkpointed(nn.Sequential):
    """Runs its forward again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]


def tied() -> nn.Sequential:
    network = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.LayerNorm(C))
    network[2].weight = network[0].weight
    return network


# A network, an input, and the shipped norm that its norms are.
ALIKE: dict[str, tuple[nn.Module, Tensor, str]] = {
    "frozen shift": (nn.Sequential(nn.Linear(C, C), frozen_shift()), ROWS, "batch"),
    "no shift": (nn.Sequential(nn.LayerNorm(C, bias=False)), TOKENS, "layer"),
    "tied gains": (tied(), TOKENS, "layer"),
    "no momentum": (nn.Sequential(nn.BatchNorm1d(C, momentum=None)), ROWS, "batch"),
    "averaged copy": (Averaged(), ROWS, "batch"),
    "checkpointing": (Checkpointed(nn.Linear(C, C), nn.BatchNorm1d(C)), ROWS, "batch"),
    "synchronized": (nn.Sequential(nn.SyncBatchNorm(C)), MAPS, "batch"),
    "spectral norm": (
        nn.Sequential(spectral_norm(nn.Linear(C, C)), nn.BatchNorm1d(C)), ROWS, "batch"
    ),
}  # fmt: skip


def trained(network: nn.Module, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Its outputs in evaluation and its state, by names as built, after steps with weight decay."""
    network = copy.deepcopy(network).train()
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        outputs = network(x + step)
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        (first - 1).pow(3).mean().backward()
        optimizer.step()
    names = names_as_built(network)
    state = {names[name]: value for name, value in network.state_dict().items()}
    return network.eval()(x), state


@pytest.mark.parametrize("name", ALIKE)
def test_its_own_norms_put_in_anew_train_alike(name: str) -> None:
    network, x, norm = ALIKE[name]
    new = normexp.replace_norms(network, norm, x)
    assert "Site" in str(new)
    for expected, found in zip(trained(network, x), trained(new, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    names = names_as_built(new)
    was_trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert {names[n] for n, p in new.named_parameters() if p.requires_grad} == was_trained


def test_gain_and_shift_are_two_facts_for_every_new_norm() -> None:
    network, x, _ = ALIKE["frozen shift"]
    new = normexp.replace_norms(network, "group1", x)
    assert [p.requires_grad for p in new[1].parameters()] == [True, False]  # type: ignore[index]
    new = normexp.replace_norms(ALIKE["no shift"][0], "rms", TOKENS)
    assert len([*new.parameters()]) == 1
    new = normexp.replace_norms(ALIKE["no shift"][0], "torch.nn.LayerNorm", TOKENS)
    assert len([*new.parameters()]) == 1
    new = normexp.replace_norms(tied(), "rms", TOKENS)
    assert new[0].norm.weight is new[2].norm.weight  # type: ignore[union-attr,index]


def test_what_the_old_norm_lacks_the_new_one_lacks_too() -> None:
    bare = nn.RMSNorm(C, elementwise_affine=False)
    for norm in ("rms", "layer"):
        new = normexp.replace_norms(nn.Sequential(bare, nn.Linear(C, C)), norm, TOKENS)
        assert [name for name, _ in new.named_parameters()] == ["1.weight", "1.bias"]


class Aliased(nn.Module):
    """One norm under two names, and gradient checkpointing that runs its forward again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(C, C), nn.BatchNorm1d(C)
        self.stem = nn.Sequential(self.first, self.norm)

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.norm, self.first(x), use_reentrant=True)
        return out  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_norm_under_two_names_is_replaced_once(caplog: pytest.LogCaptureFixture) -> None:
    new = normexp.replace_norms(Aliased(), "batch", ROWS, norm_batch_size=2)
    assert new.norm is new.stem[1] and len(caplog.messages) == 1  # type: ignore[index]


def test_norms_that_have_counted_batches_are_replaced_whatever_their_class() -> None:
    class Counting(nn.BatchNorm1d):
        pass

    network = nn.Sequential(nn.Linear(C, C), Counting(C))
    network(ROWS)
    once = normexp.replace_norms(network, "batch", ROWS)
    assert once[1].norm.num_batches_tracked == 1  # type: ignore[index]
    twice = normexp.replace_norms(once, "layer", ROWS)
    assert not hasattr(twice[1].norm, "running_mean")  # type: ignore[index]


def test_a_second_call_ends_the_split_of_the_first() -> None:
    network = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C)).double()
    x = ROWS.double()
    once = normexp.replace_norms(network, "as_built", x, norm_batch_size=2)
    twice = normexp.replace_norms(once, "as_built", x)
    torch.testing.assert_close(twice.train()(x), copy.deepcopy(network).train()(x))


def test_values_keep_the_precision_of_the_network() -> None:
    network = nn.Sequential(nn.LayerNorm(C)).double()
    nn.init.normal_(network[0].weight)  # type: ignore[arg-type]
    new = normexp.replace_norms(network, "layer", TOKENS.double())
    assert torch.equal(new[0].norm.weight, network[0].weight)  # type: ignore[union-attr,index,arg-type]


class WithoutSamples(nn.Sequential):
    """Normalizes each image as (C, H, W), without an axis of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(WithoutSamples, self).forward(one) for one in x])


def untied_outside() -> nn.Module:
    network = nn.Sequential(nn.BatchNorm1d(C), nn.Linear(C, C))
    network[1].bias = network[0].bias
    return network


@pytest.mark.parametrize(
    ("network", "x", "reason"),
    [
        (WithoutSamples(nn.InstanceNorm2d(C, affine=True)), MAPS, "it fails"),
        (nn.Sequential(nn.InstanceNorm2d(C, track_running_stats=True)), MAPS, "it saves other"),
        (untied_outside(), ROWS, "it shares its parameters otherwise"),
        (nn.Sequential(nn.BatchNorm1d(C, momentum=0.0)), ROWS, "it cannot be built: momentum=0"),
    ],
)
def test_what_trains_otherwise_is_left_as_it_is(
    network: nn.Module, x: Tensor, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=rf'put in anew {reason}.*norm="as_built"'):
        normexp.replace_norms(network, "group1", x)
    other = normexp.replace_norms(nn.Sequential(network, nn.LayerNorm(x.shape[-1])), "rms", x)
    assert "1 LayerNorm" in caplog.text and f"put in anew {reason}" in caplog.text
    assert type(other[0]) is type(network)  # type: ignore[index]


def test_large_inputs_are_recorded_for_fewer_samples(monkeypatch, caplog) -> None:
    network = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))
    monkeypatch.setattr(anew, "MAX_BYTES", 2 * 2 * C * 8)  # of two rows
    normexp.replace_norms(network, "batch", ROWS)
    assert len(caplog.messages) == 1
    monkeypatch.setattr(anew, "MAX_BYTES", 100)
    normexp.replace_norms(network, "batch", ROWS)
    assert "train alike is untried: the inputs of the norms take more than" in caplog.text


def test_a_network_without_a_backward_is_untried(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, *__: Tensor) -> Tensor:
            raise RuntimeError("no backward")

    class Network(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return Stuck.apply(super().forward(x))  # type: ignore[return-value]

    normexp.replace_norms(Network(nn.Linear(C, C), nn.BatchNorm1d(C)), "batch", ROWS)
    assert (
        "whether its own norms train alike is untried: a backward of the model fails: "
        in caplog.text
    )
