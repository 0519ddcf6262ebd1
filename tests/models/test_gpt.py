from __future__ import annotations

import pytest
import torch
from model_cases import BLOCK_SIZE, VOCAB_SIZE, PositionNorm, build_gpt

from normexp.models import GPT
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

NORM = NormFactory(PositionNorm)


@pytest.mark.parametrize("position", [1, 6, BLOCK_SIZE - 1])
def test_a_later_token_moves_no_earlier_logit(position: int) -> None:
    torch.manual_seed(0)
    model = build_gpt(NORM).eval()
    tokens = torch.randint(VOCAB_SIZE, (3, BLOCK_SIZE))
    changed = tokens.clone()
    changed[:, position] = (tokens[:, position] + 1) % VOCAB_SIZE
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(dim=-1).all()


def test_shorter_sequences_give_the_same_logits() -> None:
    torch.manual_seed(0)
    model = build_gpt(NORM).double().eval()
    tokens = torch.randint(VOCAB_SIZE, (2, BLOCK_SIZE))
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5], rtol=0, atol=1e-12)


def test_gpt_parameter_count() -> None:
    depth, width = 4, 128
    model = GPT(NORM, 65, 64, depth=depth, width=width, num_heads=4, dropout=0.0)
    linears = 12 * width**2 + (3 + 1 + 4 + 1) * width  # qkv, out, hidden, out with biases
    norms = 2 * width * (2 * depth + 1)
    expected = (65 + 64) * width + depth * linears + norms + width * 65
    assert sum(p.numel() for p in model.parameters()) == expected


def test_gpt_sites_are_named_by_role() -> None:
    names = [f"blocks.{i}.{role}" for i in (0, 1) for role in ("attn_norm", "mlp_norm")]
    assert [name for name, _ in named_sites(build_gpt(NORM))] == [*names, "final_norm"]
