"""One composed cell in this process: what is recorded is not trained again, what fails is a row."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join

from omegaconf import OmegaConf

from normexp.batching.replicas import suitable_threads
from normexp.build import plain
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.device_processes import Order, run_processes
from normexp.cells.naming import GROUPS
from normexp.cells.notes import collected_notes
from normexp.cells.peers import Peers, meet
from normexp.cells.recorded import (
    attempts_of,
    full_disk,
    record_failure,
    recorded_runs,
    stacks_of,
)
from normexp.cells.stack import (
    Stack,
    build_callbacks,
    build_task,
    fitting_replicas,
    resumed_replicas,
    train_stack,
    train_together,
    will_stack,
)
from normexp.config.place import place_among
from normexp.config.rules import OPTIONS, validate
from normexp.config.spec import (
    CellSpec,
    CellStatus,
    Listener,
    Outcome,
    Start,
    name_of,
    one_line,
)
from normexp.errors import INTERRUPTED, UserError
from normexp.records.committed import publish_results
from normexp.records.files import StackLock, ensure_writable, remove_leftovers
from normexp.records.paths import (
    CHECKPOINT_FILE,
    ENDED_FILE,
    EVALUATION_FILE,
    LOCK_FILE,
    LOG_FILE,
    RESULT_FILE,
    WEIGHTS_FILE,
    seed_dir,
    stack_dir,
)
from normexp.records.result import Result, interrupted_stacks, read_result
from normexp.training.evaluation import StatisticsEvaluation
from normexp.training.fit import fit
from normexp.training.pruning import Pruned
from normexp.training.recorder import Recorder
from normexp.training.stopping import Interrupted, StopRequest

OnSteps = Callable[[int, int], None]


def train_on_devices(
    cell: Cell,
    seeds: list[int],
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    on_steps: OnSteps | None = None,
) -> list[Result]:
    """As `train_stack`, by as many processes as the cell has devices.

    Where these have been started already, this is the first of them; else they are started here,
    and this process waits for them. Only the first one writes. No result of a run that was ended
    early.

    Raises:
        ProcessFailed: one of the processes that were started here failed, or died.
        Interrupted: as in `train_stack`; or the other processes cannot go on.
    """
    if cell.num_devices == 1:
        return train_stack(cell, seeds, notes, stop, on_steps)
    # Sets aside one that does not fit, before two processes look at it.
    fitting_replicas(cell, seeds, _checkpoint(cell, seeds))
    order = Order(
        cfg=plain(cell.cfg),
        choices={group: cell.record[group] for group in GROUPS},
        seeds=seeds,
        notes=list(notes),
        shows_progress=on_steps is None,
    )
    place = place_among(cell.num_devices)
    if place is not None:
        peers = meet(place, cell.num_devices)
        peers.tell(order)
        with peers.training():
            return train_stack(cell, seeds, notes, stop, on_steps)
    stop = stop or StopRequest()
    with stop.listening():
        run_processes(order, cell.num_devices, stop, on_steps)
    paths = [seed_dir(cell.directory, seed) / RESULT_FILE for seed in seeds]
    return [read_result(path) for path in paths if path.is_file()]


def follow_stack(cell: Cell, seeds: list[int], stop: StopRequest | None = None) -> None:
    """What every process but the first does of `train_stack`: the same, and writes nothing."""
    checkpoint = _checkpoint(cell, seeds)
    with suitable_threads(cell.elements_per_forward):
        replicas = resumed_replicas(cell, seeds, checkpoint)
        task = build_task(cell, seeds, replicas, Recorder([[] for _ in seeds]))
        with suppress(Pruned):  # in all processes at once; the first one tells
            fit(
                task,
                checkpoint=checkpoint,
                epochs=cell.plan.epochs,
                val_every_epochs=cell.cfg.val_every_epochs,
                trainer_options=plain(cell.cfg.trainer),
                loggers=[],
                callbacks=[
                    *build_callbacks(cell, on_steps=lambda *_: None),
                    StatisticsEvaluation(cell.evaluation),
                ],
                stop=stop,
            )


def follow(peers: Peers) -> int:
    """What every process but the first does of a command; returns its exit code.

    It says nothing: what is refused or recorded, the first one tells.
    """
    try:
        while (order := peers.hear()) is not None:
            try:
                with peers.training():
                    cell = prepare_cell(OmegaConf.create(order.cfg), order.choices)
                    follow_stack(cell, order.seeds)
            except Interrupted:
                return INTERRUPTED
            except Exception:
                if peers.is_apart:
                    raise
        return 0
    finally:
        peers.leave()


def _checkpoint(cell: Cell, seeds: list[int]) -> Path:
    return stack_dir(cell.directory, seeds[0], seeds[-1]) / CHECKPOINT_FILE


logger = logging.getLogger(__name__)


def run_cell(
    composed: CellSpec, listener: Listener | None = None, stop: StopRequest | None = None
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


def _outcome_of(error: Exception, composed: CellSpec) -> Outcome:
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
        if value != OPTIONS["evaluate"][key].default:
            asked.append(f"{key}={value}".replace(" ", ""))
    logger.info(
        "recorded without other statistics; they can be added: python -m normexp.evaluate %s",
        join(asked),
    )


@dataclass
class TaskEnd:
    """What became of a task.

    Attributes:
        outcomes: of each cell; None where it is still to be trained, as a task of its own. Where
            another process trains one of them it is `busy`, and the task is to be put off.
        error: why a stack of several cells failed.
    """

    outcomes: list[Outcome | None]
    error: str = ""


def run_task(
    task: Sequence[CellSpec],
    listener: Listener | None = None,
    stop: StopRequest | None = None,
) -> TaskEnd:
    """Trains the missing runs of a task; raises as little as `run_cell` does."""
    listener, stop = listener or Listener(), stop or StopRequest()
    if len(task) == 1:
        return TaskEnd([run_cell(task[0], listener, stop)])
    started = time.monotonic()
    end = TaskEnd([None] * len(task))
    try:
        _Rates(task, listener, stop, end).train()
    except UserError:
        pass  # each alone tells its own
    except Exception as error:  # also of foreign code, as it was built
        full = full_disk(error, task[0].study_dir)
        if full is not None:
            return TaskEnd([Outcome("failed", name_of(c), error=full, halts=True) for c in task])
        end.error = one_line(error)
        logger.warning("each learning rate is trained alone: %s", end.error)
    settled = [outcome for outcome in end.outcomes if outcome is not None]
    for outcome in settled:
        outcome.seconds = (time.monotonic() - started) / len(settled)
    return end


class _Rates:
    """Cells that differ in `lr` alone, on their way to `end`."""

    def __init__(
        self, task: Sequence[CellSpec], listener: Listener, stop: StopRequest, end: TaskEnd
    ) -> None:
        self.task = task
        self.listener = listener
        self.stop = stop
        self.end = end
        self.cells: dict[str, Training] = {}  # by id, in the order of the task
        self.positions: dict[str, int] = {}  # in the task, of each of these

    def train(self) -> None:
        """Raises what a training raises."""
        for position in range(len(self.task)):
            self._prepare(position)
            if position == 0 and not self._pays():
                return
        fitting = [cell_id for cell_id, training in self.cells.items() if _fits(training)]
        trained: set[str] = set()
        if len(fitting) > 1:
            with self._locked(fitting) as is_free:
                if not is_free:
                    return
                trained = self._train_stacks(fitting)
        self._settle(trained)

    @property
    def _first(self) -> Cell:
        return next(iter(self.cells.values())).cell

    def _pays(self) -> bool:
        """Whether these cells are ever stacked; they do not differ in it."""
        return will_stack(self._first, sum(len(cell.seeds) for cell in self.task))

    def _prepare(self, position: int) -> None:
        composed = self.task[position]
        assert composed.cfg is not None
        validate(composed.cfg)
        with collected_notes() as notes:
            cell = prepare_cell(composed.cfg, composed.choices)
        self.cells[cell.id] = Training(cell, composed.seeds, notes, self.listener, self.stop)
        self.positions[cell.id] = position

    @contextmanager
    def _locked(self, ids: Sequence[str]) -> Iterator[bool]:
        """With the locks of all these cells; without any, where another process has one."""
        ensure_writable(self._first.study_dir)
        with ExitStack() as held:
            for cell_id in sorted(ids):  # every process in the same order
                training = self.cells[cell_id]
                training.cell.directory.mkdir(parents=True, exist_ok=True)
                lock = StackLock(training.cell.directory / LOCK_FILE)
                if not held.enter_context(lock):
                    busy = replace(training.blank, status="busy", holder=lock.holder())
                    self.end.outcomes[self.positions[cell_id]] = busy
                    held.close()
                    yield False
                    return
            yield True

    def _train_stacks(self, ids: Sequence[str]) -> set[str]:
        """With their locks; the ids of the cells of which something was trained."""
        for cell_id in ids:
            self.cells[cell_id].clean_up()
        trained: set[str] = set()
        for stack in self._stacks([i for i in ids if _fits(self.cells[i])]):
            remove_leftovers(stack.directory)
            for cell, seeds in stack.parts:
                self.listener.begins(self.cells[cell.id].start(seeds), self.positions[cell.id])
            trained.update(cell.id for cell, _ in stack.parts)
            notes = self.cells[stack.cell.id].notes
            try:
                train_together(stack, notes, self.stop, self.listener.on_steps)
            except Interrupted:
                for cell_id, position in self.positions.items():
                    self.end.outcomes[position] = self.cells[cell_id].outcome_by_now("stopped")
                break
        return trained

    def _stacks(self, ids: Sequence[str]) -> list[Stack]:
        """Interrupted stacks as they were, then one of all other missing runs."""
        missing = {cell_id: self.cells[cell_id].todo() for cell_id in ids}
        stacks = []
        for _, members in interrupted_stacks(self._first.study_dir):
            parts: dict[str, list[int]] = {}
            for cell_id, seed in members:
                parts.setdefault(cell_id, []).append(seed)
            if all(set(seeds) <= set(missing.get(i, [])) for i, seeds in parts.items()):
                stacks.append(self._stack_of(parts))
                for cell_id, seeds in parts.items():
                    missing[cell_id] = [s for s in missing[cell_id] if s not in seeds]
        rest = {cell_id: seeds for cell_id, seeds in missing.items() if seeds}
        return [*stacks, self._stack_of(rest)] if len(rest) > 1 else stacks

    def _stack_of(self, parts: Mapping[str, list[int]]) -> Stack:
        return Stack([(self.cells[cell_id].cell, seeds) for cell_id, seeds in parts.items()])

    def _settle(self, trained: Set[str]) -> None:
        """Cells that miss nothing any more have their outcome."""
        for cell_id, position in self.positions.items():
            training = self.cells[cell_id]
            if self.end.outcomes[position] is not None or training.todo():
                continue
            is_new = cell_id in trained
            self.end.outcomes[position] = (
                training.outcome_by_now("finished") if is_new else training.outcome()
            )


def _fits(training: Training) -> bool:
    """Whether a cell misses runs, none of which has failed before or was begun alone."""
    directory = training.cell.directory
    recorded = recorded_runs(directory, training.seeds)
    was_begun = any(directory.glob(f"stacks/*/{CHECKPOINT_FILE}"))
    return bool(recorded.new) and not recorded.failed and not was_begun
