"""Which cells of a command may be trained as one stack: they differ in `lr` alone. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from normexp.config.spec import CellSpec
from normexp.sweeps.machine import needs_whole_machine

Task = tuple[int, ...]  # indices of cells that one worker is given at once

# Runs of one task at most: on a CPU a stack gains little beyond it, and a grid of learning rates
# still keeps several workers busy. Counts what a command asks for, not what is missing, so that the
# same line makes the same tasks after an interruption.
MOST_RUNS = 16


def group_cells(cells: Sequence[CellSpec]) -> list[Task]:
    """Tasks in the order of their first cells; a cell that fits no other is a task of its own."""
    tasks: list[list[int]] = []
    open_tasks: dict[str, int] = {}  # by what is shared, the task that still takes cells
    for index, cell in enumerate(cells):
        shared = _all_but_lr(cell)
        if shared is None:
            tasks.append([index])
            continue
        place = open_tasks.get(shared)
        if place is not None and _takes([cells[i] for i in tasks[place]], cell):
            tasks[place].append(index)
        else:
            open_tasks[shared] = len(tasks)
            tasks.append([index])
    return [tuple(task) for task in tasks]


def _takes(task: Sequence[CellSpec], cell: CellSpec) -> bool:
    assert cell.cfg is not None
    rates = [other.cfg.lr for other in task if other.cfg is not None]
    return cell.cfg.lr not in rates and (len(task) + 1) * len(cell.seeds) <= MOST_RUNS


def _all_but_lr(cell: CellSpec) -> str | None:
    """What a cell shares with those that it may be stacked with; None where it trains alone."""
    cfg = cell.cfg
    if cfg is None or not isinstance(cfg.lr, int | float) or cfg.lr <= 0:
        return None
    if cfg.get("stack") is False or cfg.get("dry_run") or needs_whole_machine(cfg):
        return None
    if "tensorboard" in (cfg.get("logger") or {}):  # its curves are means over the stack
        return None
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    del plain["lr"]
    return json.dumps([plain, dict(cell.choices)], sort_keys=True, default=str)
