"""A small GPT (Radford et al. 2019, "GPT-2"): by default a pre-norm decoder with a final norm."""

from __future__ import annotations

from torch import Tensor, nn

from normexp.models.initialization import check_positive
from normexp.models.transformer import (
    Block,
    Embedding,
    build_embedding_norm,
    build_final_norm,
    init_transformer,
)
from normexp.norms.factory import NormFactory


class GPT(nn.Module):
    """Predicts each next token from the tokens up to it.

    Shapes: (B, T) int64 -> (B, T, V), T at most block_size. Position t sees the positions 0..t,
    as far as the norm lets it. The output layer has its own weights and no bias.

    Args:
        depth: blocks.
        width: features of a position, a multiple of num_heads.
        dropout: probability for an element of the embedding or of a branch to be dropped.

    Raises:
        UserError: a width that the heads do not divide; a sequence longer than block_size;
            a size below 1.
    """

    def __init__(
        self,
        norm: NormFactory,
        vocab_size: int,
        block_size: int,
        *,
        depth: int,
        width: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        check_positive(depth=depth, width=width, num_heads=num_heads)
        self.embedding = Embedding(vocab_size, block_size, width, dropout=dropout)
        self.embedding_norm = build_embedding_norm(norm, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, norm, is_causal=True, dropout=dropout) for _ in range(depth)
        )
        self.final_norm = build_final_norm(norm, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        init_transformer(self, depth)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding_norm(self.embedding(inputs))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))
