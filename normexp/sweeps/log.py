"""Writes a command, its cells and their outcomes to the history of a study, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from normexp.config.spec import CellSpec, Outcome, title_of
from normexp.errors import UserError
from normexp.records.environment import code_version
from normexp.records.files import ensure_writable, is_denied, user_error_if_denied
from normexp.records.history import (
    CellEntry,
    CommandEntry,
    Entry,
    append_entries,
    read_history,
)

logger = logging.getLogger(__name__)


class StudyLog:
    """Records a command and its cells. Writes to a study only once one of its cells begins.

    Args:
        words: the typed command; empty in a job, since the launching process records it.
        writes: False for a dry run.
    """

    def __init__(
        self, cells: Sequence[CellSpec], words: Sequence[str], *, writes: bool = True
    ) -> None:
        self.cells, self.words, self.writes = cells, words, writes
        known = dict.fromkeys(cell.study_dir for cell in cells)
        self.study_dirs = [study_dir for study_dir in known if study_dir is not None]
        self._begun: set[Path] = set()

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
            commands = read_history(study_dir).commands
            before = commands[-1].code_version if commands else None
            if before not in (None, code_version()):
                logger.info(
                    "study=%s was trained with other code (%s, now %s): its results are kept, and "
                    "missing runs are trained with the present code",
                    *(study_dir.name, before[:7], code_version()[:7]),
                )

    def begin(self, study_dir: Path) -> None:
        """Records the command and its cells, before the first training in a study."""
        if study_dir in self._begun:
            return
        self._begun.add(study_dir)
        ensure_writable(study_dir)
        study_dir.mkdir(parents=True, exist_ok=True)
        cells = [cell for cell in self.cells if self._study_of(cell) == study_dir]
        entries: list[Entry] = [cell_entry(cell) for cell in cells]
        if self.words:
            asked = {cell.digest: cell.seeds for cell in cells}
            entries.append(CommandEntry([*self.words], code_version(), asked))
        with user_error_if_denied(study_dir, "take another study=..."):
            append_entries(study_dir, entries)

    def record_outcomes(self, ends: Iterable[tuple[CellSpec, Outcome]]) -> None:
        """Records the id of each cell, or why it cannot be trained."""
        entries: list[tuple[CellSpec, Entry]] = []
        for cell, outcome in ends:
            if outcome.cell_id and outcome.status != "planned":
                entries.append((cell, cell_entry(cell, outcome.cell_id)))
                entries += [(cell, outcome.cache_entry)] if outcome.cache_entry is not None else []
            elif outcome.status in ("refused", "failed") and not outcome.halts:
                error = f"{outcome.status}: {outcome.error}"
                entries.append((cell, cell_entry(cell, error=error)))
        self.append(entries)

    def append(self, entries: Sequence[tuple[CellSpec, Entry]]) -> None:
        """Records entries about cells, if their study exists and can be written."""
        for study_dir in self.study_dirs if self.writes else ():
            own = [(cell, entry) for cell, entry in entries if self._study_of(cell) == study_dir]
            if not own or not study_dir.is_dir():
                continue
            try:
                known = read_history(study_dir).cells
                for cell, entry in own:
                    before = known.get(cell.digest)
                    if not isinstance(entry, CellEntry) or before is None or not before.cell_id:
                        continue
                    if entry.cell_id and entry.cell_id not in {before.cell_id, *before.earlier_ids}:
                        logger.info(
                            "%s: the source of its norm, model or data has changed, so it is a new "
                            "cell, %s; earlier results are kept",
                            *(cell.title, entry.cell_id),
                        )
                append_entries(study_dir, [entry for _, entry in own])
            except OSError as denied:  # no result depends on the history
                if not is_denied(denied):
                    raise

    def _study_of(self, cell: CellSpec) -> Path | None:
        """The study of a cell; one that does not compose belongs to the only study, if any."""
        only = self.study_dirs[0] if len(self.study_dirs) == 1 else None
        return cell.study_dir or only


def cell_entry(cell: CellSpec, cell_id: str = "", error: str = "") -> CellEntry:
    return CellEntry(cell.digest, title_of(cell), cell.seeds, cell_id, " ".join(error.split()))
