"""What slots do to the models: formulas, initial weights, stacking, padding, the future."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from model_cases import BLOCK_SIZE, BUILDERS, VOCAB_SIZE, PositionNorm, SequenceNorm, draw_arguments
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normexp.errors import UserError
from normexp.models import ResNet
from normexp.models.resnet import ResidualBlock
from normexp.models.transformer import Attention, Block
from normexp.norms.causal import CausalInstanceNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm
from normexp.norms.site import named_sites
from normexp.norms.slots import Slots

PLACEMENTS = ("pre", "post", "sandwich", "peri")
TRANSFORMERS = ("vit", "gpt", "text_encoder")
WEIRD_CONVS = Slots(act="tlu", conv="scaled_weight_standardized", residual_scale=0.5)
CASES: list[tuple[str, Slots]] = [
    ("convnet", WEIRD_CONVS),
    ("resnet", WEIRD_CONVS),
    ("resnet", Slots(act="silu", conv="weight_standardized")),
    *(
        (name, Slots(placement=place, qk_norm=True))
        for place in PLACEMENTS
        for name in TRANSFORMERS
    ),
    ("gpt", Slots(placement="sandwich", residual_scale=0.5)),
]
EVERY = pytest.mark.parametrize(
    ("name", "slots"), CASES, ids=[f"{name}-{slots.act}-{slots.placement}" for name, slots in CASES]
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def widen(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@EVERY
def test_every_parameter_of_a_model_with_slots_gets_a_gradient(name: str, slots: Slots) -> None:
    model = BUILDERS[name](NormFactory(PositionNorm, slots=slots))
    model(*draw_arguments(name, 3)).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []


@EVERY
def test_stacked_replicas_with_slots_equal_a_loop(name: str, slots: Slots) -> None:
    models = [BUILDERS[name](NormFactory(PositionNorm, slots=slots)).double() for _ in range(3)]
    arguments = [tuple(map(widen, draw_arguments(name, 4))) for _ in models]
    params, buffers = stack_module_state(models)

    def loss(own_params, own_buffers, own_arguments):
        return functional_call(models[0], {**own_params, **own_buffers}, own_arguments).pow(2).sum()

    stacked = tuple(torch.stack(parts) for parts in zip(*arguments, strict=True))
    vmap(loss)(params, buffers, stacked).sum().backward()
    for index, (model, own) in enumerate(zip(models, arguments, strict=True)):
        model(*own).pow(2).sum().backward()
        for key, parameter in model.named_parameters():
            mine = params[key].grad[index]
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-9, msg=key)


def test_default_resnet20_has_the_weights_it_always_had() -> None:
    torch.manual_seed(3)
    model = ResNet(NormFactory(nn.BatchNorm2d), (3, 32, 32), 10, depth=20, width=16)
    torch.manual_seed(3)
    widths = [(3, 16), *[(16, 16)] * 6, (16, 32), *[(32, 32)] * 5, (32, 64), *[(64, 64)] * 5]
    convs = [nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in widths]
    head = nn.Linear(64, 10)
    for conv in convs:
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.kaiming_normal_(head.weight, nonlinearity="linear")
    found = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    expected = [*(conv.weight for conv in convs), head.weight]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sum(p.numel() for p in model.parameters()) == 269_722


@pytest.mark.parametrize("name", ["convnet", "resnet"])
def test_one_seed_gives_one_start_whatever_the_slots(name: str) -> None:
    weights = []
    for slots in (Slots(), WEIRD_CONVS):
        torch.manual_seed(3)
        model = BUILDERS[name](NormFactory(PositionNorm, slots=slots))
        weights.append([m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)])
        gains = [p for key, p in model.named_parameters() if key.endswith(".gain")]
        assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("name", ["resnet", *TRANSFORMERS])
def test_branches_that_start_at_zero_add_nothing_whatever_the_norm(name: str) -> None:
    arguments = draw_arguments(name, 3)
    outputs = []
    for scale in (1.0, 30.0):
        torch.manual_seed(1)
        model = BUILDERS[name](NormFactory(nn.Identity, slots=Slots(residual_scale=0.0))).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if ("stage" in key or "blocks" in key) and parameter.ndim > 1:
                    parameter.mul_(scale)
            outputs.append(model(*arguments))
    assert torch.equal(*outputs)


def test_residual_block_follows_its_formula() -> None:
    slots = Slots(act="silu", conv="weight_standardized", residual_scale=0.3)
    block, x = (
        ResidualBlock(4, 4, 1, NormFactory(PositionNorm, slots=slots)),
        torch.randn(2, 4, 5, 5),
    )
    y = F.silu(block.norm1(block.conv1(x)))
    expected = F.relu(x + 0.3 * block.norm2(block.conv2(y)))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_block_follows_the_formula_of_its_placement(placement, scale: float | None) -> None:
    slots = Slots(placement=placement, residual_scale=scale)
    block = Block(8, 2, NormFactory(PositionNorm, slots=slots), is_causal=True, dropout=0.0)
    for parameter in block.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)  # so that two norms of one block differ
    x = torch.randn(2, 5, 8)
    expected = x
    for f, role in ((block.attn, "attn"), (block.mlp, "mlp")):
        before, after = getattr(block, f"{role}_norm"), getattr(block, f"{role}_out_norm")
        s = 1 if scale is None else scale
        if placement == "pre":
            expected = expected + s * f(before(expected))
        elif placement == "post":
            expected = before(expected + s * f(expected))
        else:
            expected = expected + s * after(f(before(expected)))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-5)


SITES = {
    "pre": ["attn_norm", "mlp_norm"],
    "post": ["attn_norm", "mlp_norm"],
    "sandwich": ["attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"],
    "peri": ["attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"],
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sites_of_a_placement(name: str, placement) -> None:
    model = BUILDERS[name](NormFactory(PositionNorm, slots=Slots(placement=placement)))
    expected = [f"blocks.{index}.{role}" for index in (0, 1) for role in SITES[placement]]
    if placement == "peri":
        expected = ["embedding_norm", *expected]
    if placement != "post":
        expected = [*expected, "final_norm"]
    assert [site for site, _ in named_sites(model)] == expected


@pytest.mark.parametrize("is_causal", [True, False])
def test_qk_norm_normalises_each_head_of_queries_and_keys(is_causal: bool) -> None:
    rms = partial(nn.RMSNorm, eps=1e-6)
    attention = Attention(12, 3, NormFactory(rms, slots=Slots(qk_norm=True)), is_causal=is_causal)
    gains = [torch.rand(4) + 0.5 for _ in range(2)]
    for site, gain in zip((attention.q_norm, attention.k_norm), gains, strict=True):
        nn.Module.get_parameter(site, "norm.weight").data.copy_(gain)
    x = torch.randn(2, 5, 12)
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    allowed = torch.ones(5, 5, dtype=torch.bool)
    heads = []
    for a, b, c in zip(*(t.chunk(3, dim=-1) for t in (q, k, v)), strict=True):
        a, b = (
            t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain
            for t, gain in zip((a, b), gains, strict=True)
        )
        scores = a @ b.transpose(1, 2) / 2  # sqrt of 4 features
        mask = allowed.tril() if is_causal else allowed
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ c)
    expected = attention.out(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("make", [PositionNorm, SequenceNorm])
def test_padding_moves_nothing_in_any_placement(placement, make) -> None:
    view = "token" if make is PositionNorm else "sequence"
    slots = Slots(placement=placement, qk_norm=True)
    model = BUILDERS["text_encoder"](NormFactory(make, view=view, slots=slots)).double()
    tokens, mask = draw_arguments("text_encoder", 4)
    other = torch.where(mask, tokens, (tokens + 3) % VOCAB_SIZE)
    torch.testing.assert_close(model(tokens, mask), model(other, mask), rtol=0, atol=1e-12)
    length = int(mask.sum(dim=1).max())
    shorter = model(tokens[:, :length], mask[:, :length])
    torch.testing.assert_close(model(tokens, mask), shorter, rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("make", [PositionNorm, partial(CausalInstanceNorm, eps=1e-5)])
def test_no_placement_shows_a_causal_norm_the_future(placement, make) -> None:
    view = "token" if make is PositionNorm else "sequence"
    slots = Slots(placement=placement, qk_norm=True)
    model = BUILDERS["gpt"](NormFactory(make, view=view, slots=slots)).double()
    (tokens,) = draw_arguments("gpt", 2)
    cut = BLOCK_SIZE // 2
    other = torch.cat([tokens[:, :cut], (tokens[:, cut:] + 1) % VOCAB_SIZE], dim=1)
    before, after = model(tokens), model(other)
    torch.testing.assert_close(before[:, :cut], after[:, :cut], rtol=0, atol=1e-9)
    assert (before[:, cut:] - after[:, cut:]).abs().max() > 1e-3


def test_groups_that_do_not_divide_a_head_are_refused() -> None:
    norm = NormFactory(lambda c: GroupNorm(c, eps=1e-5, num_groups=8), slots=Slots(qk_norm=True))
    with pytest.raises(UserError, match="8"):
        Attention(16, 4, norm, is_causal=True)
