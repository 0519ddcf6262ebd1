from __future__ import annotations

import math

import pytest
import torch
from model_cases import PositionNorm
from torch import nn

from normexp.errors import UserError
from normexp.models.transformer import Attention, Block, Embedding, init_transformer
from normexp.norms.factory import NormFactory

NORM = NormFactory(PositionNorm)


def reference_attention(attention: Attention, x: torch.Tensor, allowed: torch.Tensor):
    """The textbook formula, a head at a time; `allowed` (B, T, T) says who may read whom."""
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    heads = []
    for a, b, c in zip(*(t.chunk(attention.num_heads, dim=-1) for t in (q, k, v)), strict=True):
        scores = a @ b.transpose(1, 2) / math.sqrt(a.shape[-1])
        heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ c)
    return attention.out(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_attention_equals_the_formula(kind: str) -> None:
    torch.manual_seed(0)
    attention = Attention(12, 3, NORM, is_causal=kind == "causal").double()
    x = torch.randn(2, 5, 12, dtype=torch.double)
    mask = torch.arange(5) < torch.tensor([[5], [3]]) if kind == "masked" else None
    allowed = torch.ones(2, 5, 5, dtype=torch.bool)
    if kind == "causal":
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask[:, None, :]
    expected = reference_attention(attention, x, allowed)
    torch.testing.assert_close(attention(x, mask), expected, rtol=0, atol=1e-12)


def test_attention_of_a_sample_without_real_positions_is_finite() -> None:
    attention = Attention(8, 2, NORM, is_causal=False)
    mask = torch.tensor([[True, True], [False, False]])
    out = attention(torch.randn(2, 2, 8), mask)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attention.parameters() if p.grad is not None)


def test_block_with_silent_branches_is_the_identity() -> None:
    block = Block(8, 2, NORM, is_causal=True, dropout=0.0)
    for linear in (block.attn.out, block.mlp.out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    x = torch.randn(2, 5, 8)
    assert torch.equal(block(x), x)


def test_initial_weights_follow_gpt2() -> None:
    torch.manual_seed(0)
    depth = 8
    blocks = nn.ModuleList(Block(128, 4, NORM, is_causal=True, dropout=0.0) for _ in range(depth))
    init_transformer(blocks, depth)
    block = blocks[3]
    assert isinstance(block, Block)
    for linear, std in [
        (block.attn.qkv, 0.02),
        (block.mlp.hidden, 0.02),
        (block.attn.out, 0.02 / 4),
        (block.mlp.out, 0.02 / 4),
    ]:
        assert linear.weight.std().item() == pytest.approx(std, rel=0.03)
        assert torch.equal(linear.bias, torch.zeros_like(linear.bias))
    norm = block.attn_norm.norm
    assert isinstance(norm, PositionNorm)
    assert torch.equal(norm.weight, torch.ones(128))


def test_heads_that_do_not_divide_the_width_are_refused_with_a_width_that_works() -> None:
    with pytest.raises(UserError, match="num_heads=3 does not divide width=64; try model.width=66"):
        Attention(64, 3, NORM, is_causal=False)


def test_sequence_longer_than_block_size_is_refused() -> None:
    embedding = Embedding(7, 4, 8, dropout=0.0)
    with pytest.raises(UserError, match="5 tokens is longer than block_size=4"):
        embedding(torch.zeros(1, 5, dtype=torch.int64))
