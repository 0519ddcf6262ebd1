"""Where things lie: runs/<study>/<cell_id>/seed-<k>/ and stacks/<first>-<last>/.

A stack of several cells lies beside them: runs/<study>/stacks/<digest of its members>/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

STUDY_FILE = "study.yaml"
INDEX_FILE = "cells.csv"
CONFIG_FILE = "config.yaml"
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.csv"
WEIGHTS_FILE = "weights.pt"
EVALUATION_FILE = "evaluation.json"
CHECKPOINT_FILE = "last.ckpt"
ENDED_FILE = "ended.json"
MEMBERS_FILE = "members.json"
LOG_FILE = "run.log"
LOCK_FILE = ".lock"

_SEED_DIR = re.compile(r"seed-(0|[1-9][0-9]*)")
_STACK_DIR = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Study:
    """A study on disk; nothing here creates a directory."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def file(self) -> Path:
        return self.root / STUDY_FILE

    def cell_dir(self, cell_id: str) -> Path:
        return self.root / cell_id

    def list_cells(self) -> list[Path]:
        """Folders with a config or a run in them, by name; other folders are not cells."""
        if not self.root.is_dir():
            return []
        folders = sorted(path for path in self.root.iterdir() if path.is_dir())
        return [path for path in folders if (path / CONFIG_FILE).exists() or list_seeds(path)]

    def list_runs(self) -> list[Path]:
        """The run directories of all cells, by cell and seed, ended or not."""
        return [seed_dir(cell, seed) for cell in self.list_cells() for seed in list_seeds(cell)]


def seed_dir(cell_dir: Path, seed: int) -> Path:
    """The directory of one run: of (cell, seed)."""
    return cell_dir / f"seed-{seed}"


def stack_dir(cell_dir: Path, first: int, last: int) -> Path:
    """The directory of a stack of seeds `first` to `last`, both included, while it runs."""
    return cell_dir / "stacks" / f"{first}-{last}"


def checkpointed_stacks(cell_dir: Path) -> dict[Path, range]:
    """The directories of stacks of one cell that have a checkpoint, by name, with their seeds.

    Folders of other names, as of a copy by hand, are not stacks.
    """
    stacks = {}
    for path in sorted(cell_dir.glob(f"stacks/*/{CHECKPOINT_FILE}")):
        match = _STACK_DIR.fullmatch(path.parent.name)
        seeds = range(int(match[1]), int(match[2]) + 1) if match else range(0)
        if seeds:
            stacks[path.parent] = seeds
    return stacks


def seed_of(run_dir: Path) -> int | None:
    """The seed in the name of a run directory; None for any other name."""
    match = _SEED_DIR.fullmatch(run_dir.name)
    return int(match[1]) if match else None


def list_seeds(cell_dir: Path) -> list[int]:
    """The seeds that have a run directory, in order of number."""
    seeds = [seed_of(path) for path in cell_dir.iterdir() if path.is_dir()]
    return sorted(seed for seed in seeds if seed is not None)
