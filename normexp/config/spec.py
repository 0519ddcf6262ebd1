"""A cell on its way through a command: as it was composed, and what became of it. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from normexp.records.identity import NOT_TRAINING
from normexp.records.result import Result

CellStatus = Literal["finished", "skipped", "refused", "failed", "stopped", "busy", "planned"]


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


@dataclass(frozen=True)
class Start:
    """What is known of a cell as it begins to train: enough to record its failure from outside."""

    cell_id: str
    directory: Path
    record: dict[str, Any]
    seeds: list[int]  # that are to be trained
    num_steps: int


@dataclass
class Outcome:
    """What became of one cell of a command; plain values that travel between processes.

    Attributes:
        status: `finished` has trained something, `skipped` nothing; `busy`: another process trains
            it; `stopped` before its end; `planned` in a dry run.
        title: norm and data, as the closing table names it.
        results: of its runs that have ended, by seed.
        missing: seeds that are still to train.
        seconds: from its begin to its end, as a clock on the wall shows.
        holder: the process that trains it, where busy.
        halts: nothing else can be trained either: the disk is full.
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


class Listener:
    """What a cell tells while it is on its way; this one keeps it to itself.

    Attributes:
        on_steps: called with (step, num_steps) of a stack now and then; None: the training shows
            its progress itself.
    """

    on_steps: Callable[[int, int], None] | None = None

    def begins(self, start: Start, position: int = 0) -> None:
        """Before anything is trained, and after everything was checked.

        Args:
            position: of the cell among those that one worker was given together.
        """


def name_of(composed: CellSpec) -> str:
    """Norm and data, as the closing table names a cell."""
    if composed.cfg is None:
        return composed.title
    return f"{composed.choices['norm']} on {composed.choices['data']}"


def one_line(error: Exception) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
