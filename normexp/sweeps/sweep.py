"""Trains the cells of a command, in this process or in workers, and prints their outcomes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait

from normexp.cells.recorded import find_skippable
from normexp.config.process import is_under_agent
from normexp.config.rules import validate_keys
from normexp.config.spec import CellSpec, Outcome, norm_and_data
from normexp.errors import Halted, UserError
from normexp.records.history import AttemptEntry, append_entries
from normexp.records.paths import LOG_FILE
from normexp.records.result import read_records
from normexp.reporting.summary import print_closing_table, print_summary
from normexp.reporting.wandb_runs import log_to_agent, refuse_many_cells
from normexp.sweeps.display import Display
from normexp.sweeps.log import StudyLog, cell_entry
from normexp.sweeps.tasks import (
    Task,
    TaskBoard,
    WorkerSlot,
    group_cells,
    own_slot,
    shared_value,
    worker_slots,
)
from normexp.sweeps.worker import (
    Event,
    RunTask,
    StackBegan,
    StepsDone,
    TaskEnded,
    TaskTaken,
    importing_run_task,
    work,
)
from normexp.sweeps.worker_process import SPAWN, Worker, WorkerState
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
    refuse_many_cells(cells)
    outcomes = train_cells(cells, words)
    if is_under_agent():
        log_to_agent(cells[0], outcomes[0])
    return print_outcomes(cells, outcomes, words)


def print_outcomes(
    cells: Sequence[CellSpec], outcomes: Sequence[Outcome], words: Sequence[str]
) -> int:
    """Prints the outcomes of a command; returns the exit code. Raises as `run_cells`."""
    reasons = {outcome.error if outcome.status == "refused" else "" for outcome in outcomes}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise UserError(reason)
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    if shared_value(cfgs, "dry_run"):
        from normexp.reporting.dry_run import print_plan  # scipy

        print_plan(cells, outcomes, num_workers=worker_slots(cfgs, len(cells))[1])
    elif len(cells) == 1 and not outcomes[0].halts:
        print_summary(outcomes[0], words)
    elif len(cells) > 1:
        print_closing_table(cells, outcomes)
    raise_if_stopped(cells, outcomes)
    return 1 if any(outcome.status in ("refused", "failed") for outcome in outcomes) else 0


def raise_if_stopped(cells: Sequence[CellSpec], outcomes: Sequence[Outcome]) -> None:
    """Raises unless a command has come to its end, or to a failure under `fail_fast`.

    Raises:
        Halted: nothing more can be trained.
        KeyboardInterrupt: the user stopped the command.
    """
    if halted := [outcome.error for outcome in outcomes if outcome.halts]:
        raise Halted(halted[0])
    statuses = {outcome.status for outcome in outcomes}
    fails_fast = any(cell.cfg is not None and cell.cfg.fail_fast for cell in cells)
    if "stopped" in statuses and not (fails_fast and "failed" in statuses):
        has_begun = any(cell.study_dir is not None and cell.study_dir.is_dir() for cell in cells)
        begun = "stopped; the same command continues"
        raise KeyboardInterrupt(begun if has_begun else "stopped before anything was trained")


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
    known = find_skippable(cells)
    slots, num_workers = worker_slots(cfgs, len(cells), workers)
    if dry_run:
        slots = [replace(slot, locks=()) for slot in slots]
    log = StudyLog(cells, words, writes=not dry_run)
    return Sweep(log, group_cells(cells), slots, num_workers, fail_fast, known).train()


@dataclass
class Sweep:
    """Trains the cells of a command, in this process or in workers, and collects their outcomes.

    Args:
        slots: for workers, or for this process; more than workers if there are spare GPUs.
        num_workers: processes that train at once; 0: this process trains.
        known: outcomes of cells that need no training, by index.
        run_task: trains a task; None: `cells.run.run_task`.
    """

    log: StudyLog
    tasks: Sequence[Task]
    slots: Sequence[WorkerSlot]
    num_workers: int = 0
    fail_fast: bool = False
    known: Mapping[int, Outcome] = field(default_factory=dict)
    run_task: RunTask | None = None

    def __post_init__(self) -> None:
        self.cells = self.log.cells
        self.display = Display([cell.title for cell in self.cells], max(1, self.num_workers))
        self.outcomes: dict[int, Outcome] = {}
        self.workers: list[Worker] = []
        self.num_started = 0
        self.request = StopRequest()
        self.stopping = False
        self._failed_starts = 0
        self._early_deaths: Counter[Task] = Counter()  # of workers, before they began to train

    def train(self) -> list[Outcome]:
        """Trains until all has ended or is stopped; returns an outcome for each cell, in order.

        Raises:
            KeyboardInterrupt: a second Ctrl-C; the workers are dead.
            Halted: no worker process starts.
        """
        num_cells = len(self.cells)  # RawArrays have no lock, which a killed worker would keep
        board = TaskBoard(
            self.tasks, SPAWN.RawArray("i", num_cells), SPAWN.RawArray("b", num_cells)
        )
        with self.display:
            self.log.check()
            done = [task for task in self.tasks if self.known.keys() >= set(task)]
            indices = tuple(index for task in done for index in task)  # before torch is imported
            self._end(indices, [self.known[index] for index in indices])
            board.end(indices)
            if self.num_workers:
                self._train_in_workers(board)
            elif board.num_open:
                self._train_here(board)
            outcomes = [
                self.outcomes.get(
                    index, Outcome("stopped", norm_and_data(cell), missing=cell.seeds)
                )
                for index, cell in enumerate(self.cells)
            ]
            # Again for cells refused before any cell began: their study did not exist then.
            ends = zip(self.cells, outcomes, strict=True)
            self.log.record_outcomes(
                [(cell, outcome) for cell, outcome in ends if not outcome.cell_id]
            )
        return outcomes

    def stop(self) -> None:
        """Ends every training of this command at a checkpoint, and starts no other."""
        self.stopping = self.display.is_stopping = self.request.requested = True
        for worker in self.workers:
            worker.process.terminate()  # the worker saves a checkpoint if it trains, and ends

    def _train_here(self, board: TaskBoard) -> None:
        report = partial(self._handle_event, WorkerState())
        with (
            _training,
            importing_run_task(self.run_task) as run_task,
            own_slot(self.slots) as slot,
        ):
            own = {"run_task": run_task, "shows_bar": True}
            while board.num_open and not self.request.requested:
                work(self.cells, board, slot, report, self.request, **own)

    def _train_in_workers(self, board: TaskBoard) -> None:
        try:
            with self.request.listening():
                while self.workers or (board.num_open and not self.stopping):
                    if self.request.requested and not self.stopping:
                        logger.warning("stopping with checkpoints; Ctrl-C again stops at once")
                        self.stop()
                    self._start_workers(board)
                    ready = wait([worker.connection for worker in self.workers], TICK)
                    for worker in [each for each in self.workers if each.connection in ready]:
                        self._receive(worker, board)
                    self.display.update(self.workers, board.num_open)
        finally:
            for worker in self.workers:
                worker.close()

    def _start_workers(self, board: TaskBoard) -> None:
        """Starts workers in free slots, for the open tasks that exceed the idle workers."""
        free = list(self.slots)
        for worker in self.workers:
            free.remove(worker.slot)
        idle = sum(not worker.task for worker in self.workers)
        wanted = min(len(board.open_tasks()) - idle, self.num_workers - len(self.workers))
        if self.stopping or wanted <= 0:
            return
        free.sort(key=lambda slot: slot.gpu is not None and slot.is_taken())
        for slot in free[:wanted]:
            self.num_started += 1
            worker = Worker(self.num_started, slot, self.cells, board, self.run_task)
            self.workers.append(worker)

    def _receive(self, worker: Worker, board: TaskBoard) -> None:
        event = worker.receive()
        if text := worker.new_output().rstrip():
            self.display.print(text)
        if event is None:
            self._handle_death(worker, board)
        else:
            self._handle_event(worker, event)

    def _handle_death(self, worker: Worker, board: TaskBoard) -> None:
        """Handles the end of a worker: orderly, by a signal, or before it was ready."""
        reason = worker.describe_death()
        task = board.taken_by(worker.number) or worker.task
        has_failed_to_start = not worker.is_ready or (not task and worker.process.exitcode != 0)
        if has_failed_to_start and not self.stopping:  # its cells are not the cause
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise Halted(f"no worker process starts: {reason}")
        elif task and not self.stopping:
            self._count_death(worker, task, reason)
        still_open = tuple(index for index in task if index not in self.outcomes)
        board.put_back(still_open, alone=self._early_deaths[task] > 1 and len(task) > 1)
        for index in set(task) - {*still_open}:
            board.end((index,))
        self.workers.remove(worker)
        worker.close()

    def _count_death(self, worker: Worker, task: Task, reason: str) -> None:
        """Records a failed attempt of the stack that the worker trained, for the next worker.

        A task whose worker dies before it trains is tried again unchanged, since the cause may lie
        outside. After a second death its cells are tried one by one; a single cell has failed.
        """
        stack, study_dir = worker.stack, self.cells[task[0]].study_dir
        if stack is not None and study_dir is not None:
            logger.warning("%s: %s", stack.directory, reason)
            with open(stack.directory / LOG_FILE, "a", encoding="utf-8") as file:
                file.write(f"{worker.last_output().rstrip()}\n{reason}\n".lstrip("\n"))
            at = stack.checkpointed_at
            attempt = AttemptEntry(stack.id, reason, died=True, checkpointed_at=at)
            append_entries(study_dir, [attempt])
            return
        self._early_deaths[task] += 1
        if self._early_deaths[task] > 1 and len(task) == 1:
            error = f"{reason}, before it was trained"
            self._end(task, [Outcome("failed", norm_and_data(self.cells[task[0]]), error=error)])

    def _handle_event(self, worker: WorkerState, event: Event) -> None:
        match event:
            case TaskTaken(task):
                worker.is_ready = True
                self._failed_starts = 0 if task else self._failed_starts
                worker.take(task)
            case StackBegan(stack, cell_ids):
                worker.stack = stack
                for index, cell_id in zip(worker.task, cell_ids, strict=True):
                    cell = self.cells[index]
                    assert cell.study_dir is not None
                    self.log.begin(cell.study_dir)
                    self.log.append([(cell, cell_entry(cell, cell_id))])
            case StepsDone(done, total):
                worker.steps = (done, total)
            case TaskEnded(task, outcomes):
                worker.take(())
                first = outcomes[0]
                if first.status not in ("busy", "alone"):
                    self._end(task, outcomes)
                elif first.holder not in [None, *(each.process.pid for each in self.workers)]:
                    logger.info(
                        "waiting for process %s, which trains %s", *(first.holder, first.cell_id)
                    )
            case logging.LogRecord():
                logger.handle(event)

    def _end(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        ends = [each for each in zip(task, outcomes, strict=True) if each[0] not in self.outcomes]
        self.outcomes |= ends
        self.log.record_outcomes([(self.cells[index], outcome) for index, outcome in ends])
        for index, outcome in ends:
            cell = self.cells[index]
            if outcome.directory is not None and not outcome.results:
                outcome.results = read_records(outcome.directory, cell.seeds).all
            self.display.ended(cell.title, outcome)
            if outcome.halts or (outcome.status == "failed" and self.fail_fast):
                self.stop()
