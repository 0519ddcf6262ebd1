"""Traits, compatibility and cost on the card: known answers for known norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import broken_norms as broken
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d as LayerNormOfMaps
from torchvision.ops import FrozenBatchNorm2d

from normexp.checks.agreement import COMPATIBILITY, COST
from normexp.checks.card import Card, measure_card, print_cards
from normexp.checks.contract import CONTRACT
from normexp.checks.subject import Line, Subject, open_subject, run_checks
from normexp.checks.traits import TRAITS
from normexp.norms.batch import BatchNorm
from normexp.norms.causal import CausalGroupNorm
from normexp.norms.deviations import (
    BatchNormBiasedAverage,
    BatchNormEpsOutside,
    BatchNormFlattened,
    BatchNormNaiveVariance,
    BatchNormNoEps,
    BatchNormUnbiased,
    LayerNormNoEps,
    LayerNormUnbiased,
)
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d
from normexp.norms.pointwise import NoNorm
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
# Of mixes samples, pools channels, pools positions, leaks the future; by the formulas.
NO, YES, TRAINING = "no", "yes", "in training"
POOLS = {
    "batch": (TRAINING, NO, TRAINING, TRAINING),
    "layer": (NO, YES, YES, YES),
    "layer2d": (NO, YES, NO, NO),
    "instance": (NO, NO, YES, YES),
    "group": (NO, YES, YES, YES),
    "causal": (NO, YES, YES, NO),
    "rms": (NO, YES, NO, NO),
    "none": (NO, NO, NO, NO),
}
# Of invariance to input scale, input shift, channel scales, weight scale.
KEEPS = {
    "batch": (TRAINING, TRAINING, TRAINING, TRAINING),
    "layer": (YES, YES, NO, YES),
    "layer2d": (YES, YES, NO, YES),
    "instance": (YES, YES, YES, YES),
    "group": (YES, YES, NO, YES),
    "causal": (YES, YES, NO, YES),
    "rms": (YES, NO, NO, YES),
    "none": (NO, NO, NO, NO),
}
ALL = {check.name: check for check in (*CONTRACT, *TRAITS, *COMPATIBILITY, *COST)}


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class ReadsPadding(broken.Affine):
    """Takes a mask and pools padding nevertheless."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return self.scaled(x, x.mean(broken.pooled(x)), x.var(broken.pooled(x), correction=0))


def subject_of(make: Callable[..., Any], slots: Slots | None = None) -> Subject:
    return open_subject(make, target="mine", eps=1e-5, slots=slots)


def lines_of(make: Callable[..., Any], *names: str, slots: Slots | None = None) -> list[Line]:
    return run_checks("traits", [ALL[name] for name in names], subject_of(make, slots))


def values_of(make: Callable[..., Any], *names: str, slots: Slots | None = None) -> list[Any]:
    return [line.value for line in lines_of(make, *names, slots=slots)]


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_that_of_the_formula(name: str):
    names = ("mixes samples", "pools channels", "pools positions", "leaks the future")
    assert tuple(values_of(MAKE[name], *names)) == POOLS[name]


def test_what_is_pooled_after_a_warm_up_counts():
    make = lambda num_features: broken.PoolsLate()  # noqa: E731, ARG005
    names = ("mixes samples", "pools channels", "pools positions", "leaks the future")
    assert tuple(values_of(make, *names)) == (YES, NO, YES, YES)


@pytest.mark.parametrize("name", KEEPS)
def test_invariance_is_that_of_the_formula(name: str):
    names = ("input scale", "input shift", "channel scales", "scale of weights")
    assert tuple(values_of(MAKE[name], *(f"ignores {what}" for what in names))) == KEEPS[name]


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
    class Streaming(broken.Affine):
        sequential_state = True

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert values_of(Streaming, "ghost = accumulated") == ["refused"]


def test_bytes_kept_are_the_output_of_a_tanh():
    assert values_of(Tanh, "bytes kept for backward") == [4 * 32 * 64 * 16 * 16]  # in float32


@pytest.mark.slow
def test_compiler_follows_sound_norms_and_not_one_that_leaves_torch():
    names = ("torch.compile in training", "torch.compile in evaluation")
    assert [line.status for line in lines_of(BatchNorm, *names)] == ["pass", "pass"]
    (line,) = lines_of(Branches, "torch.compile in training")
    assert line.status == "fail"


class Branches(broken.Affine):
    """Branches on its values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean().item() > 0:
            return x * broken.per_channel(self.weight, x)
        return x


def test_draws_are_the_same_where_outputs_are_compared():
    lines = lines_of(broken.NoisyTraining, "ghost = accumulated", "autocast to bfloat16")
    assert [line.status for line in lines] == ["pass", "pass"], lines


# The deviation, the sound norm, the line, and what it says of each: a verdict or a number.
GAIN, GAP, EPS = "output size, batch of 4", "train/eval gap, batch of 4", "effect of eps x10"
TOLD_BY = [
    (BatchNormUnbiased, BatchNorm, GAIN, (0.866, 1.0)),  # sqrt(3 / 4)
    (BatchNormEpsOutside, BatchNorm, f"{EPS}, std 0.001", (0.082, 0.67)),  # 1 - 1.01 / 1.1
    (BatchNormBiasedAverage, BatchNorm, GAP, (0.747, 0.614)),
    (BatchNormFlattened, BatchNorm, "pools positions", ("no", "in training")),
    (BatchNormNaiveVariance, BatchNorm, "exact at mean 1e4", ("fail", "pass")),
    (BatchNormNoEps, BatchNorm, "finite on constants", ("fail", "pass")),
    (LayerNormUnbiased, LayerNorm, GAIN, (0.935, 1.0)),  # sqrt(7 / 8)
    (LayerNormNoEps, LayerNorm, "finite on constants", ("fail", "pass")),
    (InstanceNorm, LayerNorm, "pools channels", ("no", "yes")),
]


def told(norm: Callable[..., Any], name: str) -> Any:
    (line,) = lines_of(norm, name)
    return line.value if line.status == "value" else line.status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deviation", "sound", "name", "expected"),
    TOLD_BY,
    ids=[deviation.__name__ for deviation, *_ in TOLD_BY],
)
def test_deviation_is_told_by_its_line(deviation, sound, name, expected):
    found = told(deviation, name), told(sound, name)
    assert found == (pytest.approx(expected, rel=0.01) if name in (GAIN, GAP) else expected)


def test_mixing_in_the_backward_alone_is_on_the_card():
    samples, channels, positions = lines_of(
        broken.MixesInBackward, "mixes samples", "pools channels", "pools positions"
    )
    assert (samples.value, channels.value, positions.value) == (TRAINING, TRAINING, NO)
    assert "gradient" in samples.detail


class OddPositions(nn.Module):
    """Each even position of a sequence reads the next one."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        if x.ndim == 3 and x.shape[2] > 1:
            out[..., : x.shape[2] // 2 * 2 : 2] += 0.1 * x[..., 1::2]
        return out


def test_lines_of_a_card_agree():
    assert values_of(OddPositions, "pools positions", "leaks the future") == [YES, YES]


def test_torch_group_norm_is_measured_where_its_groups_have_values():
    subject = subject_of(partial(nn.GroupNorm, 8))
    assert subject.num_features == 32
    names = ("pools channels", "ignores input scale", "ignores channel scales")
    assert values_of(partial(nn.GroupNorm, 8), *names) == [YES, YES, NO]


@pytest.mark.parametrize("distance", [1, 32])
def test_far_samples_and_positions_are_on_the_card(distance: int):
    traits = ("mixes samples", "pools channels", "pools positions", "leaks the future")
    assert values_of(lambda _: broken.ReadsFurther(0, distance), *traits) == [YES, NO, NO, NO]
    assert values_of(lambda _: broken.ReadsFurther(2, distance), *traits) == [NO, NO, YES, YES]


class GroupedAct(nn.Module):
    """As in timm: groups by a default, parameters (1, C, 1, 1), for maps, an activation behind."""

    def __init__(self, num_channels: int, num_groups: int = 32, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(1, num_channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, num_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(len(x), self.num_groups, -1, *x.shape[2:])
        var, mean = torch.var_mean(groups, (2, 3, 4), correction=0, keepdim=True)
        out = ((groups - mean) * (var + self.eps).rsqrt()).view(x.shape)
        return torch.relu(out * self.weight + self.bias)


@pytest.mark.slow
def test_group_norm_with_an_activation_is_measured_where_it_shows_what_it_is():
    assert subject_of(GroupedAct).num_features >= 64
    names = ("mixes samples", "pools channels", "pools positions", "ignores input scale")
    assert values_of(GroupedAct, *names) == [NO, YES, YES, YES]
    lines = lines_of(GroupedAct, "gradient in training", "exact at mean 1e4", "4-D inputs")
    assert [line.status for line in lines] == ["pass"] * 3


def test_names_with_brackets_are_text(capsys: pytest.CaptureFixture[str]):
    card = Card("mine", "a.B", 8, "(B, C)", (Line("traits", "shape [/x]", "value", 1),))
    console = Console()
    print_cards(console, [card])
    print_cards(console, [card, card])
    assert capsys.readouterr().out.count("shape [/x]") == 2


def test_failures_come_first_then_traits_and_passes_are_counted(
    capsys: pytest.CaptureFixture[str],
):
    lines = (
        Line("contract", "dtype kept", "pass"),
        Line("contract", "one sample", "fail", detail="raises"),
        Line("traits", "mixes samples", "value", "no"),
        Line("compatibility", "replicas under vmap", "pass"),
        Line("compatibility", "ghost = accumulated", "skipped"),
    )
    print_cards(Console(width=100), [Card("mine", "a.B", 8, "(B, C)", lines)])
    out = capsys.readouterr().out
    places = [
        out.index(word) for word in ("FAIL mine, one sample: raises", "\ntraits", "\ncontract ")
    ]
    assert places == sorted(places)
    assert "3 more lines" in out and "2 pass" in out and "dtype kept" not in out


# ---------------------------------------------------------------- norms of torch and torchvision

BATCH = (TRAINING, NO, TRAINING, TRAINING)
MAP = (NO, YES, YES, YES)
CHANNELS = (NO, YES, NO, NO)
OF_SAMPLE = (NO, NO, YES, YES)
TRACKED = (TRAINING, NO, TRAINING, TRAINING)
# torch's InstanceNorm reads a map as one of N * C channels: contiguous, and in bfloat16 throughout
# unless it has parameters in float32.
CONTIGUOUS, IN_HALF = "channels_last kept", "statistics wide in bfloat16"
NO_MEAN = "empty batch"  # its running mean becomes NaN
FOLLOWS_ITEM = {"torch.compile in training", "replicas under vmap"}

# Samples, channels, positions and future that it mixes, as its documentation says; the failures.
NORMS: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "batch 1d": (nn.BatchNorm1d, BATCH, set()),
    "batch 2d": (nn.BatchNorm2d, BATCH, set()),
    "batch 3d": (nn.BatchNorm3d, BATCH, set()),
    "batch without affine": (partial(nn.BatchNorm2d, affine=False), BATCH, set()),
    "batch of the batch": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        (YES, NO, YES, YES),
        set(),
    ),
    "batch, cumulative": (partial(nn.BatchNorm1d, momentum=None), BATCH, FOLLOWS_ITEM),
    "sync": (nn.SyncBatchNorm, BATCH, set()),
    "frozen": (FrozenBatchNorm2d, (NO, NO, NO, NO), set()),
    "group 8": (partial(nn.GroupNorm, 8), MAP, set()),
    "group 1": (partial(nn.GroupNorm, 1), MAP, set()),
    "group 32": (partial(nn.GroupNorm, 32), MAP, set()),
    "group without affine": (partial(nn.GroupNorm, 4, affine=False), MAP, set()),
    "layer": (nn.LayerNorm, CHANNELS, set()),
    "layer without affine": (partial(nn.LayerNorm, elementwise_affine=False), CHANNELS, set()),
    "layer without bias": (partial(nn.LayerNorm, bias=False), CHANNELS, set()),
    "layer 2d": (LayerNormOfMaps, CHANNELS, set()),
    "rms": (nn.RMSNorm, CHANNELS, set()),
    "rms without affine": (partial(nn.RMSNorm, elementwise_affine=False), CHANNELS, set()),
    "local response": (partial(nn.LocalResponseNorm, size=5), CHANNELS, {"any strides"}),
    "instance 1d": (nn.InstanceNorm1d, OF_SAMPLE, {IN_HALF}),
    "instance 2d": (nn.InstanceNorm2d, OF_SAMPLE, {CONTIGUOUS, IN_HALF}),
    "instance 3d": (nn.InstanceNorm3d, OF_SAMPLE, {IN_HALF}),
    "instance 2d with affine": (partial(nn.InstanceNorm2d, affine=True), OF_SAMPLE, {CONTIGUOUS}),
    "instance 2d that tracks": (
        partial(nn.InstanceNorm2d, track_running_stats=True),
        TRACKED,
        {CONTIGUOUS, IN_HALF, NO_MEAN},
    ),
    "instance 1d with both": (
        partial(nn.InstanceNorm1d, affine=True, track_running_stats=True),
        TRACKED,
        set(),
    ),
}
FAST = ("group 8", "frozen", "layer 2d")
CASES = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NORMS]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_card_has_no_false_line(name: str):
    make, expected, failures = NORMS[name]
    function = make.func if isinstance(make, partial) else make
    target = f"{function.__module__}.{function.__qualname__}"
    card = measure_card(make, name=name, target=target, eps=1e-5, slots=Slots())
    lines = {line.name: line for line in card.lines}
    traits = ("mixes samples", "pools channels", "pools positions", "leaks the future")
    assert tuple(lines[trait].value for trait in traits) == expected
    assert {line.name for line in card.lines if line.status == "fail"} == failures
