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
from normexp.models.common import modules_outside_sites
from normexp.norms.factory import NormFactory


class NoSite(nn.Module):
    """The identity, for placements without a norm here: returns x (B, T, C) unchanged."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return x


def site_if(wanted: bool, norm: NormFactory, width: int) -> nn.Module:
    """A site for tokens (B, T, width) if `wanted`, otherwise the identity."""
    return norm.tokens(width) if wanted else NoSite()


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C / num_heads)) v per head (Vaswani et al. 2017, arXiv:1706.03762).

    No position reads a masked one; the outputs at masked positions mean nothing. With
    `norm.qk_norm`, q and k pass a norm over the features of a head, shared by all heads: norm=layer
    is the form of Dehghani et al. 2023 (arXiv:2302.05442), norm=rms that of many language models.
    Henry et al. 2020 (arXiv:2010.04245) have an L2 norm, and a learned scale instead of the root.

    Raises:
        UserError: a width that the heads do not divide.
    """

    def __init__(self, width: int, num_heads: int, norm: NormFactory, *, is_causal: bool) -> None:
        super().__init__()
        if width % num_heads:
            raise UserError(
                f"model.num_heads={num_heads} does not divide model.width={width}; "
                f"try model.width={math.ceil(width / num_heads) * num_heads}"
            )
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.qk_norm = norm.qk_norm
        if self.qk_norm:
            self.q_norm = norm.tokens(width // num_heads)
            self.k_norm = norm.tokens(width // num_heads)
        self.out = nn.Linear(width, width)

    def normalize(self, site: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, heads, T, D) through a site, which sees (B, T * heads, D) in text order."""
        x = x.transpose(1, 2)
        if mask is not None:
            mask = mask[:, :, None].expand(-1, -1, self.num_heads).flatten(1, 2)
        return site(x.flatten(1, 2), mask).unflatten(1, x.shape[1:3]).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, heads, C / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, T, C / heads)
        if self.qk_norm:
            q, k = self.normalize(self.q_norm, q, mask), self.normalize(self.k_norm, k, mask)
        keys = None if mask is None else mask[:, None, None, :]
        # The fused CPU kernel has no batching rule: vmap would warn and loop over the replicas.
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
    """Attention and MLP f, each on a residual branch, with norms where `norm.placement` puts them:

        pre       x + f(norm(x))              (Xiong et al. 2020, arXiv:2002.04745)
        post      norm(x + f(x))              (Vaswani et al. 2017, arXiv:1706.03762)
        sandwich  x + norm_out(f(norm(x)))    (Ding et al. 2021, arXiv:2105.13290)
        peri      as sandwich, and the model has a norm on its embedding (Kim et al. 2025,
                  arXiv:2502.02732)

    A branch's output passes dropout, then `norm.residual()`. Attention weights have no dropout: the
    fused kernels draw their own noise, which would change under vmap and with a split of the batch.
    """

    def __init__(
        self, width: int, num_heads: int, norm: NormFactory, *, is_causal: bool, dropout: float
    ) -> None:
        super().__init__()
        self.is_post = norm.placement == "post"
        has_out_norm = norm.placement in ("sandwich", "peri")
        self.attn_norm = norm.tokens(width)
        self.attn = Attention(width, num_heads, norm, is_causal=is_causal)
        self.attn_out_norm = site_if(has_out_norm, norm, width)
        self.attn_dropout = Dropout(dropout)
        self.attn_residual = norm.residual()
        self.mlp_norm = norm.tokens(width)
        self.mlp = MLP(width)
        self.mlp_out_norm = site_if(has_out_norm, norm, width)
        self.mlp_dropout = Dropout(dropout)
        self.mlp_residual = norm.residual()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.is_post:
            y = self.attn_residual(self.attn_dropout(self.attn(x, mask)))
            x = self.attn_norm(x + y, mask)
            y = self.mlp_residual(self.mlp_dropout(self.mlp(x)))
            return self.mlp_norm(x + y, mask)
        y = self.attn_out_norm(self.attn(self.attn_norm(x, mask), mask), mask)
        x = x + self.attn_residual(self.attn_dropout(y))
        y = self.mlp_out_norm(self.mlp(self.mlp_norm(x, mask)), mask)
        return x + self.mlp_residual(self.mlp_dropout(y))


class Embedding(nn.Module):
    """Tokens (B, T) to (B, T, C): a learned vector per token plus one per position, dropout.

    Raises:
        UserError: in forward, for sequences longer than `block_size`.
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


class Transformer(nn.Module):
    """Base of the token models: embedding norm, blocks, final norm.

    Only placement=peri has a norm on the embedding. placement=post has no final norm, because its
    last block ends with one.
    """

    embedding_norm: nn.Module
    blocks: nn.ModuleList
    final_norm: nn.Module

    def add_blocks(
        self,
        norm: NormFactory,
        depth: int,
        width: int,
        num_heads: int,
        *,
        is_causal: bool,
        dropout: float,
    ) -> None:
        """Builds `depth` blocks and the norms around them."""
        self.embedding_norm = site_if(norm.placement == "peri", norm, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, norm, is_causal=is_causal, dropout=dropout)
            for _ in range(depth)
        )
        self.final_norm = site_if(norm.placement != "post", norm, width)

    def apply_blocks(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embedded tokens (B, T, C) to the features that the head reads, same shape."""
        x = self.embedding_norm(x, mask)
        for block in self.blocks:
            x = block(x, mask)
        return self.final_norm(x, mask)

    def init_weights(self) -> None:
        """Normal with std 0.02, zero biases; 0.02 / sqrt(2 depth) at the end of a branch (GPT-2).

        The smaller value keeps the variance of the residual stream from growing with the 2 * depth
        branches that add to it.
        """
        for module in modules_outside_sites(self):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for name, parameter in self.blocks.named_parameters():
                if name.endswith((".attn.out.weight", ".mlp.out.weight")):
                    parameter /= math.sqrt(2 * len(self.blocks))
