"""Batch norms as tutorials have them, each off by one thing and sound apart from it.

They are here to be trained with and measured. What each costs is in its docstring, and a test.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.group import InstanceNorm, LayerNorm
from normexp.norms.moments import Moments, unbiased
from normexp.norms.none import in_dtype_of, zero_masked
from normexp.norms.per_position import BatchNormPerPosition, join
from normexp.norms.site import over_channels, widen
from normexp.norms.variant import (
    BatchVariant,
    Factors,
    centred,
    measure_groups,
    measure_means,
    over_groups,
)


class BatchNormUnbiased(BatchVariant):
    """Batch norm that divides by the root of the unbiased variance, n / (n - 1) times the biased.

    What it costs: outputs are sqrt((n - 1) / n) of batch norm's where eps is small: 0.707 at n = 2
    values per statistic, 0.935 at 8, 0.984 at 32. The gain depends on the batch size, in training
    alone, and so passes for sensitivity to it. Evaluation equals batch norm's.
    """

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        moments = measure_groups(x, mask)
        mean, var, count = moments
        scale = torch.rsqrt(unbiased(var, count) + self.eps)
        return Factors(centred(x, mean, mask), over_groups(scale, x)), moments


class BatchNormEpsOutside(BatchVariant):
    """(x - mean) / (sqrt(var) + eps) * weight + bias: eps added to the root and not under it.

    What it costs: nothing at a deviation of 1; with eps 1e-5, small channels grow: at a deviation
    of 0.01 outputs are 1.048 times batch norm's, at 0.001 3.3 times. At 0 the gradient of a value
    may be 1 / eps = 100 000, and not 1 / sqrt(eps) = 316.
    """

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        moments = measure_groups(x, mask)
        mean, var, _ = moments
        return Factors(centred(x, mean, mask), over_groups(self._scale(var), x)), moments

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Factors:
        del mask
        mean, var = self.running_moments(x)
        return Factors(x - over_groups(mean, x), over_groups(self._scale(var), x))

    def _scale(self, var: Tensor) -> Tensor:
        # The root has no gradient at 0; that of the clamp is 0 below the smallest normal number.
        return 1 / (var.clamp(min=torch.finfo(var.dtype).tiny).sqrt() + self.eps)


class BatchNormBiasedAverage(BatchNorm):
    """Batch norm whose running variance averages the biased variance of the batches.

    What it costs: nothing in training; in evaluation the variance is too small by (n - 1) / n, with
    n values per statistic: a half at n = 2, 0.875 at 8, 0.996 at 256. Merged parts of a step and
    precise statistics know that there is no correction to undo.
    """

    unbiased_running_var = False


class BatchNormNaiveVariance(BatchVariant):
    """Batch norm with var = mean(x^2) - mean(x)^2, in float32 or wider.

    What it costs: digits where the mean exceeds the deviation. In float32, at a deviation of 1, the
    variance is off by about 0.1 at a mean of 1000; at 10 000 it may come out negative, and the
    output NaN. With values in bfloat16 and sums in it too, a mean of 30 is enough; not so here.
    """

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        mean, count = measure_means(x, mask)
        square, _ = measure_means(x.square(), mask)
        var = square - mean.square()
        scale = over_groups(torch.rsqrt(var + self.eps), x)
        return Factors(centred(x, mean, mask), scale), Moments(mean, var, count)


class BatchNormNoEps(BatchVariant):
    """(x - mean) / sqrt(var) * weight + bias: batch norm without eps.

    What it costs: outputs are sqrt(1 + eps / var) of batch norm's, 1.4 percent more at a variance
    of 3.5e-4 and eps 1e-5. A constant channel, as behind a dead ReLU, is 0 / 0: NaN, from
    which no training comes back.
    """

    def __init__(
        self, num_features: int, *, momentum: float | None = 0.1, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps=0.0, momentum=momentum, affine=affine)

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        moments = measure_groups(x, mask)
        mean, var, count = moments
        if isinstance(count, Tensor):
            var = torch.where(count > 0, var, 1)  # padding alone is zero, and not 0 / 0
        return Factors(centred(x, mean, mask), over_groups(torch.rsqrt(var), x)), moments


class BatchNormFlattened(BatchNormPerPosition):
    """Batch norm of C * T features: statistics, weight and bias of each position's own.

    Shape (N, C, T) in and out: what batch norm over the first axis of (N, T, C) is, where one over
    (N, T) per channel was meant. `norm=batch_per_position` has the statistics too, but a weight and
    a bias per channel. Arguments and errors as `BatchNormPerPosition`.

    What it costs: 2 * C * T parameters for 2 * C, statistics over N values for N * T, and a length
    that is fixed. No position looks at another, but samples do.
    """

    def __init__(
        self, num_features: int, *, num_positions: int, eps: float = 1e-5, momentum: float = 0.1
    ) -> None:
        super().__init__(
            num_features, num_positions=num_positions, eps=eps, momentum=momentum, affine=False
        )
        self.position_weight = nn.Parameter(torch.ones(num_positions, num_features))
        self.position_bias = nn.Parameter(torch.zeros(num_positions, num_features))

    def affine_by_feature(
        self, weight: Tensor | None, bias: Tensor | None, x: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        del weight, bias
        rows = (self.position_weight, self.position_bias)
        weight, bias = (join(row[: x.shape[-1]].T, x).to(x.dtype) for row in rows)
        return weight, bias


class LayerNormUnbiased(LayerNorm):
    """Layer norm that divides by the root of the unbiased variance, D / (D - 1) times the biased.

    D is the number of values that are pooled: C and all positions, as in `LayerNorm`. What it
    costs: outputs are sqrt((D - 1) / D) of layer norm's where eps is small: 0.866 at D = 4, 0.992
    at 64, 0.995 at 100, 0.9993 at 768. A constant, which `weight` takes up.

    Raises:
        UserError: one value to pool.
    """

    correction = 1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[1:].numel() <= self.correction:
            raise UserError(
                f"an unbiased variance needs 2 values or more, and an input of shape "
                f"{tuple(x.shape)} has one per sample; try norm=layer"
            )
        wide = zero_masked(widen(x), mask)
        dims = tuple(range(1, x.ndim))
        count = float(x.shape[1:].numel())
        if mask is not None and x.ndim > 2:
            real = mask.flatten(1).sum(dim=1).to(wide.dtype).clamp(min=1) * x.shape[1]
            count = real.view(-1, *[1] * (x.ndim - 1))
        mean = wide.sum(dim=dims, keepdim=True) / count
        deviations = zero_masked(wide - mean, mask)
        var = deviations.square().sum(dim=dims, keepdim=True) / (count - self.correction)
        if mask is not None:
            real = mask.flatten(1).any(dim=1) if mask.ndim > 1 else mask
            var = torch.where(real.view(-1, *[1] * (x.ndim - 1)), var, 1)
        out = deviations * torch.rsqrt(var + self.eps)
        weight, bias = in_dtype_of(wide, self.weight), in_dtype_of(wide, self.bias)
        if weight is not None and bias is not None:
            out = out * over_channels(weight, x) + over_channels(bias, x)
        return zero_masked(out, mask).to(x.dtype)


class LayerNormNoEps(LayerNormUnbiased):
    """(x - mean) / sqrt(var) * weight + bias: layer norm without eps.

    What it costs: outputs are sqrt(1 + eps / var) of layer norm's, 1.4 percent more at a variance
    of 3.5e-4 and eps 1e-5. A sample that is constant is 0 / 0: NaN, from which no training comes
    back.
    """

    correction = 0

    def __init__(self, num_features: int, *, affine: bool = True) -> None:
        super().__init__(num_features, eps=0.0, affine=affine)


class LayerNormOverTime(InstanceNorm):
    """Layer norm over the positions of a sequence (N, C, T) where its channels were meant.

    It is what pooling axis 1 of (N, T, C) gives, each channel by its moments over time, and so
    instance norm, whose arguments and errors it has.

    What it costs: it reads the future, in evaluation too, which a causal model must not: training
    one is refused. Channels keep their own scale no longer, and padding would be read without a
    mask, which this one takes.
    """


class LayerNormOverMap(InstanceNorm):
    """Layer norm over H and W where C, H and W were meant: LayerNorm((H, W)) on maps (N, C, H, W).

    It is instance norm, whose arguments and errors it has; the tutorial's weight and bias per pixel
    are not here, as a site does not know the size of its maps: they are per channel.

    What it costs: the scale of one channel against another is lost. Where channels have deviations
    1 and 3, layer norm leaves 0.45 and 1.34, and this 1 and 1. With a weight and a bias per pixel,
    ResNet-20 at 32x32 would have 18 176 parameters in its norms and not 1 376; with those of C, H
    and W, 376 832.
    """
