"""The parts that the token models share: embedding, attention, MLP, block, initial weights.

Shapes: tokens (B, T) int64, hidden (B, T, C), mask (B, T) bool, true where real.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normexp.batching.draws import Dropout
from normexp.errors import UserError
from normexp.models.initialization import modules_outside_sites
from normexp.norms.contract import NormFactory


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C / num_heads)) v per head (Vaswani et al. 2017, arXiv:1706.03762).

    Masked positions are no keys, so nothing reads them; their own outputs mean nothing.

    Raises:
        UserError: a width that the heads do not divide.
    """

    def __init__(self, width: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        if width % num_heads:
            raise UserError(
                f"num_heads={num_heads} does not divide width={width}; "
                f"try model.width={math.ceil(width / num_heads) * num_heads}"
            )
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, heads, C / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, T, C / heads)
        keys = None if mask is None else mask[:, None, None, :]
        # The CPU's fused kernel has no batching rule: vmap would warn and loop over the replicas.
        plain = sdpa_kernel(SDPBackend.MATH) if x.device.type == "cpu" else nullcontext()
        with plain:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Linear to four times the width, GELU, linear back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(x)))


class Block(nn.Module):
    """Pre-norm: x + attn(norm(x)), then x + mlp(norm(x)) (Xiong et al. 2020, arXiv:2002.04745).

    Dropout falls on what each branch adds; attention weights have none, since the fused kernels
    draw noise of their own, which neither vmap nor a split of the batch would leave the same.
    """

    def __init__(
        self, width: int, num_heads: int, norm: NormFactory, *, is_causal: bool, dropout: float
    ) -> None:
        super().__init__()
        self.attn_norm = norm.tokens(width)
        self.attn = Attention(width, num_heads, is_causal=is_causal)
        self.attn_dropout = Dropout(dropout)
        self.mlp_norm = norm.tokens(width)
        self.mlp = MLP(width)
        self.mlp_dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn_dropout(self.attn(self.attn_norm(x, mask), mask))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x, mask)))


class Embedding(nn.Module):
    """Tokens (B, T) to (B, T, C): a learned vector per token plus one per position, dropout.

    Raises:
        UserError: in the forward, for sequences longer than `block_size`.
    """

    def __init__(self, vocab_size: int, block_size: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.dropout = Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        length, block_size = inputs.shape[-1], self.positions.num_embeddings
        if length > block_size:
            raise UserError(
                f"a sequence of {length} tokens is longer than block_size={block_size}; "
                f"cut it, or build the model with block_size={length}"
            )
        return self.dropout(self.tokens(inputs) + self.positions.weight[:length])


def init_transformer(model: nn.Module, depth: int) -> None:
    """Normal with std 0.02 and zero biases; 0.02 / sqrt(2 depth) where a branch ends (GPT-2).

    The smaller one keeps the variance of the residual stream from growing with the 2 * depth
    branches that add to it.
    """
    for module in modules_outside_sites(model):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Block):
                module.attn.out.weight /= math.sqrt(2 * depth)
                module.mlp.out.weight /= math.sqrt(2 * depth)
