"""Every model of conf/model: its properties, and its parts against their formulas."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_cases import (
    BLOCK_SIZE,
    MODELS,
    NUM_OUTPUTS,
    TRANSFORMERS,
    VOCAB_SIZE,
    build,
    draw_arguments,
)
from surgery_cases import layer_norm
from torch import Tensor, nn
from train_cases import cells, train

import normexp
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.site import modules_outside_sites, named_sites
from normexp.training.checks.wiring import find_stacking_fault
from normexp.training.config.slots import PLACEMENTS, SLOTS, Slots
from normexp.training.models.transformer import EQUATIONS, Attention
from normexp.training.models.vision import ResidualBlock, ViT

CHANGED: dict[str, Any] = {
    "act": "tlu",
    "conv": "scaled_weight_standardized",
    "residual_scale": 0.5,
    "layer_scale": 0.1,
    "placement": "sandwich",
    "qk_norm": True,
    "v_norm": True,
}
EVERY_SLOT = Slots(**CHANGED)
every_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "torchvision")) for n in MODELS]
)


class CausalMean(nn.Module):
    """Subtracts the mean of the positions up to each one of (N, C, T)."""

    def __init__(self, _: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x - x.cumsum(-1) / torch.arange(1, x.shape[-1] + 1)


TOKEN_NORMS = {
    "token": NormFactory(layer_norm),
    "sequence": NormFactory(CausalMean, view="sequence"),
}


def with_slots(norm: NormFactory, **slots: Any) -> NormFactory:
    return NormFactory(norm.make, view=norm.view, slots=Slots(**slots))


NUM_SITES = {"convnet": 3, "deep_mlp": 20, "small_resnet": 7, "resnet20": 19, "torchvision": 20}
NUM_SITES["unet"] = 10  # two at each of three sizes on the way down, and of two on the way up
OUTPUTS = {"gpt": (3, BLOCK_SIZE, VOCAB_SIZE), "unet": (3, NUM_OUTPUTS, 8, 8)}


@every_model
def test_every_norm_of_a_model_is_a_site(name: str) -> None:
    assert len([*named_sites(build(name))]) == NUM_SITES.get(name, 5)  # two blocks, a final norm


@every_model
@pytest.mark.parametrize("slots", [Slots(), EVERY_SLOT], ids=["no slots", "every slot"])
def test_shape_and_gradients(name: str, slots: Slots) -> None:
    model = build(name, NormFactory(layer_norm, slots=slots)).double()
    out = model(*draw_arguments(name, 3))
    assert out.shape == OUTPUTS.get(name, (3, NUM_OUTPUTS))
    out.square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []


@every_model
def test_a_slot_changes_the_model_if_and_only_if_the_model_asks_for_it(name: str) -> None:
    default = str(build(name))
    for slot in SLOTS:
        norm = NormFactory(layer_norm, slots=replace(Slots(), **{slot: CHANGED[slot]}))
        assert (str(build(name, norm)) != default) == (slot in norm.used), slot


@every_model
def test_one_seed_gives_one_start_for_all_norms_and_slots(name: str) -> None:
    """Also for a norm that draws weights, which the model leaves as they are."""

    def drawing(num_features: int) -> nn.Module:
        linear = nn.Linear(num_features, num_features)
        nn.init.constant_(linear.weight, 7)
        return linear

    starts = []
    for norm in (NormFactory(layer_norm), NormFactory(drawing, slots=EVERY_SLOT)):
        torch.manual_seed(3)
        model = build(name, norm)
        own = modules_outside_sites(model)
        starts.append([m.weight for m in own if isinstance(m, nn.Linear | nn.Conv2d)])
    assert all(torch.equal(a, b) for a, b in zip(*starts, strict=True))
    assert all((site.norm.weight == 7).all() for _, site in named_sites(model))


@every_model
def test_stacked_replicas_with_every_slot_equal_a_loop(name: str) -> None:
    make = nn.BatchNorm1d if name in (*TRANSFORMERS, "deep_mlp") else nn.BatchNorm2d
    make = MaskedLayerNorm if name == "text_encoder" else make
    models = [build(name, NormFactory(make, slots=EVERY_SLOT)).double() for _ in range(2)]
    arguments = zip(*(draw_arguments(name, 4) for _ in models), strict=True)
    batch = dict(zip(("inputs", "mask"), map(torch.stack, arguments), strict=False))
    assert find_stacking_fault(models, batch, tolerance=1e-8) is None


class MaskedLayerNorm(nn.LayerNorm):
    """A norm without a mask would need dynamic shapes, which vmap cannot have."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if mask is None else y * mask[:, None]


def placed(view: str, placement: str) -> NormFactory:
    qk_norm = EQUATIONS[placement].qkv_norm is None
    return with_slots(TOKEN_NORMS[view], placement=placement, qk_norm=qk_norm)


@pytest.mark.parametrize("view", TOKEN_NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_padding_moves_no_answer_and_no_gradient(placement: str, view: str) -> None:
    model = build("text_encoder", placed(view, placement)).double()
    tokens, mask = draw_arguments("text_encoder", 4)
    tokens, mask = tokens[:, :9], mask[:, :9]
    more = nn.functional.pad(tokens, (0, 3), value=1), nn.functional.pad(mask, (0, 3))
    other = torch.where(mask, tokens, (tokens + 3) % VOCAB_SIZE), mask
    expected = model(tokens, mask)
    gradients = torch.autograd.grad(expected.square().sum(), [*model.parameters()])
    for changed in (more, other):
        out = model(*changed)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        own = torch.autograd.grad(out.square().sum(), [*model.parameters()])
        for one, two in zip(gradients, own, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    last = mask.sum(dim=1) - 1  # a real token moves the answer
    tokens[torch.arange(4), last] = (tokens[torch.arange(4), last] + 1) % VOCAB_SIZE
    assert (model(tokens, mask) != expected).any(dim=1).all()


@pytest.mark.parametrize(("depth", "size"), [(20, 269_722), (110, 1_727_962)])
def test_resnet_has_the_parameters_of_its_paper(depth: int, size: int) -> None:
    """0.27 and 1.7 million in table 6."""
    model = build("resnet20", input_shape=(3, 32, 32), num_outputs=10, depth=depth)
    assert sum(p.numel() for p in model.parameters()) == size


BAD_KNOBS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"width": 0}, "model.width=0") for name in MODELS if name != "torchvision"),
    *((name, {"depth": 0}, "model.depth=0") for name in TRANSFORMERS),
    *((name, {"num_heads": 3}, "model.num_heads=3.*model.width=18") for name in TRANSFORMERS),
    ("convnet", {"width": 1.5}, "model.width=1.5"),
    *(("resnet20", {"depth": d}, f"model.depth={d}.*20") for d in (2, 18, 21)),
    ("gpt", {"init": "mimetic"}, "model.init=mimetic.*unscaled"),
    ("vit", {"patch_size": 5, "input_shape": (1, 28, 28)}, "patch_size=5.*28x28.*patch_size=4"),
    *(
        ("gpt", {"depth": 1, "placement": key}, f"placement={key}.*model.depth=1.*model.depth=2")
        for key in ("mix_ln", "layernorm_scaling")
    ),
    ("gpt", {"placement": "hybrid", "qk_norm": True}, "qk_norm=true.*placement=hybrid"),
    ("vit", {"placement": "simple", "v_norm": True}, "v_norm=true.*placement=simple"),
    ("vit", {"patch_size": 8}, "8x8.*model=vit.*16x16"),
    ("convnet", {"input_shape": (3, 3, 8)}, "3x8.*model=convnet.*4x4"),
    ("resnet20", {"input_shape": (3, 5, 4)}, "5x4.*model=resnet.*5x5"),
    ("unet", {"input_shape": (3, 12, 10)}, "model.depth=2.*12x10.*model.depth=1"),
    ("unet", {"input_shape": (3, 12, 9)}, "model.depth=2.*12x9.*even"),
    ("convnet", {"input_shape": (64,)}, r"model=convnet.*\(64,\).*model=gpt"),
]


@pytest.mark.parametrize(("name", "knobs", "message"), BAD_KNOBS)
def test_knobs_that_do_not_fit_are_refused(name: str, knobs: dict[str, Any], message: str) -> None:
    slots = {key: value for key, value in knobs.items() if key in SLOTS}
    own = {key: value for key, value in knobs.items() if key not in SLOTS}
    with pytest.raises(UserError, match=re.compile(message)):
        build(name, with_slots(TOKEN_NORMS["token"], **slots), **own)


@pytest.mark.parametrize("name", ["gpt", "text_encoder"])
def test_sequence_longer_than_block_size_is_refused(name: str) -> None:
    model = build(name, block_size=4).double()
    with pytest.raises(UserError, match="12 tokens.*block_size=4"):
        model(*draw_arguments(name, 2))


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
    last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    assert torch.equal(shown := ResidualBlock(2, 4, 2, NORM).shortcut(last), expected)
    (gradient,) = torch.autograd.grad(shown.sum(), last)
    assert gradient.stride() == last.stride() != x.stride()


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
        if placement == "simple":  # over the full width, not per head
            q, k, v = (norm(f"{name}.{w}_norm", y) for w, y in (("q", q), ("k", k), ("v", v)))
            gains = {}
        return linear(f"{name}.out", textbook_attention(q, k, v, allowed, gains, HEADS))

    def mlp(name: str, x: Tensor) -> Tensor:
        hidden = linear(f"{name}.hidden", x)
        if placement == "simple":
            hidden = norm(f"{name}.hidden_norm", hidden)
        return linear(f"{name}.out", F.gelu(hidden))

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
            elif placement in ("reordered", "simple"):
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


@pytest.mark.slow
@pytest.mark.parametrize("words", ["data=manual", "data=langid", "model=vit model.patch_size=4"])
def test_simple_norm_trains_from_the_command_line(words: str, tmp_path: Path) -> None:
    small = ["model.depth=1", "model.width=16", "data.limit_train=256"]
    assert train(tmp_path, "norm=layer", "placement=simple", *words.split(), *small) == 0
    (cell,) = cells(tmp_path)
    block = [name for name, _ in named_sites(normexp.load(cell / "seed-0")) if "blocks" in name]
    inside = ["attn.q_norm", "attn.k_norm", "attn.v_norm", "attn_out_norm", "mlp.hidden_norm"]
    assert block == [f"blocks.0.{name}" for name in [*inside, "mlp_out_norm"]]
