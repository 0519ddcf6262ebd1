"""Response norms, which scale each channel by its size over positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm, over_channels
from normexp.norms.group import refuse_one_position
from normexp.norms.moments import measure_mean

LEARNED_EPS_INIT = 1e-4  # the paper's


@dataclass(eq=False, repr=False, kw_only=True)
class FilterResponseNorm(AffineNorm):
    """x / sqrt(mean(x^2) + eps) * weight + bias, the mean over the positions of one channel.

    Nothing is centred. The paper's activation, max(y, tau), is a slot (act=tlu). arXiv:1911.09737.

    With one position the output is close to the sign of x, and refused. The paper's remedy for maps
    of 1x1 is a learned eps + |learned_eps|, one number per layer. Implementations differ: eps is
    1e-6 in the paper and 1e-5 in timm, which has no learned part; some learn a number per channel.

    Args:
        learn_eps: adds |learned_eps| to eps, a parameter () that starts at 1e-4.
    """

    learn_eps: bool = False

    def add_state(self) -> None:
        self.learned_eps = nn.Parameter(torch.tensor(LEARNED_EPS_INIT)) if self.learn_eps else None

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if self.learned_eps is None:
            refuse_one_position(x.shape, "filter response norm", "norm.learn_eps=true")
            eps = self.eps
        else:
            eps = self.eps + self.learned_eps.to(x.dtype).abs()
        square, _ = measure_mean(x.square(), real, tuple(range(2, x.ndim)))
        return affine.apply(x, torch.rsqrt(square + eps))


@dataclass(eq=False, repr=False, kw_only=True)
class GlobalResponseNorm(AffineNorm):
    """x * (1 + response * g / (mean_C(g) + eps)) + shift, g the L2 norm of a channel's positions.

    `response` (C,) and `shift` (C,) start at 0, where it returns x: channels compete, and the scale
    of x is kept. GRN, arXiv:2301.00808. ConvNeXt V2 has it besides layer norm, after the
    activation; its code and timm's have eps 1e-6, and call the two weight and bias, or gamma and
    beta. With one position g is |x|.
    """

    affine: bool = field(default=False, init=False)

    def add_state(self) -> None:
        self.response = nn.Parameter(torch.zeros(self.num_features))
        self.shift = nn.Parameter(torch.zeros(self.num_features))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real, affine
        positions = tuple(range(2, x.ndim))
        g = torch.linalg.vector_norm(x, dim=positions, keepdim=True) if positions else x.abs()
        g = g / (g.mean(dim=1, keepdim=True) + self.eps)
        response, shift = (over_channels(v, x) for v in (self.response, self.shift))
        return torch.addcmul(shift, x, 1 + response * g)
