"""Traits, compatibility and cost on the card: known answers for known norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import broken_norms as broken
import broken_state
import pytest
import torch
from torch import Tensor, nn

from normexp.checks.card import Line, run_checks
from normexp.checks.card_invariance import INVARIANCE
from normexp.checks.card_traits import DEPENDS_ON
from normexp.checks.compatibility import COMPATIBILITY, with_ddp
from normexp.checks.cost import COST
from normexp.checks.subject import Subject, open_subject
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
ALL = {**DEPENDS_ON, **INVARIANCE, **COMPATIBILITY, **COST}


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class ReadsPadding(broken.Affine):
    """Takes a mask and pools over it all the same."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return self.scaled(x, x.mean(broken.pooled(x)), x.var(broken.pooled(x), correction=0))


def subject_of(make: Callable[..., Any], slots: Slots | None = None) -> Subject:
    return open_subject(make, name="mine", target="mine", eps=1e-5, slots=slots)


def lines_of(make: Callable[..., Any], *names: str, slots: Slots | None = None) -> list[Line]:
    return run_checks("traits", {name: ALL[name] for name in names}, subject_of(make, slots))


def values_of(make: Callable[..., Any], *names: str, slots: Slots | None = None) -> list[Any]:
    return [line.value for line in lines_of(make, *names, slots=slots)]


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_that_of_the_formula(name: str):
    names = ("mixes samples", "pools channels", "pools positions", "leaks the future")
    assert tuple(values_of(MAKE[name], *names)) == POOLS[name]


@pytest.mark.parametrize("name", KEEPS)
def test_invariance_is_that_of_the_formula(name: str):
    names = [f"invariant to {what}" for what in ("input scale", "input shift")]
    names += ["invariant to channel scales", "invariant to weight scale"]
    assert tuple(values_of(MAKE[name], *names)) == KEEPS[name]


def test_standardized_weights_make_no_norm_invariant_to_their_scale():
    slots = Slots(conv="weight_standardized")
    assert values_of(NoNorm, "invariant to weight scale", slots=slots) == ["yes"]


def test_mixing_is_shown_by_the_smallest_input():
    (line,) = lines_of(BatchNorm, "mixes samples")
    assert line.detail == "(2, 8)"
    (line,) = lines_of(InstanceNorm, "pools positions")
    assert line.detail == "(2, 8, 3)"


def test_padding_that_is_read_is_told_from_padding_that_is_not():
    assert values_of(BatchNorm, "reads padding") == ["no"]
    assert values_of(ReadsPadding, "reads padding") == ["yes"]
    assert values_of(nn.BatchNorm1d, "reads padding") == ["takes no mask"]


def test_running_state_lists_the_buffers_that_move():
    (line,) = lines_of(nn.BatchNorm1d, "running state")
    assert line.value == "yes" and "running_var" in line.detail
    assert values_of(LayerNorm, "running state") == ["no"]


def test_effect_of_eps_is_half_its_share_of_a_variance_of_one():
    """1 / sqrt(1 + 1e-4) differs from 1 / sqrt(1 + 1e-5) by 4.5e-5."""
    (at_one, at_small) = values_of(BatchNorm, "effect of eps x10 at std 1", *SMALL)
    assert at_one == pytest.approx(4.5e-5, rel=0.2)
    # Of variance 1e-6: sqrt((1e-6 + 1e-5) / (1e-6 + 1e-4)) of the output is left.
    assert at_small == pytest.approx(1 - (1.1e-5 / 1.01e-4) ** 0.5, rel=0.02)
    assert lines_of(Tanh, *SMALL)[0].status == "skipped"


SMALL = ["effect of eps x10 at std 0.001"]
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


def test_buffers_put_in_place_of_others_are_named():
    (line,) = lines_of(broken_state.KeptGraph, "buffers written in place")
    assert (line.value, line.detail) == ("no", "running_mean is another tensor")
    assert values_of(BatchNorm, "buffers written in place") == ["yes"]


def test_cost_counts_numbers_and_bytes():
    names = ("parameters", "buffers", "bytes saved for backward")
    assert values_of(Tanh, *names) == [0, 0, 4 * 32 * 64 * 16 * 16]  # its output in float32
    assert values_of(nn.BatchNorm2d, "parameters", "buffers") == [128, 129]


def test_time_is_a_ratio_and_skipped_for_inputs_that_are_refused():
    features, maps = lines_of(
        InstanceNorm, "forward vs batch norm, features", "forward vs batch norm, maps"
    )
    assert features.status == "skipped"
    assert maps.value > 0 and "threads: " in maps.detail


@pytest.mark.slow
def test_compiler_follows_sound_norms_and_not_one_that_leaves_torch():
    names = ("torch.compile in training", "torch.compile in evaluation")
    assert [line.status for line in lines_of(BatchNorm, *names)] == ["pass", "pass"]
    (line,) = lines_of(Branches, "torch.compile in training")
    assert line.status == "fail"


class Branches(broken.Affine):
    """Looks at its values to choose what it does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean().item() > 0:
            return x * broken.per_channel(self.weight, x)
        return x


@pytest.mark.slow
def test_two_processes_train_a_sound_norm_and_not_one_with_an_unused_parameter():
    checks = {"DDP": with_ddp(True)}
    sound = subject_of(BatchNorm)
    assert run_checks("compatibility", checks, sound)[0].status == "pass"
    unused = subject_of(broken_state.UnusedParameter)
    assert run_checks("compatibility", checks, unused)[0].status == "fail"


def test_processes_are_started_on_request_alone():
    (line,) = run_checks("compatibility", {"DDP": with_ddp(False)}, subject_of(BatchNorm))
    assert (line.status, line.detail) == ("skipped", "ask for it with ddp=true")


def test_draws_are_the_same_where_outputs_are_compared():
    lines = lines_of(broken.NoisyTraining, "ghost = accumulated", "autocast to bfloat16")
    assert [line.status for line in lines] == ["pass", "pass"], lines
