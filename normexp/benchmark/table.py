"""The runs of the benchmark as one table: read from records, written to one compressed file.

A cell of the table has the results of all seeds of one recipe, norm, norm batch size and rate. The
file is a .npz of arrays and a JSON text; it holds no code. What is right or wrong for each test
sample is kept as packed bits; losses of language models as float16, at rates that seeds choose.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normexp.benchmark.protocol import BENCHMARK, WorkloadRecipe, digest, recipes
from normexp.errors import UserError
from normexp.records.files import open_atomic
from normexp.records.paths import RESULT_FILE, list_seeds, seed_dir
from normexp.records.result import Result, Status, read_result
from normexp.records.samples import read_samples

Array = NDArray[np.float64]
METRICS = ("accuracy", "bits_per_byte", "loss")
SCHEMA = 1


@dataclass(frozen=True, eq=False)
class TableCell:
    """The runs of one cell.

    norm: with its knobs where a recipe varies them, as `dyt alpha_init=2.0`
    norm_batch_size: None if the norm mixes no samples, or takes the whole batch
    about: cell id, versions of the code, machine, number of parameters, step time in ms
    diverged: (n,)
    metrics: by name, (n,); NaN where missing
    samples: by kind of statistics, (n, N): right or not, or the loss of each test sequence
    """

    recipe: str
    norm: str
    norm_batch_size: int | None
    lr: float
    about: Mapping[str, Any]
    seeds: tuple[int, ...]
    diverged: NDArray[np.bool_]
    metrics: Mapping[str, Array]
    samples: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def is_accuracy(self) -> bool:
        """Whether accuracy is compared, not bits per byte; known also where every run diverged."""
        return self.about["chance"] is not None


@dataclass(frozen=True)
class Cost:
    """What a norm costs in the network of a workload, as multiples of batch norm's.

    step: median time of a training step, in turns in one process
    kept: bytes that a forward keeps for its backward
    """

    step: float
    kept: float


Costs = Mapping[str, Mapping[str, Cost]]  # by workload and norm
Traits = Mapping[str, Mapping[str, Mapping[str, bool]]]  # by workload, norm and trait


@dataclass(frozen=True, eq=False)
class Table:
    """All cells of the benchmark that have runs.

    about: benchmark, digest of its rules, commits, time; `machine` on which costs were measured
    traits: of the built networks that claims ask about, measured by a probe
    """

    about: Mapping[str, Any]
    cells: tuple[TableCell, ...]
    costs: Costs = field(default_factory=dict)
    traits: Traits = field(default_factory=dict)

    @property
    def recipes(self) -> Mapping[str, WorkloadRecipe]:
        return recipes(self.about["benchmark"])

    @cached_property
    def groups(self) -> Mapping[tuple[str, str, int | None], list[TableCell]]:
        """By recipe, norm and norm batch size: the cells in order of their rates."""
        groups: dict[tuple[str, str, int | None], list[TableCell]] = {}
        for cell in sorted(self.cells, key=lambda cell: cell.lr):
            groups.setdefault((cell.recipe, cell.norm, cell.norm_batch_size), []).append(cell)
        return groups

    def rates_of(self, recipe: str, norm: str, size: int | None = None) -> list[TableCell]:
        """The complete grid of rates of a norm, the smallest rate first; empty if one is missing.

        A norm that does not mix samples has one grid for all sizes.
        """
        cells = self.groups.get((recipe, norm, size)) or self.groups.get((recipe, norm, None), [])
        if size is not None and cells and cells[0].about["mixes_samples"]:
            cells = self.groups.get((recipe, norm, size), [])
        known = self.recipes[recipe]
        complete = [cell for cell in cells if len(cell.seeds) >= known.num_seeds]
        is_grid = {cell.lr for cell in complete} >= set(known.rates)
        return complete if is_grid else []

    def norms_of(self, recipe: str) -> list[str]:
        """The norms that have runs of a recipe, in the order of the recipe."""
        norms = dict.fromkeys(cell.norm for cell in self.cells if cell.recipe == recipe)
        order = self.recipes[recipe].norms
        return sorted(norms, key=lambda norm: order.index(norm) if norm in order else len(order))

    def seconds_per_run(self, recipe: str) -> float:
        """Core-seconds of a run of the reference norm where the table was made."""
        cells = self.rates_of(recipe, self.recipes[recipe].reference)
        return sum(cell.about["seconds"] for cell in cells) / len(cells)

    def cost_of(self, workload: str, norm: str) -> Cost | None:
        return self.costs.get(workload, {}).get(norm)

    def with_entry(self, cells: Sequence[TableCell]) -> Table:
        """This table with the cells of an entry, instead of those of the same recipes."""
        entered = {(cell.recipe, cell.norm) for cell in cells}
        others = tuple(cell for cell in self.cells if (cell.recipe, cell.norm) not in entered)
        return replace(self, cells=(*others, *cells))


def read_runs(runs_dir: Path, benchmark: str = BENCHMARK, first_seed: int = 0) -> Table:
    """The runs of a benchmark below `runs_dir`, with as many seeds as its recipes have.

    first_seed: other than 0 for a repetition with other seeds

    Raises:
        UserError: no run of the benchmark is there.
    """
    known = recipes(benchmark)
    if not known:
        raise UserError(
            f"reference={benchmark}: no such rules; benchmark0 and benchmark1 have some"
        )
    cells = tuple(cells_below(runs_dir, known.values(), first_seed))
    if not cells:
        raise UserError(
            f"runs_dir={runs_dir}: no run of {benchmark} is there; train its recipes, as python -m "
            f"normexp.train experiment={benchmark}/{next(iter(known))}"
        )
    commits = sorted({str(cell.about["commit"]) for cell in cells})
    now = datetime.now(UTC).isoformat(timespec="minutes")
    about = {"schema": SCHEMA, "benchmark": benchmark, "rules": digest(benchmark)}
    return Table(about | {"commits": commits, "time": now}, cells)


def cells_below(
    runs_dir: Path, known: Collection[WorkloadRecipe], first_seed: int
) -> Iterator[TableCell]:
    """The cells of the studies of some recipes, with their seeds from `first_seed` on."""
    for study in sorted({recipe.study for recipe in known}):
        candidates = [recipe for recipe in known if recipe.study == study]
        for cell_dir in sorted(path for path in (runs_dir / study).glob("*-*") if path.is_dir()):
            cell = _read_cell(cell_dir, candidates, first_seed)
            if cell is not None:
                yield cell


def _read_cell(
    cell_dir: Path, candidates: Iterable[WorkloadRecipe], first_seed: int
) -> TableCell | None:
    folders = [seed_dir(cell_dir, seed) for seed in list_seeds(cell_dir)]
    results = [read_result(path) for path in folders if (path / RESULT_FILE).is_file()]
    results = [one for one in results if one.status in (Status.FINISHED, Status.DIVERGED)]
    if not results:
        return None
    config = results[0].config
    recipe = next((one for one in candidates if one.trains(config)), None)
    if recipe is None or config["lr"] not in recipe.rates or any(one.invalid for one in results):
        return None
    seeds = range(first_seed, first_seed + recipe.num_seeds)
    results = [one for one in results if one.seed in seeds]
    if not results:
        return None
    names = sorted({name for one in results for name in one.metrics})
    metrics = {
        name: np.array([one.metrics.get(name, np.nan) for one in results])
        for name in names
        if name.partition("/")[2].partition("@")[0] in METRICS
    }
    return TableCell(
        recipe=recipe.name,
        norm=_label(recipe, config),
        norm_batch_size=config["norm_batch_size"] if config["mixes_samples"] else None,
        lr=config["lr"],
        about=_about(results),
        seeds=tuple(one.seed for one in results),
        diverged=np.array([one.status == Status.DIVERGED for one in results]),
        metrics=metrics,
        samples=_samples_of([seed_dir(cell_dir, one.seed) for one in results]),
    )


def _label(recipe: WorkloadRecipe, config: Mapping[str, Any]) -> str:
    alpha = config["recipe"]["norm"].get("alpha_init")
    return f"{config['norm']} alpha_init={alpha}" if recipe.alphas else config["norm"]


def _about(results: list[Result]) -> dict[str, Any]:
    first = results[0]
    environment = first.environment
    kept = ("python", "torch", "cpu", "data_source", "code_version")
    timing = first.timing
    return {
        "id": first.cell_id,
        "commit": environment.get("git_commit"),
        **{key: environment[key] for key in kept if key in environment},
        "mixes_samples": first.config["mixes_samples"],
        "chance": first.config.get("chance_accuracy"),
        "num_parameters": first.num_parameters,
        "seconds": round(timing.get("train_seconds", 0.0) / timing.get("stack_size", 1), 2),
    }


def _samples_of(folders: Iterable[Path]) -> dict[str, NDArray[Any]]:
    """By kind, (n, N), of the kinds that every run has, and of a run without any a row of zeros."""
    read = [read_samples(folder) for folder in folders]
    shapes = {kind: values for samples in read for kind, values in samples.items()}
    return {
        kind: np.stack([samples.get(kind, np.zeros_like(values)) for samples in read])
        for kind, values in shapes.items()
    }


# --- The file ------------------------------------------------------------------------------------


def write_table(table: Table, path: Path) -> None:
    """Writes a table; losses of language models are kept at the rates that any seeds choose."""
    arrays: dict[str, Any] = {}
    rows = []
    for number, cell in enumerate(table.cells):
        kinds = {}
        for kind, values in cell.samples.items():
            name = f"{number}/{kind}"
            if values.dtype == bool:  # wrong ones: few, so they compress better
                arrays[name] = np.packbits(~values, axis=1)
                kinds[kind] = values.shape[1]
            elif _is_chosen(table, cell):
                arrays[name] = values.astype(np.float16)
                kinds[kind] = 0
        rows.append(
            {
                "recipe": cell.recipe,
                "norm": cell.norm,
                "norm_batch_size": cell.norm_batch_size,
                "lr": cell.lr,
                "about": dict(cell.about),
                "seeds": list(cell.seeds),
                "diverged": [
                    seed for seed, is_lost in zip(cell.seeds, cell.diverged, strict=True) if is_lost
                ],
                "metrics": {
                    name: [None if np.isnan(value) else round(float(value), 6) for value in values]
                    for name, values in cell.metrics.items()
                },
                "samples": kinds,
            }
        )
    costs = {
        workload: {norm: [cost.step, cost.kept] for norm, cost in of_norms.items()}
        for workload, of_norms in table.costs.items()
    }
    content = {"about": dict(table.about), "costs": costs, "traits": table.traits, "cells": rows}
    text = json.dumps(content, separators=(",", ":"))
    arrays["table"] = np.frombuffer(text.encode(), dtype=np.uint8)
    with open_atomic(path) as file:
        np.savez_compressed(file, **arrays)


def _is_chosen(table: Table, cell: TableCell) -> bool:
    """Whether a cell has the best or second best rate of its grid by the mean on validation."""
    group = table.groups[cell.recipe, cell.norm, cell.norm_batch_size]
    known = [other for other in group if "val/loss" in other.metrics]
    best = sorted(known, key=lambda other: float(np.nanmean(other.metrics["val/loss"])))
    return cell in best[:2]


def read_table(path: Path) -> Table:
    """The table that `write_table` wrote.

    Raises:
        UserError: no such file, or another one.
    """
    try:
        with np.load(path) as content:
            text = json.loads(bytes(content["table"]))
            cells = tuple(_cell_of(n, row, content) for n, row in enumerate(text["cells"]))
        costs = {
            workload: {norm: Cost(*values) for norm, values in of_norms.items()}
            for workload, of_norms in text.get("costs", {}).items()
        }
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a table of the benchmark ({error})") from error
    return Table(text["about"], cells, costs, text.get("traits", {}))


def _cell_of(number: int, row: Mapping[str, Any], content: Mapping[str, Any]) -> TableCell:
    def samples(kind: str, count: int) -> NDArray[Any]:
        values = content[f"{number}/{kind}"]
        if not count:
            return values.astype(np.float64)
        return ~np.unpackbits(values, axis=1, count=count).astype(bool)

    seeds = tuple(row["seeds"])
    return TableCell(
        recipe=row["recipe"],
        norm=row["norm"],
        norm_batch_size=row["norm_batch_size"],
        lr=row["lr"],
        about=row["about"],
        seeds=seeds,
        diverged=np.array([seed in row["diverged"] for seed in seeds]),
        metrics={
            name: np.array([np.nan if value is None else value for value in values])
            for name, values in row["metrics"].items()
        },
        samples={kind: samples(kind, count) for kind, count in row["samples"].items()},
    )


def shipped_path(name: str) -> Path:
    """The file of a shipped reference, such as benchmark1; a name that ends in .npz is a path.

    Raises:
        UserError: there is none of that name.
    """
    if name.endswith(".npz"):
        return Path(name)
    folder = Path(__file__).parent
    known = sorted(path.stem for path in folder.glob("*.npz"))
    if re.fullmatch(r"\w+", name) and name in known:
        return folder / f"{name}.npz"
    message = f"reference={name}: shipped are {', '.join(known) or 'none'}"
    if recipes(name):
        message = (
            f"reference={name}: its rules ship and its table does not; train its recipes, as "
            f"experiment={name}/{next(iter(recipes(name)))}"
        )
    raise UserError(message)


def main() -> None:
    """`python -m normexp.benchmark.table RUNS_DIR FILE`: the table of the runs there."""
    runs_dir, file = map(Path, sys.argv[1:])
    write_table(read_runs(runs_dir), file)


if __name__ == "__main__":
    main()
