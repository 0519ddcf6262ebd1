"""A small bidirectional encoder of short padded strings, with a pooled head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.models.common import check_positive
from normexp.models.transformer import Embedding, Init, Transformer
from normexp.norms.factory import NormFactory


class TextEncoder(Transformer):
    """Classifies a string; its output does not depend on the content or amount of padding.

    Shapes: inputs (B, T) int64 and mask (B, T) bool, true where real -> (B, num_outputs), T at most
    block_size. Attention reads real positions only, every site gets the mask, and the head reads
    the maximum over real positions: a mean would erase a norm that centres each channel over
    positions, as instance norm does. All shapes are static. Sizes as in `Transformer.add_blocks`;
    the embedding has the same dropout.

    Raises:
        UserError: sizes that do not fit; a sequence longer than block_size.
    """

    def __init__(
        self,
        norm: NormFactory,
        vocab_size: int,
        block_size: int,
        num_outputs: int,
        *,
        depth: int,
        width: int,
        num_heads: int,
        dropout: float,
        init: Init = "depth_scaled",
    ) -> None:
        super().__init__()
        check_positive(depth=depth, width=width, num_heads=num_heads)
        self.embedding = Embedding(vocab_size, block_size, width, dropout=dropout)
        self.add_blocks(norm, depth, width, num_heads, is_causal=False, dropout=dropout)
        self.head = nn.Linear(width, num_outputs)
        self.init_weights(init)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return self.head(masked_max(self.apply_blocks(self.embedding(inputs), mask), mask))


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Maximum of x (B, T, C) over the real positions, (B, C); zero for a sample without any."""
    largest = x.masked_fill(~mask[:, :, None], -torch.inf).amax(dim=1)
    return torch.where(mask.any(dim=1, keepdim=True), largest, 0)
