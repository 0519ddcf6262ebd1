"""A study in one zip, to ship: its commands, and each cell's results and test samples.

    python -m normexp.training.records.archive runs/mine mine.zip
    python -m normexp.training.records.archive mine.zip runs/mine    a folder again, to add runs

Reports read `runs/mine.zip` for `study=mine`, like a folder of that name. Weights, histories and
logs are left out. In the zip:

    study.jsonl             as in the folder
    search.jsonl            the study.jsonl of the study mine-search, if `tune` wrote one
    results.jsonl           a result.json per line; its metrics include those of evaluation.json
    <cell_id>/samples.npz   a row per run for each kind of statistics, and the seeds of the rows
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np

from normexp.errors import USER_MISTAKE, UserError
from normexp.training.records.files import describe, open_atomic
from normexp.training.records.journal import Entry, append_entry, parse_entries
from normexp.training.records.layout import (
    ARCHIVED_RESULTS,
    RESULT_FILE,
    SAMPLES_FILE,
    STUDY_FILE,
    list_cells,
    list_seeds,
    search_dir,
    seed_dir,
)
from normexp.training.records.result import (
    Result,
    read_evaluation,
    read_result_of_study,
    result_of,
    write_result,
)
from normexp.training.records.samples import (
    TORN,
    pack_bits,
    read_samples,
    unpack_bits,
    write_samples,
)

SEARCH_FILE = "search.jsonl"
SEEDS = "/seeds"  # after the name of a kind of statistics: the seeds of its rows
Samples = Mapping[str, np.ndarray]  # of one run: test samples by kind of statistics


@dataclass(frozen=True)
class ArchivedCell:
    """A cell as it is shipped.

    Attributes:
        samples: the test samples of each seed that has some.
    """

    id: str
    results: list[Result]
    samples: dict[int, Samples]


def pack_study(study_dir: Path, path: Path) -> None:
    """Writes the ended runs of a study to a zip.

    Raises:
        UserError: a record that cannot be read, or no ended run.
    """
    cells = [_read_cell(folder) for folder in list_cells(study_dir)]
    ended = [cell for cell in cells if cell.results]
    if not ended:
        raise UserError(f"{study_dir} has no ended run")
    commands = _text_of(study_dir / STUDY_FILE)
    search_commands = _text_of(search_dir(study_dir) / STUDY_FILE)
    write_archive(path, commands, ended, search_commands)


def _read_cell(folder: Path) -> ArchivedCell:
    results, samples = [], {}
    for seed in list_seeds(folder):
        run_dir = seed_dir(folder, seed)
        if not (run_dir / RESULT_FILE).exists():
            continue
        result = read_result_of_study(run_dir)
        metrics = read_evaluation(run_dir) | result.metrics  # the training's take precedence
        results.append(replace(result, measured=replace(result.measured, metrics=metrics)))
        if run_samples := read_samples(run_dir):
            samples[seed] = run_samples
    return ArchivedCell(folder.name, results, samples)


def _text_of(path: Path) -> str:
    """The text of a file; empty if it is missing."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def write_archive(
    path: Path, commands: str, cells: Sequence[ArchivedCell], search_commands: str = ""
) -> None:
    """Replaces a zip atomically.

    Args:
        commands, search_commands: the text of study.jsonl, and of that of the search.
    """
    with open_atomic(path) as file, ZipFile(file, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(STUDY_FILE, commands)
        if search_commands:
            archive.writestr(SEARCH_FILE, search_commands)
        results = [result.to_dict() for cell in cells for result in cell.results]
        lines = [json.dumps(result, separators=(",", ":")) for result in results]
        archive.writestr(ARCHIVED_RESULTS, "\n".join(lines))
        for cell in cells:
            if cell.samples:
                archive.writestr(f"{cell.id}/{SAMPLES_FILE}", _join(cell.samples))


def _join(samples: Mapping[int, Samples]) -> bytes:
    """The samples of all runs of a cell as one npz, which the zip compresses."""
    joined: dict[str, np.ndarray] = {}
    kinds = set[str]().union(*samples.values())
    for kind in sorted(kinds):
        seeds = [seed for seed, run_samples in samples.items() if kind in run_samples]
        joined[kind] = np.stack([samples[seed][kind] for seed in seeds])
        joined[kind + SEEDS] = np.array(seeds)
    file = io.BytesIO()
    np.savez(file, **pack_bits(joined))
    return file.getvalue()


class Archive:
    """A study in a zip. Samples are read where they are needed.

    Raises:
        UserError: a file that is no zip of a study.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = ZipFile(io.BytesIO(path.read_bytes()))
            self.entries = parse_entries(self._zip.read(STUDY_FILE).decode(), path)
            self.search_entries: tuple[Entry, ...] = ()
            if SEARCH_FILE in self._zip.namelist():
                self.search_entries = parse_entries(self._zip.read(SEARCH_FILE).decode(), path)
            self._results = self._zip.read(ARCHIVED_RESULTS).decode().splitlines()
        except (OSError, KeyError, BadZipFile) as error:
            raise UserError(f"{path} is not a zip of a study ({error}); unpack it") from error
        # Reports ask for the runs of a cell one after the other.
        self._samples_of_cell = lru_cache(maxsize=1)(self._read_samples)

    def results(self) -> Iterator[Result]:
        """Every run, in the order of cells and seeds."""
        return (result_of(json.loads(line), self.path) for line in self._results)

    def samples(self, cell_id: str, seed: int) -> Samples:
        """The test samples of a run by kind of statistics, as `read_samples` returns them."""
        return self._samples_of_cell(cell_id).get(seed, {})

    def _read_samples(self, cell_id: str) -> dict[int, dict[str, np.ndarray]]:
        """The test samples of a cell's runs, by seed."""
        samples = defaultdict[int, dict[str, np.ndarray]](dict)
        try:
            file = io.BytesIO(self._zip.read(f"{cell_id}/{SAMPLES_FILE}"))
        except KeyError:  # the cell has no samples
            return samples
        try:
            arrays = unpack_bits(file)
        except TORN as error:
            raise UserError(f"{self.path}: the samples of {cell_id} are torn ({error})") from error
        for kind, seeds in arrays.items():
            if kind.endswith(SEEDS):
                rows = arrays[kind.removesuffix(SEEDS)]
                for seed, row in zip(seeds.tolist(), rows, strict=True):
                    samples[seed][kind.removesuffix(SEEDS)] = row
        return samples


def unpack_study(path: Path, study_dir: Path) -> None:
    """Writes the folder of a shipped study, to which a command can add runs.

    Raises:
        UserError: a file that is no zip of a study, or a folder that has runs.
    """
    archive = Archive(path)
    if list_cells(study_dir):
        raise UserError(f"{study_dir} has runs; name another folder")
    study_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=study_dir.parent) as folder:  # nothing is left half-made
        for result in archive.results():
            run_dir = seed_dir(Path(folder, result.cell_id), result.seed)
            run_dir.mkdir(parents=True)
            if samples := archive.samples(result.cell_id, result.seed):
                write_samples(run_dir, samples)
            write_result(run_dir, result)
        for entry in archive.entries:
            append_entry(Path(folder), entry)
        study_dir.mkdir(exist_ok=True)
        for content in Path(folder).iterdir():
            os.replace(content, study_dir / content.name)
    for entry in archive.search_entries:
        append_entry(search_dir(study_dir), entry)


def main(source: Path, target: Path) -> int:
    """Packs a study, or unpacks its zip; returns the exit code."""
    try:
        convert = unpack_study if source.suffix == ".zip" else pack_study
        convert(source, target)
    except (UserError, OSError) as error:
        message = describe(error) if isinstance(error, OSError) else error
        print(f"normexp: {message}", file=sys.stderr)
        return USER_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])) if len(sys.argv) == 3 else __doc__)
