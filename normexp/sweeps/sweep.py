"""Trains the cells of a command, in this process or in workers, and prints what became of them."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from normexp.cells.recorded import passed_over
from normexp.config.place import is_under_agent
from normexp.config.rules import validate_keys
from normexp.config.spec import CellSpec, Outcome, name_of
from normexp.errors import UserError
from normexp.records.files import full_disk
from normexp.records.history import append_attempt
from normexp.records.paths import LOG_FILE
from normexp.records.result import read_records
from normexp.reporting.agent import log_to_agent, refuse_many_cells
from normexp.reporting.summary import print_closing_table, print_summary
from normexp.sweeps.crew import SPAWN, Seat, Worker, ready_workers
from normexp.sweeps.display import Display
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import Place, places_for, shared_value, trains_here
from normexp.sweeps.tasks import Board, Task, group_cells
from normexp.sweeps.worker import (
    Began,
    Ended,
    Event,
    Note,
    PutBack,
    Ready,
    Steps,
    Took,
    Trainer,
    loaded,
    work,
)
from normexp.training.stopping import StopRequest

logger = logging.getLogger(__name__)

TICK = 0.2  # seconds between checks of signals and of the display
FAILED_STARTS = 3  # consecutive failed starts after which the sweep gives up
COMMAND_KEYS = ("study", "workers", "fail_fast", "retry_failed", "max_attempts", "dry_run")
STOPPED = "stopped; the same command continues"


class WorkersFail(Exception):
    """No worker process starts, so nothing can be trained."""


# --- The command ---------------------------------------------------------------------------------


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
        message = str(error) if isinstance(error, WorkersFail) else full_disk(error, None)
        if message is None:
            raise
        print(f"normexp: {message}", file=sys.stderr)
        return 1
    return conclude(cells, outcomes, words)


def conclude(cells: Sequence[CellSpec], outcomes: Sequence[Outcome], words: Sequence[str]) -> int:
    """Prints the outcomes of a command; returns the exit code. Raises as `run_cells`."""
    halted = next((outcome for outcome in outcomes if outcome.halts), None)
    reasons = {outcome.error if outcome.status == "refused" else "" for outcome in outcomes}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise UserError(reason)
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    if shared_value(cfgs, "dry_run"):
        from normexp.reporting.dry_run import print_plan  # scipy

        is_here = trains_here(cfgs, len(cells))
        num_workers = 1 if is_here else len(places_for(cfgs, len(cells)))
        print_plan(cells, outcomes, num_workers=num_workers)
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
    cells: Sequence[CellSpec], words: Sequence[str], *, workers: int | None = None
) -> list[Outcome]:
    """Trains the missing runs of each cell; returns the outcomes in the order of the cells.

    Args:
        words: the command, as study.jsonl records it.
        workers: number of cells trained at once, 0 for this process; overrides the config.
    """
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    for cfg in cfgs:
        validate_keys(cfg, COMMAND_KEYS)
    dry_run = bool(shared_value(cfgs, "dry_run"))
    fail_fast = bool(shared_value(cfgs, "fail_fast"))
    known = passed_over(cells)
    places = places_for(cfgs, len(cells), workers)
    if dry_run:
        places = [replace(place, slots=()) for place in places]
    is_here = trains_here(cfgs, len(cells), workers)
    log = StudyLog(cells, words, writes=not dry_run)
    display = Display([cell.title for cell in cells], 1 if is_here else len(places))
    with display:
        log.check()
        sweep = Sweep(cells, places, log, display, fail_fast=fail_fast, known=known)
        outcomes = sweep.run_here() if is_here else sweep.run_workers()
        for cell, outcome in zip(cells, outcomes, strict=True):
            if not outcome.cell_id:  # it may have been refused before the study existed
                log.settle(cell, outcome)
    return outcomes


# --- The sweep -----------------------------------------------------------------------------------


class Sweep:
    """The cells of a command until each has its outcome: what workers tell comes together here.

    Args:
        places: of each worker; the first is also this process's own.
        known: outcomes of cells that need no training, by index.
        tasks: for each task, the indices of its cells; None: as `group_cells`.
        run_task: trains; None: `cells.run.run_task`.
    """

    def __init__(
        self,
        cells: Sequence[CellSpec],
        places: Sequence[Place],
        log: StudyLog,
        display: Display,
        *,
        fail_fast: bool,
        known: Mapping[int, Outcome] | None = None,
        tasks: Sequence[Task] | None = None,
        run_task: Trainer | None = None,
    ) -> None:
        self.cells = cells
        self.places = places
        self.log = log
        self.display = display
        self.fail_fast = fail_fast
        self.known = known or {}
        self.tasks = group_cells(cells) if tasks is None else tasks
        self.run_task = run_task
        self.outcomes: dict[int, Outcome] = {}
        self.workers: list[Worker] = []
        self.request = StopRequest()
        self.stopping = False
        self._numbers = count(1)
        self._failed_starts = 0
        self._early_deaths: Counter[Task] = Counter()  # of workers, before they trained the task

    def run_here(self) -> list[Outcome]:
        """Trains in this process; returns an outcome for each cell, in order."""
        board = Board(self.tasks, [0] * len(self.cells), [0] * len(self.cells))
        self._pass_over(board)
        if not board.num_open:
            return self._all_outcomes()
        report = partial(self._note, Seat())
        with loaded(self.run_task) as run_task:
            own = {"run_task": run_task, "shows_bar": True}
            while board.num_open and not self.request.requested:
                work(self.cells, board, self.places[0], report, self.request, **own)
        return self._all_outcomes()

    def run_workers(self) -> list[Outcome]:
        """Trains in a worker for each place; returns an outcome for each cell, in order.

        Raises:
            KeyboardInterrupt: a second Ctrl-C; the workers are dead.
            WorkersFail: no worker process starts.
        """
        num_cells = len(self.cells)  # no lock in shared memory: a killed worker would keep it
        board = Board(self.tasks, SPAWN.RawArray("i", num_cells), SPAWN.RawArray("b", num_cells))
        self._pass_over(board)
        try:
            with self.request.listening():
                while self.workers or (board.num_open and not self.stopping):
                    if self.request.requested and not self.stopping:
                        logger.warning("stopping with checkpoints; Ctrl-C again stops at once")
                        self.stop()
                    self._start_workers(board)
                    for worker in ready_workers(self.workers, TICK):
                        self._hear(worker, board)
                    self.display.update(self.workers, board.num_open)
        finally:
            for worker in self.workers:
                worker.close()
        return self._all_outcomes()

    def _pass_over(self, board: Board) -> None:
        """Ends the tasks that need no training, before torch is imported."""
        for task in self.tasks:
            if self.known.keys() >= set(task):
                self._end(task, [self.known[index] for index in task])
                board.end(task)

    def stop(self) -> None:
        """Ends every training of this command at a checkpoint, and starts no other."""
        self.stopping = self.display.is_stopping = self.request.requested = True
        for worker in self.workers:
            worker.ask_to_stop()

    def _all_outcomes(self) -> list[Outcome]:
        return [
            self.outcomes.get(index, Outcome("stopped", name_of(cell), missing=cell.seeds))
            for index, cell in enumerate(self.cells)
        ]

    # --- Workers ----------------------------------------------------------------------------------

    def _start_workers(self, board: Board) -> None:
        """Starts workers in free places, for open tasks that none of the others will take."""
        free = list(self.places)
        for worker in self.workers:
            free.remove(worker.place)
        idle = sum(not worker.task for worker in self.workers)
        wanted = 0 if self.stopping else max(0, len(board.open_tasks()) - idle)
        for place in free[:wanted]:
            number = next(self._numbers)
            self.workers.append(Worker(number, place, self.cells, board, self.run_task))

    def _hear(self, worker: Worker, board: Board) -> None:
        event = worker.hear()
        text = worker.new_output()
        if text.strip():
            self.display.print(text.rstrip("\n"))
        if event is None:
            self._bury(worker, board)
        else:
            self._note(worker, event)

    def _bury(self, worker: Worker, board: Board) -> None:
        """Handles the end of a worker: orderly, or by a signal, or at its start."""
        reason = worker.describe_death()
        task = board.taken_by(worker.number) or worker.task
        fails_without = not worker.is_ready or (not task and worker.process.exitcode != 0)
        if fails_without and not self.stopping:  # its cells are not the cause
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise WorkersFail(f"no worker process starts: {reason}")
        elif task and not self.stopping:
            self._count_death(worker, task, reason)
        still_open = tuple(index for index in task if index not in self.outcomes)
        board.put_back(still_open, alone=self._early_deaths[task] > 1 and len(task) > 1)
        for index in set(task) - {*still_open}:
            board.end((index,))
        self.workers.remove(worker)
        worker.close()

    def _count_death(self, worker: Worker, task: Task, reason: str) -> None:
        """A failed attempt of the stack that it trained, which the next worker knows of.

        A task whose worker dies before it trains is begun once more as it is, since the cause may
        lie outside; then cell by cell, and a cell alone has failed.
        """
        stack, study_dir = worker.stack, self.cells[task[0]].study_dir
        if stack is not None and study_dir is not None:
            logger.warning("%s: %s", stack.directory, reason)
            with open(stack.directory / LOG_FILE, "a", encoding="utf-8") as file:
                file.write(f"{worker.last_output().rstrip()}\n{reason}\n".lstrip("\n"))
            at = stack.checkpointed_at
            append_attempt(study_dir, stack.id, reason, died=True, checkpointed_at=at)
            return
        self._early_deaths[task] += 1
        if self._early_deaths[task] > 1 and len(task) == 1:
            error = f"{reason}, before it was trained"
            self._end(task, [Outcome("failed", name_of(self.cells[task[0]]), error=error)])

    # --- Events -----------------------------------------------------------------------------------

    def _note(self, seat: Seat, event: Event) -> None:
        match event:
            case Ready():
                seat.is_ready = True
            case Took(task):
                self._failed_starts = 0
                seat.take(task)
            case Began(stack, cell_ids):
                seat.stack = stack
                for index, cell_id in zip(seat.task, cell_ids, strict=True):
                    self.log.begin(self.cells[index], cell_id)
            case Steps(done, total):
                seat.steps = (done, total)
            case Note(level, text):
                logger.log(level, text)
            case PutBack(holder, cell_id):
                seat.take(())
                if holder not in [None, *(worker.process.pid for worker in self.workers)]:
                    logger.info("waiting for process %s, which trains %s", holder, cell_id)
            case Ended(task, outcomes):
                seat.take(())
                self._end(task, outcomes)

    def _end(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        for index, outcome in zip(task, outcomes, strict=True):
            if index in self.outcomes:
                continue
            cell = self.cells[index]
            if outcome.directory is not None:
                outcome.results = read_records(outcome.directory, cell.seeds).all
            self.outcomes[index] = outcome
            self.log.settle(cell, outcome)
            self.display.ended(cell.title, outcome)
            if outcome.halts or (outcome.status == "failed" and self.fail_fast):
                self.stop()
