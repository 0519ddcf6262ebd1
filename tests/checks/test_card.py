"""Traits on the card: known answers for known norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import broken_norms as broken
import pytest
import torch
from rich.console import Console
from timm.layers.norm_act import GroupNormAct
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d as LayerNormOfMaps
from torchvision.ops import FrozenBatchNorm2d

from normexp.checks.card import Card, measure_card, print_cards
from normexp.checks.norm import Answer, LoneNorm, open_norm
from normexp.checks.questions import OF_NORMS
from normexp.norms.batch import BatchNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, NoNorm, RMSNorm
from normexp.norms.sequence import CausalGroupNorm

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
# The answers of the formulas.
MIXED = ("mixes samples", "pools channels", "pools positions", "reads the future")
IGNORED = ("ignores input scale", "ignores input shift")
NO, YES, TRAINING = "no", "yes", "in training"
POOLS = {
    "batch": ((TRAINING, NO, TRAINING, TRAINING), (TRAINING, TRAINING)),
    "layer": ((NO, YES, YES, YES), (YES, YES)),
    "layer2d": ((NO, YES, NO, NO), (YES, YES)),
    "instance": ((NO, NO, YES, YES), (YES, YES)),
    "group": ((NO, YES, YES, YES), (YES, YES)),
    "causal": ((NO, YES, YES, NO), (YES, YES)),
    "rms": ((NO, YES, NO, NO), (YES, NO)),
    "none": ((NO, NO, NO, NO), (NO, NO)),
}
ALL = {question.name: question for question in OF_NORMS}


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class ReadsPadding(broken.Affine):
    """Takes a mask and pools padding nevertheless."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return super().forward(x)


@cache
def lone(make: Callable[..., Any], num_features: int | None = 8) -> LoneNorm:
    return open_norm(make, target="mine", eps=1e-5, num_features=num_features)


def line_of(make: Callable[..., Any], name: str) -> Answer:
    return ALL[name].answer(lone(make))


def values_of(make: Callable[..., Any], *names: str) -> list[Any]:
    return [line_of(make, name).value for name in names]


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_invariance_are_those_of_the_formula(name: str):
    assert tuple(values_of(MAKE[name], *MIXED, *IGNORED)) == sum(POOLS[name], ())


def test_eps_that_is_no_argument_hides_no_invariance():
    class OneGroup(nn.GroupNorm):
        def __init__(self, num_channels: int, **others: Any) -> None:
            super().__init__(1, num_channels, **others)

    assert values_of(OneGroup, "ignores input scale") == [YES]


def test_padding_that_is_read_is_told_from_padding_that_is_not():
    assert values_of(BatchNorm, "reads padding") == ["no"]
    assert values_of(ReadsPadding, "reads padding") == ["yes"]
    line = line_of(nn.BatchNorm1d, "reads padding")
    assert line.status == "skipped" and "`mask`" in line.detail


def test_running_state_lists_the_buffers_that_move():
    line = line_of(nn.BatchNorm1d, "running state")
    assert line.value == "yes" and "running_var" in line.detail
    assert values_of(LayerNorm, "running state") == ["no"]


def test_sound_norm_is_stacked_and_split():
    names = ("replicas under vmap", "ghost = accumulated")
    for make in (MAKE["batch"], MAKE["group"]):
        assert values_of(make, *names) == [YES] * 2
    assert values_of(broken.NoisyTraining, names[1]) == [YES]


def test_leaving_torch_breaks_vmap():
    line = line_of(broken.CallsNumpy, "replicas under vmap")
    assert line.value == NO and "(5, 8)" in line.detail


def test_sequential_state_is_refused_a_split():
    assert values_of(lambda _: broken.Streaming(), "ghost = accumulated") == ["refused"]


def test_bytes_kept_are_the_output_of_a_tanh():
    assert values_of(Tanh, "bytes kept for backward") == [4 * 32 * 8 * 16 * 16]  # in float32


def test_norms_of_many_groups_are_measured_where_their_groups_have_values():
    for make in (partial(nn.GroupNorm, 8), GroupNormAct):  # the latter of 32 groups
        norm = lone(make, None)
        names = (*MIXED[:3], "ignores input scale")
        assert [ALL[name].answer(norm).value for name in names] == [NO, YES, YES, YES]


def test_failures_come_first_then_traits_and_brackets_are_text(
    capsys: pytest.CaptureFixture[str],
):
    lines = (
        Answer("contract", "dtype kept", "pass"),
        Answer("contract", "one [/x]", "fail", detail="raises"),
        Answer("traits", "mixes samples", "value", "no"),
        Answer("traits", "replicas under vmap", "value", "no"),
        Answer("contract", "gradient", "skipped"),
    )
    print_cards(Console(width=100), [Card("mine", "a.B", 8, "(B, C)", lines)])
    out = capsys.readouterr().out
    words = ("1 line of the contract failed", "FAIL mine, one [/x]: raises", "mixes samples")
    places = [out.index(word) for word in words]
    assert places == sorted(places) and out.count("FAIL ") == 2
    assert "dtype kept" not in out and "lines of the contract that hold  1" in out


# ---------------------------------------------------------------- norms of torch and torchvision

BATCH = (TRAINING, NO, TRAINING, TRAINING)
MAP = (NO, YES, YES, YES)
CHANNELS = (NO, YES, NO, NO)
OF_SAMPLE = (NO, NO, YES, YES)
# torch's InstanceNorm computes in bfloat16 throughout unless it has parameters in float32.
IN_HALF = "statistics wide in bfloat16"

# Samples, channels, positions and future that it mixes, as its documentation says; the failures.
NORMS: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "batch 1d": (nn.BatchNorm1d, BATCH, set()),
    "batch of the batch": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        (YES, NO, YES, YES),
        set(),
    ),
    "batch, cumulative": (partial(nn.BatchNorm1d, momentum=None), BATCH, set()),
    "frozen": (FrozenBatchNorm2d, (NO, NO, NO, NO), set()),
    "group 8": (partial(nn.GroupNorm, 8), MAP, set()),
    "layer": (nn.LayerNorm, CHANNELS, set()),
    "layer 2d": (LayerNormOfMaps, CHANNELS, set()),
    "rms": (nn.RMSNorm, CHANNELS, set()),
    "local response": (partial(nn.LocalResponseNorm, size=5), CHANNELS, set()),
    "instance 1d": (nn.InstanceNorm1d, OF_SAMPLE, {IN_HALF}),
    "instance 2d that tracks": (
        partial(nn.InstanceNorm2d, track_running_stats=True),
        BATCH,
        {IN_HALF},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_card_has_no_false_line(name: str):
    make, expected, failures = NORMS[name]
    function = make.func if isinstance(make, partial) else make
    target = f"{function.__module__}.{function.__qualname__}"
    card = measure_card(make, name=name, target=target, eps=1e-5)
    lines = {line.name: line for line in card.lines}
    assert tuple(lines[trait].value for trait in MIXED) == expected
    assert {line.name for line in card.failures} == failures
