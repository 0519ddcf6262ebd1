"""Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.train import main
from normexp.training.muon import MuonAdamW

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    first, last = list(model[0].parameters()), list(model[1:].parameters())
    return [{"params": first, "weight_decay": 0.1}, {"params": last, "weight_decay": 0.0}]


def take_steps(model: nn.Module, optimizers: list[Any], count: int, start: int = 0) -> None:
    schedulers = [LambdaLR(one, lambda step: 1 / (1 + start + step)) for one in optimizers]
    for step in range(start, start + count):
        draws = torch.Generator().manual_seed(step)
        model.zero_grad()
        model(torch.randn(8, 3, generator=draws)).square().mean().backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()


def values(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.detach() for parameter in model.parameters())


@NEEDS_MUON
def test_each_parameter_moves_as_under_its_own_optimizer():
    model, other = network(), network()
    take_steps(model, [MuonAdamW(groups(model), lr=0.1)], 3)
    first, first_bias, *norm, last, last_bias = other.parameters()
    vectors: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95)}
    apart = [
        torch.optim.Muon([first], 0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon([last], 0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([first_bias], weight_decay=0.1, **vectors),
        torch.optim.AdamW([*norm, last_bias], weight_decay=0.0, **vectors),
    ]
    take_steps(other, apart, 3)
    for ours, expected in zip(values(model), values(other), strict=True):
        assert_close(ours, expected, rtol=0, atol=0)


@NEEDS_MUON
def test_a_loaded_state_goes_on_with_the_same_bits():
    whole = network()
    take_steps(whole, [MuonAdamW(groups(whole), lr=0.1)], 4)
    model = network()
    before = MuonAdamW(groups(model), lr=0.1)
    take_steps(model, [before], 2)
    after = MuonAdamW(groups(model), lr=0.1)
    after.load_state_dict(before.state_dict())
    for group in after.param_groups:
        group["initial_lr"] = group["lr"] = 0.1
    take_steps(model, [after], 2, start=2)
    for ours, expected in zip(values(model), values(whole), strict=True):
        assert_close(ours, expected, rtol=0, atol=0)


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UserError, match="optim=muon needs torch 2.9"):
        MuonAdamW(groups(network()), lr=0.1)


@NEEDS_MUON
def test_a_command_trains_with_it(tmp_path: Path, capsys):
    words = ["optim=muon", "model.width=4", "steps=2", "replicas=2", "workers=0"]
    words.append(f"runs_dir={tmp_path}")
    assert main(words) == 0
    assert "trains by itself" in capsys.readouterr().err
