"""Norms with one fault each, in what they compute or in what they keep, as found in the wild."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

EPS = 1e-5


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.ndim - 2))


def pooled(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


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


class Bare(nn.Module):
    """No parameters."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features


class NaiveVariance(Affine):
    """E[x^2] - E[x]^2."""

    def spread(self, x: Tensor) -> Tensor:
        return x.square().mean(pooled(x)) - x.mean(pooled(x)).square()


class NarrowStatistics(Affine):
    """Moments in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(pooled(x)) / (x.numel() / x.shape[1])
        centred = x - per_channel(mean, x)
        return self.scaled(x, mean, centred.square().mean(pooled(x)))


class UnbiasedVariance(Affine):
    """Normalizes by the unbiased variance: a gain of sqrt(1 - 1/n)."""

    def spread(self, x: Tensor) -> Tensor:
        return x.var(pooled(x), correction=1)


class ViewOfMaps(Affine):
    """Layer norm by `view`, which a channels_last input does not allow."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(x.shape[0], -1)
        centred = flat - flat.mean(-1, keepdim=True)
        out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
        return out.view(x.shape) * per_channel(self.weight, x) + per_channel(self.bias, x)


class DropsChannelsLast(Affine):
    """Always returns contiguous memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class OtherShape(Affine):
    """Parameters shaped for maps: (N, C) comes back as (1, N, C, C) or (1, C, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(pooled(x)), x.var(pooled(x), correction=0)
        shape = (1, -1, 1, 1)
        out = (x - mean.view(shape)) * torch.rsqrt(var.view(shape) + EPS)
        return out * self.weight.view(shape) + self.bias.view(shape)


class NoisyEvaluation(Bare):
    """Draws in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.rand_like(x))


class WritesItsInput(Bare):
    """Centres the caller's tensor."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x -= x.mean(dim=1, keepdim=True)
        return x * 1.0


class NoEps(Affine):
    """Divides by a variance that may be zero."""

    def spread(self, x: Tensor) -> Tensor:
        return super().spread(x) - EPS


class WrongDtype(Bare):
    """Returns float32 whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() / (x.float().square().mean(dim=1, keepdim=True) + EPS).sqrt()


class WrongGradient(Bare):
    """Lets no gradient through its statistic."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.detach().square().mean(dim=1, keepdim=True) + EPS).sqrt()


class ErasesOnePosition(Bare):
    """Instance norm without a word about one position, whose output is zero for any input."""

    def forward(self, x: Tensor) -> Tensor:
        dims = list(range(2, x.ndim))
        if not dims:
            raise ValueError("needs positions")
        mean = x.mean(dims, keepdim=True)
        return (x - mean) * torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + EPS)


class CallsNumpy(Affine):
    """Leaves torch in its forward, where a compiler and vmap cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(x.detach().numpy().mean()) * 0.0)


class HalfInside(Affine):
    """Computes in float16 and returns the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half()).to(x.dtype)


class NoisyTraining(Affine):
    """Draws noise in training."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (1 + 0.1 * torch.randn_like(out)) if self.training else out


class KeepsItsMean(Affine):
    """Keeps the last mean for somebody to look at."""

    def forward(self, x: Tensor) -> Tensor:
        self.last_mean = x.detach().mean()
        return super().forward(x)


class SwallowedAffine(Affine):
    """Takes `affine` and has its parameters whatever it says."""

    def __init__(self, num_features: int, affine: bool = True) -> None:
        del affine
        super().__init__(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() if x.dtype != torch.double else x).to(x.dtype)


class LazyParameter(nn.Module):
    """Makes its weight in the first forward."""

    weight: nn.Parameter | None

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.ones(x.shape[1], dtype=x.dtype))
        return x * per_channel(self.weight, x)


class NoSuper(nn.Module):
    """Forgets super().__init__()."""

    def __init__(self, num_features: int) -> None:
        self.weight = nn.Parameter(torch.ones(num_features))


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


class HiddenState(Affine):
    """A running mean that is no buffer, so that no checkpoint has it."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.running_mean = torch.zeros(num_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(pooled(x))
        return self.scaled(x, self.running_mean.to(x.dtype), torch.ones_like(self.running_mean))


class UnusedParameter(Affine):
    """A parameter that no output depends on."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.rho = nn.Parameter(torch.ones(num_features))


class Averaging(Affine):
    """Batch norm in the words of torch; subclasses change one of them."""

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


class KeptGraph(Averaging):
    """Moves its running averages outside of no_grad."""

    def update(self, x: Tensor) -> None:
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(pooled(x))
        self.running_var = 0.9 * self.running_var + 0.1 * self.spread(x)


class PoisonedByOne(Averaging):
    """The unbiased variance of one sample, NaN, goes into the running average for good."""

    def kept_spread(self, x: Tensor) -> Tensor:
        return x.var(pooled(x), correction=1)


class EvaluationLearns(Averaging):
    """Moves its running averages in evaluation."""

    def evaluate(self, x: Tensor) -> Tensor:
        self.update(x)
        return super().evaluate(x)


class OppositeMomentum(Averaging):
    """Momentum as flax has it: the weight of the old value."""

    def weight_of_new(self) -> float:
        return 1 - self.momentum


class AveragedDeviation(Averaging):
    """Averages the standard deviation and squares it in evaluation."""

    def kept_spread(self, x: Tensor) -> Tensor:
        return super().kept_spread(x).sqrt()

    def evaluate(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.running_mean, self.running_var.square())


class BiasedRunningVariance(Averaging):
    """Averages the biased variance."""

    def kept_spread(self, x: Tensor) -> Tensor:
        return self.spread(x)


class EvaluatesByBatch(Averaging):
    """Keeps averages, and evaluates by the statistics of the batch."""

    def evaluate(self, x: Tensor) -> Tensor:
        return self.scaled(x, x.mean(pooled(x)), self.spread(x))


class ReturnsNaN(Bare):
    """The logarithm of the values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Counter(Bare):
    """Grows its output with the training steps, which a Python attribute counts."""

    warmup = 1

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return torch.tanh(x)
        self.steps += 1
        return torch.tanh(x) * (1.0 + max(0, self.steps - self.warmup))


class LateCounter(Counter):
    """A counter that matters after a long warm-up."""

    warmup = 1000


class LateCounterInList(Bare):
    """A counter in a list that matters after a long warm-up."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.steps = [0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps[0] += 1
        return torch.tanh(x) * (2.0 if self.steps[0] > 1000 else 1.0)


class LateCounterTensor(Bare):
    """A counter in a tensor that is no buffer, and matters after a long warm-up."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.steps = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1
        return torch.tanh(x) * (1.0 + (self.steps > 1000))


class CountsInClass(Bare):
    """Counts its training steps in the class, which all replicas share."""

    steps = [0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps[0] += 1
        return torch.tanh(x) / (1 + self.steps[0])


class LastMean(Bare):
    """Keeps the last mean, at first a number, for evaluation."""

    mean: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.keep(x.detach().mean())
            return torch.tanh(x)
        return torch.tanh(x) - self.mean

    def keep(self, mean: Tensor) -> None:
        self.mean = mean


class MeanInClass(LastMean):
    """Keeps it in the class."""

    def keep(self, mean: Tensor) -> None:
        type(self).mean = mean


class InClosure(Bare):
    """Keeps its steps in a closure."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        steps = [0]

        def count() -> int:
            steps[0] += 1
            return steps[0]

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * (self.count() if self.training else 1)


SEEN: list[float] = []


class InGlobal(Bare):
    """Keeps the means of its training steps in a list of the module."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            SEEN.append(float(x.detach().mean()))
        return torch.tanh(x) + 0.1 * len(SEEN)


class InList(Bare):
    """Keeps the means of its training steps in a list, for evaluation."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.means.append(x.detach().mean())
            return torch.tanh(x)
        return torch.tanh(x) - (torch.stack(self.means).mean() if self.means else 0.0)


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


class OwnGenerator(Bare):
    """Draws noise from numbers that torch does not seed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * (random.random() if self.training else 1.0)


UNSAVED = (
    *(HiddenState, Counter, LateCounter, CountsInClass, LastMean, MeanInClass, InClosure, InGlobal),
    *(InList, Unsaved, OwnGenerator),
)


class WritesItsParameters(Affine):
    """Constrains its weight to unit length in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(1.5 * self.weight)
        return x * per_channel(self.weight, x)


class ReadsFurther(nn.Module):
    """Adds a little of what lies `distance` further along an axis, if anything does."""

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
    """The identity, but for its backward, which reads other samples and channels."""

    def forward(self, x: Tensor) -> Tensor:
        out = MixedSlope.apply(x)
        assert isinstance(out, Tensor)
        return out
