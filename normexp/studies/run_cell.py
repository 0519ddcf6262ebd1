"""One composed cell in this process: what is recorded is not trained again, what fails is a row."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from shlex import join

from normexp.errors import UserError
from normexp.records.committed import publish_results
from normexp.records.layout import (
    ENDED_FILE,
    EVALUATION_FILE,
    LOCK_FILE,
    LOG_FILE,
    WEIGHTS_FILE,
    seed_dir,
    stack_dir,
)
from normexp.records.lock import StackLock
from normexp.records.result import Result
from normexp.records.writer import ensure_writable, remove_leftovers
from normexp.studies.cell import Cell, prepare_cell
from normexp.studies.devices import train_on_devices
from normexp.studies.disk import full_disk
from normexp.studies.evaluate_options import DEFAULTS
from normexp.studies.naming import plain
from normexp.studies.notes import collected_notes
from normexp.studies.outcome import (
    CellStatus,
    Composed,
    Listener,
    Outcome,
    Start,
    name_of,
    one_line,
)
from normexp.studies.recorded import (
    attempts_of,
    record_failure,
    recorded_runs,
    stacks_of,
)
from normexp.studies.validate import validate
from normexp.tasks.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)


def run_cell(
    composed: Composed, listener: Listener | None = None, stop: StopRequest | None = None
) -> Outcome:
    """Trains the runs of a cell that are missing.

    A mistake of the user's is a `refused` outcome and a failure a `failed` one; neither raises.

    Args:
        listener: is told of the begin and of progress.
        stop: where somebody else may ask this process to stop; Ctrl-C does in any case.
    """
    started = time.monotonic()
    try:
        if composed.cfg is None:
            raise UserError(composed.error)
        validate(composed.cfg)
        with collected_notes() as notes:
            cell = prepare_cell(composed.cfg, composed.choices)
        training = Training(
            cell, composed.seeds, notes, listener or Listener(), stop or StopRequest()
        )
        outcome = training.outcome()
    except Exception as error:  # also of foreign code, as it was built; the other cells go on
        outcome = _outcome_of(error, composed)
    outcome.seconds = time.monotonic() - started
    return outcome


def _outcome_of(error: Exception, composed: Composed) -> Outcome:
    title = name_of(composed)
    full = full_disk(error, composed.study_dir)
    if full is not None:
        return Outcome("failed", title, error=full, halts=True)
    if isinstance(error, UserError):
        return Outcome("refused", title, error=str(error))
    logger.error("%s: %s", composed.title, "".join(traceback.format_exception(error)))
    return Outcome("failed", title, error=one_line(error))


class Training:
    """A prepared cell and what is to be done with it.

    Attributes:
        blank: its outcome, as long as nothing has come of it.
    """

    def __init__(
        self,
        cell: Cell,
        seeds: list[int],
        notes: Sequence[str],
        listener: Listener,
        stop: StopRequest,
    ) -> None:
        self.cell = cell
        self.seeds = seeds
        self.notes = notes
        self.listener = listener
        self.stop = stop
        self.blank = Outcome(
            "skipped", cell.title, cell.id, cell.directory, cell.record, invalid=cell.invalid
        )

    def outcome(self) -> Outcome:
        """Trains what is missing."""
        cell = self.cell
        recorded = recorded_runs(cell.directory, self.seeds)
        todo = self.todo()
        if cell.cfg.dry_run:
            return replace(self.blank, status="planned", results=recorded.ended, missing=todo)
        if not todo:
            self._clear_ended()
            _tell_of_evaluation(cell, self.seeds)
            return self.outcome_by_now("skipped")
        ensure_writable(cell.study_dir)
        cell.directory.mkdir(parents=True, exist_ok=True)
        lock = StackLock(cell.directory / LOCK_FILE)
        with lock as held:
            if not held:
                return replace(self.blank, status="busy", holder=lock.holder(), missing=todo)
            return self._train_missing()

    def todo(self) -> list[int]:
        """Seeds to train, as far as is recorded by now."""
        cfg = self.cell.cfg
        recorded = recorded_runs(self.cell.directory, self.seeds)
        return recorded.missing(retry_failed=cfg.retry_failed, max_attempts=cfg.max_attempts)

    def clean_up(self) -> None:
        """With the lock: what a killed process left; results that it had not handed out yet."""
        folder = self.cell.directory
        for each in (folder, *folder.glob("*"), *folder.glob("stacks/*")):
            remove_leftovers(each)
        publish_results(folder)

    def _clear_ended(self) -> None:
        """What is left of a stack where a process was killed after the last result."""
        ended = f"stacks/*/{ENDED_FILE}"
        if any([*self.cell.directory.glob(ended), *self.cell.study_dir.glob(ended)]):
            with StackLock(self.cell.directory / LOCK_FILE) as held:
                if held:
                    self.clean_up()

    def start(self, todo: list[int]) -> Start:
        cell = self.cell
        return Start(cell.id, cell.directory, cell.record, todo, cell.plan.num_steps)

    def outcome_by_now(self, status: CellStatus, error: str = "") -> Outcome:
        """With what is recorded by now; a failed run makes the cell a failed one."""
        recorded = recorded_runs(self.cell.directory, self.seeds)
        results = sorted(recorded.ended + recorded.failed, key=lambda run: run.seed)
        if recorded.failed and status != "stopped":
            status, error = "failed", error or self._given_up(recorded.failed)
        return replace(
            self.blank, status=status, results=results, error=error, missing=recorded.new
        )

    def _given_up(self, failed: Sequence[Result]) -> str:
        attempts = max(map(attempts_of, failed))
        can_retry = self.cell.cfg.retry_failed
        remedy = f"max_attempts={attempts + 1}" if can_retry else "retry_failed=true"
        return f"{failed[0].error} (attempt {attempts}; {remedy} tries again)"

    def _train_missing(self) -> Outcome:
        """With the lock: what another process has recorded meanwhile is not trained again."""
        cell = self.cell
        self.clean_up()
        todo = self.todo()
        if not todo:
            return self.outcome_by_now("skipped")
        start = self.start(todo)
        self.listener.begins(start)
        error = ""
        for stack in stacks_of(cell.directory, todo):
            try:
                train_on_devices(cell, stack, self.notes, self.stop, self.listener.on_steps)
            except UserError:
                raise
            except Interrupted:
                return self.outcome_by_now("stopped")
            except Exception as problem:
                if full_disk(problem, cell.directory):
                    raise
                failure = self._failed(start, stack, problem)
                error = error or failure
        return self.outcome_by_now("finished", error)

    def _failed(self, start: Start, stack: Sequence[int], error: Exception) -> str:
        """Records the failure of a stack: the traceback in its log, a line in each result."""
        log = stack_dir(start.directory, stack[0], stack[-1]) / LOG_FILE
        with open(log, "a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        reason = one_line(error)
        record_failure(start, stack, reason)
        return f"{reason} (see {log})"


def _tell_of_evaluation(cell: Cell, seeds: Sequence[int]) -> None:
    """Runs that were recorded without an evaluation that is asked for now can be given one."""
    folders = [seed_dir(cell.directory, seed) for seed in seeds]
    if not cell.evaluation.adds or all((each / EVALUATION_FILE).is_file() for each in folders):
        return
    if not any((each / WEIGHTS_FILE).is_file() for each in folders):
        logger.info("recorded without other statistics, and without weights to measure them from")
        return
    asked = [f"run={cell.directory}", f"evaluate_with=[{','.join(cell.evaluation.statistics)}]"]
    for key in ("precise_samples", "evaluate_batch_sizes"):
        value = plain(cell.cfg)[key]
        if value != DEFAULTS[key]:
            asked.append(f"{key}={value}".replace(" ", ""))
    logger.info(
        "recorded without other statistics; they can be added: python -m normexp.evaluate %s",
        join(asked),
    )
