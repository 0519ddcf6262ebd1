"""The parts of the models against their formulas."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_cases import build, layer_norm
from torch import Tensor, nn

from normexp.models.resnet import ResidualBlock
from normexp.models.transformer import Attention, Block
from normexp.models.vit import ViT
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites
from normexp.norms.slots import Slots

NORM = NormFactory(layer_norm)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_residual_block_follows_its_formula() -> None:
    slots = Slots(act="silu", conv="weight_standardized", residual_scale=0.3)
    block = ResidualBlock(4, 4, 1, NormFactory(layer_norm, slots=slots))
    x = torch.randn(2, 4, 5, 5)
    y = F.silu(block.norm1(block.conv1(x)))
    expected = F.relu(x + 0.3 * block.norm2(block.conv2(y)))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-6)


def test_shortcut_takes_every_second_position_and_adds_zero_channels() -> None:
    x = torch.randn(3, 2, 5, 5)
    expected = torch.zeros(3, 4, 3, 3)
    expected[:, :2] = x[:, :, ::2, ::2]
    assert torch.equal(ResidualBlock(2, 4, 2, NORM).shortcut(x), expected)


def test_resnet20_starts_from_one_draw_per_layer_in_forward_order() -> None:
    model = build("resnet20", input_shape=(3, 32, 32), num_outputs=10)
    torch.manual_seed(0)
    widths = [(3, 16), *[(16, 16)] * 6, (16, 32), *[(32, 32)] * 5, (32, 64), *[(64, 64)] * 5]
    layers = [nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in widths]
    head = nn.Linear(64, 10)
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.kaiming_normal_(head.weight, nonlinearity="linear")
    found = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    expected = [*(layer.weight for layer in layers), head.weight]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def reference_attention(attention: Attention, x: Tensor, allowed: Tensor, gains: list) -> Tensor:
    """The textbook formula, one head at a time; `allowed` (B, T, T) says who may read whom."""
    split = [t.chunk(attention.num_heads, dim=-1) for t in attention.qkv(x).chunk(3, dim=-1)]
    heads = []
    for q, k, v in zip(*split, strict=True):
        if gains:
            q, k = (
                t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
                for t, gain in zip((q, k), gains, strict=True)
            )
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ v)
    return attention.out(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_attention_equals_the_formula(kind: str, qk_norm: bool) -> None:
    norm = NormFactory(partial(nn.RMSNorm, eps=1e-6), slots=Slots(qk_norm=qk_norm))
    attention = Attention(12, 3, norm, is_causal=kind == "causal").double()
    gains = [torch.rand(4, dtype=torch.double) + 0.5 for _ in named_sites(attention)]
    for (_, site), gain in zip(named_sites(attention), gains, strict=True):
        site.norm.get_parameter("weight").data.copy_(gain)
    x = torch.randn(2, 5, 12, dtype=torch.double)
    mask = torch.arange(5) < torch.tensor([[5], [3]]) if kind == "masked" else None
    allowed = torch.ones(2, 5, 5, dtype=torch.bool)
    allowed = allowed.tril() if kind == "causal" else allowed
    allowed = allowed if mask is None else allowed & mask[:, None, :]
    expected = reference_attention(attention, x, allowed, gains)
    real = torch.ones(2, 5, dtype=torch.bool) if mask is None else mask
    out = attention(x, mask)
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=1e-12)


def test_a_text_without_real_positions_gives_finite_outputs_and_gradients() -> None:
    model = build("text_encoder")
    mask = torch.tensor([[True, True], [False, False]])
    out = model(torch.zeros(2, 2, dtype=torch.long), mask)
    out.sum().backward()
    assert out.isfinite().all() and torch.equal(out[1], model.head.bias)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "peri"])
def test_block_follows_the_formula_of_its_placement(placement: Any, scale: float | None) -> None:
    slots = Slots(placement=placement, residual_scale=scale)
    block = Block(8, 2, NormFactory(layer_norm, slots=slots), is_causal=True, dropout=0.0)
    for parameter in block.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)  # so that the norms of the block differ
    x, s = torch.randn(2, 5, 8), scale or 1
    expected = x
    for f, role in ((block.attn, "attn"), (block.mlp, "mlp")):
        before, after = getattr(block, f"{role}_norm"), getattr(block, f"{role}_out_norm")
        if placement == "pre":
            expected = expected + s * f(before(expected))
        elif placement == "post":
            expected = before(expected + s * f(expected))
        else:
            expected = expected + s * after(f(before(expected)))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-5)


def test_initial_weights_follow_gpt2() -> None:
    model = build("gpt", depth=8, width=128)
    for name, std in [
        ("blocks.3.attn.qkv", 0.02),
        ("blocks.3.mlp.hidden", 0.02),
        ("blocks.3.attn.out", 0.02 / 4),
        ("blocks.3.mlp.out", 0.02 / 4),
    ]:
        assert model.get_parameter(f"{name}.weight").std().item() == pytest.approx(std, rel=0.03)
        assert not model.get_parameter(f"{name}.bias").any()


def test_patches_are_cut_row_by_row_and_become_tokens_of_unit_variance() -> None:
    model = build("vit", input_shape=(3, 8, 12), width=64)
    assert isinstance(model, ViT)
    images = torch.randn(500, 3, 8, 12)
    patches = model.split(images)
    assert patches.shape == (500, 6, 48)
    for index, (row, column) in enumerate((r, c) for r in (0, 4) for c in (0, 4, 8)):
        expected = images[:, :, row : row + 4, column : column + 4].flatten(1)
        assert torch.equal(patches[:, index], expected)
    assert model.patch_embedding(patches).var().item() == pytest.approx(1, rel=0.1)
