"""Each broken norm is caught by the line that should catch it; sound ones keep the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import broken_norms as broken
import pytest
import torch
from torch import Tensor, nn

from normexp.checks import assert_contract
from normexp.checks.contract import CONTRACT, open_and_measure
from normexp.checks.subject import Line, open_subject, run_checks
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm
from normexp.norms.power import PowerNorm

CAUGHT_BY = {
    broken.WrongDtype: "dtype kept",
    broken.NarrowStatistics: "statistics wide in bfloat16",
    broken.DropsChannelsLast: "channels_last kept",
    broken.ViewOfMaps: "channels_last kept",
    broken.WritesItsInput: "input unchanged",
    broken.LazyParameter: "parameters made at once",
    broken.UnusedParameter: "gradient for every parameter",
    broken.KeptGraph: "no graph kept",
    broken.GrowingBuffer: "buffers keep shape and dtype",
    broken.LateBuffer: "buffers keep shape and dtype",
    broken.HiddenState: "state_dict round trip",
    broken.NoisyEvaluation: "deterministic in evaluation",
    broken.EvaluationLearns: "evaluation changes no state",
    broken.WrongGradient: "gradient in training",
    broken.NaiveVariance: "exact at mean 1e4",
    broken.NoEps: "finite on constants",
    broken.UnbiasedVariance: "one sample",
    broken.PoisonedByOne: "one sample",
    broken.ErasesOnePosition: "one position",
    broken.SwallowedAffine: "no argument swallowed",
    broken.OppositeMomentum: "running averages",
    broken.AveragedDeviation: "running averages",
    broken.BiasedRunningVariance: "running averages",
    broken.EvaluatesByBatch: "evaluation by averages",
    broken.ReturnsNaN: "finite outputs",
    **dict.fromkeys(broken.UNSAVED, "state_dict round trip"),
}


def line_of(make: Callable[..., Any], name: str, num_features: int | None = None) -> Line:
    """One line of the contract, measured by itself."""
    subject = open_subject(make, target="mine", eps=1e-5, num_features=num_features)
    (line,) = run_checks("contract", [check for check in CONTRACT if check.name == name], subject)
    return line


@pytest.mark.parametrize(
    ("norm", "name"), CAUGHT_BY.items(), ids=[norm.__name__ for norm in CAUGHT_BY]
)
def test_fault_is_caught_by_its_line(norm: type[nn.Module], name: str):
    line = line_of(norm, name, 8)
    assert line.status == "fail"
    assert line.detail


def test_averages_of_torch_are_sound():
    for sound in (broken.Averaging, nn.BatchNorm2d, BatchNorm):
        for name in ("running averages", "evaluation by averages", "state_dict round trip"):
            assert line_of(sound, name, 8).status == "pass", (sound, name)
    assert line_of(LayerNorm, "running averages").status == "skipped"


def test_fault_of_an_average_is_named():
    assert "weight of the old" in line_of(broken.OppositeMomentum, "running averages", 8).detail
    assert "standard deviation" in line_of(broken.AveragedDeviation, "running averages", 8).detail
    assert "biased variance" in line_of(broken.BiasedRunningVariance, "running averages", 8).detail


def test_norm_that_returns_nan_is_said_to_and_nothing_else():
    lines = measure(broken.ReturnsNaN)
    failed = [line for line in lines.values() if line.status == "fail"]
    assert [line.name for line in failed] == ["finite outputs"] and "NaN" in failed[0].detail


def test_maps_are_no_reason_to_take_vectors():
    """Parameters of shape (1, C, 1, 1) are sound where the norm is used."""
    lines = measure(broken.OtherShape)
    assert (lines["2-D inputs"].value, lines["4-D inputs"].status) == ("reshaped", "pass")


def test_assertion_names_the_norm_and_every_failed_line():
    with pytest.raises(AssertionError) as caught:
        assert_contract(broken.NaiveVariance, 8)
    first, *rest = str(caught.value).splitlines()
    assert first == "broken_norms.NaiveVariance breaks the contract:"
    assert [line.partition(":")[0].strip() for line in rest] == [
        *("statistics wide in bfloat16", "exact at mean 1e4", "one sample"),
    ]


def test_line_may_be_waived_by_its_name():
    known = ("statistics wide in bfloat16", "exact at mean 1e4")
    assert_contract(broken.NaiveVariance, 8, except_for=(*known, "one sample"))
    assert_contract(broken.NoisyEvaluation, 8, except_for="deterministic in evaluation")
    with pytest.raises(AssertionError) as caught:
        assert_contract(broken.NaiveVariance, 8, except_for=known)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UserError, match="no line 'one smaple'; did you mean one sample?"):
        assert_contract(broken.NaiveVariance, 8, except_for=("one smaple",))


def test_constructor_that_fails_is_a_failed_line():
    with pytest.raises(AssertionError, match=r"can be built: .*before Module.__init__\(\)"):
        assert_contract(broken.NoSuper)
    with pytest.raises(AssertionError, match="can be built: .*must be divisible"):
        assert_contract(partial(nn.GroupNorm, 3), 8)


@pytest.mark.parametrize(
    "make",
    [
        BatchNorm,
        InstanceNorm,
        partial(GroupNorm, num_groups=4),
        nn.BatchNorm2d,
        nn.LayerNorm,
    ],
    ids=["batch", "instance", "group", "torch batch", "torch layer"],
)
def test_sound_norm_keeps_the_contract(make: Callable[..., Any]):
    assert_contract(make)


def test_norm_of_a_factory_keeps_the_contract():
    assert_contract(NormFactory(LayerNorm), 8)


def test_line_says_the_smallest_input_that_shows_it():
    assert "(2, 8)" in line_of(broken.NaiveVariance, "exact at mean 1e4").detail
    assert "in training, (4, 8, 1)" in line_of(broken.ErasesOnePosition, "one position").detail


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
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"not {x.ndim}-D")

    lines = measure(lambda _: Refuses())
    assert [line.name for line in lines.values() if line.status == "fail"] == ["an input is taken"]
    assert lines["dtype kept"].status == "skipped"
    assert lines["5-D inputs"].detail == "not 5-D"


class OneSize(broken.Bare):
    """With another `size`, its backward fails."""

    def __init__(self, num_features: int, size: int = 4) -> None:
        super().__init__(num_features)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if self.size != 4 and x.requires_grad:
            raise RuntimeError("no such size")
        return torch.tanh(x) * self.size


def test_argument_whose_backward_fails_has_an_effect():
    assert line_of(OneSize, "no argument swallowed", 8).status == "pass"


def test_argument_that_counts_only_beside_another_is_not_swallowed():
    """torch's instance norm has a momentum that is of no use without running statistics."""
    assert line_of(nn.InstanceNorm2d, "no argument swallowed").status == "pass"


def test_swallowed_number_is_named_with_a_value_that_showed_nothing():
    class Swallows(broken.Affine):
        def __init__(self, num_features: int, groups: int = 4, sharpness: float = 0.5) -> None:
            del groups, sharpness
            super().__init__(num_features)

        def forward(self, x: Tensor) -> Tensor:
            return x * broken.per_channel(self.weight, x) + broken.per_channel(self.bias, x)

    line = line_of(Swallows, "no argument swallowed", 8)
    assert line.status == "fail" and line.detail.startswith("groups, sharpness: ")
    assert "groups=1" in line.detail


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda num_features: num_features, "made a int, not an nn.Module"),
        (broken.per_channel, "needs the argument"),
        (partial(nn.BatchNorm1d, knob=1), "norm.knob: "),
    ],
    ids=["no module", "missing argument", "unknown knob"],
)
def test_mistake_in_what_is_asked_for_is_no_failure(make: Callable[..., Any], message: str):
    with pytest.raises(UserError, match=message):
        assert_contract(make)


def test_half_precision_inside_is_told_from_a_wrong_gradient():
    assert "half" in line_of(broken.HalfInside, "statistics wide in bfloat16", 8).detail
    assert line_of(broken.HalfInside, "gradient in training", 8).status == "skipped"


def test_gradient_of_a_backward_that_moves_state_is_measured_after_its_warm_up():
    line = line_of(partial(PowerNorm, warmup=0.01), "gradient in training", 8)
    assert line.status == "fail" and "128 steps" in line.detail
    assert line_of(partial(PowerNorm, warmup=1), "gradient in training", 8).status == "pass"


# ---------------------------------------------------------------- norms from the wild


def along(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (x.ndim - 2))


class Noisy(nn.Module):
    """Draws its first weight, and noise in training."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(num_features) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = along(self.weight, x).to(x.dtype)
        return x * scale * (1 + 0.1 * torch.randn_like(x)) if self.training else x * scale


class InSingle(nn.Module):
    """RMS norm of language models: channels last, float32 inside whatever it is given."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, backward: bool = True) -> None:
        super().__init__()
        self.eps, self.backward = eps, backward
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        single = x.float()
        size = (single.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return self.weight.to(x.dtype) * (single / (size if self.backward else size.detach())).to(
            x.dtype
        )


def measure(make: Callable[..., Any]) -> dict[str, Line]:
    _, lines = open_and_measure(make, target="mine", eps=1e-5, num_features=8)
    return {line.name: line for line in lines}


def failures(make: Callable[..., Any]) -> dict[str, str]:
    return {name: line.detail for name, line in measure(make).items() if line.status == "fail"}


def test_norm_that_draws_in_training_keeps_the_contract():
    before = torch.get_rng_state()
    assert_contract(Noisy)
    assert torch.equal(before, torch.get_rng_state())


def test_norm_that_draws_in_evaluation_fails_by_one_line():
    assert failures(broken.NoisyEvaluation).keys() == {"deterministic in evaluation"}


def test_float32_inside_is_no_wrong_gradient_and_hides_none():
    assert failures(InSingle) == {}
    assert measure(InSingle)["gradient in training"].detail
    wrong = failures(lambda hidden_size: InSingle(hidden_size, backward=False))
    assert wrong.keys() == {"gradient in training", "gradient in evaluation"}


def test_missing_kernel_is_skipped():
    class NoHalf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.bfloat16:
                raise NotImplementedError("kernel not implemented for 'BFloat16'")
            return torch.tanh(x)

    lines = measure(lambda _: NoHalf())
    assert "bfloat16" in lines["dtype kept"].detail and lines["dtype kept"].status == "pass"
    assert lines["statistics wide in bfloat16"].status == "skipped"


@pytest.mark.slow
def test_lazy_norm_swallows_no_argument_that_could_not_be_looked_at():
    found = failures(nn.LazyBatchNorm2d)
    assert "parameters made at once" in found and "no argument swallowed" not in found


def test_arguments_that_take_any_name_are_a_failure():
    class AnyName(nn.Module):
        def __init__(self, num_features: int, **_: object) -> None:
            del num_features
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    assert failures(AnyName).keys() == {"no argument swallowed"}


def test_input_beside_x_is_named():
    class Conditional(nn.Module):
        def forward(self, x: Tensor, style: Tensor) -> Tensor:
            return x * style

    with pytest.raises(AssertionError, match="an input is taken: .*'style'"):
        assert_contract(Conditional, 8)
