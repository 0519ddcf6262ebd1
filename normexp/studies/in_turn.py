"""The cells of a command one after another in the calling process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from normexp.studies.display import Display
from normexp.studies.grouping import Task
from normexp.studies.outcome import Composed, Listener, Outcome, Start, name_of
from normexp.studies.queueing import Queue
from normexp.studies.study_log import StudyLog

TICK = 0.5  # seconds between two looks at the locks of others


class Recording(Listener):
    """Writes the command to its study as a cell begins."""

    def __init__(self, task: Sequence[Composed], log: StudyLog) -> None:
        self.task = task
        self.log = log

    def begins(self, start: Start, position: int = 0) -> None:
        cell = self.task[position]
        assert cell.study_dir is not None
        self.log.begin(cell.study_dir)
        self.log.tell(cell, cell_id=start.cell_id)


def run_in_turn(
    cells: Sequence[Composed],
    tasks: Sequence[Task],
    log: StudyLog,
    display: Display,
    *,
    fail_fast: bool,
) -> list[Outcome]:
    """An outcome for every cell, in their order; `stopped` for those behind a stop.

    Args:
        tasks: the indices of cells that may be trained together.
    """
    from normexp.studies.kept_data import keeping_data  # torch

    outcomes: dict[int, Outcome] = {}
    with keeping_data():
        _run(Queue(tasks), outcomes, cells, log, display, fail_fast=fail_fast)
    return [
        outcomes.get(index, Outcome("stopped", name_of(cell), missing=cell.seeds))
        for index, cell in enumerate(cells)
    ]


def _run(
    queue: Queue,
    outcomes: dict[int, Outcome],
    cells: Sequence[Composed],
    log: StudyLog,
    display: Display,
    *,
    fail_fast: bool,
) -> None:
    """Fills `outcomes` until the queue is empty or something ends all."""
    from normexp.studies.run_task import run_task

    while queue:
        task = queue.take()
        if task is None:
            queue.tell_of_waiting([])
            time.sleep(TICK)
            continue
        given = [cells[index] for index in task]
        ended = dict(zip(task, run_task(given, Recording(given, log)).outcomes, strict=True))
        new = {index: outcome for index, outcome in ended.items() if outcome is not None}
        busy = [outcome for outcome in new.values() if outcome.status == "busy"]
        if busy:
            queue.put_off(task, busy[0])
            continue
        queue.put_back_apart([index for index in task if index not in new])
        outcomes |= new
        ends_all = any(_ends_all(outcome, fail_fast=fail_fast) for outcome in new.values())
        display.is_stopping = ends_all
        for index, outcome in new.items():
            log.settle(cells[index], outcome)
            display.ended(cells[index].title, outcome)
        if ends_all:
            return


def _ends_all(outcome: Outcome, *, fail_fast: bool) -> bool:
    failed = outcome.status == "failed" and fail_fast
    return outcome.halts or outcome.status == "stopped" or failed
