"""Norms with one fault each, as found in the wild, and the line of the contract that catches it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normexp.norms.zoo.deviations import (
    BatchNormBiasedAverage,
    BatchNormNaiveVariance,
    BatchNormNoEps,
)

EPS = 1e-5
Make = TypeVar("Make", bound=Callable[..., Any])
CAUGHT_BY: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {}  # norm, line, words of it
UNSAVED: dict[str, tuple[Callable[[int], nn.Module], str]] = {}  # norm, what a checkpoint lacks


class Applies(nn.Module):
    """A function of (N, C, *) as a norm."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def caught_by(line: str, words: str = "") -> Callable[[Make], Make]:
    """Adds a class, or a function of (N, C, *), to the table."""

    def enter(norm: Make) -> Make:
        any_norm: Any = norm
        make = any_norm if isinstance(any_norm, type) else lambda _: Applies(any_norm)
        CAUGHT_BY[norm.__name__] = make, line, words
        return norm

    return enter


def unsaved(lacks: str) -> Callable[[Make], Make]:
    def enter(norm: Make) -> Make:
        UNSAVED[norm.__name__] = norm, lacks
        return caught_by("state_dict round trip")(norm)

    return enter


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.ndim - 2))


def pooled(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


class Bare(nn.Module):
    """No parameters."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features


class Affine(nn.Module):
    """Normalizes by batch moments, with a weight and a bias per channel."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, x.mean(pooled(x)), self.spread(x))

    def spread(self, x: Tensor) -> Tensor:
        return x.var(pooled(x), correction=0)

    def scaled(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        out = (x - per_channel(mean, x)) * torch.rsqrt(per_channel(var, x) + EPS)
        return (out * per_channel(self.weight, x) + per_channel(self.bias, x)).to(x.dtype)


# ---------------------------------------------------------------- faults of the forward

caught_by("exact at mean 1e4", "(2, 8)")(BatchNormNaiveVariance)
caught_by("finite on constants")(BatchNormNoEps)
caught_by("running averages", "biased variance")(BatchNormBiasedAverage)


@caught_by("exact at mean 1e4", "(2, 8)")
class NaiveVariance(Affine):
    """E[x^2] - E[x]^2."""

    def spread(self, x: Tensor) -> Tensor:
        return x.square().mean(pooled(x)) - x.mean(pooled(x)).square()


@caught_by("statistics wide in bfloat16")
class NarrowStatistics(Affine):
    """Moments in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(pooled(x)) / (x.numel() / x.shape[1])
        centred = x - per_channel(mean, x)
        return self.scaled(x, mean, centred.square().mean(pooled(x)))


@caught_by("statistics wide in bfloat16", "half")
class HalfInside(Affine):
    """Computes in float16 and returns the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half()).to(x.dtype)


@caught_by("one sample")
class UnbiasedVariance(Affine):
    """Normalizes by the unbiased variance: a gain of sqrt(1 - 1/n)."""

    def spread(self, x: Tensor) -> Tensor:
        return x.var(pooled(x), correction=1)


@caught_by("any strides")
class ViewOfMaps(Affine):
    """Layer norm by `view`, which a channels_last input does not allow."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(x.shape[0], -1)
        centred = flat - flat.mean(-1, keepdim=True)
        out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
        return out.view(x.shape) * per_channel(self.weight, x) + per_channel(self.bias, x)


class OtherShape(Affine):
    """Parameters shaped for maps: (N, C) comes back as (1, N, C, C) or (1, C, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(pooled(x)), x.var(pooled(x), correction=0)
        shape = (1, -1, 1, 1)
        out = (x - mean.view(shape)) * torch.rsqrt(var.view(shape) + EPS)
        return out * self.weight.view(shape) + self.bias.view(shape)


@caught_by("deterministic in evaluation")
def noisy_evaluation(x: Tensor) -> Tensor:
    return x * (1 + 0.1 * torch.rand_like(x))


class NoisyTraining(Affine):
    """Draws its first weight, and noise in training, which is not a fault."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        out = (x * per_channel(self.weight, x) + per_channel(self.bias, x)).to(x.dtype)
        return out * (1 + 0.1 * torch.randn_like(out)) if self.training else out


class Streaming(nn.Module):
    """Sees samples one after another, it says."""

    sequential_state = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@caught_by("input unchanged")
def writes_its_input(x: Tensor) -> Tensor:
    with torch.no_grad():
        x -= x.mean(dim=1, keepdim=True)
    return x * 1.0


@caught_by("dtype kept")
def wrong_dtype(x: Tensor) -> Tensor:
    return x.float() / (x.float().square().mean(dim=1, keepdim=True) + EPS).sqrt()


@caught_by("gradient in training")
def wrong_gradient(x: Tensor) -> Tensor:
    return x / (x.detach().square().mean(dim=1, keepdim=True) + EPS).sqrt()


@caught_by("one position", "in training, (4, 8, 1)")
def erases_one_position(x: Tensor) -> Tensor:
    dims = list(range(2, x.ndim))
    if not dims:
        raise ValueError("needs positions")
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + EPS)


@caught_by("finite outputs", "NaN")
def returns_nan(x: Tensor) -> Tensor:
    return x.log()


@caught_by("finite outputs", "NaN, in evaluation")
class NaNInEvaluation(Affine):
    """Forgets its statistics in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.training else torch.nan)


class CallsNumpy(Affine):
    """Leaves torch in its forward, where a compiler and vmap cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(x.detach().numpy().mean()) * 0.0)


class WritesItsParameters(Affine):
    """Grows its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(1.5 * self.weight)
        return x * per_channel(self.weight, x)


# ---------------------------------------------------------------- arguments, parameters, buffers


@caught_by("no argument swallowed", "affine, groups, sharpness: another value changes nothing")
class Swallows(Affine):
    """Accepts arguments and ignores them."""

    def __init__(
        self, num_features: int, affine: bool = True, groups: int = 4, sharpness: float = 0.5
    ) -> None:
        del affine, groups, sharpness
        super().__init__(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return x * per_channel(self.weight, x) + per_channel(self.bias, x)


@caught_by("no argument swallowed", "misspelt")
class AnyName(Bare):
    """Takes arguments of any name."""

    def __init__(self, num_features: int, **_: object) -> None:
        super().__init__(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@caught_by("parameters made at once", "weight")
class LazyParameter(Bare):
    """Makes its weight in the first forward."""

    weight: nn.Parameter | None

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.ones(x.shape[1], dtype=x.dtype))
        return x * per_channel(self.weight, x)


class NoSuper(nn.Module):
    """Forgets super().__init__()."""

    def __init__(self, num_features: int) -> None:
        self.weight = nn.Parameter(torch.ones(num_features))


@caught_by("gradient for every parameter", "rho")
class UnusedParameter(Affine):
    """A parameter that no output depends on."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.rho = nn.Parameter(torch.ones(num_features))


@caught_by("buffers keep shape and dtype", "last")
class GrowingBuffer(Affine):
    """A buffer that takes the shape of its batch: no rank knows how much to broadcast."""

    last: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("last", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.last = x.detach().flatten()
        return super().forward(x)


@caught_by("buffers keep shape and dtype", "missing")
class LateBuffer(Affine):
    """A buffer that is None until the first forward."""

    running_mean: Tensor | None

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("running_mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.running_mean is None:
            self.running_mean = x.detach().mean(pooled(x))
        return super().forward(x)


# ---------------------------------------------------------------- running averages


class Averaging(Affine):
    """Batch norm written with torch's functions; each subclass changes one step."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, momentum: float = 0.1) -> None:
        super().__init__(num_features)
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.evaluate(x)
        self.update(x)
        return super().forward(x)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        self.running_mean.lerp_(x.mean(pooled(x)), self.weight_of_new())
        self.running_var.lerp_(self.kept_spread(x), self.weight_of_new())

    def evaluate(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.running_mean, self.running_var)

    def weight_of_new(self) -> float:
        return self.momentum

    def kept_spread(self, x: Tensor) -> Tensor:
        return x.var(pooled(x), correction=min(1, x.numel() // x.shape[1] - 1))


@caught_by("no graph kept", "running_mean")
class KeptGraph(Averaging):
    """Moves its running averages outside of no_grad."""

    def update(self, x: Tensor) -> None:
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(pooled(x))
        self.running_var = 0.9 * self.running_var + 0.1 * self.spread(x)


@caught_by("one sample")
class PoisonedByOne(Averaging):
    """The unbiased variance of one sample, NaN, stays in the running average for good."""

    def kept_spread(self, x: Tensor) -> Tensor:
        return x.var(pooled(x), correction=1)


@caught_by("evaluation changes no state", "running_mean")
class EvaluationLearns(Averaging):
    """Moves its running averages in evaluation."""

    def evaluate(self, x: Tensor) -> Tensor:
        self.update(x)
        return super().evaluate(x)


@caught_by("running averages", "weight of the old")
class OppositeMomentum(Averaging):
    """Momentum as flax has it: the weight of the old value."""

    def weight_of_new(self) -> float:
        return 1 - self.momentum


@caught_by("running averages", "standard deviation")
class AveragedDeviation(Averaging):
    """Averages the standard deviation and squares it in evaluation."""

    def kept_spread(self, x: Tensor) -> Tensor:
        return super().kept_spread(x).sqrt()

    def evaluate(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.running_mean, self.running_var.square())


@caught_by("evaluation by averages", "running_mean")
class EvaluatesByBatch(Averaging):
    """Keeps averages, and evaluates by the statistics of the batch."""

    def evaluate(self, x: Tensor) -> Tensor:
        return self.scaled(x, x.mean(pooled(x)), self.spread(x))


# ---------------------------------------------------------------- state that checkpoints lack


@unsaved("its state_dict lacks: running_mean")
class HiddenState(Affine):
    """A running mean that is not a buffer."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.running_mean = torch.zeros(num_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(pooled(x))
        return self.scaled(x, self.running_mean.to(x.dtype), torch.ones_like(self.running_mean))


@unsaved("its state_dict lacks: mean")
class Unsaved(HiddenState):
    """A running mean in a buffer that is not persistent."""

    mean: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        del self.running_mean
        self.register_buffer("mean", torch.zeros(num_features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(pooled(x)), 0.1)
        return self.scaled(x, self.mean, torch.ones_like(self.mean))


class Remembers(nn.Module):
    """tanh(x), scaled by what it keeps of the means of its training steps.

    Args:
        state: at first.
        keep: the next state, of the state and the mean of an input.
        read: the number to scale by, of the state and the mode.
    """

    def __init__(self, state: Any, keep: Callable[..., Any], read: Callable[..., Any]) -> None:
        super().__init__()
        self.state, self.keep, self.read = copy.copy(state), keep, read

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state = self.keep(self.state, x.detach().mean())
        return torch.tanh(x) * (1.0 + self.read(self.state, self.training))


def count_in_list(state: list[int], _: Tensor) -> list[int]:
    state[0] += 1
    return state


def append(state: list[Tensor], mean: Tensor) -> list[Tensor]:
    state.append(mean)
    return state


COUNTS = lambda state, _: state + 1  # noqa: E731
KEEPS_LAST = lambda _, mean: mean  # noqa: E731
LATE = lambda state, _: state > 1000  # noqa: E731
IN_EVALUATION = lambda state, training: 0 if training else state  # noqa: E731
IN_TRAINING = lambda state, training: state if training else 0  # noqa: E731
LACKS, LACKS_COUNTER = "its state_dict lacks: state", "a counter that its state_dict lacks: state"
OUTSIDE = "outside of the module"
SHARED: list[Any] = [0]  # as in a class, a closure or a Python module


def count_in_shared(_: Any, mean: Tensor) -> None:
    SHARED[0] = float(mean) + SHARED[0]


# The state, how it is kept and read, and how it is named.
KEPT = {
    "a number": (0, COUNTS, IN_TRAINING, LACKS),
    "the last mean": (0.0, KEEPS_LAST, IN_EVALUATION, LACKS),
    "a list of means": ([], append, lambda s, training: 0 if training else sum(s), LACKS),
    "a late counter": (0, COUNTS, LATE, LACKS_COUNTER),
    "a late tensor": (torch.zeros(()), COUNTS, LATE, LACKS_COUNTER),
    "a late list": ([0], count_in_list, lambda state, _: state[0] > 1000, LACKS_COUNTER),
    "a shared number": (None, count_in_shared, lambda *_: 0.1 * SHARED[0], OUTSIDE),
    "a generator": (None, lambda *_: None, lambda _, t: random.random() if t else 0, "not seed"),
}
for name, (state, keep, read, lacks) in KEPT.items():
    make = partial(lambda *arguments: Remembers(*arguments[:3]), state, keep, read)
    UNSAVED[name] = make, lacks
    CAUGHT_BY[name] = make, "state_dict round trip", ""


class KeepsItsMean(Affine):
    """Stores the last mean for inspection only; training does not read it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last_mean = x.detach().mean()
        return super().forward(x)


# ---------------------------------------------------------------- dependences


class ReadsFurther(nn.Module):
    """Adds a little of the value `distance` further along an axis, if there is one."""

    def __init__(self, axis: int, distance: int) -> None:
        super().__init__()
        self.axis, self.distance = axis, distance

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim <= self.axis or x.shape[self.axis] <= self.distance:
            return 1.0 * x
        rest = x.shape[self.axis] - self.distance
        read = torch.zeros_like(x)
        read.narrow(self.axis, 0, rest).copy_(x.narrow(self.axis, self.distance, rest))
        return x + 0.1 * read


class MixedSlope(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - 0.1 * gradients[0].sum(dim=(0, 1), keepdim=True)


class MixesInBackward(nn.Module):
    """The identity, except that its backward reads other samples and channels."""

    def forward(self, x: Tensor) -> Tensor:
        out = MixedSlope.apply(x)
        assert isinstance(out, Tensor)
        return out


class PoolsLate(nn.Module):
    """After 50 training steps, centres over samples and positions, in both modes."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return torch.tanh(x - torch.where(self.steps > 50, x.mean(pooled(x), keepdim=True), 0))


class StartsFromItsBatch(Affine):
    """Sets its weight by the first batch, as ActNorm does."""

    started: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.started:
            with torch.no_grad():
                self.weight.copy_(torch.rsqrt(self.spread(x) + EPS))
            self.started.fill_(True)
        return x * per_channel(self.weight, x) + per_channel(self.bias, x)
