"""Norms with one fault each in their parameters or buffers, as they are found in the wild."""

from __future__ import annotations

import torch
from broken_norms import Affine, per_channel, pooled
from torch import Tensor, nn


class SwallowedAffine(Affine):
    """Takes `affine` and has its parameters whatever it says."""

    def __init__(self, num_features: int, affine: bool = True) -> None:
        del affine
        super().__init__(num_features)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype != torch.double else x
        return self.scaled(wide, wide.mean(pooled(x)), wide.var(pooled(x), correction=0)).to(
            x.dtype
        )


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


class KeptGraph(Affine):
    """Moves its running averages outside of no_grad."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.scaled(x, self.running_mean, self.running_var)
        mean, var = x.mean(pooled(x)), x.var(pooled(x), correction=0)
        self.running_mean = 0.9 * self.running_mean + 0.1 * mean
        self.running_var = 0.9 * self.running_var + 0.1 * var
        return self.scaled(x, mean, var)


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
        return self.scaled(x, x.mean(pooled(x)), x.var(pooled(x), correction=0))


class LateBuffer(Affine):
    """A buffer that is None until the first forward."""

    running_mean: Tensor | None

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("running_mean", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(pooled(x))
        if self.running_mean is None:
            self.running_mean = mean.detach()
        return self.scaled(x, mean, x.var(pooled(x), correction=0))


class HiddenState(Affine):
    """A running mean that is no buffer, so that no checkpoint has it."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.running_mean = torch.zeros(num_features)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(pooled(x))
        return self.scaled(x, self.running_mean.to(x.dtype), torch.ones_like(self.running_mean))


class EvaluationLearns(Affine):
    """Moves its running mean in evaluation."""

    running_mean: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("running_mean", torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.mul_(0.9).add_(0.1 * x.detach().mean(pooled(x)))
        return self.scaled(x, x.mean(pooled(x)), x.var(pooled(x), correction=0))


class UnusedParameter(Affine):
    """A parameter that no output depends on."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.rho = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, x.mean(pooled(x)), x.var(pooled(x), correction=0))


class PoisonedByOne(Affine):
    """The unbiased variance of one sample, NaN, goes into the running average for good."""

    running_var: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.scaled(x, torch.zeros_like(self.running_var), self.running_var)
        with torch.no_grad():
            self.running_var.mul_(0.9).add_(0.1 * x.var(pooled(x), correction=1))
        return self.scaled(x, x.mean(pooled(x)), x.var(pooled(x), correction=0))
