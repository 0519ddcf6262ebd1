"""A worker: claims the open tasks of a command, one after another, and trains them.

Nothing is assigned. Every worker of every command walks the same list, skips what is recorded or
busy, and trains what it can lock. A command without worker processes runs the same loop itself.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from normexp.config.process import importing_torch
from normexp.config.spec import CellSpec, Outcome
from normexp.records.files import is_held
from normexp.records.paths import LOCK_FILE
from normexp.records.stacks import StackRecord
from normexp.sweeps.tasks import Task, TaskBoard, WorkerSlot
from normexp.training.stopping import StopRequest, TrainingControl

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds between attempts while all open tasks are busy, or this worker's slot is taken


@dataclass(frozen=True)
class TaskTaken:
    """The worker has taken a task and prepares its cells; () means that its imports are done."""

    task: Task


@dataclass(frozen=True)
class StackBegan:
    """A stack of the task begins to train; `cell_ids` are the ids of the task's cells."""

    stack: StackRecord
    cell_ids: Sequence[str]


@dataclass(frozen=True)
class StepsDone:
    """The optimizer steps that the stack in training has done."""

    done: int
    total: int


@dataclass(frozen=True)
class TaskEnded:
    """The outcomes of the task, one for each cell, without results.

    If they are `busy` (another process trains one of the cells) or `alone`, the task is open again.
    """

    task: Task
    outcomes: Sequence[Outcome]


Event = TaskTaken | StackBegan | StepsDone | TaskEnded | logging.LogRecord
RunTask = Callable[..., list[Outcome]]  # `cells.run.run_task`


def work(
    cells: Sequence[CellSpec],
    board: TaskBoard,
    slot: WorkerSlot,
    report: Callable[[Event], None],
    stop: StopRequest,
    *,
    run_task: RunTask,
    number: int = 1,
    shows_bar: bool = False,
) -> None:
    """Trains open tasks until none is left, a stop is requested, or a failure may affect the next.

    Args:
        report: called with each event.
        number: of the worker on the board.
        shows_bar: show a progress bar instead of reporting `StepsDone`.
    """
    locks: dict[Task, Path] = {}  # of tasks that another process trains
    on_steps = None if shows_bar else lambda done, total: report(StepsDone(done, total))
    control = TrainingControl(stop, on_steps)
    while board.num_open and not stop.requested:
        with slot.claim() as is_free:
            busy = {task for task, lock in locks.items() if is_held(lock)}
            task = board.take(number, busy) if is_free else None
            if task is not None:
                report(TaskTaken(task))
                task_cells = [cells[index] for index in task]
                outcomes = run_task(task_cells, lambda *begun: report(StackBegan(*begun)), control)
                report(TaskEnded(task, outcomes))
                status, directory = outcomes[0].status, outcomes[0].directory
                if status == "busy" and directory is not None:
                    locks[task] = directory / LOCK_FILE
                if status in ("busy", "alone"):
                    board.put_back(task, alone=status == "alone")
                else:
                    board.end(task)
                if _may_affect_next(outcomes):
                    return
            elif not is_free:  # shown once in a command
                logger.info("waiting: other commands use every core or GPU of this machine")
        if task is None:
            time.sleep(TICK)


def _may_affect_next(outcomes: Sequence[Outcome]) -> bool:
    """True for a failure on a GPU, whose context may be broken, or for lack of memory."""
    errors = [outcome.error.lower() for outcome in outcomes if outcome.status == "failed"]
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    return bool(errors) and (has_gpu or any("memory" in error for error in errors))


@contextmanager
def importing_run_task(run_task: RunTask | None) -> Iterator[RunTask]:
    """Yields `run_task`, or imports torch and that of `cells.run`, and caches its data sets."""
    if run_task is not None:
        yield run_task
        return
    with importing_torch():
        from normexp.build import keeping_data
        from normexp.cells.run import run_task as trains

    with keeping_data():
        yield trains
