"""A weight and a bias per channel, and the frame around every shipped norm that has them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.moments import widen, zero_padding


def over_channels(vector: Tensor, x: Tensor, axis: int = 1) -> Tensor:
    """Returns a vector (C,) in the dtype of `x`, shaped to broadcast along its channel axis."""
    return vector.to(x.dtype).view(-1, *[1] * (x.ndim - axis - 1))


class Affine(NamedTuple):
    """Weight and bias (C,), each possibly None, in the dtype of the values to scale.

    A tuple, so that it can be passed to torch's kernels as `*affine`.
    """

    weight: Tensor | None
    bias: Tensor | None

    def apply(self, z: Tensor, scale: Tensor | None = None, *, axis: int = 1) -> Tensor:
        """Returns z * scale * weight + bias, with the channels of `z` along `axis`.

        `scale` broadcasts to `z`; it is multiplied with the weight first, to save a pass over `z`.
        """
        if self.weight is not None:
            gain = over_channels(self.weight, z, axis)
            scale = gain if scale is None else scale * gain
        if scale is None:
            return z
        if self.bias is None:
            return z * scale
        return torch.addcmul(over_channels(self.bias, z, axis), z, scale)


NO_AFFINE = Affine(None, None)


@dataclass(eq=False, repr=False, kw_only=True)
class AffineNorm(nn.Module):
    """Abstract: a norm with a weight and a bias per channel, in float32 or wider.

    Shape (N, C, *) in and out, in the dtype of the input; where a mask (N, *) is false, the output
    is zero and the input is ignored. A subclass is a dataclass whose fields are its knobs, and
    defines `normalize`.

    Args:
        eps: small constant added to the variance, or to the mean square.
        affine: false leaves out weight and bias.
        zero_centered: true scales by 1 + weight, the weight from 0, as Gemma's RMS norm does and
            Megatron's `zero_centered_gamma`. The same training, but for weight decay, which then
            pulls towards 1, and for the rounding of weights in half precision.

    Raises, as every norm here:
        UserError: a knob outside its range; in forward, an input that leaves nothing to pool.
    """

    num_features: int = field(kw_only=False)
    eps: float = 1e-5
    affine: bool = True
    zero_centered: bool = False
    has_bias = True  # False: `affine` means a weight alone
    is_stacked = False  # True: runs under vmap, with the replicas of a stack
    channel_axis = 1  # of the x that `normalize` is given; 2 for (G, N, C, *), G ghost groups

    def __post_init__(self) -> None:
        super().__init__()
        if self.zero_centered and not self.affine:
            raise UserError("zero_centered=true has no effect with affine=false; set affine=true")
        self.check_knobs()
        ones, zeros = torch.ones(self.num_features), torch.zeros(self.num_features)
        self.weight = nn.Parameter(zeros if self.zero_centered else ones) if self.affine else None
        self.bias = nn.Parameter(zeros.clone()) if self.affine and self.has_bias else None
        self.add_state()

    def check_knobs(self) -> None:
        """Refuses knobs out of their range, and derives others from them."""

    def add_state(self) -> None:
        """Registers parameters and buffers beyond weight and bias."""

    def require_positive(self, knob: str, example: float) -> None:
        """Raises UserError, which proposes `example`, unless the knob is above zero."""
        value = getattr(self, knob)
        if not value > 0:
            raise UserError(f"{knob}={value} is not positive; try norm.{knob}={example}")

    def extra_repr(self) -> str:
        knobs = [knob.name for knob in fields(self) if knob.init]
        return ", ".join(f"{name}={getattr(self, name)}" for name in knobs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.numel() == 0:
            return self.pass_empty(x)
        real = None if mask is None else mask.unsqueeze(self.channel_axis)  # (N, 1, *)
        wide = zero_padding(widen(x), real)
        return zero_padding(self.normalize(wide, real, self.affine_like(wide)), real).to(x.dtype)

    def pass_empty(self, x: Tensor) -> Tensor:
        """Returns the empty batch `x`, and gives every parameter a gradient of zero, as torch.nn.

        For inputs of any number of dimensions, in training and evaluation.
        """
        for parameter in self.parameters():
            x = x + parameter.sum().to(x.dtype)
        return x

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        """Returns the output for x (N, C, *), which is zero where `real` (N, 1, *) is false.

        The caller discards outputs where `real` is false.
        """
        raise NotImplementedError

    def affine_like(self, x: Tensor) -> Affine:
        """Returns gain and bias in the dtype of `x`, since kernels want one dtype for both."""
        weight, bias = (None if v is None else v.to(x.dtype) for v in (self.weight, self.bias))
        return Affine(weight + 1 if weight is not None and self.zero_centered else weight, bias)
