"""A deep network of linear layers, for norms without positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.models.common import check_positive, modules_outside_sites
from normexp.norms.factory import NormFactory


class DeepMLP(nn.Module):
    """Linear layer, norm and tanh, `depth` times; then a linear head.

    Shapes: (N, *) -> (N, num_outputs); norms see (N, width). Weights as Glorot and Bengio 2010,
    "Understanding the difficulty of training deep feedforward neural networks"; biases zero.

    Args:
        depth: hidden layers.
        width: features of a hidden layer.
    """

    def __init__(
        self,
        norm: NormFactory,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        depth: int,
        width: int,
    ) -> None:
        super().__init__()
        check_positive(depth=depth, width=width)
        num_inputs = int(torch.Size(input_shape).numel())
        sizes = [num_inputs, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in sizes[:-1])
        self.norms = nn.ModuleList(norm(width) for _ in range(depth))
        self.head = nn.Linear(width, num_outputs)
        for module in modules_outside_sites(self):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return self.head(x)
