"""A small GPT (Radford et al. 2019, "GPT-2"): by default a pre-norm decoder with a final norm."""

from __future__ import annotations

from torch import Tensor, nn

from normexp.models.common import check_positive
from normexp.models.transformer import Embedding, Init, Transformer
from normexp.norms.factory import NormFactory


class GPT(Transformer):
    """Predicts each next token from the tokens up to it.

    Shapes: (B, T) int64 -> (B, T, V), T at most block_size. Position t sees the positions 0..t,
    provided that the norm looks no further. The output layer has its own weights and no bias.
    Sizes as in `Transformer.add_blocks`; the embedding has the same dropout.

    Raises:
        UserError: sizes that do not fit; a sequence longer than block_size.
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
        init: Init = "depth_scaled",
    ) -> None:
        super().__init__()
        check_positive(depth=depth, width=width, num_heads=num_heads)
        self.embedding = Embedding(vocab_size, block_size, width, dropout=dropout)
        self.add_blocks(norm, depth, width, num_heads, is_causal=True, dropout=dropout)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.init_weights(init)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.apply_blocks(self.embedding(inputs)))
