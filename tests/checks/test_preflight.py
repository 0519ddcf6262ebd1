"""The reasons to refuse, warn of or mark a network before it trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import broken_norms as broken
import pytest
import torch
from broken_norms import Applies
from checks_cases import (
    WIDTH,
    FlatNet,
    Model,
    PositionMean,
    convnet,
    encoder,
    gpt,
    image_data,
    padded_data,
    shipped,
    text_data,
    text_model,
)
from torch import Tensor, nn
from train_cases import prepare

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.sample import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, NoNorm
from normexp.norms.sequence import BatchNormPerPosition
from normexp.norms.site import named_sites
from normexp.train import main
from normexp.training.batching.copies import copied
from normexp.training.checks.network import BuiltNetwork, smallest_group
from normexp.training.checks.preflight import OUTSIDE, Traits, examine, reaches_of
from normexp.training.checks.training import check_optimizer
from normexp.training.config.sizes import Sizes
from normexp.training.config.slots import Slots
from normexp.training.data.dataset import Data
from normexp.training.optimizer import parameter_groups
from normexp.training.records.result import read_result

LAYER, BATCH, NONE = NormFactory(LayerNorm), NormFactory(BatchNorm), NormFactory(NoNorm)


def traits_of(
    network: nn.Module,
    data: Data | None = None,
    sizes: Sizes | int = 8,
    *,
    drop_last: bool = True,
    allow_leak: bool = False,
) -> Traits:
    """On images by default."""
    sizes = Sizes(sizes) if isinstance(sizes, int) else sizes
    data = data or image_data()
    return examine(network, data, sizes, drop_last=drop_last, allow_leak=allow_leak)


def norm_of(function: Callable[[Tensor], Tensor], view: Any = "token") -> NormFactory:
    """A norm from a function of (N, C, *)."""
    return NormFactory(lambda _: Applies(function), view=view)


# ---------------------------------------------------------------- other samples


def test_batch_norm_on_images():
    traits = traits_of(convnet(BATCH))
    assert traits.mixes_samples and not traits.mixes_samples_in_evaluation
    assert not traits.leaks_future and not traits.leaks_future_in_training
    assert traits.reaches and traits.stacking_obstacle is None and not traits.draws_for_itself
    assert traits.elements_per_sample == 8 * 64 + 16 * 16 + 16 * 16


def test_norm_that_is_frozen_mixes_no_samples():
    traits = traits_of(Frozen(BATCH), sizes=Sizes(8, None, 4))
    assert not traits.mixes_samples and not traits.reaches


def around(before: Callable[..., Tensor], after: Callable[..., Tensor]) -> nn.Module:
    return Model(lambda m, inputs: after(m.net(before(inputs))), net=FlatNet(NONE))


@pytest.mark.parametrize(
    ("network", "where"),
    [
        (convnet(norm_of(broken.ReadsFurther(0, 1))), "norm1, norm2, norm3"),
        (FlatNet(NormFactory(lambda _: broken.MixesInBackward())), "norm1"),
        (around(broken.ReadsFurther(0, 2), nn.Identity()), OUTSIDE),
        (around(nn.Identity(), lambda out: out - out.mean(0)), OUTSIDE),
    ],
    ids=["next", "gradient", "before a norm", "after a norm"],
)
def test_samples_mixed_anywhere_are_found(network: nn.Module, where: str):
    traits = traits_of(network)
    assert traits.mixing == where and traits.mixes_samples
    assert traits.norms_mix_samples == (where != OUTSIDE)


def test_a_norm_that_mixes_in_large_batches_alone_is_found():
    network = convnet(norm_of(broken.splits_large))
    assert traits_of(network, sizes=8).norms_mix_samples
    assert not traits_of(network, sizes=7).mixes_samples


# ---------------------------------------------------------------- refusals


def ignores(m: Any, inputs: Tensor) -> Tensor:
    """Takes `norm` but builds another."""
    return m.head(torch.relu(m.norm1(m.hidden(inputs.flatten(1)))))


def drops(m: Any, inputs: Tensor) -> Tensor:
    """Ignores the output of its site."""
    m.norm2(m.hidden(inputs.flatten(1)))
    return ignores(m, inputs)


def with_own_norm(function: Callable[..., Tensor], **sites: nn.Module) -> nn.Module:
    own = {"hidden": nn.Linear(64, WIDTH), "norm1": nn.BatchNorm1d(WIDTH)}
    return Model(function, **own, head=nn.Linear(WIDTH, 3), **sites)


class Counting(FlatNet):
    """Keeps state outside of its norm."""

    steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        return super().forward(inputs) * (1 + self.steps)


class Frozen(FlatNet):
    """Keeps its norm in evaluation mode while it trains."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm1.eval()
        return self


class Exploding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("no statistics\nsecond line")
        return x * torch.ones(())


STREAMING = NormFactory(lambda _: broken.Streaming())
REFUSED: dict[str, tuple[nn.Module, str]] = {
    **{
        name: (FlatNet(NormFactory(make)), f"norm at norm1 keeps .*{lacks}.*register_buffer")
        for name, (make, lacks) in broken.UNSAVED.items()
    },
    "no site": (with_own_norm(ignores), "no norm site.*has no effect"),
    "dropped site": (with_own_norm(drops, norm2=LAYER(WIDTH)), "at norm2 has no effect"),
    "state of the model": (Counting(LAYER), "the model keeps .*: steps"),
    "groups of one": (FlatNet(NormFactory(lambda n: nn.GroupNorm(n, n))), "1 value at norm1"),
    "size of one": (FlatNet(norm_of(lambda x: x * (x * x + 1e-5).rsqrt())), "1 value at norm1"),
    "NaN": (FlatNet(norm_of(lambda x: x * torch.nan)), "norm1: .*NaN"),
    "fails": (
        convnet(NormFactory(lambda _: Exploding())),
        r"norm1 on 4 samples fails: RuntimeError: no statistics \(test_p",
    ),
    "parameters in a list": (
        FlatNet(NormFactory(broken.PlainList)),
        "require a gradient but are no parameters",
    ),
    "backward": (FlatNet(norm_of(lambda x: x.exp().add_(1))), "backward pass fails: .*inplace"),
}
# With the sizes at which they are refused, and not without.
REFUSED_IN_PARTS = [
    (FlatNet(STREAMING), Sizes(8, 4), "micro_batch_size=4 .* norm1 "),
    (FlatNet(STREAMING), Sizes(8, None, 2), "norm_batch_size=2 .* norm1 "),
    (FlatNet(NormFactory(broken.StartsFromItsBatch)), Sizes(8, None, 4), "norm1 .*parameters"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_network_is_refused_with_its_site(name: str):
    network, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        traits_of(network)


@pytest.mark.parametrize(("network", "sizes", "message"), REFUSED_IN_PARTS)
def test_network_that_cannot_be_split_is_refused_with_the_key(network, sizes, message: str):
    with pytest.raises(UserError, match=message):
        traits_of(network, sizes=sizes)
    traits_of(network)
    in_order = copied(network)
    for _, site in named_sites(in_order):
        site.running_from = "sequence"
    traits_of(in_order, sizes=sizes)


def test_ragged_last_batch_of_one_sample_is_refused():
    assert traits_of(FlatNet(BATCH), image_data(33)).mixes_samples
    with pytest.raises(UserError, match="norm1.*batch_size"):
        traits_of(FlatNet(BATCH), image_data(33), drop_last=False)


@pytest.mark.parametrize("norm", [broken.KeepsItsMean, broken.NoisyTraining, BatchNorm])
def test_what_moves_no_result_is_no_state(norm: type[nn.Module]):
    traits = traits_of(FlatNet(NormFactory(norm)))
    assert traits.draws_for_itself == (norm is broken.NoisyTraining)
    assert (traits.stacking_obstacle is None) == (norm is BatchNorm)


def test_head_that_starts_at_zero_does_not_look_as_if_the_input_were_erased():
    network = FlatNet(NONE)
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    traits = traits_of(network)
    assert not traits.mixes_samples and not traits.reaches


@pytest.mark.parametrize("norm", ["instance", "causal_instance"])
def test_norm_that_needs_positions_is_refused_on_a_model_that_has_none(norm: str):
    with pytest.raises(UserError, match="site norm1: .*positions"):
        prepare(f"norm={norm}", "model=custom", "model._target_=checks_cases.FlatNet")


# ---------------------------------------------------------------- warnings


class Forgetful(LayerNorm):
    """A layer norm with an unused parameter, and one that is detached."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.unused = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        assert self.weight is not None and self.bias is not None
        return torch.layer_norm(x, x.shape[1:]) * self.weight.detach() + self.bias


def flattened(norm: nn.Module, *more: nn.Module) -> nn.Module:
    """A site before the network's own norm, and others that are never entered."""
    entered = lambda m, inputs: ignores(m, m.site(inputs.flatten(1)))  # noqa: E731
    return with_own_norm(entered, site=norm, **{f"idle{i}": own for i, own in enumerate(more)})


NOTED = {
    "idle site": (flattened(LAYER(64), LAYER(64)), image_data(), "idle0 has no effect"),
    "norm outside": (flattened(LAYER(64)), image_data(), r"norm1 \(BatchNorm1d\)"),
    "idle parameters": (
        FlatNet(NormFactory(Forgetful)),
        image_data(),
        "norm1.norm.weight, norm1.norm.unused",
    ),
    "mixed outside": (
        around(nn.Identity(), lambda x: x - x.mean(0)),
        image_data(),
        "has no effect there",
    ),
    "leak in training": (gpt(BATCH), text_data(), "blocks.0.attn_norm.*train/loss"),
}


@pytest.mark.parametrize("name", NOTED)
def test_doubtful_network_is_noted(name: str):
    network, data, said = NOTED[name]
    notes = traits_of(network, data).notes
    assert len([note for note in notes if re.search(said, note)]) == 1
    assert all(parameter.grad is None for parameter in network.parameters())


# ---------------------------------------------------------------- values per statistic


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, num_groups=4)


def silent(norm: Any) -> nn.Module:
    """A norm whose scale starts at zero."""
    nn.init.zeros_(norm.weight)
    return norm


# Maps: 8 channels at 64 positions, 16 at 16, 16 at 16. Tokens: 16 channels at 8 positions.
@pytest.mark.parametrize(
    ("make", "view", "values", "by_group"),
    [
        (BatchNorm, "map", (64, 16, 16), True),
        (lambda n: nn.BatchNorm2d(n), "map", (64, 16, 16), True),
        (lambda n: silent(BatchNorm(n)), "map", (64, 16, 16), True),
        (InstanceNorm, "map", (64, 16, 16), False),
        (LayerNorm, "map", (8 * 64, 16 * 16, 16 * 16), False),
        (LayerNorm2d, "map", (8, 16, 16), False),
        (group_norm, "map", (2 * 64, 4 * 16, 4 * 16), False),
        (lambda _: Applies(lambda x: torch.tanh(5 * x)), "map", (), False),
        (group_norm, "token", (16 // 4,) * 3, False),
        (group_norm, "sequence", (16 // 4 * 8,) * 3, False),
        (BatchNorm, "token", (8,) * 3, True),
    ],
)
@pytest.mark.parametrize("size", [3, 128])
def test_values_per_statistic_are_of_the_formula(make, view: Any, values, by_group, size: int):
    on_map, norm = view == "map", NormFactory(make, view=view)
    network, data = (convnet, image_data()) if on_map else (encoder, padded_data())
    reaches = reaches_of(BuiltNetwork(network(norm), data, Sizes(8), drop_last=True)).values()
    expected = [count * (size if by_group else 1) for count in values]
    assert [reach.num_values(size) for reach in reaches] == expected


@pytest.mark.parametrize(
    ("sizes", "num_samples", "drop_last", "smallest"),
    [
        (Sizes(32), 100, True, 32),
        (Sizes(32, 16, 4), 96, False, 4),
        (Sizes(32), 97, False, 1),
        (Sizes(32, 8, 4), 96 + 13, False, 1),  # parts of 8 and 5, the latter in groups of 4 and 1
        (Sizes(32, None, 8), 96 + 6, False, 6),
    ],
    ids=str,
)
def test_smallest_group_counts_a_ragged_last_batch(sizes, num_samples, drop_last, smallest):
    assert smallest_group(sizes, num_samples, drop_last=drop_last) == smallest


# ---------------------------------------------------------------- later positions

SITES = "blocks.0.attn_norm, blocks.0.mlp_norm, final_norm"


def unmasked(start: float | None) -> nn.Module:
    """Positions add their mean on a branch; the norm reads nothing."""
    norm = NormFactory(NoNorm, slots=Slots(residual_scale=start))

    def run(m: Any, inputs: Tensor) -> Tensor:
        x = m.norm(m.embedding(inputs))
        return m.head(x + m.residual(x.mean(dim=1, keepdim=True)))

    return text_model(run, norm.tokens(WIDTH), residual=norm.residual())


OTHERS = "norm.view=token, norm=causal_instance, norm=causal_group or norm=batch_per_position"
LEAKING: dict[str, tuple[nn.Module, str, str]] = {
    "instance": (gpt(shipped("instance", text_data(), "sequence")), SITES, OTHERS),
    "batch statistics in evaluation": (
        gpt(NormFactory(partial(BatchNorm, track_running_stats=False))),
        SITES,
        OTHERS,
    ),
    "model": (unmasked(None), OUTSIDE, "mask its attention"),
    "branch from zero": (unmasked(0.0), OUTSIDE, "mask its attention"),
}


def over_the_last(x: Tensor) -> Tensor:
    """Divides all positions by the last one: scaling them all alike changes nothing."""
    return x / x[..., -1:].abs() if x.ndim > 2 else x


def test_statistics_of_later_positions_alone_are_a_leak_and_not_over_one_value():
    network = gpt(norm_of(over_the_last, "sequence"))
    with pytest.raises(UserError, match=f"earlier positions see later ones at {SITES}"):
        traits_of(network, text_data())
    assert traits_of(network, text_data(), allow_leak=True).leak == SITES


@pytest.mark.parametrize("view", ["token", "sequence"])
def test_padding_stays_for_a_norm_without_a_mask_that_pools_no_positions(view: str):
    traits = traits_of(encoder(norm_of(torch.tanh, view)), padded_data())
    assert traits.keeps_padding and traits.stacking_obstacle is None


@pytest.mark.parametrize(
    ("norm", "view"),
    [(nn.BatchNorm1d, "token"), (partial(nn.GroupNorm, 4), "sequence")],
    ids=["pools samples", "pools positions"],
)
def test_padding_is_removed_for_any_other_norm_without_a_mask(norm: Any, view: Any):
    traits = traits_of(encoder(NormFactory(norm, view=view)), padded_data())
    assert not traits.keeps_padding
    assert traits.stacking_obstacle == (
        f"the norm at {SITES} pools positions and takes no `mask`: padding is removed"
    )


@pytest.mark.parametrize("name", LEAKING)
def test_leak_is_refused_with_its_place_and_a_remedy_that_fits(name: str):
    network, where, remedy = LEAKING[name]
    with pytest.raises(UserError, match=f"at {where}, .*; try {remedy}, or .*allow_leak=true"):
        traits_of(network, text_data())
    assert traits_of(network, text_data(), allow_leak=True).leak == where


def test_numbers_of_a_leak_that_is_allowed_are_marked_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["norm=instance", "data=manual", "allow_leak=true", f"runs_dir={tmp_path}"]
    small = ["model.depth=1", "model.width=16", "steps=2", "replicas=1", "data.block_size=8"]
    assert main([*words, *small]) == 0
    assert "INVALID" in capsys.readouterr().out
    (path,) = tmp_path.rglob("result.json")
    result = read_result(path)
    assert result is not None and SITES in str(result.measured.invalid)
    assert result.measured.traits["leaks_future"] is True


# ---------------------------------------------------------------- padding


class CarelessState(BatchNorm):
    """Normalizes real positions correctly, but its running mean includes padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (N, C)
        out = super().forward(x, mask)
        if self.training:
            assert self.running_mean is not None
            with torch.no_grad():
                self.running_mean.copy_(x.mean(dim=0))
        return out


def one_length(make: Callable[[int], nn.Module]) -> nn.Module:
    """An encoder that takes strings of 8 only."""
    run = lambda m, inputs, mask: m.encoder(inputs.view(-1, 8), mask.view(-1, 8))  # noqa: E731
    return Model(run, encoder=in_sequence(make))


def whole_mean(m: Any, inputs: Tensor, mask: Tensor) -> Tensor:
    """Averages over padding too."""
    x = m.embedding(inputs)
    return m.head((m.norm(x, mask) + x).mean(dim=1))


def in_sequence(make: Callable[[int], nn.Module]) -> nn.Module:
    return encoder(NormFactory(make, view="sequence"))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (in_sequence(lambda _: PositionMean()), f"norm reads padding at {SITES}"),
        (encoder(NormFactory(CarelessState)), "norm reads padding"),
        (text_model(whole_mean, LAYER.tokens(WIDTH)), "model reads padding"),
        (in_sequence(lambda n: nn.BatchNorm1d(n)), "blocks.0.attn_norm.*norm.view=token"),
    ],
    ids=["norm", "state", "model", "no mask"],
)
def test_reader_of_padding_is_refused(network: nn.Module, message: str):
    with pytest.raises(UserError, match=message):
        traits_of(network, padded_data())


@pytest.mark.parametrize(
    "network",
    [
        encoder(NormFactory(lambda n: nn.BatchNorm1d(n))),
        in_sequence(lambda n: nn.GroupNorm(4, n)),
        one_length(lambda n: BatchNormPerPosition(n, num_positions=8)),
        encoder(BATCH, dropout=0.5),
    ],
    ids=["tokens without mask", "samples without mask", "one length", "dropout"],
)
def test_sound_network_reads_no_padding(network: nn.Module):
    assert not traits_of(network, padded_data()).leaks_future  # not refused


# ---------------------------------------------------------------- optimizer, stacking, hygiene


def test_optimizer_must_hold_every_parameter():
    for network in (convnet(LAYER), gpt(LAYER)):
        groups = parameter_groups(network, weight_decay=0.1)
        check_optimizer(network, torch.optim.SGD(groups, lr=0.1))
    network = FlatNet(LAYER)
    network.head.bias.requires_grad_(False)
    with pytest.raises(UserError, match="norm1.norm.weight, norm1.norm.bias, head.weight "):
        check_optimizer(network, torch.optim.SGD(network.hidden.parameters(), lr=0.1))


def test_probes_leave_the_network_and_the_random_state_alone():
    network = gpt(BATCH)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    traits_of(network, text_data())
    assert torch.equal(state, torch.get_rng_state()) and network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_pre_hooks for module in network.modules())
