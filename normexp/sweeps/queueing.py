"""The tasks of a sweep that wait: in their order, busy ones behind the others."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from normexp.config.spec import Outcome
from normexp.records.files import is_held
from normexp.records.paths import LOCK_FILE
from normexp.sweeps.grouping import Task

logger = logging.getLogger(__name__)


class Queue:
    """Which task is next. A busy one comes back when its lock is free and no other waits."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waiting = deque(tasks)
        self._busy: dict[Task, Outcome] = {}
        self._told: set[tuple[str, int | None]] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._busy)

    def __len__(self) -> int:
        """Cells, not tasks."""
        return sum(map(len, [*self._waiting, *self._busy]))

    def take(self) -> Task | None:
        """The next task; None where all that are left are trained by others at this moment."""
        if not self._waiting:
            self._free_busy()
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, task: Task) -> None:
        """A task that was taken and not begun."""
        self._waiting.appendleft(task)

    def put_back_apart(self, indices: Sequence[int]) -> None:
        """Cells of a task, each as a task of its own."""
        self._waiting.extendleft((index,) for index in reversed(indices))

    def put_off(self, task: Task, busy: Outcome) -> None:
        """A task of which another process trains a cell."""
        self._busy[task] = busy

    def tell_of_waiting(self, own: Sequence[int]) -> None:
        """Once per cell and holder, where only busy cells are left; not of one's own workers."""
        for busy in self._busy.values():
            key = (busy.cell_id, busy.holder)
            if busy.holder not in own and key not in self._told:
                self._told.add(key)
                logger.info("waiting for process %s, which trains %s", busy.holder, busy.cell_id)

    def _free_busy(self) -> None:
        for task, busy in list(self._busy.items()):
            assert busy.directory is not None
            if not is_held(busy.directory / LOCK_FILE):
                del self._busy[task]
                self._waiting.append(task)
