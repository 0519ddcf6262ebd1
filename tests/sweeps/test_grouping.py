"""Which cells of a command become one task."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from normexp.config.spec import CellSpec
from normexp.sweeps.grouping import group_cells

CONFIG = {
    **{"lr": 0.1, "seed": 0, "replicas": 2, "batch_size": 32, "stack": "auto", "dry_run": False},
    **{"trainer": {"devices": 1}, "logger": {"csv": {}}, "tune": {"metric": None}},
}


def cell(lr: float | None, norm: str = "batch", **own: Any) -> CellSpec:
    if lr is None:
        return CellSpec(None, {}, "norm=bad", "no such norm")
    config = OmegaConf.create({**CONFIG, "lr": lr, **own})
    return CellSpec(config, {"norm": norm}, f"lr={lr}")


def test_cells_that_differ_in_lr_alone_are_one_task():
    cells = [cell(0.1), cell(None), cell(0.1, norm="group"), cell(1.0), cell(1.0, norm="group")]
    cells += [cell(3.0, batch_size=16), cell(3.0)]
    assert group_cells(cells) == [(0, 3, 6), (1,), (2, 4), (5,)]


def test_a_task_has_sixteen_runs_at_most():
    rates = [0.01 * (index + 1) for index in range(5)]
    assert group_cells([cell(lr, replicas=8) for lr in rates]) == [(0, 1), (2, 3), (4,)]
    assert group_cells([cell(lr, replicas=9) for lr in rates[:2]]) == [(0,), (1,)]


def test_the_same_rate_twice_is_not_stacked_with_itself():
    assert group_cells([cell(0.1), cell(0.1)]) == [(0,), (1,)]


@pytest.mark.parametrize(
    "own",
    [
        {"stack": False},
        {"dry_run": True},
        {"trainer": {"devices": 2}},
        {"logger": {"csv": {}, "tensorboard": {}}},
        {"tune": {"metric": None, "thresholds": {3: 0.5}}},
    ],
)
def test_what_cannot_mix_rates_trains_alone(own: dict[str, Any]):
    assert group_cells([cell(0.1, **own), cell(1.0, **own)]) == [(0,), (1,)]
