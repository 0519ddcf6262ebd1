"""Traits, compatibility and cost on the card: known answers for known norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import broken_norms as broken
import pytest
import torch
from rich.console import Console
from timm.layers import GroupNormAct
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d as LayerNormOfMaps
from torchvision.ops import FrozenBatchNorm2d

from normexp.checks.asking import Answer, ask_norm
from normexp.checks.card import Card, measure_card, print_cards
from normexp.checks.lone_norm import LoneNorm, open_norm
from normexp.checks.questions import INPUTS, OF_NORMS
from normexp.norms.batch import BatchNorm
from normexp.norms.causal import CausalGroupNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d
from normexp.norms.none import NoNorm
from normexp.norms.rms import RMSNorm
from normexp.norms.slots import Slots

MAKE = {
    "batch": BatchNorm,
    "layer": LayerNorm,
    "layer2d": LayerNorm2d,
    "instance": InstanceNorm,
    "group": partial(GroupNorm, num_groups=4),
    "causal": partial(CausalGroupNorm, num_groups=4),
    "rms": RMSNorm,
    "none": NoNorm,
}
# The answers of the formulas to the first four lines, and to the other four.
MIXED = ("mixes samples", "pools channels", "pools positions", "leaks the future")
IGNORED = ("input scale", "input shift", "channel scales", "scale of weights")
NO, YES, TRAINING = "no", "yes", "in training"
POOLS = {
    "batch": ((TRAINING, NO, TRAINING, TRAINING), (TRAINING, TRAINING, TRAINING, TRAINING)),
    "layer": ((NO, YES, YES, YES), (YES, YES, NO, YES)),
    "layer2d": ((NO, YES, NO, NO), (YES, YES, NO, YES)),
    "instance": ((NO, NO, YES, YES), (YES, YES, YES, YES)),
    "group": ((NO, YES, YES, YES), (YES, YES, NO, YES)),
    "causal": ((NO, YES, YES, NO), (YES, YES, NO, YES)),
    "rms": ((NO, YES, NO, NO), (YES, NO, NO, YES)),
    "none": ((NO, NO, NO, NO), (NO, NO, NO, NO)),
}
ALL = {question.name: question for question in INPUTS + OF_NORMS}


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class ReadsPadding(broken.Affine):
    """Takes a mask and pools padding nevertheless."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return super().forward(x)


@cache
def lone(make: Callable[..., Any], slots: Slots | None = None) -> LoneNorm:
    return open_norm(make, target="mine", eps=1e-5, num_features=8, slots=slots)


def lines_of(make: Callable[..., Any], *names: str, slots: Slots | None = None) -> list[Answer]:
    return ask_norm([ALL[name] for name in names], lone(make, slots))


def values_of(make: Callable[..., Any], *names: str, slots: Slots | None = None) -> list[Any]:
    return [line.value for line in lines_of(make, *names, slots=slots)]


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_invariance_are_those_of_the_formula(name: str):
    names = (*MIXED, *(f"ignores {what}" for what in IGNORED))
    assert tuple(values_of(MAKE[name], *names)) == sum(POOLS[name], ())


def test_what_is_pooled_after_a_warm_up_counts():
    make = lambda num_features: broken.PoolsLate()  # noqa: E731, ARG005
    assert tuple(values_of(make, *MIXED)) == (YES, NO, YES, YES)


def test_eps_that_is_no_argument_hides_no_invariance():
    class OneGroup(nn.GroupNorm):
        def __init__(self, num_channels: int, **others: Any) -> None:
            super().__init__(1, num_channels, **others)

    assert values_of(OneGroup, "ignores input scale", "ignores scale of weights") == [YES, YES]


def test_standardized_weights_make_no_norm_invariant_to_their_scale():
    slots = Slots(conv="weight_standardized")
    assert values_of(NoNorm, "ignores scale of weights", slots=slots) == ["yes"]


def test_mixing_is_shown_by_the_smallest_input():
    (line,) = lines_of(BatchNorm, "mixes samples")
    assert line.detail == "(2, 8)"
    (line,) = lines_of(InstanceNorm, "pools positions")
    assert line.detail == "(2, 8, 3)"


def test_batch_norm_is_instance_norm_at_one_sample():
    name = "instance norm at one sample"
    assert values_of(BatchNorm, name) == values_of(nn.BatchNorm2d, name) == ["yes"]
    (line,) = lines_of(LayerNorm, name)
    assert line.status == "skipped" and "mixes no samples" in line.detail


def test_padding_that_is_read_is_told_from_padding_that_is_not():
    assert values_of(BatchNorm, "reads padding") == ["no"]
    assert values_of(ReadsPadding, "reads padding") == ["yes"]
    (line,) = lines_of(nn.BatchNorm1d, "reads padding")
    assert line.status == "skipped" and "`mask`" in line.detail


def test_running_state_lists_the_buffers_that_move():
    (line,) = lines_of(nn.BatchNorm1d, "running state")
    assert line.value == "yes" and "running_var" in line.detail
    assert values_of(LayerNorm, "running state") == ["no"]


def test_effect_of_eps_is_that_of_the_formula():
    """Of variance 1e-6: sqrt((1e-6 + 1e-5) / (1e-6 + 1e-4)) of the output is left."""
    (found,) = values_of(BatchNorm, f"{EPS}, std 0.001")
    assert found == pytest.approx(1 - (1.1e-5 / 1.01e-4) ** 0.5, rel=0.02)
    assert lines_of(Tanh, f"{EPS}, std 0.001")[0].status == "skipped"


EPS = "effect of eps x10"
SIZES = ["output size, batch of 4", "output size, batch of 32"]
GAPS = ["train/eval gap, batch of 4", "train/eval gap, batch of 32"]


def test_unbiased_variance_is_seen_as_a_gain_that_grows_with_the_batch():
    assert values_of(BatchNorm, *SIZES) == [1.0, 1.0]
    expected = [(3 / 4) ** 0.5, (31 / 32) ** 0.5]
    assert values_of(broken.UnbiasedVariance, *SIZES) == pytest.approx(expected, abs=1e-3)


def test_gap_between_modes_shrinks_with_the_batch_and_is_none_without_state():
    small, large = values_of(BatchNorm, *GAPS)
    assert small > 2 * large > 0.02
    assert values_of(LayerNorm, *GAPS) == [0.0, 0.0]


def test_sound_norm_is_compatible():
    names = ("replicas under vmap", "ghost = accumulated", "autocast to bfloat16")
    for name in ("batch", "group"):
        assert [line.status for line in lines_of(MAKE[name], *names)] == ["pass"] * 3
    assert values_of(BatchNorm, "state of a split step") == ["exact"]
    assert 0 < values_of(nn.BatchNorm1d, "state of a split step")[0] < 1


def test_leaving_torch_breaks_vmap():
    (line,) = lines_of(broken.CallsNumpy, "replicas under vmap")
    assert line.status == "fail" and "(2, 8)" in line.detail


def test_sequential_state_is_refused_a_split():
    assert values_of(lambda _: broken.Streaming(), "ghost = accumulated") == ["refused"]


def test_bytes_kept_are_the_output_of_a_tanh():
    assert values_of(Tanh, "bytes kept for backward") == [4 * 32 * 64 * 16 * 16]  # in float32


@pytest.mark.slow
def test_compiler_follows_sound_norms_and_not_one_that_leaves_torch():
    names = ("torch.compile in training", "torch.compile in evaluation")
    assert [line.status for line in lines_of(BatchNorm, *names)] == ["pass", "pass"]
    (line,) = lines_of(lambda _: broken.Applies(branches), "torch.compile in training")
    assert line.status == "fail"


def branches(x: Tensor) -> Tensor:
    """Branches on its values."""
    return 2 * x if x.mean().item() > 0 else x


def test_draws_are_the_same_where_outputs_are_compared():
    lines = lines_of(broken.NoisyTraining, "ghost = accumulated", "autocast to bfloat16")
    assert [line.status for line in lines] == ["pass", "pass"], lines


def test_torch_group_norm_is_measured_where_its_groups_have_values():
    norm = open_norm(partial(nn.GroupNorm, 8), target="mine", eps=1e-5)
    assert norm.num_features == 32
    names = ("pools channels", "ignores input scale", "ignores channel scales")
    assert [line.value for line in ask_norm([ALL[name] for name in names], norm)] == [YES, YES, NO]


@pytest.mark.slow
def test_group_norm_with_an_activation_is_measured_where_it_shows_what_it_is():
    norm = open_norm(GroupNormAct, target="mine", eps=1e-5)  # of 32 groups
    assert norm.num_features >= 64
    names = (*MIXED[:3], "ignores input scale")
    values = [line.value for line in ask_norm([ALL[name] for name in names], norm)]
    assert values == [NO, YES, YES, YES]
    names = ("gradient in training", "exact at mean 1e4", "4-D inputs")
    lines = ask_norm([ALL[name] for name in names], norm)
    assert [line.status for line in lines] == ["pass"] * 3


def test_failures_come_first_then_traits_and_brackets_are_text(
    capsys: pytest.CaptureFixture[str],
):
    lines = (
        Answer("contract", "dtype kept", "pass"),
        Answer("contract", "one [/x]", "fail", detail="raises"),
        Answer("traits", "mixes samples", "value", "no"),
        Answer("compatibility", "replicas under vmap", "pass"),
        Answer("compatibility", "ghost = accumulated", "skipped"),
    )
    print_cards(Console(width=100), [Card("mine", "a.B", 8, "(B, C)", lines)])
    out = capsys.readouterr().out
    places = [
        out.index(word) for word in ("FAIL mine, one [/x]: raises", "\ntraits", "\ncontract ")
    ]
    assert places == sorted(places)
    assert "3 more lines" in out and "2 pass" in out and "dtype kept" not in out


# ---------------------------------------------------------------- norms of torch and torchvision

BATCH = (TRAINING, NO, TRAINING, TRAINING)
MAP = (NO, YES, YES, YES)
CHANNELS = (NO, YES, NO, NO)
OF_SAMPLE = (NO, NO, YES, YES)
TRACKED = (TRAINING, NO, TRAINING, TRAINING)
# torch's InstanceNorm computes in bfloat16 throughout unless it has parameters in float32.
IN_HALF = "statistics wide in bfloat16"
NO_MEAN = "empty batch"  # its running mean becomes NaN
FOLLOWS_ITEM = {"torch.compile in training", "replicas under vmap"}

# Samples, channels, positions and future that it mixes, as its documentation says; the failures.
NORMS: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "batch 1d": (nn.BatchNorm1d, BATCH, set()),
    "batch 2d": (nn.BatchNorm2d, BATCH, set()),
    "batch of the batch": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        (YES, NO, YES, YES),
        set(),
    ),
    "batch, cumulative": (partial(nn.BatchNorm1d, momentum=None), BATCH, FOLLOWS_ITEM),
    "sync": (nn.SyncBatchNorm, BATCH, set()),
    "frozen": (FrozenBatchNorm2d, (NO, NO, NO, NO), set()),
    "group 8": (partial(nn.GroupNorm, 8), MAP, set()),
    "group 32": (partial(nn.GroupNorm, 32), MAP, set()),
    "layer": (nn.LayerNorm, CHANNELS, set()),
    "layer without affine": (partial(nn.LayerNorm, elementwise_affine=False), CHANNELS, set()),
    "layer 2d": (LayerNormOfMaps, CHANNELS, set()),
    "rms": (nn.RMSNorm, CHANNELS, set()),
    "local response": (partial(nn.LocalResponseNorm, size=5), CHANNELS, {"any strides"}),
    "instance 1d": (nn.InstanceNorm1d, OF_SAMPLE, {IN_HALF}),
    "instance 2d": (nn.InstanceNorm2d, OF_SAMPLE, {IN_HALF}),
    "instance 2d with affine": (partial(nn.InstanceNorm2d, affine=True), OF_SAMPLE, set()),
    "instance 2d that tracks": (
        partial(nn.InstanceNorm2d, track_running_stats=True),
        TRACKED,
        {IN_HALF, NO_MEAN},
    ),
    "instance 1d with both": (
        partial(nn.InstanceNorm1d, affine=True, track_running_stats=True),
        TRACKED,
        set(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_card_has_no_false_line(name: str):
    make, expected, failures = NORMS[name]
    function = make.func if isinstance(make, partial) else make
    target = f"{function.__module__}.{function.__qualname__}"
    card = measure_card(make, name=name, target=target, eps=1e-5, slots=Slots())
    lines = {line.name: line for line in card.lines}
    assert tuple(lines[trait].value for trait in MIXED) == expected
    assert {line.name for line in card.lines if line.status == "fail"} == failures
