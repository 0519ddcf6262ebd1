"""A later position that moves an earlier output is found, its site named, a remedy given."""

from __future__ import annotations

import pytest
import torch
from checks_cases import VOCAB, WIDTH, Hidden, PositionMean, gpt, shipped, text_data
from torch import Tensor, nn

from normexp.checks.causality import Leak, find_leak
from normexp.checks.probing import probe_batch
from normexp.checks.sites import probe_sites
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.none import NoNorm
from normexp.norms.site import View
from normexp.norms.slots import Slots


class LastPosition(nn.Module):
    """Subtracts the last position from all."""

    def forward(self, x: Tensor) -> Tensor:  # (N, C, T)
        return x - x[..., -1:]


class Unmasked(nn.Module):
    """A language model whose positions add their mean on a branch; its norm reads nothing."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = norm.tokens(WIDTH)
        self.residual = norm.residual()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(self.embedding(inputs))
        return self.head(x + self.residual(x.mean(dim=1, keepdim=True)))


def leak_of(network: nn.Module, *, training: bool = False) -> Leak | None:
    batch = probe_batch(text_data(), 4)
    return find_leak(network, probe_sites(network, batch), batch, VOCAB, training=training)


@pytest.mark.parametrize(
    ("name", "view", "remedy"),
    [
        ("instance", "sequence", "norm=causal_instance"),
        ("group", "sequence", "norm=causal_group or norm.view=token"),
        ("layer", "sequence", "norm=causal_group or norm.view=token"),
    ],
)
def test_leak_names_its_sites_and_a_remedy_that_fits(name: str, view: View, remedy: str):
    leak = leak_of(gpt(shipped(name, text_data(), view)))
    assert leak == Leak("blocks.0.attn_norm, blocks.0.mlp_norm, final_norm", remedy)


def test_batch_statistics_in_evaluation_are_a_leak():
    norm = NormFactory(lambda n: BatchNorm(n, track_running_stats=False))
    leak = leak_of(gpt(norm))
    assert leak is not None and "norm.track_running_stats=true" in leak.remedy


def test_leak_behind_a_gate_that_starts_at_zero_is_found():
    network = Hidden(NormFactory(lambda _: PositionMean(), view="sequence"))
    assert leak_of(network) == Leak("norm", "norm=causal_instance")


def test_norm_whose_weight_starts_at_zero_is_found():
    def silent(num_features: int) -> nn.Module:
        norm = nn.GroupNorm(4, num_features)
        nn.init.zeros_(norm.weight)
        return norm

    assert leak_of(gpt(NormFactory(silent, view="sequence"))) is not None


def test_reading_the_last_position_alone_is_found():
    assert leak_of(gpt(NormFactory(lambda _: LastPosition(), view="sequence"))) is not None


@pytest.mark.parametrize("start", [None, 0.0], ids=["plain", "branch_from_zero"])
def test_leak_of_the_model_is_not_blamed_on_its_norm(start: float | None):
    leak = leak_of(Unmasked(NormFactory(NoNorm, slots=Slots(residual_scale=start))))
    assert leak is not None and leak.where == "the model outside its norms"


def test_probes_leave_the_network_and_the_random_state_alone():
    network = gpt(NormFactory(BatchNorm))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    leak_of(network, training=True)
    assert torch.equal(state, torch.get_rng_state())
    after = network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert network.training
    assert not any(module._forward_pre_hooks for module in network.modules())
