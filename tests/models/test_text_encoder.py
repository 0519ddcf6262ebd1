from __future__ import annotations

import pytest
import torch
from model_cases import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    PositionNorm,
    SequenceNorm,
    build_text_encoder,
)
from torch import nn

from normexp.models.text_encoder import masked_max
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

FACTORIES = {
    "token": NormFactory(PositionNorm),
    "sequence": NormFactory(SequenceNorm, view="sequence"),
    "without a mask": NormFactory(nn.LayerNorm),
}


@pytest.fixture(params=FACTORIES)
def encoder(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return build_text_encoder(FACTORIES[request.param]).double()


def draw_strings(num_samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB_SIZE, (num_samples, length))
    lengths = torch.randint(2, length + 1, (num_samples, 1))
    return tokens, torch.arange(length) < lengths


def test_content_of_padding_moves_nothing(encoder: nn.Module) -> None:
    tokens, mask = draw_strings(4, 7)
    other = torch.where(mask, tokens, (tokens + 3) % VOCAB_SIZE)
    assert not torch.equal(tokens, other)
    torch.testing.assert_close(encoder(tokens, mask), encoder(other, mask), rtol=0, atol=1e-12)


def test_amount_of_padding_moves_nothing(encoder: nn.Module) -> None:
    tokens, mask = draw_strings(4, 7)
    more = BLOCK_SIZE - 7
    longer = nn.functional.pad(tokens, (0, more), value=1)
    longer_mask = nn.functional.pad(mask, (0, more), value=False)
    expected = encoder(tokens, mask)
    torch.testing.assert_close(encoder(longer, longer_mask), expected, rtol=0, atol=1e-12)


def test_padding_moves_no_gradient(encoder: nn.Module) -> None:
    tokens, mask = draw_strings(4, 7)
    gradients = []
    for content in (tokens, torch.where(mask, tokens, (tokens + 3) % VOCAB_SIZE)):
        encoder.zero_grad()
        encoder(content, mask).square().sum().backward()
        gradients.append([p.grad.clone() for p in encoder.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_later_token_moves_the_answer_through_earlier_positions(encoder: nn.Module) -> None:
    tokens, mask = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool)
    seen = []
    encoder.get_submodule("blocks.0.attn").register_forward_hook(
        lambda _m, _a, out: seen.append(out)
    )
    encoder(tokens, mask)
    tokens[0, 4] = 1
    encoder(tokens, mask)
    assert (seen[0][:, 0] != seen[1][:, 0]).any()


def test_masked_max_is_the_largest_real_value() -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert torch.equal(masked_max(x, mask), torch.tensor([[2.0, 3.0], [0.0, 0.0]]))


def test_text_encoder_sites_are_named_by_role() -> None:
    names = [f"blocks.{i}.{role}" for i in (0, 1) for role in ("attn_norm", "mlp_norm")]
    model = build_text_encoder(FACTORIES["token"])
    assert [name for name, _ in named_sites(model)] == [*names, "final_norm"]
