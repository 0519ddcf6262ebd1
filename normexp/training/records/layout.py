"""The folders and files of a study: <study>/<cell_id>/seed-<k>/, <study>/stacks/<digest>/."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from normexp.errors import UserError
from normexp.words import name_some, suggest

STUDY_FILE = "study.jsonl"
CONFIG_FILE = "config.yaml"
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.csv"
WEIGHTS_FILE = "weights.pt"
EVALUATION_FILE = "evaluation.json"
SAMPLES_FILE = "samples.npz"
PICTURE_FILE = "predictions.png"  # of a run that segments
CHECKPOINT_FILE = "last.ckpt"
STACKS = "stacks"  # the folders of those in training
ATTEMPTS_FILE = "attempts.json"
PROGRESS_FILE = "progress.json"  # step, total and the last metrics
RESULTS_FILE = "results.json"  # of all runs of a stack
LOG_FILE = "run.log"
LOCK_FILE = ".lock"
CONFIRM_LOCK = ".confirm.lock"
WANDB_ID_FILE = "wandb-id"  # the W&B run that has its metrics
ARCHIVED_RESULTS = "results.jsonl"  # in the zip of a study that ships

_SEED_DIR = re.compile(r"seed-(0|[1-9][0-9]*)")


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted; none if it is missing or another process has removed it."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if (folder / name).is_dir()]


def list_cells(study_dir: Path) -> list[Path]:
    """The folders of a study that hold a config or a run, sorted by name."""
    folders = subfolders(study_dir)
    return [path for path in folders if (path / CONFIG_FILE).exists() or list_seeds(path)]


def list_runs(study_dir: Path) -> list[Path]:
    """The run directories of all cells, ended or not, sorted by cell and seed."""
    return [seed_dir(cell, seed) for cell in list_cells(study_dir) for seed in list_seeds(cell)]


def list_studies(runs_dir: Path) -> list[str]:
    """The names of the studies in a folder, sorted. Raises UserError if it has none."""
    folders = subfolders(runs_dir)
    known = {path.name for path in folders if (path / STUDY_FILE).exists() or list_cells(path)}
    known |= {path.stem for path in runs_dir.glob("*.zip") if ships_study(path)}
    if not known:
        raise UserError(f"runs_dir={runs_dir} has no studies yet; train one first")
    return sorted(known)


def find_study(runs_dir: Path, name: str) -> Path:
    """Returns the folder of a study, or the zip that ships it.

    Raises:
        UserError: the study is missing (names the nearest), or is there twice.
    """
    known = list_studies(runs_dir)
    if name not in known:
        raise UserError(f"study={name} not found in {runs_dir}; {_hint(name, known)}")
    folder, archive = runs_dir / name, runs_dir / f"{name}.zip"
    if not ships_study(archive):
        return folder
    if list_cells(folder):
        raise UserError(f"study={name} is there twice: rename {folder} or {archive}")
    return archive


def refuse_shipped(study_dir: Path) -> None:
    """Raises UserError if the study ships as a zip, beside which no runs may be trained."""
    archive = study_dir.with_name(f"{study_dir.name}.zip")
    if ships_study(archive):
        raise UserError(
            f"study={study_dir.name} ships as {archive}; train in another study, or unpack it with "
            f"python -m normexp.training.records.archive {archive} {study_dir}, and move the zip "
            "away"
        )


def ships_study(path: Path) -> bool:
    """True for a zip of records.archive, and not for one that the user has made of a folder."""
    with suppress(OSError, BadZipFile), ZipFile(path) as archive:
        return ARCHIVED_RESULTS in archive.namelist()
    return False


def _hint(name: str, known: list[str]) -> str:
    return suggest(name, known, most=3) or f"known: {name_some(known) or 'none'}"


def search_dir(study_dir: Path) -> Path:
    """The study of the points that `tune` tried for a study."""
    return study_dir.with_name(f"{study_dir.name}-search")


def seed_dir(cell_dir: Path, seed: int) -> Path:
    """The directory of the run (cell, seed)."""
    return cell_dir / f"seed-{seed}"


def seed_of(run_dir: Path) -> int | None:
    """The seed in the name of a run directory; None for any other name."""
    match = _SEED_DIR.fullmatch(run_dir.name)
    return int(match[1]) if match else None


def list_seeds(cell_dir: Path) -> list[int]:
    """The seeds that have a run directory, in ascending order."""
    seeds = [seed_of(path) for path in subfolders(cell_dir)]
    return sorted(seed for seed in seeds if seed is not None)


def find_cell(run: Path) -> Path:
    """Returns `run` if it is the folder of a cell. Raises UserError, with near names, if not."""
    if (run / CONFIG_FILE).is_file():
        return run
    if seed_of(run) is not None and (run.parent / CONFIG_FILE).is_file():
        raise UserError(f"{run} is one seed of a cell; give the cell, {run.parent}")
    folder = run if run.is_dir() else run.parent
    cells = list_cells(folder) or [cell for part in subfolders(folder) for cell in list_cells(part)]
    hint = _hint(str(run), [str(path) for path in cells])
    lacks = f"is no cell, as it has no {CONFIG_FILE}" if run.exists() else "does not exist"
    raise UserError(f"{run} {lacks}; {hint}")


def find_run(run_dir: Path) -> tuple[Path, int]:
    """Returns the folder of the cell, and the seed. Raises UserError if that is not one run."""
    seed = seed_of(run_dir)
    if seed is not None and run_dir.is_dir():
        return find_cell(run_dir.parent), seed
    cell_dir = find_cell(run_dir if seed is None else run_dir.parent)
    seeds = list_seeds(cell_dir)
    if len(seeds) != 1 or seed is not None:
        names = ", ".join(f"seed-{seed}" for seed in seeds) or "none"
        raise UserError(f"{run_dir} is not one run; give one of its seeds: {names}")
    return cell_dir, seeds[0]
