"""The token models, GPT and a text encoder, and the parts that the ViT of vision.py shares.

`EQUATIONS` is the table of placements: where each puts the norms of a block, and its paper.

Shapes: tokens (B, T) int64, hidden (B, T, C), mask (B, T) bool, true where real.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.site import modules_outside_sites
from normexp.training.batching.draws import Dropout
from normexp.training.config.slots import Placement
from normexp.training.models.common import check_positive

Init = Literal["depth_scaled", "unscaled", "torch"]


@dataclass(frozen=True)
class Branch:
    """Where a residual branch f has norms: y = after(f(before(x))), then around(x + y).

    A norm that is false here is the identity; `before` and `around` are never both true.
    """

    before: bool = False
    after: bool = False
    around: bool = False


@dataclass(frozen=True)
class Equation:
    """The norms of a block and of the model around its blocks.

    Attributes:
        early: both branches in the first quarter of the blocks; None: as in the others.
        qkv_norm: queries, keys and values are normalized, per head or over the whole width.
        norms_hidden: the hidden features of the MLP are normalized, before the activation.
        is_scaled: the output of `before` in block l = 1, 2, ... is divided by sqrt(l).
        is_parallel: the MLP reads the input of attention, and both add to x.
        norms_embedding, has_final_norm: a norm before the first block, after the last.
    """

    attention: Branch
    mlp: Branch
    early: Branch | None = None
    qkv_norm: Literal["head", "width"] | None = None
    norms_hidden: bool = False
    is_scaled: bool = False
    is_parallel: bool = False
    norms_embedding: bool = False
    has_final_norm: bool = True


NO_NORM, PRE, POST = Branch(), Branch(before=True), Branch(around=True)
OUT, SANDWICH = Branch(after=True), Branch(before=True, after=True)

EQUATIONS: dict[Placement, Equation] = {
    # x + f(norm(x)); Xiong et al. 2020, arXiv:2002.04745
    "pre": Equation(PRE, PRE),
    # norm(x + f(x)); Vaswani et al. 2017, arXiv:1706.03762
    "post": Equation(POST, POST, has_final_norm=False),
    # x + norm_out(f(norm(x))); Ding et al. 2021, arXiv:2105.13290
    "sandwich": Equation(SANDWICH, SANDWICH),
    # as sandwich, after a norm on the embedding; Kim et al. 2025, arXiv:2502.02732
    "peri": Equation(SANDWICH, SANDWICH, norms_embedding=True),
    # x + norm(f(x)); OLMo 2, 2025, arXiv:2501.00656, which has qk_norm=true too
    "reordered": Equation(OUT, OUT),
    # x + f(norm(x) / sqrt(l)) in block l, and a plain final norm; Sun et al. 2025, arXiv:2502.05795
    # (depth-scaled initial weights take part of the gain, say the authors: see model.init)
    "layernorm_scaling": Equation(PRE, PRE, is_scaled=True),
    # y = norm(x + attention(x)), y + mlp(y); Zhuo et al. 2025, arXiv:2503.04598. Not their
    # HybridNorm*, whose first block differs.
    "hybrid": Equation(POST, NO_NORM, qkv_norm="head"),
    # post, then pre; Li et al. 2024, arXiv:2412.13795. Their code (pixeli99/MixLN) has 3 of 12.
    "mix_ln": Equation(PRE, PRE, early=POST),
    # x + attention(norm(x)) + mlp(norm(x)), of one norm; Chowdhery et al. 2022, arXiv:2204.02311
    "parallel": Equation(PRE, NO_NORM, is_parallel=True),
    # x + f(x), where f has norm(W x) for every W x, and a final norm; 2026, arXiv:2602.01212
    "simple": Equation(OUT, OUT, qkv_norm="width", norms_hidden=True),
}


class NoSite(nn.Module):
    """The identity, where a placement has no norm: returns x (B, T, C) unchanged."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        return x


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C / num_heads)) v per head (Vaswani et al. 2017, arXiv:1706.03762).

    No position reads a masked one; outputs at masked positions are meaningless. With
    `norm.qk_norm`, q and k pass a norm over the features of a head, shared by all heads: norm=layer
    is the form of Dehghani et al. 2023 (arXiv:2302.05442), norm=rms that of many language models.
    With `norm.v_norm`, v passes one as well; Gemma's has no weight (norm=simple_rms). A placement
    with `qkv_norm` normalizes all three.

    Raises:
        UserError: a width that the heads do not divide; either slot with such a placement.
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
        equation = EQUATIONS[norm.placement]
        if equation.qkv_norm and (norm.qk_norm or norm.v_norm):
            slot = "qk_norm" if norm.qk_norm else "v_norm"
            raise UserError(
                f"{slot}=true: placement={norm.placement} normalizes queries, keys and values "
                "already; leave it out"
            )
        self.num_parts = 1 if equation.qkv_norm == "width" else num_heads
        part_width = width // self.num_parts
        norms_queries = equation.qkv_norm or norm.qk_norm
        norms_values = equation.qkv_norm or norm.v_norm
        self.q_norm = norm.tokens(part_width) if norms_queries else NoSite()
        self.k_norm = norm.tokens(part_width) if norms_queries else NoSite()
        self.v_norm = norm.tokens(part_width) if norms_values else NoSite()
        self.out = nn.Linear(width, width)

    def split_heads(self, x: Tensor, site: nn.Module, mask: Tensor | None) -> Tensor:
        """Normalizes queries, keys or values (B, T, C) and returns (B, heads, T, C / heads).

        The site sees the parts of each position in text order, (B, T * parts, C / parts).
        """
        batch, length, width = x.shape
        if not isinstance(site, NoSite):
            if mask is not None:
                mask = mask[:, :, None].expand(-1, -1, self.num_parts).flatten(1, 2)
            parts = x.reshape(batch, length * self.num_parts, width // self.num_parts)
            x = site(parts, mask)
        return x.reshape(batch, length, self.num_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = self.split_heads(q, self.q_norm, mask)
        k = self.split_heads(k, self.k_norm, mask)
        v = self.split_heads(v, self.v_norm, mask)
        bias = None
        if mask is not None:
            # Made from q, so that it has the axis of replicas: under vmap, torch 2.11 gives its
            # fused kernels a mask that all replicas share without repeating it for each.
            padded = ~mask[:, None, None, :]
            bias = q.new_zeros(padded.shape).masked_fill(padded, -math.inf)
        # The fused CPU kernel has no batching rule: vmap would warn and loop over the replicas.
        plain = sdpa_kernel(SDPBackend.MATH) if x.device.type == "cpu" else nullcontext()
        with plain:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Linear to four times the width, a norm if the placement has one here, GELU, linear back."""

    def __init__(self, width: int, norm: NormFactory) -> None:
        super().__init__()
        has_norm = EQUATIONS[norm.placement].norms_hidden
        self.hidden = nn.Linear(width, 4 * width)
        self.hidden_norm = norm.tokens(4 * width) if has_norm else NoSite()
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out(F.gelu(self.hidden_norm(self.hidden(x), mask)))


class Block(nn.Module):
    """Attention and MLP, each on a residual branch, with norms as `EQUATIONS` places them.

    A branch's output passes dropout, then `norm.residual()`. Attention weights have no dropout: the
    fused kernels draw their own noise, which would change under vmap and with a split of the batch.

    Args:
        layer: number of the block, from 1.
        depth: number of blocks in the model.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        norm: NormFactory,
        *,
        is_causal: bool,
        dropout: float,
        layer: int,
        depth: int,
    ) -> None:
        super().__init__()
        equation = EQUATIONS[norm.placement]
        attn, mlp = equation.attention, equation.mlp
        if equation.early is not None and layer <= max(1, depth // 4):
            attn = mlp = equation.early
        self.attn_branch = attn
        self.mlp_branch = mlp
        self.is_parallel = equation.is_parallel
        self.divisor = math.sqrt(layer) if equation.is_scaled else 1.0
        self.attn_norm = norm.tokens(width) if attn.before or attn.around else NoSite()
        self.attn = Attention(width, num_heads, norm, is_causal=is_causal)
        self.attn_out_norm = norm.tokens(width) if attn.after else NoSite()
        self.attn_dropout = Dropout(dropout)
        self.attn_residual = norm.residual(width)
        self.mlp_norm = norm.tokens(width) if mlp.before or mlp.around else NoSite()
        self.mlp = MLP(width, norm)
        self.mlp_out_norm = norm.tokens(width) if mlp.after else NoSite()
        self.mlp_dropout = Dropout(dropout)
        self.mlp_residual = norm.residual(width)

    def extra_repr(self) -> str:
        return f"divisor={self.divisor:.4g}" if self.divisor != 1 else ""

    def before(self, branch: Branch, norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        """The input of a branch: x, or its norm."""
        if not branch.before:
            return x
        y = norm(x, mask)
        return y if self.divisor == 1 else y / self.divisor

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.attn_out_norm(self.attn(x, mask), mask)
        return self.attn_residual(self.attn_dropout(y))

    def transform(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.mlp_out_norm(self.mlp(x, mask), mask)
        return self.mlp_residual(self.mlp_dropout(y))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.before(self.attn_branch, self.attn_norm, x, mask)
        if self.is_parallel:
            return x + self.attend(h, mask) + self.transform(h, mask)
        x = x + self.attend(h, mask)
        if self.attn_branch.around:
            x = self.attn_norm(x, mask)
        h = self.before(self.mlp_branch, self.mlp_norm, x, mask)
        x = x + self.transform(h, mask)
        if self.mlp_branch.around:
            x = self.mlp_norm(x, mask)
        return x


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
        length = inputs.shape[-1]
        block_size = self.positions.num_embeddings
        if length > block_size:
            raise UserError(
                f"a sequence of {length} tokens is longer than block_size={block_size}; "
                f"cut it, or build the model with block_size={length}"
            )
        return self.dropout(self.tokens(inputs) + self.positions.weight[:length])


@dataclass(eq=False, repr=False, kw_only=True)
class Transformer(nn.Module):
    """Abstract: embedding norm, blocks and final norm of `EQUATIONS`, a head.

    A subclass defines `embed`; all initial weights are drawn in the order of the modules.

    Args:
        depth: number of blocks.
        width: features of a token, a multiple of `num_heads`.
        dropout: probability of dropping an element of a branch's output.

    Raises:
        UserError: a single block for a placement in which blocks differ; as `Attention`.
    """

    norm: InitVar[NormFactory] = field(kw_only=False)
    depth: int
    width: int
    num_heads: int
    dropout: float
    init: Init = "depth_scaled"
    is_causal = False

    def __post_init__(self, norm: NormFactory) -> None:
        super().__init__()
        width = self.width
        check_positive(depth=self.depth, width=width, num_heads=self.num_heads)
        equation = EQUATIONS[norm.placement]
        if self.depth == 1 and (equation.early or equation.is_scaled):
            raise UserError(
                f"placement={norm.placement} needs two blocks or more, and model.depth=1 has one; "
                "try model.depth=2 or placement=pre"
            )
        self.add_embedding()
        self.embedding_norm = norm.tokens(width) if equation.norms_embedding else NoSite()
        common = {"is_causal": self.is_causal, "dropout": self.dropout, "depth": self.depth}
        self.blocks = nn.ModuleList(
            Block(width, self.num_heads, norm, layer=layer, **common)
            for layer in range(1, self.depth + 1)
        )
        self.final_norm = norm.tokens(width) if equation.has_final_norm else NoSite()
        self.head = self.build_head()
        self.init_weights(self.init)

    def add_embedding(self) -> None:
        """Adds what makes tokens (B, T, C) of the inputs."""
        raise NotImplementedError

    def build_head(self) -> nn.Linear:
        raise NotImplementedError

    def apply_blocks(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embedded tokens (B, T, C) to the features that the head reads, same shape."""
        x = self.embedding_norm(x, mask)
        for block in self.blocks:
            x = block(x, mask)
        return self.final_norm(x, mask)

    def init_weights(self, init: Init) -> None:
        """Normal with std 0.02, zero biases; `torch`: as the modules of torch draw them.

        depth_scaled: 0.02 / sqrt(2 * depth) at the end of a branch (Radford et al. 2019, "GPT-2"),
        so that the variance of the residual stream does not grow with its 2 * depth branches.
        unscaled: 0.02 there too.

        Raises:
            UserError: another `init`.
        """
        if init not in get_args(Init):
            raise UserError(f"model.init={init}: must be one of {', '.join(get_args(Init))}")
        if init == "torch":
            return
        for module in modules_outside_sites(self):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if init == "unscaled":
            return
        with torch.no_grad():
            for name, parameter in self.blocks.named_parameters():
                if name.endswith((".attn.out.weight", ".mlp.out.weight")):
                    parameter /= math.sqrt(2 * len(self.blocks))


@dataclass(eq=False, repr=False)
class TextTransformer(Transformer):
    """Abstract: its inputs are (B, T) int64, T at most block_size."""

    vocab_size: int
    block_size: int

    def add_embedding(self) -> None:
        self.embedding = Embedding(
            self.vocab_size, self.block_size, self.width, dropout=self.dropout
        )


class GPT(TextTransformer):
    """Predicts each next token from those up to it (Radford et al. 2019, "GPT-2").

    Shapes: (B, T) int64 -> (B, T, V), T at most block_size. Position t sees the positions 0..t,
    provided that the norm looks no further. The output layer has its own weights and no bias.
    Sizes as in `Transformer`; the embedding has the same dropout.

    Raises:
        UserError: sizes that do not fit; a sequence longer than block_size.
    """

    is_causal = True

    def build_head(self) -> nn.Linear:
        return nn.Linear(self.width, self.vocab_size, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.apply_blocks(self.embedding(inputs)))


@dataclass(eq=False, repr=False)
class TextEncoder(TextTransformer):
    """Classifies a short string; neither content nor amount of padding moves its output.

    Shapes: inputs (B, T) int64 and mask (B, T) bool, true where real -> (B, num_outputs), T at most
    block_size. Attention reads real positions only, every site gets the mask, and the head reads
    the maximum over real positions: a mean would erase a norm that centres each channel over
    positions, as instance norm does. All shapes are static. Sizes as in `Transformer`; the
    embedding has the same dropout.

    Raises:
        UserError: sizes that do not fit; a sequence longer than block_size.
    """

    num_outputs: int

    def build_head(self) -> nn.Linear:
        return nn.Linear(self.width, self.num_outputs)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return self.head(masked_max(self.apply_blocks(self.embedding(inputs), mask), mask))


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Maximum of x (B, T, C) over the real positions, (B, C); zero for a sample without any."""
    largest = x.masked_fill(~mask[:, :, None], -torch.inf).amax(dim=1)
    return torch.where(mask.any(dim=1, keepdim=True), largest, 0)
