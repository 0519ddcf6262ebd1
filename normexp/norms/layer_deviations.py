"""Layer norms as tutorials have them, each off by one thing and sound apart from it."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.contract import over_channels, widen
from normexp.norms.instance import InstanceNorm
from normexp.norms.layer import LayerNorm
from normexp.norms.none import in_dtype_of, zero_masked


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
