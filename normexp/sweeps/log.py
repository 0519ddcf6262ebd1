"""The lines of one command in the history of its studies."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from normexp.config.spec import CellSpec, title_of
from normexp.errors import UserError
from normexp.records.environment import code_version
from normexp.records.files import ensure_writable, is_denied, user_error_if_denied
from normexp.records.history import (
    CommandEntry,
    EndEntry,
    History,
    append_entries,
    read_history,
    words_on_added_seeds,
)
from normexp.records.paths import STUDY_FILE
from normexp.records.result import Status

logger = logging.getLogger(__name__)


class StudyLog:
    """Writes a command and what came of its cells, and reads what other processes wrote.

    A study begins with the first training or worker process: a mistake in a command leaves none.

    Args:
        words: the typed command; empty in a job, since the launching process records it.
        command_id: of the command that a job belongs to.
    """

    def __init__(
        self, cells: Sequence[CellSpec], words: Sequence[str], command_id: str | None = None
    ) -> None:
        self.cells, self.words = cells, words
        self.command_id = command_id or secrets.token_hex(8)
        known = dict.fromkeys(cell.study_dir for cell in cells)
        self.study_dirs = [study_dir for study_dir in known if study_dir is not None]
        self._begun: set[Path] = set()
        self._ends: dict[tuple[str, tuple[int, ...]], EndEntry] = {}  # by id and seeds
        self._num_ends: Counter[Path] = Counter()  # that were read from a study
        self._unwritten: list[tuple[Path, EndEntry]] = []
        self._read: dict[Path, tuple[tuple[int, int], History]] = {}

    def check(self) -> None:
        """Checks that studies can be read, and logs which were trained with other code.

        Raises:
            UserError: a study that is a file, or whose history cannot be read.
        """
        for study_dir in self.study_dirs:
            if study_dir.is_file():
                raise UserError(
                    f"study={study_dir.name}: {study_dir} is a file; take another name, or move "
                    "the file away"
                )
            commands = self.history(study_dir).commands
            before = commands[-1].code_version if commands else None
            if before not in (None, code_version()):
                logger.info(
                    "study=%s was trained with other code (%s, now %s): its results are kept, and "
                    "missing runs are trained with the present code",
                    *(study_dir.name, before[:7], code_version()[:7]),
                )

    def warn_of_added_seeds(self) -> None:
        """Logs which studies lose verdicts, see `words_on_added_seeds`."""
        for study_dir in self.study_dirs if self.words else ():  # a job's command has done so
            cells = [cell for cell in self.cells if cell.study_dir == study_dir]
            wanted: dict[str, set[int]] = {}
            for cell in cells:
                wanted.setdefault(cell.id, set()).update(cell.seeds)
            if words := words_on_added_seeds(study_dir, wanted):
                logger.warning(words)

    def history(self, study_dir: Path) -> History:
        """The history of a study, read again if it has grown."""
        try:
            stat = (study_dir / STUDY_FILE).stat()
        except OSError:
            return read_history(study_dir)
        state = (stat.st_ino, stat.st_size)
        if study_dir not in self._read or self._read[study_dir][0] != state:
            self._read[study_dir] = state, read_history(study_dir)
        return self._read[study_dir][1]

    def begin(self, study_dir: Path) -> None:
        """Records the command and its cells, once."""
        if study_dir in self._begun or not self.words:
            return
        ensure_writable(study_dir)
        study_dir.mkdir(parents=True, exist_ok=True)
        asked: dict[str, list[tuple[str, list[int]]]] = {}
        attempts = 1
        for cell in (cell for cell in self.cells if self._study_of(cell) == study_dir):
            asked.setdefault(cell.id, []).append((title_of(cell), cell.seeds))
            if cell.config is not None:
                attempts = cell.config["max_attempts"] if cell.config["retry_failed"] else 1
        words = [*self.words]
        entry = CommandEntry(self.command_id, words, code_version(), attempts, asked)
        with user_error_if_denied(study_dir, "take another study=..."):
            append_entries(study_dir, [entry])
        self._begun.add(study_dir)
        self.write()

    def end(self, cell: CellSpec, status: Status, error: str) -> None:
        """Records that a cell was refused or has failed; no worker of this command tries again."""
        text = " ".join(error.split())
        end = EndEntry(cell.id, title_of(cell), cell.seeds, self.command_id, status, text)
        self._ends[cell.id, tuple(cell.seeds)] = end
        if (study_dir := self._study_of(cell)) is not None:
            self._unwritten.append((study_dir, end))
        self.write()

    def write(self) -> None:
        """Writes ends to the studies that have begun, now or earlier, and can be written."""
        waiting, self._unwritten = self._unwritten, []
        for study_dir in {study_dir for study_dir, _ in waiting}:
            ends = [(path, end) for path, end in waiting if path == study_dir]
            if not study_dir.is_dir():
                self._unwritten += ends
                continue
            try:
                append_entries(study_dir, [end for _, end in ends])
            except OSError as error:  # no result depends on the history
                if not is_denied(error):
                    raise

    def end_of(self, cell: CellSpec) -> EndEntry | None:
        """Why this command does not train a cell; None if it may."""
        if cell.study_dir is not None:
            for end in self.history(cell.study_dir).ends[self._num_ends[cell.study_dir] :]:
                self._num_ends[cell.study_dir] += 1
                if end.command == self.command_id:
                    self._ends.setdefault((end.cell, tuple(end.seeds)), end)
        return self._ends.get((cell.id, tuple(cell.seeds)))

    def _study_of(self, cell: CellSpec) -> Path | None:
        """The study of a cell; one that does not compose belongs to the only study, if any."""
        only = self.study_dirs[0] if len(self.study_dirs) == 1 else None
        return cell.study_dir or only
