"""The parts of the models against their formulas."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_cases import VOCAB_SIZE, build, layer_norm
from torch import Tensor, nn

from normexp.models.transformer import EQUATIONS, Attention
from normexp.models.vision import ResidualBlock, ViT
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites
from normexp.norms.slots import Slots

NORM = NormFactory(layer_norm)


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


def textbook_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, gains: dict[str, Tensor], num_heads: int
) -> Tensor:
    """One head at a time, RMS norm where there is a gain; `allowed` (..., T, T): who reads whom."""
    heads = []
    for values in zip(*(t.chunk(num_heads, dim=-1) for t in (q, k, v)), strict=True):
        own = dict(zip("qkv", values, strict=True))
        for name, gain in gains.items():
            own[name] = rms(own[name]) * gain
        scores = own["q"] @ own["k"].transpose(1, 2) / math.sqrt(own["q"].shape[-1])
        heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ own["v"])
    return torch.cat(heads, dim=-1)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(("qk_norm", "v_norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_attention_equals_the_formula(kind: str, qk_norm: bool, v_norm: bool) -> None:
    slots = Slots(qk_norm=qk_norm, v_norm=v_norm)
    norm = NormFactory(partial(nn.RMSNorm, eps=1e-6), slots=slots)
    attention = Attention(12, 3, norm, is_causal=kind == "causal").double()
    gains = {}
    for name, site in named_sites(attention):
        gains[name[0]] = torch.rand(4, dtype=torch.double) + 0.5
        site.norm.get_parameter("weight").data.copy_(gains[name[0]])
    assert len(gains) == 2 * qk_norm + v_norm
    x = torch.randn(2, 5, 12, dtype=torch.double)
    mask = torch.arange(5) < torch.tensor([[5], [3]]) if kind == "masked" else None
    allowed = torch.ones(2, 5, 5, dtype=torch.bool)
    allowed = allowed.tril() if kind == "causal" else allowed
    allowed = allowed if mask is None else allowed & mask[:, None, :]
    qkv = attention.qkv(x).chunk(3, dim=-1)
    expected = attention.out(textbook_attention(*qkv, allowed, gains, num_heads=3))
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


DEPTH, HEADS = 4, 2


def textbook_gpt(placement: str, state: dict[str, Tensor], tokens: Tensor, s: float) -> Tensor:
    """The GPT of a placement by its paper's equations, with RMS norm and s at each branch's end."""

    def norm(name: str, x: Tensor) -> Tensor:
        return rms(x) * state[f"{name}.norm.weight"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def attention(name: str, x: Tensor) -> Tensor:
        allowed = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        named = {which: state.get(f"{name}.{which}_norm.norm.weight") for which in "qkv"}
        gains = {which: gain for which, gain in named.items() if gain is not None}
        q, k, v = linear(f"{name}.qkv", x).chunk(3, -1)
        return linear(f"{name}.out", textbook_attention(q, k, v, allowed, gains, HEADS))

    def mlp(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.out", F.gelu(linear(f"{name}.hidden", x)))

    x = state["embedding.tokens.weight"][tokens]
    x = x + state["embedding.positions.weight"][: tokens.shape[1]]
    if placement == "peri":
        x = norm("embedding_norm", x)
    for layer in range(1, DEPTH + 1):
        block = f"blocks.{layer - 1}"
        if placement == "parallel":
            h = norm(f"{block}.attn_norm", x)
            x = x + s * attention(f"{block}.attn", h) + s * mlp(f"{block}.mlp", h)
            continue
        for f, part in ((attention, "attn"), (mlp, "mlp")):
            name, own, out = (f"{block}.{part}{end}" for end in ("", "_norm", "_out_norm"))
            is_post = placement == "post" or (placement == "mix_ln" and layer == 1)
            if is_post or (placement == "hybrid" and part == "attn"):
                x = norm(own, x + s * f(name, x))
            elif placement == "hybrid":
                x = x + s * f(name, x)
            elif placement in ("pre", "mix_ln"):
                x = x + s * f(name, norm(own, x))
            elif placement in ("sandwich", "peri"):
                x = x + s * norm(out, f(name, norm(own, x)))
            elif placement == "reordered":
                x = x + s * norm(out, f(name, x))
            elif placement == "layernorm_scaling":
                x = x + s * f(name, norm(own, x) / math.sqrt(layer))
            else:
                raise NotImplementedError(placement)
    return (x if placement == "post" else norm("final_norm", x)) @ state["head.weight"].T


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("placement", EQUATIONS)
def test_a_placement_is_the_network_of_its_paper(placement: Any, scale: float | None) -> None:
    slots = Slots(placement=placement, residual_scale=scale)
    norm = NormFactory(partial(nn.RMSNorm, eps=1e-6), slots=slots)
    model = build("gpt", norm, depth=DEPTH, num_heads=HEADS).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("residual.scale"):
                nn.init.normal_(parameter, std=0.5)  # large: no branch is lost in the stream
    tokens = torch.randint(VOCAB_SIZE, (2, 7))
    state = dict(model.state_dict())
    expected = textbook_gpt(placement, state, tokens, scale or 1)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-12)
    used = {name for name in state if "norm" in name}  # the textbook reads every gain
    for name in used:
        changed = state | {name: state[name] + 1}
        assert not torch.allclose(textbook_gpt(placement, changed, tokens, scale or 1), expected)


@pytest.mark.parametrize(("init", "end"), [("depth_scaled", 0.02 / 4), ("unscaled", 0.02)])
def test_initial_weights_follow_gpt2(init: str, end: float) -> None:
    model = build("gpt", depth=8, width=128, init=init)
    for name, std in [
        ("blocks.3.attn.qkv", 0.02),
        ("blocks.3.mlp.hidden", 0.02),
        ("blocks.3.attn.out", end),
        ("blocks.3.mlp.out", end),
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
