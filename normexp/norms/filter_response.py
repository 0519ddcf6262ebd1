"""Filter response normalization: each channel of each sample by its mean square."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm
from normexp.norms.group import refuse_one_position
from normexp.norms.moments import measure_mean

LEARNED_EPS_INIT = 1e-4  # the paper's


class FilterResponseNorm(AffineNorm):
    """x / sqrt(mean(x^2) + eps) * weight + bias, the mean over the positions of one channel.

    Nothing is centred. The paper's activation, max(y, tau), is a slot (act=tlu). arXiv:1911.09737.

    With one position the output is close to the sign of x. The paper's remedy for maps of 1x1 is a
    learned eps + |learned_eps|, one number per layer; without it one position is refused.
    Implementations differ: eps is 1e-6 in the paper and 1e-5 in timm, which has no learned part;
    some learn a number per channel, and some learn |eps| from 1e-6 with nothing added to it.

    Args:
        learn_eps: adds |learned_eps| to eps, a parameter () that starts at 1e-4.

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
        super().__init__(num_features, eps=eps, affine=affine)
        self.learned_eps = nn.Parameter(torch.tensor(LEARNED_EPS_INIT)) if learn_eps else None

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if self.learned_eps is None:
            refuse_one_position(x.shape, "filter response norm", "norm.learn_eps=true")
            eps = self.eps
        else:
            eps = self.eps + self.learned_eps.to(x.dtype).abs()
        square, _ = measure_mean(x.square(), real, tuple(range(2, x.ndim)))
        return affine.apply(x, torch.rsqrt(square + eps))
