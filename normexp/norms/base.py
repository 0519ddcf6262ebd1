"""The base of every shipped norm: moments with a mask, and a weight and a bias per channel.

Axis letters, as in every shape comment of the project:
    N samples, C channels (features), H W image rows and columns, T token positions,
    * any number of position axes (none, L, H W, D H W), G groups of samples, S replicas,
    V vocabulary

A mask that broadcasts to the values, as (N, 1, *), is called `real`. Values that are not real must
already be zero (`zero_padding`), because 0 * NaN would reach a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import ClassVar, NamedTuple, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.contract import Mask

Norm = TypeVar("Norm")


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(field,))
def knobs(norm: type[Norm]) -> type[Norm]:
    """Makes the annotated attributes of a norm class arguments of its constructor."""
    return dataclass(eq=False, repr=False, kw_only=True)(norm)


class Moments(NamedTuple):
    """Mean, biased variance and the number of pooled values, broadcastable to the values.

    The number is a single integer unless it depends on a mask.
    """

    mean: Tensor
    var: Tensor
    count: int | Tensor


def widen(x: Tensor) -> Tensor:
    """Returns `x` in float32, or in its own dtype if that is wider: squares in bf16 lose digits."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns float32, or the dtype of `x` if that is wider."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def zero_padding(x: Tensor, real: Mask) -> Tensor:
    """Returns `x` with zeros where `real` is false, even in place of NaN."""
    return x if real is None else torch.where(real, x, 0)


def centre(x: Tensor, mean: Tensor, real: Mask) -> Tensor:
    """Returns x - mean, zero where `real` is false."""
    return zero_padding(x - mean, real)


def count_values(x: Tensor, real: Mask, dims: tuple[int, ...]) -> int | Tensor:
    """Returns how many values of `x` each statistic over `dims` pools."""
    if real is None:
        return math.prod([x.shape[dim] for dim in dims])  # dynamo cannot trace a generator
    shared = math.prod([x.shape[dim] for dim in dims if real.shape[dim] == 1])
    count = real.sum(dim=dims, keepdim=True) if dims else real
    return count.to(x.dtype) * shared


def at_least_one(count: int | Tensor) -> int | Tensor:
    """Returns `count`, or 1 in place of 0, so that the mean of padding alone is 0 and not 0 / 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def measure_mean(x: Tensor, real: Mask, dims: tuple[int, ...]) -> tuple[Tensor, int | Tensor]:
    """Returns the mean over `dims`, kept with size 1, and the number of values behind it."""
    count = count_values(x, real, dims)
    if not dims:
        return x, count
    return x.sum(dim=dims, keepdim=True) / at_least_one(count), count


def measure(x: Tensor, real: Mask, dims: tuple[int, ...]) -> Moments:
    """Returns the moments over `dims`, kept with size 1; over no axis, each value is its mean.

    The variance averages squared deviations, because E[x^2] - E[x]^2 would lose digits.
    """
    if not dims:
        return Moments(x, torch.zeros_like(x), count_values(x, real, dims))
    if real is None:
        var, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
        return Moments(mean, var, count_values(x, real, dims))
    mean, count = measure_mean(x, real, dims)
    squares = centre(x, mean, real).square()
    return Moments(mean, squares.sum(dim=dims, keepdim=True) / at_least_one(count), count)


def pool_mean(means: Tensor, count: int | Tensor, dim: int) -> tuple[Tensor, int | Tensor]:
    """Returns the mean of all values from means over groups of them, and the number of values.

    Args:
        means: one per group, along the axis `dim`, which is kept with size 1.
        count: number of values in each group.
    """
    num_groups = means.shape[dim]
    if num_groups == 1:
        return means, count
    if isinstance(count, Tensor):
        total = count.sum(dim=dim, keepdim=True)
        return (count / at_least_one(total) * means).sum(dim=dim, keepdim=True), total
    return (1 / num_groups * means).sum(dim=dim, keepdim=True), count * num_groups


def pool(groups: Moments, dim: int) -> Moments:
    """Returns the moments of all values from those of groups of them along the axis `dim`.

    The variance is the mean variance within the groups plus the variance of their means.
    """
    means, variances, count = groups
    if means.shape[dim] == 1:
        return groups
    mean, total = pool_mean(means, count, dim)
    var, _ = pool_mean(variances + (means - mean).square(), count, dim)
    return Moments(mean, var, total)


def pool_with_others(
    sample: Moments, share: float | Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the mean and variance of a batch that consists of one sample and others.

    Args:
        share: of the values of the batch that belong to the sample.
        mean, var: of the other values.
    """
    between = share * (1 - share) * (sample.mean - mean).square()
    mixed_var = share * sample.var + (1 - share) * var + between
    return share * sample.mean + (1 - share) * mean, mixed_var


def unbiased(var: Tensor, count: int | Tensor) -> Tensor:
    """Returns a biased variance over n = `count` values times n / (n - 1); unchanged below two."""
    freedom = (count - 1).clamp(min=1) if isinstance(count, Tensor) else max(count - 1, 1)
    return var * (count / freedom)


def over_channels(vector: Tensor, x: Tensor, axis: int = 1) -> Tensor:
    """Returns a vector (C,) in the dtype of `x`, shaped to broadcast along its channel axis."""
    return vector.to(x.dtype).view(-1, *[1] * (x.ndim - axis - 1))


class Affine(NamedTuple):
    """Weight and bias (C,), or None, in the dtype of the values to scale.

    torch's kernels take them as `*affine`.
    """

    weight: Tensor | None
    bias: Tensor | None

    def apply(self, z: Tensor, scale: Tensor | None = None, *, axis: int = 1) -> Tensor:
        """Returns z * scale * weight + bias, with the channels of `z` along `axis`.

        `scale` broadcasts to `z`. It multiplies the weight first, which saves a pass over `z`.
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


@knobs
class AffineNorm(nn.Module):
    """Abstract: a norm with a weight and a bias per channel, in float32 or wider.

    Shape (N, C, *) in and out, in the dtype of the input; where a mask (N, *) is false, the output
    is zero and the input is ignored. A subclass defines `normalize`; `knobs` adds its own.

    Args:
        eps: small constant added to the variance, or to the mean square.
        affine: false leaves out weight and bias.
        has_bias: false leaves out the bias alone.
        zero_centered: true scales by 1 + weight, and the weight starts at 0, as in Gemma's RMS norm
            and Megatron's `zero_centered_gamma`. The training is the same but for weight decay,
            which then pulls the gain towards 1, and for the rounding of half-precision weights.

    Raises, as every norm here:
        UserError: a knob outside its range; in forward, an input that leaves nothing to pool.
    """

    num_features: int = field(kw_only=False)
    eps: float = 1e-5
    affine: bool = True
    zero_centered: bool = False
    has_bias: bool = True
    learned: ClassVar[dict[str, float]] = {}  # parameters (C,) to add, and their initial values
    channel_axis = 1  # of the x that `normalize` gets; 2 if it gets G ghost groups, (G, N, C, *)

    def __post_init__(self) -> None:
        super().__init__()
        if self.zero_centered and not self.affine:
            raise UserError("zero_centered=true has no effect with affine=false; set affine=true")
        for knob in fields(self):
            value = getattr(self, knob.name, None)
            if type(knob.default) in (int, float) and not isinstance(value, Real | None):
                raise UserError(f"{knob.name}={value} must be a number")
        self.check_knobs()
        start = 0 if self.zero_centered else 1
        self.weight = nn.Parameter(self.vector(start)) if self.affine else None
        self.bias = nn.Parameter(self.vector(0)) if self.affine and self.has_bias else None
        self.add_state()
        for name, value in self.learned.items():
            setattr(self, name, nn.Parameter(self.vector(value)))

    def vector(self, value: float) -> Tensor:
        """Returns `value` for each channel, (C,)."""
        return torch.full((self.num_features,), float(value))

    def check_knobs(self) -> None:
        """Raises UserError for a knob out of its range, and derives attributes from the knobs."""

    def add_state(self) -> None:
        """Registers parameters and buffers beyond weight and bias."""

    def require_positive(self, knob: str, example: float) -> None:
        """Raises UserError unless the knob is above zero; the message proposes `example`."""
        value = getattr(self, knob)
        if not value > 0:
            raise UserError(f"norm.{knob}={value} must be above 0; try norm.{knob}={example}")

    def extra_repr(self) -> str:
        knobs = [knob.name for knob in fields(self) if knob.init]
        return ", ".join(f"{name}={getattr(self, name)}" for name in knobs)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        real = None if mask is None else mask.unsqueeze(self.channel_axis)  # (N, 1, *)
        wide = zero_padding(x if self.widens_itself(x, mask) else widen(x), real)
        out = self.normalize(wide, real, self.affine_like(x))
        return zero_padding(out, real).to(x.dtype)

    def widens_itself(self, x: Tensor, mask: Mask) -> bool:
        """True if `normalize` takes half precision as it is, which saves a wider copy of `x`."""
        del x, mask
        return False

    def normalize(self, x: Tensor, real: Mask, affine: Affine, /) -> Tensor:
        """Returns the output for x (N, C, *), which is zero where `real` (N, 1, *) is false.

        The caller discards outputs where `real` is false.
        """
        raise NotImplementedError

    def affine_like(self, x: Tensor) -> Affine:
        """Returns gain and bias in the dtype of `widen(x)`; kernels want one for all but `x`."""
        dtype, gain, bias = wide_dtype(x), self.weight, self.bias
        if gain is not None:
            gain = gain.to(dtype) + 1 if self.zero_centered else gain.to(dtype)
        return Affine(gain, None if bias is None else bias.to(dtype))
