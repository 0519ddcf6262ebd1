"""Writes a command, its cells and their outcomes to the history of a study, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normexp.config.spec import CellSpec, Outcome, title_of
from normexp.errors import UserError
from normexp.records.environment import code_version
from normexp.records.files import ensure_writable, is_denied, refusing_denied
from normexp.records.history import (
    CellEntry,
    CellHistory,
    NewEntry,
    append_cells,
    append_command,
    read_history,
)

logger = logging.getLogger(__name__)

GRID_KEYS = ("batch_size", "micro_batch_size", "norm_batch_size", "lr", "seed", "replicas")


@dataclass
class StudyLog:
    """The command and its cells. A study is written to only when one of its cells begins.

    Args:
        words: what was typed; nothing for a job, whose command is recorded by another process.
        writes: not in a dry run.
    """

    cells: Sequence[CellSpec]
    words: Sequence[str]
    writes: bool = True

    def __post_init__(self) -> None:
        known = dict.fromkeys(cell.study_dir for cell in self.cells)
        self.study_dirs = [study_dir for study_dir in known if study_dir is not None]
        # Of a cell that does not compose: the study of all others.
        self._only = self.study_dirs[0] if len(self.study_dirs) == 1 else None
        self._begun: set[Path] = set()

    def check(self) -> None:
        """Tells once of a study that was begun with other code.

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

    def open(self, study_dir: Path) -> None:
        """Records the command and all cells it asks for, before the first training of a study."""
        if study_dir in self._begun:
            return
        self._begun.add(study_dir)
        ensure_writable(study_dir)
        study_dir.mkdir(parents=True, exist_ok=True)
        cells = [cell for cell in self.cells if (cell.study_dir or self._only) == study_dir]
        with refusing_denied(study_dir, "take another study=..."):
            append_cells(study_dir, [cell_entry(cell) for cell in cells])
            if self.words:
                asked = {cell.digest: cell.seeds for cell in cells}
                append_command(study_dir, self.words, grid_of(cells), code_version(), asked)

    def tell(self, told: Iterable[tuple[CellSpec, NewEntry]]) -> None:
        """Records entries about cells whose study exists and can be written."""
        by_study: dict[Path, list[tuple[CellSpec, NewEntry]]] = {}
        for cell, entry in told:
            study_dir = cell.study_dir or self._only
            if self.writes and study_dir is not None and study_dir.is_dir():
                by_study.setdefault(study_dir, []).append((cell, entry))
        for study_dir, own in by_study.items():
            try:
                known = read_history(study_dir).cells
                for cell, entry in own:
                    if isinstance(entry, CellEntry) and cell.digest in known:
                        _tell_new_id(entry.cell_id, known[cell.digest], cell.title)
                append_cells(study_dir, [entry for _, entry in own])
            except OSError as denied:  # no result depends on it
                if not is_denied(denied):
                    raise

    def settle(self, ends: Iterable[tuple[CellSpec, Outcome]]) -> None:
        """Records what became of cells: the id, or why there is none."""
        told: list[tuple[CellSpec, NewEntry]] = []
        for cell, outcome in ends:
            if outcome.cell_id and outcome.status != "planned":
                told.append((cell, cell_entry(cell, outcome.cell_id)))
                told += [(cell, outcome.key)] if outcome.key is not None else []
            elif outcome.status in ("refused", "failed") and not outcome.halts:
                error = f"{outcome.status}: {outcome.error}"
                told.append((cell, cell_entry(cell, error=error)))
        self.tell(told)


def cell_entry(cell: CellSpec, cell_id: str = "", error: str = "") -> CellEntry:
    return CellEntry(cell.digest, title_of(cell), cell.seeds, cell_id, " ".join(error.split()))


def _tell_new_id(cell_id: str, before: CellHistory, title: str) -> None:
    """Says so if a cell of the same config had only other ids."""
    known = {before.cell_id, *before.earlier_ids}
    if cell_id and before.cell_id and cell_id not in known:
        logger.info(
            "%s: the source of its norm, model or data has changed, so it is a new cell, %s; "
            "earlier results are kept",
            *(title, cell_id),
        )


def grid_of(cells: Sequence[CellSpec]) -> dict[str, list[Any]]:
    """The values that a command spans, of the keys that a study usually varies."""
    rows = [
        {**cell.choices, **{key: cell.cfg[key] for key in GRID_KEYS}}
        for cell in cells
        if cell.cfg is not None
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: list(dict.fromkeys(row[key] for row in rows if key in row)) for key in keys}
