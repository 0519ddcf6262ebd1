"""Each broken norm is caught by the line that should catch it; sound ones keep the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import broken_norms as broken
import broken_state
import pytest
import torch
from torch import nn

from normexp.checks import assert_contract
from normexp.checks.card import Line, run_checks
from normexp.checks.contract import ON_SHAPES, measure_contract
from normexp.checks.contract_shapes import SHAPES
from normexp.checks.subject import open_subject
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm
from normexp.norms.power import PowerNorm

CAUGHT_BY = {
    broken.OtherShape: "2-D inputs",
    broken.WrongDtype: "dtype kept",
    broken.NarrowStatistics: "statistics wide in bfloat16",
    broken.DropsChannelsLast: "channels_last kept",
    broken.ViewOfMaps: "channels_last kept",
    broken.WritesItsInput: "input unchanged",
    broken_state.LazyParameter: "parameters made at once",
    broken_state.UnusedParameter: "gradient for every parameter",
    broken_state.KeptGraph: "no graph kept",
    broken_state.GrowingBuffer: "buffers keep shape and dtype",
    broken_state.LateBuffer: "buffers keep shape and dtype",
    broken_state.HiddenState: "state_dict round trip",
    broken.NoisyEvaluation: "deterministic in evaluation",
    broken_state.EvaluationLearns: "evaluation changes no state",
    broken.WrongGradient: "gradient in training",
    broken.NaiveVariance: "exact at mean 1e3",
    broken.NoEps: "finite on constants",
    broken.UnbiasedVariance: "one sample",
    broken_state.PoisonedByOne: "one sample",
    broken.ErasesOnePosition: "one position",
    broken_state.SwallowedAffine: "no argument swallowed",
}


def line_of(make: Callable[..., Any], name: str, num_features: int | None = None) -> Line:
    """One line of the contract, measured by itself."""
    subject = open_subject(make, name="mine", target="mine", eps=1e-5, num_features=num_features)
    (line,) = run_checks("contract", {name: {**SHAPES, **ON_SHAPES}[name]}, subject)
    return line


@pytest.mark.parametrize(
    ("norm", "name"), CAUGHT_BY.items(), ids=[norm.__name__ for norm in CAUGHT_BY]
)
def test_fault_is_caught_by_its_line(norm: type[nn.Module], name: str):
    line = line_of(norm, name, 8)
    assert line.status == "fail"
    assert line.detail


def test_assertion_names_the_norm_and_every_failed_line():
    with pytest.raises(AssertionError) as caught:
        assert_contract(broken.NaiveVariance, 8)
    first, *rest = str(caught.value).splitlines()
    assert first == "broken_norms.NaiveVariance breaks the contract:"
    assert [line.partition(":")[0].strip() for line in rest] == [
        *("statistics wide in bfloat16", "exact at mean 1e3", "exact at mean 1e4", "one sample"),
    ]


def test_line_may_be_waived_by_its_name():
    known = ("statistics wide in bfloat16", "exact at mean 1e3", "exact at mean 1e4")
    assert_contract(broken.NaiveVariance, 8, except_for=(*known, "one sample"))
    assert_contract(broken.NoisyEvaluation, 8, except_for="deterministic in evaluation")
    with pytest.raises(AssertionError) as caught:
        assert_contract(broken.NaiveVariance, 8, except_for=known)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UserError, match="no line 'one smaple'; did you mean one sample?"):
        assert_contract(broken.NaiveVariance, 8, except_for=("one smaple",))


def test_constructor_that_fails_is_a_failed_line():
    with pytest.raises(AssertionError, match=r"can be built: .*before Module.__init__\(\)"):
        assert_contract(broken_state.NoSuper)
    with pytest.raises(AssertionError, match="can be built: .*must be divisible"):
        assert_contract(partial(nn.GroupNorm, 3), 8)


@pytest.mark.parametrize(
    "make",
    [
        BatchNorm,
        LayerNorm,
        InstanceNorm,
        partial(GroupNorm, num_groups=4),
        nn.BatchNorm2d,
        nn.LayerNorm,
    ],
    ids=["batch", "layer", "instance", "group", "torch batch", "torch layer"],
)
def test_sound_norm_keeps_the_contract(make: Callable[..., Any]):
    assert_contract(make)


def test_norm_of_a_factory_keeps_the_contract():
    assert_contract(NormFactory(LayerNorm), 8)


def test_line_says_the_smallest_input_that_shows_it():
    assert line_of(broken.NaiveVariance, "exact at mean 1e4").detail == "not finite at (2, 8)"
    detail = "every input has one output, in training, (4, 8, 1)"
    assert line_of(broken.ErasesOnePosition, "one position").detail == detail


def test_refused_shape_is_no_failure_and_says_why():
    assert line_of(nn.BatchNorm2d, "4-D inputs").status == "pass"
    refused = line_of(nn.BatchNorm2d, "3-D inputs")
    assert (refused.status, refused.value) == ("value", "refused")
    assert "expected 4D input" in refused.detail


def test_two_dimensional_reading_without_a_batch_is_a_refusal():
    """torch's InstanceNorm1d reads (N, C) as one sample (C, L), and only warns."""
    assert line_of(nn.InstanceNorm1d, "2-D inputs").value == "refused"


def test_nothing_taken_is_one_failure_and_the_rest_is_skipped():
    class Refuses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"not {x.ndim}-D")

    subject = open_subject(lambda _: Refuses(), name="mine", target="mine", num_features=8)
    lines = {line.name: line for line in measure_contract(subject)}
    assert [line.name for line in lines.values() if line.status == "fail"] == ["an input is taken"]
    assert lines["deepcopy"].status == "skipped"
    assert lines["5-D inputs"].detail == "not 5-D"


def test_argument_that_counts_only_beside_another_is_not_swallowed():
    """torch's instance norm has a momentum that is of no use without running statistics."""
    assert line_of(nn.InstanceNorm2d, "no argument swallowed").status == "pass"


def test_swallowed_number_is_named_with_a_value_that_showed_nothing():
    class Swallows(broken.Affine):
        def __init__(self, num_features: int, groups: int = 4, sharpness: float = 0.5) -> None:
            del groups, sharpness
            super().__init__(num_features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * broken.per_channel(self.weight, x) + broken.per_channel(self.bias, x)

    line = line_of(Swallows, "no argument swallowed", 8)
    assert line.status == "fail"
    assert line.detail == "groups, sharpness: another value changes nothing, as groups=1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda num_features: num_features, "made a int, not an nn.Module"),
        (broken.per_channel, "needs the argument"),
        (partial(nn.BatchNorm1d, knob=1), "norm.knob is no argument"),
    ],
    ids=["no module", "missing argument", "unknown knob"],
)
def test_mistake_in_what_is_asked_for_is_no_failure(make: Callable[..., Any], message: str):
    with pytest.raises(UserError, match=message):
        assert_contract(make)


def test_half_precision_inside_is_told_from_a_wrong_gradient():
    assert "half precision" in line_of(broken.HalfInside, "statistics wide in bfloat16", 8).detail
    assert line_of(broken.HalfInside, "gradient in training", 8).status == "skipped"


def test_gradient_of_a_backward_that_moves_state_is_measured_after_its_warm_up():
    line = line_of(partial(PowerNorm, warmup=10), "gradient in training", 8)
    assert line.detail.startswith("gradient of the input is not the slope of the output")
    line = line_of(partial(PowerNorm, warmup=1000), "gradient in training", 8)
    assert line.status == "pass"
    assert line.detail == "in one direction, after 128 steps, as its backward moves state"


def test_state_that_a_checkpoint_lacks_is_named():
    assert (
        "running_mean is no buffer"
        in line_of(broken_state.HiddenState, "state_dict round trip", 8).detail
    )
