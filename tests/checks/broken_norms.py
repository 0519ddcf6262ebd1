"""Norms with one fault each, as found in the wild, and the line of the contract that catches it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normexp.norms.zoo.deviations import BatchNormNoEps

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
        return caught_by("buffers saved", lacks)(norm)

    return enter


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.ndim - 2))


def pooled(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def splits_large(x: Tensor) -> Tensor:
    """Takes statistics over groups of 8 samples, where these divide a batch."""
    if len(x) % 8:
        return torch.tanh(x)
    groups = x.view(-1, 8, *x.shape[1:])
    return (groups - groups.mean(dim=1, keepdim=True)).view(x.shape)


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

caught_by("finite", "on a constant input")(BatchNormNoEps)


@caught_by("finite", "on a constant input, 0")
def divided_by_the_largest(x: Tensor) -> Tensor:
    return x / x.abs().amax(dim=1, keepdim=True)


class NarrowStatistics(Affine):
    """Moments in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(pooled(x)) / (x.numel() / x.shape[1])
        centred = x - per_channel(mean, x)
        return self.scaled(x, mean, centred.square().mean(pooled(x)))


@caught_by("shape kept", "on an input")
def wrong_shape(x: Tensor) -> Tensor:
    return x[:, :1]


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


@caught_by("dtype kept", "float64 in, float32 out")
class WrongDtype(Affine):
    """Returns its float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


@caught_by("gradient", "gradient of the input")
def wrong_gradient(x: Tensor) -> Tensor:
    return x / (x.detach().square().mean(dim=1, keepdim=True) + EPS).sqrt()


@caught_by("finite", "the output")
def returns_nan(x: Tensor) -> Tensor:
    return x.log()


class CallsNumpy(Affine):
    """Leaves torch in its forward, where vmap cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(x.detach().numpy().mean()) * 0.0)


# ---------------------------------------------------------------- parameters and averages


@caught_by("parameters made at once", "weight")
class LazyParameter(nn.Module):
    """Makes its weight in the first forward."""

    weight: nn.Parameter | None

    def __init__(self, num_features: int) -> None:
        del num_features
        super().__init__()
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


# ---------------------------------------------------------------- state that checkpoints lack


@unsaved("running_mean")
class HiddenState(Affine):
    """A running mean that is not a buffer."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.running_mean = torch.zeros(num_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(pooled(x))
        return self.scaled(x, self.running_mean.to(x.dtype), torch.ones_like(self.running_mean))


@unsaved("mean")
class Unsaved(Affine):
    """A running mean in a buffer that is not persistent."""

    mean: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("mean", torch.zeros(num_features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(pooled(x)), 0.1)
        return self.scaled(x, self.mean, torch.ones_like(self.mean))


@unsaved("torch does not seed")
class PythonNoise(Affine):
    """Draws from a generator that no seed of a training sets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random() * self.training)


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


class PlainList(nn.Module):
    """Its weight is in a list, where no optimizer finds it."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(num_features))]

    def forward(self, x: Tensor) -> Tensor:
        return x * per_channel(self.weights[0], x)
