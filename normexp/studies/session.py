"""What the sweeps of one command share, where it trains in several rounds. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from normexp.studies.outcome import Composed
from normexp.studies.pool import Worker, close_all
from normexp.studies.study_log import StudyLog


class Session:
    """Warm workers, and the command, which each study records once.

    with Session() as session:
        outcomes = train_cells(cells, words, session=session)

    Attributes:
        idle: workers that wait for the next sweep.
    """

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        self._log: StudyLog | None = None

    def log_of(self, cells: Sequence[Composed], words: Sequence[str], *, writes: bool) -> StudyLog:
        """The log of the command, which goes on to `cells`."""
        if self._log is None:
            self._log = StudyLog(cells, words, writes=writes)
        return self._log.further(cells)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        close_all(self.idle)
