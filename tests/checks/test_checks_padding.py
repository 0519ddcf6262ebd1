"""Padding, its content or its amount, must move nothing; what lets it is named."""

from __future__ import annotations

import pytest
import torch
from checks_cases import VOCAB, WIDTH, PositionMean, encoder, padded_data, text_data
from torch import Tensor, nn

from normexp.checks.padding import check_padding, padded_batch
from normexp.checks.sites import probe_sites
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import LayerNorm
from normexp.norms.per_position import BatchNormPerPosition


class CarelessState(BatchNorm):
    """Normalizes real positions as it should, and keeps a running mean of all of them."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (N, C)
        out = super().forward(x, mask)
        if self.training:
            assert self.running_mean is not None
            with torch.no_grad():
                self.running_mean.copy_(x.mean(dim=0))
        return out


class OneLength(nn.Module):
    """An encoder that takes strings of 8 only."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.encoder = encoder(norm)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(inputs.view(-1, 8), mask.view(-1, 8))


class WholeMean(nn.Module):
    """A classifier of strings that averages over padding too."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = norm.tokens(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.embedding(inputs), mask)
        return self.head((x + self.embedding(inputs)).mean(dim=1))


def check(network: nn.Module) -> None:
    batch = padded_batch(padded_data(), 4)
    assert batch is not None
    check_padding(network, probe_sites(network, batch), batch, VOCAB)


def test_norm_that_pools_padding_is_refused_with_its_sites():
    network = encoder(NormFactory(lambda _: PositionMean(), view="sequence"))
    sites = "blocks.0.attn_norm, blocks.0.mlp_norm, final_norm"
    with pytest.raises(UserError, match=f"norm reads padding at {sites}"):
        check(network)


def test_running_state_that_pools_padding_is_refused():
    with pytest.raises(UserError, match="norm reads padding"):
        check(encoder(NormFactory(CarelessState)))


def test_model_that_pools_padding_is_refused():
    with pytest.raises(UserError, match="model reads padding"):
        check(WholeMean(NormFactory(LayerNorm)))


def test_norm_without_a_mask_that_mixes_samples_needs_the_token_view():
    make = NormFactory(lambda n: nn.BatchNorm1d(n), view="sequence")
    with pytest.raises(UserError, match="blocks.0.attn_norm mixes samples but takes no mask"):
        check(encoder(make))
    check(encoder(NormFactory(lambda n: nn.BatchNorm1d(n))))


def test_norm_without_a_mask_that_pools_a_sample_gets_real_positions_only():
    check(encoder(NormFactory(lambda n: nn.GroupNorm(4, n), view="sequence")))


def test_model_and_norm_for_one_length_are_probed_by_content():
    def whole(num_features: int) -> nn.Module:
        return BatchNormPerPosition(num_features, num_positions=8)

    check(OneLength(NormFactory(whole, view="sequence")))


def test_dropout_is_not_taken_for_a_reader_of_padding():
    check(encoder(NormFactory(BatchNorm), dropout=0.5))


def test_batch_to_probe_has_padding_in_every_sample():
    batch = padded_batch(padded_data((8, 8, 3, 5, 8)), 4)
    assert batch is not None
    assert batch["mask"].sum(dim=1).tolist() == [3, 3, 3, 3]  # the shorter half
    assert padded_batch(padded_data((8, 8)), 4) is None
    assert padded_batch(text_data(), 4) is None
