"""The tasks of a command: what one worker claims at once, and how far each is. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from normexp.config.spec import CellSpec
from normexp.sweeps.machine import needs_whole_machine

Task = tuple[int, ...]  # indices of cells

# Runs of one task at most: on a CPU a stack gains little beyond it, and a grid of learning rates
# still keeps several workers busy. Counts what a command asks for, not what is missing, so that the
# same line makes the same tasks after an interruption.
MOST_RUNS = 16


def group_cells(cells: Sequence[CellSpec]) -> list[Task]:
    """Cells that may be one stack, as they differ in `lr` alone; in the order of their first."""
    tasks: list[list[int]] = []
    open_tasks: dict[str, list[int]] = {}  # by what is shared, the task that still takes cells
    for index, cell in enumerate(cells):
        shared = _all_but_lr(cell)
        task = open_tasks.get(shared or "")
        if task is not None and _takes([cells[i] for i in task], cell):
            task.append(index)
            continue
        tasks.append([index])
        if shared is not None:
            open_tasks[shared] = tasks[-1]
    return [tuple(task) for task in tasks]


def _takes(task: Sequence[CellSpec], cell: CellSpec) -> bool:
    assert cell.cfg is not None
    rates = [other.cfg.lr for other in task if other.cfg is not None]
    return cell.cfg.lr not in rates and (len(task) + 1) * len(cell.seeds) <= MOST_RUNS


def _all_but_lr(cell: CellSpec) -> str | None:
    """A key that is equal for cells that may be stacked; None for a cell that trains alone."""
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


OPEN, ENDED = 0, -1  # of a cell; a positive number is the worker that has it


@dataclass
class Board:
    """How far each cell of a command is, in memory that all of its workers share.

    It spares workers of one command from preparing the same cell, and no more: two may take a task
    in the same instant, and the locks of its cells decide.

    Attributes:
        holders: of each cell: OPEN, ENDED, or the number of a worker.
        is_alone: of each cell, 1 once it has become a task of its own.
    """

    tasks: Sequence[Task]
    holders: MutableSequence[int]
    is_alone: MutableSequence[int]

    def open_tasks(self) -> list[Task]:
        alone = [[(i,) for i in task] if self.is_alone[task[0]] else [task] for task in self.tasks]
        return [part for parts in alone for part in parts if self.holders[part[0]] == OPEN]

    def take(self, worker: int, busy: Collection[Task]) -> Task | None:
        """The first open task that is not busy, now the worker's; None if there is none."""
        task = next((task for task in self.open_tasks() if task not in busy), None)
        self._mark(task or (), worker)
        return task

    def put_back(self, task: Task, *, alone: bool = False) -> None:
        """Opens a task again, or each of its cells alone."""
        for index in task:
            self.is_alone[index] |= alone
        self._mark(task, OPEN)

    def end(self, task: Task) -> None:
        self._mark(task, ENDED)

    def taken_by(self, worker: int) -> Task:
        return tuple(i for i, holder in enumerate(self.holders) if holder == worker)

    @property
    def num_open(self) -> int:
        """Cells, not tasks."""
        return sum(holder == OPEN for holder in self.holders)

    def _mark(self, task: Task, state: int) -> None:
        for index in task:
            self.holders[index] = state
