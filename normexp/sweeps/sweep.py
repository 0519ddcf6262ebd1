"""Trains the cells of a command, in this process or in workers, and prints their outcomes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait

from normexp.config.outcome import Outcome
from normexp.config.rules import validate_keys
from normexp.config.spec import CellSpec
from normexp.errors import FAILED, USER_MISTAKE, Halted, UserError
from normexp.records.history import AttemptEntry, append_entries
from normexp.records.logs import messages_about
from normexp.records.paths import LOG_FILE
from normexp.records.result import Status
from normexp.reporting.summary import print_closing_table, print_summary
from normexp.sweeps.display import Display
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import WorkerSlot, own_slot, shared_value, worker_slots
from normexp.sweeps.walk import Positions, Walk
from normexp.sweeps.worker import (
    Event,
    StackBegan,
    StackEnded,
    StackTaken,
    StepsDone,
    WalkEnded,
    WorkerReady,
    WorkerState,
    WorkerWaits,
    outcome_of_error,
    ready_to_train,
    work,
)
from normexp.sweeps.worker_process import Worker
from normexp.training.stopping import StopRequest

logger = logging.getLogger(__name__)

_training = threading.RLock()  # threads train in turn: torch has one random state for all

TICK = 0.2  # seconds between checks of signals and of the display
FAILED_STARTS = 3  # consecutive failed starts after which the sweep gives up
COMMAND_KEYS = ("study", "workers", "fail_fast", "retry_failed", "max_attempts", "dry_run")


def run_cells(cells: Sequence[CellSpec], words: Sequence[str]) -> int:
    """Trains the missing runs of each cell and prints the outcomes; returns the exit code.

    Raises:
        UserError: all cells are refused for the same reason; otherwise a refusal is a row.
        Halted, KeyboardInterrupt: as `raise_if_stopped`.
    """
    outcomes = train_cells(cells, words)
    return print_outcomes(cells, outcomes, words)


def print_outcomes(
    cells: Sequence[CellSpec], outcomes: Sequence[Outcome], words: Sequence[str]
) -> int:
    """Prints the outcomes of a command; returns the exit code. Raises as `run_cells`."""
    refused = [outcome.error for outcome in outcomes if outcome.status is Status.REFUSED]
    is_mistaken = bool(refused) and len(refused) == len(outcomes)
    if is_mistaken and len(set(refused)) == 1:
        raise UserError(refused[0])
    if shared_value(cells, "dry_run"):
        from normexp.reporting.dry_run import print_plan  # scipy

        print_plan(cells, outcomes, num_workers=worker_slots(cells)[1])
    elif len(cells) == 1 and not outcomes[0].halts:
        print_summary(outcomes[0], words)
    elif len(cells) > 1:
        print_closing_table(cells, outcomes)
    raise_if_stopped(cells, outcomes)
    if is_mistaken:
        return USER_MISTAKE
    return FAILED if refused or any(o.status is Status.FAILED for o in outcomes) else 0


def raise_if_stopped(cells: Sequence[CellSpec], outcomes: Sequence[Outcome]) -> None:
    """Raises if a command was stopped before its end, unless a failure under `fail_fast` ended it.

    Raises:
        Halted: nothing more can be trained.
        KeyboardInterrupt: the user stopped the command.
    """
    if halted := [outcome.error for outcome in outcomes if outcome.halts]:
        raise Halted(halted[0])
    statuses = {outcome.status for outcome in outcomes}
    fails_fast = any(cell.config is not None and cell.config["fail_fast"] for cell in cells)
    if Status.STOPPED in statuses and not (fails_fast and Status.FAILED in statuses):
        has_begun = any(cell.study_dir is not None and cell.study_dir.is_dir() for cell in cells)
        begun = "stopped; the same command continues"
        raise KeyboardInterrupt(begun if has_begun else "stopped before anything was trained")


def train_cells(
    cells: Sequence[CellSpec],
    words: Sequence[str],
    *,
    workers: int | None = None,
    command_id: str | None = None,
) -> list[Outcome]:
    """Trains the missing runs of each cell; returns the outcomes in the order of the cells.

    Args:
        words: the command, as study.jsonl records it; empty in a job of a launcher.
        workers: number of stacks trained at once, 0 for this process; overrides the config.
        command_id: of the command that a job belongs to.
    """
    for cell in cells:
        if cell.config is not None:
            validate_keys(cell.config, COMMAND_KEYS)
    dry_run = bool(shared_value(cells, "dry_run"))
    fail_fast = bool(shared_value(cells, "fail_fast"))
    log = StudyLog(cells, words, command_id)
    slots, num_workers = worker_slots(cells, workers)
    if dry_run:
        return plan_cells(log, slots[0].threads if num_workers else None)
    return Sweep(log, slots, num_workers, fail_fast).train()


def plan_cells(log: StudyLog, threads: int | None) -> list[Outcome]:
    """The outcomes of a dry run, which trains and writes nothing.

    Args:
        threads: CPU threads of a worker that would train a cell; None: this process would.
    """
    outcomes: list[Outcome] = []
    planned: dict[str, Outcome] = {}  # by id
    with Display([cell.title for cell in log.cells]), _training, ready_to_train():
        log.check()
        from normexp.cells.run import plan_cell

        for cell in log.cells:
            try:
                with messages_about(cell.title):
                    outcomes.append(plan_cell(cell, planned, threads))
            except Exception as error:  # user code may raise anything
                outcomes.append(outcome_of_error(error, cell))
    return outcomes


@dataclass
class Sweep:
    """Trains the cells of a command, in this process or in workers, and collects their outcomes.

    Args:
        slots: for workers, or for this process; more than workers if there are spare GPUs.
        num_workers: processes that train at once; 0: this process trains.
    """

    log: StudyLog
    slots: Sequence[WorkerSlot]
    num_workers: int = 0
    fail_fast: bool = False

    def __post_init__(self) -> None:
        self.cells = self.log.cells
        self.walk = Walk(self.log)
        self.display = Display([cell.title for cell in self.cells], max(1, self.num_workers))
        self.outcomes: dict[int, Outcome] = {}  # by position
        self._shown: set[str] = set()  # cells whose outcome was printed, see `_key`
        self.workers: list[Worker] = []
        self.num_started = 0
        self.request = StopRequest()
        self.stopping = False
        self._failed_starts = 0
        self._early_deaths: Counter[Positions] = Counter()  # of workers, before they trained

    def train(self) -> list[Outcome]:
        """Trains until all has ended or is stopped; returns an outcome for each cell, in order.

        Raises:
            KeyboardInterrupt: a second Ctrl-C; the workers are dead.
            Halted: no worker process starts.
        """
        with self.display:
            self.log.check()
            self.log.warn_of_added_seeds()
            self._pass_over()  # before torch is imported
            if self.walk.left and self.num_workers:
                self._train_in_workers()
            elif self.walk.left:
                self._train_here()
            self._end({position: self.walk.outcome(position) for position in self._left()})
            self.log.write()
        return [self.outcomes[position] for position in range(len(self.cells))]

    def stop(self) -> None:
        """Ends every training of this command at a checkpoint, and starts no other."""
        self.stopping = self.display.is_stopping = self.request.requested = True
        for worker in self.workers:
            worker.process.terminate()  # the worker saves a checkpoint if it trains, and ends

    def _left(self) -> list[int]:
        """The positions of the cells without an outcome."""
        return [position for position in range(len(self.cells)) if position not in self.outcomes]

    def _key(self, position: int) -> str:
        """Equal for equal cells."""
        cell = self.cells[position]
        return str(position if cell.config is None else cell.directory)

    def _distinct(self, positions: Iterable[int]) -> dict[str, set[int]]:
        """The seeds of each cell at these positions."""
        seeds: dict[str, set[int]] = {}
        for position in positions:
            seeds.setdefault(self._key(position), set()).update(self.cells[position].seeds)
        return seeds

    def _pass_over(self) -> None:
        """Ends the cells that need no training."""
        for cell in self.cells:
            if cell.config is None:
                self.log.end(cell, Status.REFUSED, cell.error)
        for _ in self.walk:  # drops them
            pass
        left = {position for group in self.walk.left for position in group}
        done = [position for position in self._left() if position not in left]
        self._end({position: self.walk.outcome(position) for position in done})

    def _train_here(self) -> None:
        report = partial(self._handle_event, WorkerState())
        with _training, ready_to_train(), own_slot(self.slots) as slot:
            while not self.request.requested:
                if work(self.walk, slot, report, self.request, shows_bar=True):
                    break

    def _train_in_workers(self) -> None:
        for group in self.walk.left:
            self.log.begin(self.cells[group[0]].directory.parent)
        to_start = min(self.num_workers, len(self.walk.left))
        try:
            with self.request.listening():
                while self.workers or (to_start and not self.stopping and not self.walk.is_over):
                    if self.request.requested and not self.stopping:
                        logger.warning("stopping with checkpoints; Ctrl-C again stops at once")
                        self.stop()
                    to_start -= self._start_workers(to_start)
                    ready = wait([worker.connection for worker in self.workers], TICK)
                    for worker in [worker for worker in self.workers if worker.connection in ready]:
                        if not self._receive(worker):
                            to_start += not worker.has_ended
                    taken = {position for worker in self.workers for position in worker.taken}
                    waiting = set(self._left()) - taken
                    self.display.update(self.workers, len(self._distinct(waiting)))
        finally:
            for worker in self.workers:
                worker.close()

    def _start_workers(self, number: int) -> int:
        """Starts workers in free slots unless one is idle; returns how many."""
        if self.stopping or any(worker.is_ready and not worker.taken for worker in self.workers):
            return 0
        free = list(self.slots)
        for worker in self.workers:
            free.remove(worker.slot)
        free.sort(key=lambda slot: slot.gpu is not None and slot.is_taken())
        for slot in free[:number]:
            self.num_started += 1
            self.workers.append(Worker(slot, Walk(self.log, self.walk.left)))
        return len(free[:number])

    def _receive(self, worker: Worker) -> bool:
        """Handles the next event of a worker; returns False if the worker has ended."""
        event = worker.receive()
        if text := worker.new_output().rstrip():
            self.display.print(text)
        if event is None:
            self._handle_death(worker)
        else:
            self._handle_event(worker, event)
        return event is not None

    def _handle_death(self, worker: Worker) -> None:
        """Handles the end of a worker: orderly, by a signal, or before it was ready."""
        reason = worker.describe_death()
        has_failed = not worker.is_ready or (not worker.taken and worker.process.exitcode != 0)
        if has_failed and not self.stopping:  # its cells are not the cause
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise Halted(f"no worker process starts: {reason}")
        elif worker.taken and not self.stopping:
            self._count_death(worker, reason)
        self.workers.remove(worker)
        worker.close()

    def _count_death(self, worker: Worker, reason: str) -> None:
        """Records a failed attempt of the stack that the worker trained, for the next worker.

        Cells whose worker dies before it trains are tried again unchanged, since the cause may lie
        outside; after a second death they have failed.
        """
        positions = worker.taken
        if worker.stack is not None:
            stack, study_dir = worker.stack, self.cells[positions[0]].directory.parent
            logger.warning("%s: %s", stack.directory, reason)
            with open(stack.directory / LOG_FILE, "a", encoding="utf-8") as file:
                file.write(f"{worker.last_output().rstrip()}\n{reason}\n".lstrip("\n"))
            at = stack.checkpointed_at
            attempt = AttemptEntry(stack.id, reason, died=True, checkpointed_at=at)
            append_entries(study_dir, [attempt])
            return
        self._early_deaths[positions] += 1
        if self._early_deaths[positions] > 1:
            error = f"{reason}, before it was trained"
            for position in positions:
                self.log.end(self.cells[position], Status.FAILED, error)
            self._end({position: self.walk.outcome(position) for position in positions})

    def _handle_event(self, worker: WorkerState, event: Event) -> None:
        match event:
            case WorkerReady():
                worker.is_ready = True
            case StackTaken(positions):
                self._failed_starts = 0
                worker.take(positions)
            case StackBegan(record):
                worker.stack = record
            case StepsDone(done, total):
                worker.steps = (done, total)
            case StackEnded(outcomes):
                worker.take(())
                self._end(outcomes)
            case WorkerWaits(holder, cell_id):
                if holder not in [process.process.pid for process in self.workers]:
                    logger.info("waiting for process %s, which trains %s", holder, cell_id)
            case WalkEnded():
                worker.has_ended = True
            case logging.LogRecord():
                logger.handle(event)

    def _end(self, outcomes: Mapping[int, Outcome]) -> None:
        new = {key: value for key, value in outcomes.items() if key not in self.outcomes}
        self.outcomes |= new
        runs = self._distinct(range(len(self.cells)))
        self.display.total = sum(map(len, runs.values()))
        left = set(self._distinct(self._left()))
        for position, outcome in new.items():
            key = self._key(position)
            if key not in self._shown:  # else another point of the grid was this cell
                self._shown.add(key)
                title = self.cells[position].title
                self.display.ended(title, outcome, len(runs[key]), len(left - self._shown))
            if outcome.halts or (outcome.status is Status.FAILED and self.fail_fast):
                self.stop()
