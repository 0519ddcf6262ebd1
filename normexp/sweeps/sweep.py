"""Trains the cells of a command in worker processes, one task at a time per place."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from normexp.cells.attempts import full_disk, record_death
from normexp.config.place import is_under_agent
from normexp.config.rules import validate_keys
from normexp.config.spec import CellSpec, Outcome, name_of
from normexp.errors import UserError
from normexp.sweeps.display import Display
from normexp.sweeps.grouping import Task, group_cells
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import Place, places_for, shared_value
from normexp.sweeps.messages import Begins, Ended, Note, Ready, Steps
from normexp.sweeps.pool import PATIENCE, Pool, Worker, close_all
from normexp.sweeps.queueing import Queue
from normexp.sweeps.summary import print_closing_table, print_plan, print_summary
from normexp.sweeps.wandb import log_to_agent, refuse_many_cells
from normexp.sweeps.worker import run_in_turn
from normexp.training.stopping import StopRequest

logger = logging.getLogger(__name__)

TICK = 0.2  # seconds between checks of the clock, signals and other processes' locks
FAILED_STARTS = 3  # consecutive failed starts after which the sweep gives up


class WorkersFail(Exception):
    """No worker process starts, so nothing can be trained."""


class Sweep:
    """Hands cells to workers until each has its outcome.

    Args:
        places, warm: see `Pool`.
        fail_fast: stop everything at the first failure.
        tasks: for each task, the indices of its cells; None: one task per cell.
    """

    new_worker = Worker

    def __init__(
        self,
        cells: Sequence[CellSpec],
        places: Sequence[Place],
        log: StudyLog,
        display: Display,
        *,
        fail_fast: bool,
        tasks: Sequence[Task] | None = None,
        warm: list[Worker] | None = None,
    ) -> None:
        self.cells = cells
        self.log = log
        self.display = display
        self.fail_fast = fail_fast
        self.queue = Queue([(index,) for index in range(len(cells))] if tasks is None else tasks)
        self.outcomes: dict[int, Outcome] = {}
        self.pool = Pool(places, warm, self.new_worker)
        self.request = StopRequest()
        self.stopping = False
        self._failed_starts = 0

    def run(self) -> list[Outcome]:
        """Returns an outcome for every cell, in order; `stopped` for cells that did not end.

        Raises:
            KeyboardInterrupt: a second Ctrl-C; the workers are dead.
            WorkersFail: no worker process starts.
        """
        try:
            with self.request.listening():
                while self._is_going_on():
                    if self.request.requested and not self.stopping:
                        logger.warning("stopping with checkpoints; Ctrl-C again stops at once")
                        self.stop()
                    self._hand_out()
                    self._listen()
                    self.display.update(self.pool.workers, len(self.queue))
        except BaseException:
            self.pool.kill()
            raise
        finally:
            self.pool.close(keep_warm=not self.stopping)
        return [self.outcomes.get(index, self._unbegun(index)) for index in range(len(self.cells))]

    def stop(self) -> None:
        """Ends every training at a checkpoint, and starts no other."""
        if not self.stopping:
            self.stopping = self.display.is_stopping = True
            for worker in self.pool.workers:
                worker.ask_to_stop()

    def _is_going_on(self) -> bool:
        at_work = any(worker.task for worker in self.pool.workers)
        return at_work or (bool(self.queue) and not self.stopping)

    def _unbegun(self, index: int) -> Outcome:
        return Outcome("stopped", name_of(self.cells[index]), missing=self.cells[index].seeds)

    # --- assigning tasks ----------------------------------------------------------------------

    def _hand_out(self) -> None:
        if self.stopping:
            return
        idle = self.pool.idle()
        while idle or self.pool.has_room:
            task = self.queue.take()
            if task is None:
                if self.queue:
                    self.queue.tell_of_waiting([worker.process.pid for worker in self.pool.workers])
                return
            given = [self.cells[index] for index in task]
            if given[0].cfg is None:  # always a task of its own
                refused = Outcome("refused", given[0].title, error=given[0].error)
                self._end(task, [refused])
                continue
            worker = idle.pop(0) if idle else self.pool.start()
            worker.give(task, given)

    # --- receiving messages -------------------------------------------------------------------

    def _listen(self) -> None:
        by_connection = {worker.connection: worker for worker in self.pool.workers}
        for connection in wait(list(by_connection), TICK):
            assert isinstance(connection, Connection)
            worker = by_connection[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                self._bury(worker)
            else:
                self._hear(worker, message)
            self._relay_output(worker)

    def _hear(self, worker: Worker, message: Any) -> None:
        match message:
            case Ready():
                worker.is_ready = True
                worker.since = time.monotonic()  # leaves out the start of its process
                self._failed_starts = 0
            case Begins(position, begun):
                worker.begun = begun if len(worker.task) == 1 else None
                self.log.begin(self.cells[worker.task[position]], begun)
            case Steps(done, total):
                worker.steps = (done, total)
            case Note(level, text):
                logger.log(level, text)
            case Ended(outcomes, spent):
                task = worker.task
                worker.take_back()
                self._end(task, outcomes)
                if spent:
                    self.pool.dismiss(worker, PATIENCE)

    def _relay_output(self, worker: Worker) -> None:
        text = worker.read_output() if worker in self.pool.workers else ""
        if text.strip():
            self.display.print(text.rstrip("\n"))

    def _bury(self, worker: Worker) -> None:
        """Handles the death of a worker, by a signal or after a stop."""
        reason = worker.describe_death()
        task = worker.task
        if task and self.stopping:
            self._end(task, [Outcome("stopped", name_of(self.cells[index])) for index in task])
        elif len(task) > 1 and worker.is_ready:  # one of its cells may be the cause
            logger.warning("each learning rate is trained alone: %s", reason)
            self._end(task, [Outcome("alone", "")] * len(task))
        elif task and worker.is_ready:
            self._end(task, [self._death_of(worker, reason)])
        elif not worker.is_ready:  # its cells are not the cause
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise WorkersFail(f"no worker process starts: {reason}")
            if task:
                self.queue.put_back(task)
        worker.take_back()
        self.pool.dismiss(worker, 0)

    def _death_of(self, worker: Worker, reason: str) -> Outcome:
        cell, begun = self.cells[worker.task[0]], worker.begun
        if begun is None:
            return Outcome("failed", name_of(cell), error=f"{reason}, before it was trained")
        results = record_death(begun, cell.seeds, reason, worker.last_output())
        return Outcome(
            *("failed", name_of(cell), begun.cell_id, begun.directory, begun.record, results),
            error=reason,
        )

    def _end(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        """Records the outcomes of a task."""
        for outcome in outcomes:
            if outcome.status == "busy":
                self.queue.put_off(task, outcome)
                return
        ended = dict(zip(task, outcomes, strict=True))
        self.queue.put_back_apart([index for index in task if ended[index].status == "alone"])
        for index, outcome in ended.items():
            if outcome.status != "alone":
                self._end_cell(index, outcome)

    def _end_cell(self, index: int, outcome: Outcome) -> None:
        cell = self.cells[index]
        self.outcomes[index] = outcome
        self.log.settle(cell, outcome)
        if outcome.halts or (outcome.status == "failed" and self.fail_fast):
            self.stop()
        self.display.ended(cell.title, outcome)


class Session:
    """Keeps workers between sweeps, and records the command once per study.

    with Session() as session:
        outcomes = train_cells(cells, words, session=session)

    Attributes:
        idle: workers that wait for the next sweep.
    """

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        self._log: StudyLog | None = None

    def log_of(self, cells: Sequence[CellSpec], words: Sequence[str], *, writes: bool) -> StudyLog:
        """Returns the log of the command, extended by `cells`."""
        if self._log is None:
            self._log = StudyLog(cells, words, writes=writes)
        return self._log.further(cells)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        close_all(self.idle)


COMMAND_KEYS = ("study", "workers", "fail_fast", "retry_failed", "max_attempts", "dry_run")
STOPPED = "stopped; the same command continues"


def run_cells(cells: Sequence[CellSpec], words: Sequence[str]) -> int:
    """Trains the missing runs of each cell and prints the outcomes; returns the exit code.

    Raises:
        UserError: all cells are refused for the same reason; otherwise a refusal is a row.
        KeyboardInterrupt: the user stopped the command; the same command continues.
    """
    refuse_many_cells(cells)
    try:
        outcomes = train_cells(cells, words)
        if is_under_agent():
            log_to_agent(cells[0], outcomes[0])
    except (OSError, WorkersFail) as error:
        message = full_disk(error, None) or (str(error) if isinstance(error, WorkersFail) else None)
        if message is None:
            raise
        print(f"normexp: {message}", file=sys.stderr)
        return 1
    halted = next((outcome for outcome in outcomes if outcome.halts), None)
    reasons = {outcome.error if outcome.status == "refused" else "" for outcome in outcomes}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise UserError(reason)
    if shared_value([cell.cfg for cell in cells if cell.cfg is not None], "dry_run"):
        print_plan(cells, outcomes)
    elif len(cells) == 1 and halted is None:
        print_summary(outcomes[0], words)
    elif len(cells) > 1:
        print_closing_table(cells, outcomes)
    if halted is not None:
        print(f"normexp: {halted.error}", file=sys.stderr)
    elif is_interrupted(cells, outcomes):
        raise KeyboardInterrupt(STOPPED)
    return 1 if any(outcome.status in ("refused", "failed") for outcome in outcomes) else 0


def is_interrupted(cells: Sequence[CellSpec], outcomes: Sequence[Outcome]) -> bool:
    """True if the user stopped a command, not a failure under `fail_fast`."""
    statuses = {outcome.status for outcome in outcomes}
    fails_fast = any(cell.cfg is not None and cell.cfg.fail_fast for cell in cells)
    return "stopped" in statuses and not (fails_fast and "failed" in statuses)


def train_cells(
    cells: Sequence[CellSpec],
    words: Sequence[str],
    *,
    workers: int | None = None,
    session: Session | None = None,
) -> list[Outcome]:
    """Trains the missing runs of each cell; returns the outcomes in the order of the cells.

    Args:
        words: the command, as study.jsonl records it.
        workers: number of cells trained at once; overrides the config.
        session: shared by several calls of one command.
    """
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    for cfg in cfgs:
        validate_keys(cfg, COMMAND_KEYS)
    fail_fast = bool(shared_value(cfgs, "fail_fast"))
    dry_run = bool(shared_value(cfgs, "dry_run"))
    tasks = group_cells(cells)
    places = places_for(cfgs, len(cells), workers) if len(cells) > 1 else []
    warm = None if session is None else session.idle
    log = (session or Session()).log_of(cells, words, writes=not dry_run)
    display = Display([cell.title for cell in cells], len(places))
    with display:
        log.check()
        if places:
            sweep = Sweep(cells, places, log, display, fail_fast=fail_fast, tasks=tasks, warm=warm)
            outcomes = sweep.run()
        else:
            outcomes = run_in_turn(cells, tasks, log, display, fail_fast=fail_fast)
        for cell, outcome in zip(cells, outcomes, strict=True):
            if not outcome.cell_id:  # it may have been refused before the study existed
                log.settle(cell, outcome)
    return outcomes
