"""A cell on its way through a command: as it was composed, and what became of it. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from normexp.records.identity import NOT_TRAINING
from normexp.records.result import Result

CellStatus = Literal[
    "running", "finished", "skipped", "refused", "failed", "stopped", "busy", "alone", "planned"
]


@dataclass(frozen=True)
class CellSpec:
    """A cell as the command line asks for it.

    Attributes:
        cfg: None where it does not compose; `error` says why.
        choices: the name chosen in each config group.
        title: what sets it apart in its sweep: `norm=batch norm_batch_size=2`.
        overrides: all that was typed of it, one value for each key.
    """

    cfg: DictConfig | None
    choices: Mapping[str, str]
    title: str
    error: str = ""
    overrides: Sequence[str] = ()

    @cached_property
    def digest(self) -> str:
        """Names what is asked for, without seeds and paths; equal cells may differ in it."""
        asked: Any = self.title
        if self.cfg is not None:
            plain = OmegaConf.to_container(self.cfg, resolve=True)
            assert isinstance(plain, dict)
            asked = {key: value for key, value in plain.items() if key not in NOT_TRAINING}
        text = json.dumps(asked, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def seeds(self) -> list[int]:
        """The seeds that are asked for; none where that is not known."""
        if self.cfg is None:
            return []
        return list(range(self.cfg.seed, self.cfg.seed + self.cfg.replicas))

    @property
    def study_dir(self) -> Path | None:
        return None if self.cfg is None else Path(self.cfg.runs_dir) / self.cfg.study


@dataclass
class Outcome:
    """The outcome of one cell of a command; plain values that travel between processes.

    Attributes:
        status: `finished` has trained something, `skipped` nothing; `busy`: another process trains
            it; `stopped` before its end; `alone`: to be trained as a task of its own; `planned` in
            a dry run; `running` as its training begins.
        title: norm and data, as the closing table names the cell.
        results: of its recorded runs, by seed.
        missing: the seeds that are still to train.
        seconds: wall-clock time of its training.
        holder: the process that trains it, if busy.
        halts: nothing else can be trained either, because the disk is full.
    """

    status: CellStatus
    title: str
    cell_id: str = ""
    directory: Path | None = None
    record: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    error: str = ""
    invalid: str | None = None
    missing: list[int] = field(default_factory=list)
    seconds: float = 0.0
    holder: int | None = None
    halts: bool = False


def name_of(composed: CellSpec) -> str:
    """Norm and data, as the closing table names a cell."""
    if composed.cfg is None:
        return composed.title
    return f"{composed.choices['norm']} on {composed.choices['data']}"


def one_line(error: Exception) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
