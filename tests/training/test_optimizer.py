from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.training.optim import Schedule, parameter_groups


def factors(kind: str, warmup: float, total: int = 20) -> list[float]:
    schedule = Schedule(kind, warmup, total)
    return [schedule.factor(step) for step in range(total)]


def test_warmup_rises_linearly_to_one():
    assert factors("constant", 0.2)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_constant_stays():
    assert set(factors("constant", 0.0)) == {1.0}


def test_cosine_falls_by_its_formula():
    values = factors("cosine", 0.0)
    assert values == pytest.approx([(1 + math.cos(math.pi * k / 20)) / 2 for k in range(20)])


def test_one_cycle_rises_from_a_25th_and_ends_near_zero():
    values = factors("one_cycle", 0.25)
    assert values[0] == pytest.approx(1 / 25 + 24 / 25 / 5)
    assert max(values) == values[4] == values[5] == pytest.approx(1.0)
    assert 1e-4 <= values[-1] < 0.02


@pytest.mark.parametrize(
    ("kind", "warmup", "message"),
    [("triangle", 0.1, r"optim\.schedule=triangle"), ("cosine", 1.0, r"optim\.warmup=1\.0")],
)
def test_schedule_refuses(kind: str, warmup: float, message: str):
    with pytest.raises(UserError, match=message):
        Schedule(kind, warmup, 10)


class TableNorm(nn.Module):
    """A norm whose affine parameters have three dimensions: a rule by ndim would miss them."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, 2, 2))


@pytest.mark.parametrize("decay_norm", [False, True])
def test_weight_decay_of_norms_goes_by_owner_and_not_by_dimensions(decay_norm: bool):
    site = NormFactory(TableNorm)(3)
    model = nn.ModuleDict({"norm1": site, "head": nn.Linear(3, 2)})
    groups = parameter_groups(model, weight_decay=0.1, decay_norm=decay_norm)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays[id(site.norm.weight)] == (0.1 if decay_norm else 0.0)
    assert decays[id(model["head"].bias)] == 0.1
    assert len(decays) == 3
