"""The terms of a gap between training and evaluation, where each is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diagnosis_cases import (
    batches,
    kinds,
    norms_of,
    trained,
)
from torch import nn

from normexp.any_network.diagnosis import decompose, diagnose


def outside_one(output, _):
    """Above 0 only for values beyond 1 and -1."""
    return (output.abs() - 1).clamp(min=0).square().mean()


def not_of_variance_one(output, _):
    return (output.square().mean() - 1).abs()


def above_variance_one(output, _):
    return (output.square().mean() - 1).clamp(min=0)


def as_target(output, target):
    return (output - target).square().mean()


def normal(*shape: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def averaged(model, pairs):
    """Gives every norm the mean of the moments of all batches, as long averaging would."""
    for norm in norms_of(model):
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    for inputs, _ in pairs:
        model(inputs)
    return model


def test_own_share():
    """With batches of two, training outputs are 1 and -1; with the own share they stay inside."""
    pairs = [(x, x) for x in normal(100, 2, 32)]
    model = averaged(nn.Sequential(nn.BatchNorm1d(32, eps=1e-12)), pairs)
    diagnosis = diagnose(model, pairs, outside_one, max_batches=100)
    # of a standard normal value z, (|z| - 1)^2 beyond 1: 2 (2 (1 - Phi(1)) - phi(1)) = 0.1506
    assert diagnosis.terms["own_share"].value == pytest.approx(0.1506, abs=0.02)
    assert diagnosis.terms["small_batch"].value == pytest.approx(0, abs=1e-6)
    assert kinds(diagnosis) == {"own_share"}


def test_small_batch():
    """Each batch has an offset that its statistics remove and no others can."""
    noise = normal(20, 8, 4, 5)
    offsets = 3 * torch.randn(20, 1, 4, 1, generator=torch.Generator().manual_seed(1))
    norm = nn.BatchNorm1d(4, affine=False)
    pairs = [(x + offset, norm(x).detach()) for x, offset in zip(noise, offsets, strict=True)]
    diagnosis = diagnose(averaged(nn.Sequential(norm), pairs), pairs, as_target, max_batches=20)
    assert "small_batch" in kinds(diagnosis)


def test_averages_of_small_batches_leave_out_the_variance_between_them():
    """Values differ between samples alone, so a batch of two has half of the variance."""
    pairs = [(x.expand(-1, -1, 4), x) for x in normal(50, 2, 1024, 1)]
    model = averaged(nn.Sequential(nn.BatchNorm1d(1024)), pairs)
    diagnosis = diagnose(model, pairs, above_variance_one, max_batches=50, tolerance=0.1)
    assert diagnosis.terms["averages"].value == pytest.approx(7 / 4 - 1, abs=0.05)
    assert kinds(diagnosis) == {"noisy_averages"}


def test_statistics_behind_dropout():
    """Inputs near 5 have variance 1; behind dropout of a half it is 27."""
    pairs = [(5 + x, x) for x in normal(20, 64, 8)]
    torch.manual_seed(0)
    model = averaged(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8)), pairs)
    diagnosis = diagnose(model, pairs, not_of_variance_one, max_batches=20)
    assert diagnosis.terms["dropout_shift"].value == pytest.approx(1 - 1 / 27, abs=0.07)
    assert kinds(diagnosis) == {"dropout_shift"}


def test_the_terms_add_up_to_the_gap_between_the_losses_of_the_two_modes():
    model, pairs = trained().eval(), batches()[:3]
    model[6].p = 0.2
    by_name = decompose(model, pairs, F.cross_entropy)
    training, *terms, evaluation = by_name.values()
    assert training + sum(terms) == pytest.approx(evaluation, abs=1e-9)
    losses = [F.cross_entropy(model(x), y).item() for x, y in pairs]
    assert evaluation == pytest.approx(sum(losses) / 3)
