"""Activations behind a norm, on maps (N, C, *)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normexp.norms.slots import Act


class TLU(nn.Module):
    """max(x, tau), tau learned for each channel and zero at first, which is ReLU.

    The threshold of filter response norm (Singh and Krishnan 2020, arXiv:1911.09737), whose outputs
    are not centred. Shape (N, C, *) in and out. `tau` counts as a norm's for weight decay.
    """

    norm_parameters = ("tau",)

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.zeros(num_features))

    def extra_repr(self) -> str:
        return f"{len(self.tau)}"

    def forward(self, x: Tensor) -> Tensor:
        tau = self.tau.view(-1, *[1] * (x.ndim - 2))  # (C, 1, ...), and float32: x widens to it
        # As torch.maximum, whose backward is slower; in this order a NaN of x passes.
        return torch.where(x <= tau, tau, x).to(x.dtype)


class ScaledReLU(nn.Module):
    """1.714 * max(x, 0): variance 1 for x from a standard normal distribution.

    The activation of normalizer-free networks (Brock et al. 2021, arXiv:2101.08692), for scaled
    weight standardization. The gain is that of the authors' code and of timm, an estimate 0.06 %
    above the exact sqrt(2 / (1 - 1 / pi)). Any shape.
    """

    GAIN = 1.7139588594436646

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.GAIN


ACTIVATIONS: dict[Act, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(),
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "tlu": TLU,
    "scaled_relu": lambda _: ScaledReLU(),
    "identity": lambda _: nn.Identity(),
}
