"""The study that an entry of the benchmark is compared with. It ships as a zip.

Each of its commands has trained a recipe of conf/experiment/<benchmark>: a workload at one budget.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from normexp.errors import UserError
from normexp.training.config.spec import CellSpec
from normexp.training.records.archive import Archive
from normexp.training.records.journal import CommandEntry
from normexp.training.records.layout import RESULT_FILE, seed_dir
from normexp.training.records.result import read_result_of_study
from normexp.training.studies.rows import add_archive, row_of_folder
from normexp.verdicts.rows import Row, Rows

BENCHMARK = "benchmark1"
WORKLOADS = ("convnet", "vit", "encoder", "gpt")  # recipes of the long budget, which rank norms


@dataclass(frozen=True, eq=False)
class Reference:
    """The runs of a benchmark, without entries.

    name: the name of the benchmark
    study: the study of its runs
    recipes: by name, the ids of the cells that it trains
    """

    name: str
    study: str
    rows: Rows
    recipes: Mapping[str, Collection[str]]

    @property
    def workloads(self) -> list[str]:
        """The recipes that rank norms."""
        return [name for name in WORKLOADS if name in self.recipes]

    def runs_of(self, cells: Iterable[CellSpec]) -> list[Row]:
        """The recorded runs of an entry, as runs of this study."""
        run_dirs = [seed_dir(cell.directory, seed) for cell in cells for seed in cell.seeds]
        ended = [run_dir for run_dir in run_dirs if (run_dir / RESULT_FILE).exists()]
        return [row_of_folder(self.study, one, read_result_of_study(one)) for one in ended]

    def rows_of(self, recipes: Iterable[str], entry: Sequence[Row] = ()) -> Rows:
        """The runs of some recipes, and those of an entry, which replace the same cells."""
        entered = {run.cell_id for run in entry}
        wanted = {cell for name in recipes for cell in self.recipes[name]} - entered
        runs = [run for run in self.rows.runs if run.cell_id in wanted]
        return replace(self.rows, runs=[*runs, *entry])


def read_reference(name: str) -> Reference:
    """Reads a shipped reference, such as benchmark1, or the zip of another.

    Raises:
        UserError: there is none of that name, or its commands name no recipe of a benchmark.
    """
    path = Path(name) if name.endswith(".zip") else Path(__file__).parent / f"{name}.zip"
    if not path.is_file():
        raise UserError(
            f"reference={name}: no such study; {BENCHMARK}, or a zip made by "
            "python -m normexp.training.records.archive STUDY_DIR FILE"
        )
    archive = Archive(path)
    benchmarks: set[str] = set()
    recipes: dict[str, set[str]] = {}
    for command in archive.entries:
        if not isinstance(command, CommandEntry):
            continue
        for word in command.command:
            if match := re.fullmatch(r"experiment=(\w+)/(\w+)", word):
                benchmarks.add(match[1])
                recipes.setdefault(match[2], set()).update(command.cells)
    if len(benchmarks) != 1:
        raise UserError(f"reference={name}: its commands are not of one benchmark")
    rows = Rows()
    add_archive(rows, archive)
    return Reference(benchmarks.pop(), path.stem, rows, recipes)
