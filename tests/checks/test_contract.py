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
from normexp.checks.asking import Answer, ask_norm
from normexp.checks.contract import open_and_measure
from normexp.checks.lone_norm import open_norm
from normexp.checks.questions import CONTRACT
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, LayerNorm
from normexp.norms.zoo.power import PowerNorm

Make = Callable[..., Any]


def line_of(make: Make, name: str, num_features: int | None = None) -> Answer:
    """Measures one line of the contract alone."""
    norm = open_norm(make, target="mine", eps=1e-5, num_features=num_features)
    (line,) = ask_norm([question for question in CONTRACT if question.name == name], norm)
    return line


def failures(make: Make) -> dict[str, str]:
    _, lines = open_and_measure(make, target="mine", eps=1e-5, num_features=8)
    return {line.name: line.detail for line in lines if line.status == "fail"}


@pytest.mark.parametrize("norm", broken.CAUGHT_BY)
def test_fault_is_caught_by_its_line(norm: str):
    make, name, words = broken.CAUGHT_BY[norm]
    line = line_of(make, name, 8)
    assert line.status == "fail" and line.detail
    assert words in line.detail


# ---------------------------------------------------------------- norms from the wild


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


class PNorm(nn.Module):
    """x / (mean over channels of |x|^p)^(1/p), whose slope in p is infinite at 0."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        return x / ((x.abs() ** self.p).mean(1, keepdim=True) ** (1 / self.p) + 1e-5)


class NoHalf(nn.Module):
    """Has no kernel for bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise NotImplementedError("kernel not implemented for 'BFloat16'")
        return torch.tanh(x)


class OneSize(broken.Bare):
    """With another `size`, its backward fails."""

    def __init__(self, num_features: int, size: int = 4) -> None:
        super().__init__(num_features)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if self.size != 4 and x.requires_grad:
            raise RuntimeError("no such size")
        return torch.tanh(x) * self.size


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"not {x.ndim}-D")


SOUND = [partial(GroupNorm, num_groups=4), nn.BatchNorm2d, nn.LayerNorm]  # and all shipped norms
FAILURES: dict[str, tuple[Make, set[str]]] = {
    **{f"sound {i}": (make, set()) for i, make in enumerate(SOUND)},
    "a factory": (NormFactory(LayerNorm), set()),
    "draws in training": (broken.NoisyTraining, set()),
    "float32 inside": (InSingle, set()),
    "wrong slope in float32": (
        lambda hidden_size: InSingle(hidden_size, backward=False),
        {"gradient in training", "gradient in evaluation"},
    ),
    "missing kernel": (lambda _: NoHalf(), set()),
    "draws in evaluation": (
        lambda _: broken.Applies(broken.noisy_evaluation),
        {"deterministic in evaluation"},
    ),
    "any name": (broken.AnyName, {"no argument swallowed"}),
    "NaN": (lambda _: broken.Applies(broken.returns_nan), {"finite outputs"}),
    "no input": (lambda _: Refuses(), {"an input is taken"}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_contract_fails_by_the_lines_that_are_broken_and_by_no_other(name: str):
    make, expected = FAILURES[name]
    before = torch.get_rng_state()
    assert failures(make).keys() == expected
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_lazy_norm_swallows_no_argument_that_could_not_be_looked_at():
    found = failures(nn.LazyBatchNorm2d)
    assert "parameters made at once" in found and "no argument swallowed" not in found


# The norm, a line, its result and words of its detail.
LINES = [
    *((norm, "running averages", "pass", "") for norm in (broken.Averaging, nn.BatchNorm2d)),
    (LayerNorm, "running averages", "skipped", ""),
    (broken.Averaging, "evaluation by averages", "pass", ""),
    (broken.Averaging, "state_dict round trip", "pass", ""),
    (broken.OtherShape, "2-D inputs", "reshaped", ""),  # parameters of (1, C, 1, 1) are sound
    (broken.OtherShape, "4-D inputs", "pass", ""),
    (nn.BatchNorm2d, "3-D inputs", "refused", "expected 4D input"),
    # torch's InstanceNorm1d reads (N, C) as one sample (C, L), and only warns.
    (nn.InstanceNorm1d, "2-D inputs", "refused", ""),
    # Its momentum is of no use without running statistics.
    (nn.InstanceNorm2d, "no argument swallowed", "pass", ""),
    (OneSize, "no argument swallowed", "pass", ""),
    (broken.HalfInside, "gradient in training", "skipped", ""),
    (InSingle, "gradient in training", "pass", "below float64"),
    (lambda _: NoHalf(), "dtype kept", "pass", "bfloat16"),
    (lambda _: NoHalf(), "statistics wide in bfloat16", "skipped", ""),
    (broken.NaiveVariance, "statistics wide in bfloat16", "fail", "statistics in float32"),
    (PNorm, "finite on constants", "fail", "gradient of p"),
    (lambda _: Refuses(), "5-D inputs", "refused", "not 5-D"),
    # A backward that moves state is measured after its warm-up.
    (partial(PowerNorm, warmup=0.01), "gradient in training", "fail", "128 steps"),
    (partial(PowerNorm, warmup=1), "gradient in training", "pass", ""),
]


@pytest.mark.parametrize(("make", "name", "result", "words"), LINES)
def test_line_says_what_was_found(make: Make, name: str, result: str, words: str):
    line = line_of(make, name, 8)
    assert (line.value or line.status) == result
    assert words in line.detail


# ---------------------------------------------------------------- the assertion


def test_assertion_names_the_norm_and_every_failed_line_that_is_not_waived():
    known = ("statistics wide in bfloat16", "exact at mean 1e4")
    with pytest.raises(AssertionError) as caught:
        assert_contract(broken.NaiveVariance, 8)
    first, *rest = str(caught.value).splitlines()
    assert first == "broken_norms.NaiveVariance breaks the contract:"
    assert [line.partition(":")[0].strip() for line in rest] == [*known, "one sample"]
    assert_contract(broken.NaiveVariance, 8, except_for=(*known, "one sample"))
    assert_contract(broken.AnyName, 8, except_for="no argument swallowed")
    with pytest.raises(AssertionError) as caught:
        assert_contract(broken.NaiveVariance, 8, except_for=known)
    assert len(str(caught.value).splitlines()) == 2


class Conditional(nn.Module):
    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return x * style


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken.NoSuper, r"can be built: .*before Module.__init__\(\)"),
        (partial(nn.GroupNorm, 3), "can be built: .*must be divisible"),
        (lambda _: Conditional(), "an input is taken: .*'style'"),
    ],
    ids=["no super", "groups", "second input"],
)
def test_norm_that_cannot_run_is_a_failed_line(make: Make, message: str):
    with pytest.raises(AssertionError, match=message):
        assert_contract(make, 8)


@pytest.mark.parametrize(
    ("make", "waived", "message"),
    [
        (lambda num_features: num_features, (), "made a int, not an nn.Module"),
        (broken.per_channel, (), "needs the argument"),
        (LayerNorm(8, eps=1e-5), (), "must be a class, as in assert_contract"),
        (partial(nn.BatchNorm1d, **{"knob": 1}), (), "norm.knob: "),
        (LayerNorm, ("one smaple",), "no line 'one smaple'; did you mean one sample?"),
    ],
    ids=["no module", "missing argument", "a module", "unknown knob", "unknown line"],
)
def test_mistake_in_what_is_asked_for_is_no_failure(make: Make, waived: Any, message: str):
    with pytest.raises(UserError, match=message):
        assert_contract(make, except_for=waived)
