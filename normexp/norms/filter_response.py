"""Filter response normalization: each channel of each sample by its mean square."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.none import scale_and_shift, zero_masked
from normexp.norms.site import widen

# Where the learned part of eps begins; the paper's value.
LEARNED_EPS_INIT = 1e-4


class FilterResponseNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight + bias, the mean over the positions of one channel.

    Shape (N, C, *) in and out, statistics in float32 or wider; nothing is centred. The paper's
    activation, max(y, tau), is a slot of the model and not of this class. arXiv:1911.09737.

    On one position the output is close to the sign of x. The paper's remedy, for maps of 1x1, is a
    learned eps + |learned_eps|, one number per layer; without it one position is refused.
    Implementations differ: eps is 1e-6 in the paper and 1e-5 in timm, which has no learned part;
    some learn a number per channel, and some learn |eps| from 1e-6 with nothing added to it.

    Args:
        learn_eps: adds |learned_eps| to eps, a parameter () that begins at 1e-4.

    Raises:
        UserError: in forward, an input with one position, unless eps is learned.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        learn_eps: bool = False,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.learned_eps = nn.Parameter(torch.tensor(LEARNED_EPS_INIT)) if learn_eps else None

    def extra_repr(self) -> str:
        affine, learned = self.weight is not None, self.learned_eps is not None
        return f"{self.num_features}, eps={self.eps}, affine={affine}, learn_eps={learned}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.learned_eps is None and x.shape[2:].numel() == 1:
            raise UserError(
                "filter response norm needs positions to pool, and an input of shape "
                f"{tuple(x.shape)} has one; try norm.learn_eps=true, or norm.view=sequence for "
                "tokens"
            )
        wide = zero_masked(widen(x), mask)
        out = wide * torch.rsqrt(_mean_squares(wide, mask) + self._eps(wide.dtype))
        out = scale_and_shift(out, self.weight, self.bias)
        return zero_masked(out, mask).to(x.dtype)

    def _eps(self, dtype: torch.dtype) -> float | Tensor:
        learned = self.learned_eps
        return self.eps if learned is None else self.eps + learned.to(dtype).abs()


def _mean_squares(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of each channel over its real positions, (N, C, 1...); `x` is zero where masked."""
    squares = x.square()
    if x.ndim == 2:
        return squares
    positions = tuple(range(2, x.ndim))
    if mask is None:
        return squares.mean(dim=positions, keepdim=True)
    count = mask.unsqueeze(1).sum(dim=positions, keepdim=True).clamp(min=1)
    return squares.sum(dim=positions, keepdim=True) / count
