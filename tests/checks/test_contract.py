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
from normexp.checks.card import measure_card
from normexp.checks.norm import Answer, open_norm
from normexp.checks.questions import CONTRACT, OF_NORMS
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, LayerNorm
from normexp.norms.zoo.power import PowerNorm

Make = Callable[..., Any]


def line_of(make: Make, name: str) -> Answer:
    """Measures one line alone."""
    norm = open_norm(make, target="mine", eps=1e-5, num_features=8)
    (question,) = [question for question in OF_NORMS if question.name == name]
    return question.answer(norm)


def failures(make: Make) -> dict[str, str]:
    card = measure_card(
        make, name="mine", target="mine", eps=1e-5, num_features=8, contract_only=True
    )
    return {line.name: line.detail for line in card.failures}


@pytest.mark.parametrize("norm", broken.CAUGHT_BY)
def test_fault_is_caught_by_its_line(norm: str):
    make, name, words = broken.CAUGHT_BY[norm]
    line = line_of(make, name)
    assert line.status == "fail" and line.detail
    assert words in line.detail


def test_each_line_has_a_norm_that_breaks_it():
    assert {name for _, name, _ in broken.CAUGHT_BY.values()} == {*CONTRACT} - {"can be built"}


class InSingle(nn.Module):
    """RMS norm of language models: channels last, float32 inside whatever it is given."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, backward: bool = True) -> None:
        super().__init__()
        self.eps, self.backward = eps, backward
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        single = x.float()
        size = (single.square().mean(-1, keepdim=True) + self.eps).sqrt()
        normalized = single / (size if self.backward else size.detach())
        return self.weight.to(x.dtype) * normalized.to(x.dtype)


class NoHalf(nn.Module):
    """Has no kernel for bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise NotImplementedError("kernel not implemented for 'BFloat16'")
        return torch.tanh(x)


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"not {x.ndim}-D")


SOUND = [partial(GroupNorm, num_groups=4), nn.BatchNorm2d, nn.LayerNorm, broken.NoisyTraining]
FAILURES: dict[str, tuple[Make, set[str]]] = {
    **{f"sound {i}": (make, set()) for i, make in enumerate(SOUND)},  # and all shipped norms
    "a factory": (NormFactory(LayerNorm), set()),
    "float32 inside": (InSingle, set()),
    "wrong slope in float32": (
        lambda hidden_size: InSingle(hidden_size, backward=False),
        {"gradient"},
    ),
    "missing kernel": (lambda _: NoHalf(), set()),
    "NaN": (lambda _: broken.Applies(broken.returns_nan), {"finite"}),
    "no input": (lambda _: Refuses(), {"shape kept"}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_contract_fails_by_the_lines_that_are_broken_and_by_no_other(name: str):
    make, expected = FAILURES[name]
    before = torch.get_rng_state()
    assert failures(make).keys() == expected
    assert torch.equal(before, torch.get_rng_state())


# The norm, a line, its result and words of its detail.
LINES = [
    (broken.KeepsItsMean, "buffers saved", "pass", ""),
    (InSingle, "gradient", "pass", "below float64"),
    (lambda _: NoHalf(), "dtype kept", "pass", "bfloat16"),
    (lambda _: NoHalf(), "statistics wide in bfloat16", "skipped", ""),
    # A backward that moves state is measured after its warm-up.
    (partial(PowerNorm, warmup=0.01), "gradient", "fail", "gradient of the input"),
]


@pytest.mark.parametrize(("make", "name", "result", "words"), LINES)
def test_line_says_what_was_found(make: Make, name: str, result: str, words: str):
    line = line_of(make, name)
    assert line.status == result and words in line.detail


# ---------------------------------------------------------------- the assertion


class TwoFaults(broken.UnusedParameter):
    def forward(self, x: Tensor) -> Tensor:
        return broken.wrong_gradient(x) * broken.per_channel(self.weight, x)


def test_assertion_names_the_norm_and_every_failed_line_that_is_not_waived():
    known = ("gradient for every parameter", "gradient")
    with pytest.raises(AssertionError) as caught:
        assert_contract(TwoFaults, 8)
    first, *rest = str(caught.value).splitlines()
    assert first == "test_contract.TwoFaults breaks the contract:"
    assert [line.partition(":")[0].strip() for line in rest] == [*known]
    assert_contract(TwoFaults, 8, except_for=known)
    with pytest.raises(AssertionError) as caught:
        assert_contract(TwoFaults, 8, except_for=known[0])
    assert len(str(caught.value).splitlines()) == 2


class Conditional(nn.Module):
    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return x * style


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken.NoSuper, r"can be built: .*before Module.__init__\(\)"),
        (partial(nn.GroupNorm, 3), "can be built: .*must be divisible"),
        (lambda _: Conditional(), "shape kept: .*'style'"),
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
        (partial(nn.BatchNorm1d, **{"knob": 1}), (), "unexpected keyword argument .knob."),
        (LayerNorm, ("gradeint",), "no line 'gradeint'; there are can be built, "),
    ],
    ids=["no module", "missing argument", "a module", "unknown knob", "unknown line"],
)
def test_mistake_in_what_is_asked_for_is_no_failure(make: Make, waived: Any, message: str):
    with pytest.raises(UserError, match=message):
        assert_contract(make, except_for=waived)
