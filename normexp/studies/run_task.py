"""What a worker is given: one cell, or cells that differ in `lr` alone, trained as one stack.

Only what is simple is trained together. A cell that has failed before or has a checkpoint of its
own trains alone, as does every cell where one is refused, where the rule of `stacks` says so, or
where the stack fails: one of its runs may have done that, and the others must not fail with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from normexp.errors import UserError
from normexp.records.layout import CHECKPOINT_FILE, LOCK_FILE
from normexp.records.lock import StackLock
from normexp.records.shared import interrupted_stacks
from normexp.records.writer import ensure_writable, remove_leftovers
from normexp.studies.assembly import will_stack
from normexp.studies.cell import Cell, prepare_cell
from normexp.studies.disk import full_disk
from normexp.studies.notes import collected_notes
from normexp.studies.outcome import Composed, Listener, Outcome, name_of, one_line
from normexp.studies.recorded import recorded_runs
from normexp.studies.run_cell import Training, run_cell
from normexp.studies.stack import Stack, train_together
from normexp.studies.validate import validate
from normexp.tasks.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)


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
    task: Sequence[Composed],
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
        self, task: Sequence[Composed], listener: Listener, stop: StopRequest, end: TaskEnd
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
