"""A norm by itself: each fault is caught by its line, and traits are those of the formula."""

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

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.sample import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, NoNorm, RMSNorm
from normexp.norms.sequence import CausalGroupNorm
from normexp.norms.zoo.power import PowerNorm
from normexp.training.checks import assert_contract
from normexp.training.checks.card import Card, measure_card, print_cards
from normexp.training.checks.norm import LoneNorm, open_norm
from normexp.training.checks.question import Answer
from normexp.training.checks.questions import CONTRACT, OF_NORMS

Make = Callable[..., Any]
ALL = {question.name: question for question in OF_NORMS}


@cache
def lone(make: Make) -> LoneNorm:
    return open_norm(make, target="mine", eps=1e-5, num_features=8)


def line_of(make: Make, name: str) -> Answer:
    """Measures one line alone."""
    return ALL[name].answer(lone(make))


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("norm", broken.CAUGHT_BY)
def test_fault_is_caught_by_its_line(norm: str):
    make, name, words = broken.CAUGHT_BY[norm]
    line = line_of(make, name)
    assert line.status == "fail" and line.detail
    assert words in line.detail


def test_each_line_has_a_norm_that_breaks_it():
    apart = {"can be built", "mixes samples as declared"}
    assert {name for _, name, _ in broken.CAUGHT_BY.values()} == {*CONTRACT} - apart


class InPlace(nn.Module):
    """Centres its input in place, as memory-saving norms do."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        x -= x.mean(dim=1, keepdim=True)
        return x * self.gain.view(-1, *[1] * (x.ndim - 2))


def test_a_norm_may_change_its_input_in_place():
    assert_contract(InPlace, 8)
    assert "leaf" not in line_of(InPlace, "replicas under vmap").detail


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
    """A tanh without a kernel for bfloat16."""

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
    card = measure_card(make, name="mine", target="mine", num_features=8, contract_only=True)
    assert {line.name for line in card.failures} == expected
    assert torch.equal(before, torch.get_rng_state())


class Declares(nn.BatchNorm1d):
    mixes_samples = False


def test_a_class_that_declares_falsely_breaks_the_contract():
    with pytest.raises(AssertionError, match="mixes samples as declared: declares"):
        assert_contract(Declares)
    assert_contract(Declares, except_for=["mixes samples as declared"])


def test_a_norm_that_mixes_in_large_batches_alone_is_found():
    assert line_of(lambda _: broken.Applies(broken.splits_large), "mixes samples").value == "yes"


class TwoFaults(broken.UnusedParameter):
    def forward(self, x: Tensor) -> Tensor:
        return broken.wrong_gradient(x) * broken.per_channel(self.weight, x)


def test_assertion_names_the_norm_and_every_failed_line_that_is_not_waived():
    known = ("gradient for every parameter", "gradient")
    with pytest.raises(AssertionError) as caught:
        assert_contract(TwoFaults, 8)
    first, *rest = str(caught.value).splitlines()
    assert first == "test_card.TwoFaults breaks the contract:"
    assert [line.partition(":")[0].strip() for line in rest] == [*known]
    assert_contract(TwoFaults, 8, except_for=known)
    with pytest.raises(AssertionError) as caught:
        assert_contract(TwoFaults, 8, except_for=known[0])
    assert len(str(caught.value).splitlines()) == 2


class Conditional(nn.Module):
    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return x * style


# A norm that cannot run fails its contract; a mistake in what is asked for is one of the user's.
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no super": (broken.NoSuper, (), AssertionError, r"can be built: .*before Module.__init__\(\)"),
    "groups": (partial(nn.GroupNorm, 3), (), AssertionError, "built: .*must be divisible"),
    "second input": (lambda _: Conditional(), (), AssertionError, "shape kept: .*'style'"),
    "no module": (lambda num_features: num_features, (), UserError, "made a int, not an nn.Module"),
    "missing argument": (broken.per_channel, (), UserError, "needs the argument"),
    "a module": (LayerNorm(8, eps=1e-5), (), UserError, "must be a class, as in assert_contract"),
    "unknown knob": (partial(nn.BatchNorm1d, **{"knob": 1}), (), UserError, "argument .knob."),
    "unknown line": (LayerNorm, ("gradeint",), UserError, "no line 'gradeint'; there are can be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_with_the_reason(name: str):
    make, waived, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        assert_contract(make, None if kind is UserError else 8, except_for=waived)


# ---------------------------------------------------------------- traits

# Do samples, channels, positions mix, does it read the future; is it invariant to scale and shift?
TRAITS = ("mixes samples", "pools channels", "pools positions", "reads the future")
TRAITS += ("ignores input scale", "ignores input shift")
NO, YES, TRAINING = "no", "yes", "in training"
POOLS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "batch": (BatchNorm, (TRAINING, NO, TRAINING, TRAINING, TRAINING, TRAINING)),
    "layer": (LayerNorm, (NO, YES, YES, YES, YES, YES)),
    "layer2d": (LayerNorm2d, (NO, YES, NO, NO, YES, YES)),
    "instance": (InstanceNorm, (NO, NO, YES, YES, YES, YES)),
    "group": (partial(GroupNorm, num_groups=4), (NO, YES, YES, YES, YES, YES)),
    "causal": (partial(CausalGroupNorm, num_groups=4), (NO, YES, YES, NO, YES, YES)),
    "rms": (RMSNorm, (NO, YES, NO, NO, YES, NO)),
    "none": (NoNorm, (NO, NO, NO, NO, NO, NO)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_invariance_are_those_of_the_formula(name: str):
    make, expected = POOLS[name]
    assert tuple(line_of(make, trait).value for trait in TRAITS) == expected


class ReadsPadding(broken.Affine):
    """Takes a mask and pools padding nevertheless."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return super().forward(x)


class HidesItsEps(nn.GroupNorm):
    def __init__(self, num_channels: int, **others: Any) -> None:
        super().__init__(1, num_channels, **others)


class PrivateEps(nn.Module):
    """RMS norm over all of a sample, with a large eps that no argument sets."""

    def __init__(self, num_features: int) -> None:
        del num_features
        super().__init__()
        self._eps = 0.5

    def forward(self, x: Tensor) -> Tensor:
        size = x.square().mean(list(range(1, x.ndim)), keepdim=True)
        return x * (size + self._eps).rsqrt()


class KeepsParameters(nn.Module):
    """Moves averages that are parameters, and uses those of the batch."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(num_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean([d for d in range(x.ndim) if d != 1])
        self.centre.data.lerp_(mean.detach(), 0.1)
        return x - mean.view(-1, *[1] * (x.ndim - 2))


IN_HALF = "statistics wide in bfloat16"
# The norm, a line, its value or else its status, and words of its detail.
LINES = [
    (broken.KeepsItsMean, "buffers saved", "pass", ""),
    (InSingle, "gradient", "pass", "below float64"),
    (lambda _: NoHalf(), "dtype kept", "pass", "bfloat16"),
    (lambda _: NoHalf(), IN_HALF, "skipped", ""),
    (broken.NarrowStatistics, IN_HALF, NO, "train it in float32"),
    (LayerNorm, IN_HALF, YES, ""),
    # A backward that moves state is measured after its warm-up.
    (partial(PowerNorm, warmup=0.01), "gradient", "fail", "gradient of the input"),
    (BatchNorm, "reads padding", NO, ""),
    (ReadsPadding, "reads padding", YES, ""),
    (nn.BatchNorm1d, "reads padding", "skipped", "`mask`"),
    (HidesItsEps, "ignores input scale", YES, ""),
    (PrivateEps, "ignores input scale", YES, ""),
    (nn.BatchNorm1d, "running state", YES, "running_var"),
    (LayerNorm, "running state", NO, ""),
    (KeepsParameters, "running state", YES, "centre"),
    (broken.HiddenState, "running state", YES, ""),
    (broken.KeepsItsMean, "running state", NO, ""),
    (BatchNorm, "replicas under vmap", YES, ""),
    (broken.CallsNumpy, "replicas under vmap", NO, "(5, 8)"),
]


@pytest.mark.parametrize(("make", "name", "said", "words"), LINES)
def test_line_says_what_was_found(make: Make, name: str, said: Any, words: str):
    line = line_of(make, name)
    assert (line.status if line.value is None else line.value) == said and words in line.detail


def test_the_verdict_says_that_an_evaluation_depends_on_the_batch():
    mixes = Answer("traits", "mixes samples", "value", YES)
    card = Card("mine", "a.B", 8, "(B, C)", (mixes,))
    assert card.verdict.endswith(
        "its evaluation depends on the other samples of a batch, and on its size"
    )


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
    assert "dtype kept" not in out


# ---------------------------------------------------------------- norms of torch and torchvision

BATCH = (TRAINING, NO, TRAINING, TRAINING)
MAP = (NO, YES, YES, YES)
CHANNELS = (NO, YES, NO, NO)
OF_SAMPLE = (NO, NO, YES, YES)
TRACKING = partial(nn.InstanceNorm2d, track_running_stats=True)

# Samples, channels, positions and future that it mixes, as its documentation says; the failures.
NORMS: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "batch 1d": (nn.BatchNorm1d, BATCH, set()),
    "of the batch": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        (YES, NO, YES, YES),
        set(),
    ),
    "batch, cumulative": (partial(nn.BatchNorm1d, momentum=None), BATCH, set()),
    "frozen": (FrozenBatchNorm2d, (NO, NO, NO, NO), set()),
    "group 8": (partial(nn.GroupNorm, 8), MAP, set()),
    "group of 32": (GroupNormAct, MAP, set()),
    "layer": (nn.LayerNorm, CHANNELS, set()),
    "layer 2d": (LayerNormOfMaps, CHANNELS, set()),
    "rms": (nn.RMSNorm, CHANNELS, set()),
    "local response": (partial(nn.LocalResponseNorm, size=5), CHANNELS, set()),
    "instance 1d": (nn.InstanceNorm1d, OF_SAMPLE, set()),
    "instance 2d that tracks": (TRACKING, BATCH, set()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_card_has_no_false_line(name: str):
    make, expected, failures = NORMS[name]
    function = make.func if isinstance(make, partial) else make
    target = f"{function.__module__}.{function.__qualname__}"
    card = measure_card(make, name=name, target=target, eps=1e-5)
    lines = {line.name: line for line in card.lines}
    assert tuple(lines[trait].value for trait in TRAITS[:4]) == expected
    assert {line.name for line in card.failures} == failures
    # torch's InstanceNorm computes in bfloat16 throughout unless it has parameters in float32.
    is_narrow = name.startswith("instance")
    assert (lines[IN_HALF].value == "no") is is_narrow
    assert ("train it in float32" in card.verdict) is is_narrow
