"""Trains the cells of a command, in this process or in workers, and prints what came of them."""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait

from normexp.errors import FAILED, Halted, UserError
from normexp.training.cells.stack import remove_failed, remove_if_empty, settle
from normexp.training.config.command import Command
from normexp.training.config.spec import CellSpec, shared_value
from normexp.training.records.environment import code_version
from normexp.training.records.files import ensure_writable, is_read_only
from normexp.training.records.journal import (
    CommandEntry,
    ConfirmRequest,
    Refusal,
    append_entry,
    remove_refused,
)
from normexp.training.records.layout import refuse_shipped
from normexp.training.records.result import Status
from normexp.training.records.study import CellState
from normexp.training.stopping import StopRequest, Together, TrainingControl
from normexp.training.studies.terminal import print_closing_table, print_summary
from normexp.training.sweeps.agent import asked_run, log_recorded
from normexp.training.sweeps.display import Display
from normexp.training.sweeps.launch import launch_workers
from normexp.training.sweeps.machine import (
    WorkerSlot,
    check_processes,
    other_trainings,
    worker_slots,
)
from normexp.training.sweeps.worker import Job, Worker, import_training, work
from normexp.verdicts.metric import OF_TEST, OF_VALIDATION
from normexp.words import format_count

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0  # at the files of the study


def run_cells(
    cells: Sequence[CellSpec],
    words: Sequence[str],
    command: Command | None = None,
    together: Together = nullcontext,
) -> int:
    """Trains the missing runs of each cell and prints what came of it; returns the exit code.

    Args:
        words, command, together: see `train_cells`.

    Raises:
        UserError: all cells are refused; otherwise a refusal is a row.
        Halted: nothing more can be trained.
        KeyboardInterrupt: the user stopped the command.
    """
    if shared_value(cells, "dry_run"):
        from normexp.training.sweeps.plan import print_plan_of  # torch

        return print_plan_of(cells)
    states = train_cells(cells, words, command=command, together=together)
    refused = dict.fromkeys(state.refused for state in states)
    if "" not in refused:
        raise UserError("; ".join(refused))
    if len(states) == 1:
        print_summary(states[0])
    else:
        print_closing_table(states)
    raise_if_stopped(cells, states)
    return FAILED if any(state.status in ("failed", "refused") for state in states) else 0


def raise_if_stopped(cells: Sequence[CellSpec], states: Sequence[CellState]) -> None:
    """Raises KeyboardInterrupt if runs lack a result, unless `fail_fast` has ended the command."""
    has_failed = any(state.status == "failed" for state in states)
    if has_failed and shared_value(cells, "fail_fast"):
        return
    if any(state.missing for state in states if not state.refused):
        if states[0].directory.parent.is_dir():
            raise KeyboardInterrupt("stopped; the same command continues")
        raise KeyboardInterrupt("stopped before anything was trained")


def train_cells(
    cells: Sequence[CellSpec],
    words: Sequence[str],
    *,
    workers: int | None = None,
    command: Command | None = None,
    searched: Sequence[str] = (),
    confirms: ConfirmRequest | None = None,
    together: Together = nullcontext,
) -> list[CellState]:
    """Trains the missing runs of each cell; returns the states of all, in order.

    Args:
        words: the command, as study.jsonl records it.
        workers: number of stacks trained at once, 0 for this process; overrides the config.
        command: names the launcher that starts the workers elsewhere, if any.
        searched, confirms: see `CommandEntry`.
        together: see `TrainingControl`.

    Raises:
        UserError: a study that cannot be written or read.
        Halted: nothing more can be trained.
        KeyboardInterrupt: a second Ctrl-C.
    """
    check_processes(cells, words)
    wandb_run = asked_run(cells) if os.environ.get("WANDB_SWEEP_ID") else ""
    requests = {cell.id: cell.request for cell in cells if not cell.error}
    command_id = secrets.token_hex(8)
    entry = CommandEntry(command_id, [*words], code_version(), requests, [*searched], confirms)
    job = Job(cells, entry)
    states = job.states()
    runs_dir = job.study_dir.parent
    has_runs_dir = runs_dir.is_dir()
    ended_before = {state.id for state in states if state.is_over and state.status != "failed"}
    if not is_read_only(job.study_dir):
        settle(job.study_dir)
    remove_failed(states)
    try:
        for cell in cells:
            if cell.error:
                refusal = Refusal(cell.id, cell.title, cell.seeds, entry.id, cell.error)
                append_entry(job.study_dir, refusal)
        if job.unfinished():  # otherwise torch is not imported
            ensure_writable(job.study_dir)
            refuse_shipped(job.study_dir)
            if command is None or command.launcher is None:
                Sweep(job, workers, together).train()
            else:
                _launch(job, command)
        if wandb_run:
            log_recorded(cells, wandb_run)
        return [replace(state, was_over=state.id in ended_before) for state in job.states()]
    finally:
        if not is_read_only(job.study_dir):
            remove_refused(job.study_dir, entry.id)
        if not has_runs_dir:
            remove_if_empty(runs_dir)


def _launch(job: Job, command: Command) -> None:
    """Trains in the jobs of a launcher. Raises Halted if the launcher fails before all ended."""
    num_jobs = shared_value(job.cells, "workers") or len(job.unfinished())
    error = launch_workers(command, job.study_dir, num_jobs, partial(_train_in_job, job))
    if error and job.unfinished():
        raise Halted(f"hydra/launcher={command.launcher} stopped: {error}")


def _train_in_job(job: Job) -> None:
    Sweep(job, workers=0).train()


class Sweep:
    """The workers of a command; this process may be one of them.

    Attributes:
        num_workers: the most trainings at once; 0 if this process trains all.
        here: the slot in which this process trains, if it does.
    """

    def __init__(
        self, job: Job, workers: int | None = None, together: Together = nullcontext
    ) -> None:
        self.slots, self.num_workers = worker_slots(job.cells, workers)
        self.job = replace(job, on_gpu=bool(self.slots[0].locks))
        self.fails_fast = shared_value(job.cells, "fail_fast")
        # What a search chooses by, so that nobody chooses by the test split.
        metrics = OF_VALIDATION if job.command.searched else OF_TEST
        self.display = Display(job.states(), metrics)
        self.workers: list[Worker] = []
        self.here: list[WorkerSlot] = []
        self.request = StopRequest()
        self.control = TrainingControl(self.request, self._look, together)
        self.is_stopping = False

    def train(self) -> None:
        """Trains until all has ended, or is stopped.

        A single stack trains in this process, several in workers, which survive each other.

        Raises:
            KeyboardInterrupt: a second Ctrl-C; the workers are dead.
            Halted: nothing more can be trained.
        """
        with self.display:
            if not self.job.on_gpu and (others := other_trainings()):
                beside = format_count(others, "other training")
                logger.info("sharing this machine with %s, so this one takes longer", beside)
            try:
                if not self.num_workers or len(self.job.unfinished()) == 1:
                    self._train_here()
                if self.num_workers:
                    self._train_in_workers()
            finally:
                for worker in self.workers:
                    worker.close()
            self._look()

    def _train_here(self) -> None:
        """Trains in this process; if its stack is cut into runs, workers start and share them."""
        slot = self._free_slots()[0]
        slot.hide_other_gpus()
        self.here = [slot]
        try:
            import_training()
            work(self.job, slot, self.control)
        except KeyboardInterrupt:
            if self.request.requested or not self.workers:
                raise
            self.request.requested = True  # workers are stopped with checkpoints
        self.here = []

    def _look(self) -> None:
        """Shows the states of the cells, and tends the workers; a failure may end the command."""
        self._tend_workers()
        states = self.job.states()
        self.display.update(states)
        if self.fails_fast and any(Status.FAILED in state.states.values() for state in states):
            self._stop()

    def _stop(self) -> None:
        """Ends every training of this command at a checkpoint."""
        if not self.is_stopping:
            logger.warning("stopping with checkpoints; Ctrl-C again stops at once")
            self.is_stopping = self.request.requested = True
            for worker in self.workers:
                worker.process.terminate()  # the worker saves a checkpoint if it trains, and ends

    def _train_in_workers(self) -> None:
        with self.request.listening():
            while self.workers or (self.job.unfinished() and not self.request.requested):
                if self.request.requested:
                    self._stop()
                self._look()
                wait([worker.process.sentinel for worker in self.workers], SECONDS_BETWEEN_LOOKS)

    def _tend_workers(self) -> None:
        """Reads what workers print, and starts one for each unfinished stack, up to the limit."""
        for worker in [*self.workers]:
            self._read(worker)
        if self.request.requested:
            return
        num_wanted = min(self.num_workers, len(self.job.unfinished()))
        for _ in range(num_wanted - len(self.here) - len(self.workers)):
            self.workers.append(Worker(self._free_slots()[0], self.job))

    def _free_slots(self) -> list[WorkerSlot]:
        """The slots that this command does not use; first those that no other command does."""
        free = list(self.slots)
        for slot in [*self.here, *(worker.slot for worker in self.workers)]:
            free.remove(slot)
        return sorted(free, key=WorkerSlot.is_in_use)

    def _read(self, worker: Worker) -> None:
        """Prints what a worker has printed and logged; handles its end."""
        code = worker.process.exitcode  # before its last lines are read
        lines = worker.new_output()
        if code == FAILED:
            lines = lines[:-1]  # the last one is raised
        for line in lines:
            self.display.print(line)
        if code is None:
            return
        self.workers.remove(worker)
        worker.close()
        if code == FAILED:
            guard = 'in a script, call normexp below `if __name__ == "__main__":`'
            raise Halted(worker.last_line or f"no worker process starts; {guard}")
        if code and not self.is_stopping:
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            logger.warning("a worker was lost, with code %d%s; another goes on", code, memory)
