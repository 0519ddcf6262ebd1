"""The runs of the benchmark as one table: packed from studies, unpacked into a report's own rows.

The file is a .npz of arrays and a JSON text; it holds no code. A cell has all seeds of one recipe,
norm, norm batch size and learning rate. What is right or wrong for each test sample is kept as
packed bits; losses of language models as float16, at learning rates that seeds choose.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from normexp.config.schema import conf_dir
from normexp.errors import UserError
from normexp.records.files import open_atomic
from normexp.records.result import (
    RESULT_FILE,
    Result,
    Status,
    list_runs,
    list_seeds,
    read_result,
    read_samples,
    seed_dir,
)
from normexp.reporting.runs import Records, RunRow

BENCHMARK = "benchmark1"
WORKLOADS = ("convnet", "vit", "encoder", "gpt")  # recipes at the long budget, where norms rank
METRICS = ("accuracy", "bits_per_byte", "loss")
ENVIRONMENT = ("python", "torch", "cpu", "data_source", "code_version")  # that a cell records
SCHEMA = 1
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class BenchmarkRecipe:
    """A recipe of conf/experiment/<benchmark>: a workload at one budget.

    study: the folder of its runs
    shared: what all of its cells record: sizes, budget, model, data
    """

    name: str
    study: str
    shared: Mapping[str, Any]
    norms: tuple[str, ...]
    alphas: tuple[float, ...]
    lrs: tuple[float, ...]
    num_seeds: int

    def trains(self, config: Mapping[str, Any]) -> bool:
        """True for a cell of this recipe, from the `config` of its results."""
        recipe = config.get("recipe") or {}
        known = {**config, "model.width": (recipe.get("model") or {}).get("width")}
        keys = ("batch_size", "epochs", "num_steps", "model.width")
        is_alike = all(known.get(key) == self.shared[key] for key in keys if key in self.shared)
        alpha = (recipe.get("norm") or {}).get("alpha_init")
        is_open = self.name in WORKLOADS  # to other norms too
        is_listed = config["lr"] in self.lrs and (is_open or config["norm"] in self.norms)
        return is_alike and is_listed and (not self.alphas or alpha in self.alphas)


@cache
def recipes(benchmark: str = BENCHMARK) -> dict[str, BenchmarkRecipe]:
    """By name; a cell belongs to the first that trains it, those with an alpha of their own first.

    Raises:
        UserError: there is no such benchmark.
    """
    read = [_recipe(name, values) for name, values in _rules(benchmark).items()]
    if not read:
        raise UserError(
            f"reference={benchmark}: no such rules; {BENCHMARK} and benchmark0 have some"
        )
    return {one.name: one for one in sorted(read, key=lambda one: (not one.alphas, one.name))}


@cache
def digest(benchmark: str = BENCHMARK) -> str:
    """12 hex digits over the recipes in which norms are ranked, and those at a short budget."""
    ranked = {*WORKLOADS, *(f"{name}_short" for name in WORKLOADS)}
    rules = {name: values for name, values in _rules(benchmark).items() if name in ranked}
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:12]


def _rules(benchmark: str) -> dict[str, Any]:
    files = sorted((conf_dir() / "experiment" / benchmark).glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}


def _recipe(name: str, values: Mapping[str, Any]) -> BenchmarkRecipe:
    params = values["hydra"]["sweeper"]["params"]

    lists = {key: str(value).replace(",", " ").split() for key, value in params.items()}
    defaults = [one for one in values.get("defaults", []) if isinstance(one, dict)]
    data = next((one["override /data"] for one in defaults if "override /data" in one), "digits")
    optional = {
        "epochs": values.get("epochs"),
        "num_steps": values.get("steps"),
        "model.width": values.get("model", {}).get("width"),
    }
    shared = {
        "model": name.partition("_")[0],
        "data": data,
        "batch_size": values["batch_size"],
        **{key: value for key, value in optional.items() if value is not None},
    }
    return BenchmarkRecipe(
        name,
        values["study"],
        shared,
        norms=tuple(lists["norm"]),
        alphas=tuple(map(float, lists.get("norm.alpha_init", ()))),
        lrs=tuple(map(float, lists["lr"])),
        num_seeds=values["replicas"],
    )


@dataclass(frozen=True, eq=False)
class TableCell:
    """The runs of one cell.

    norm: with its knob where a recipe varies it, as `dyt alpha_init=2.0`
    norm_batch_size: None if the norm mixes no samples, or takes the whole batch
    about: cell id, versions of the code, machine, number of parameters
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
    metrics: Arrays
    samples: Arrays


@dataclass(frozen=True, eq=False)
class Table:
    """All cells of a benchmark that have runs.

    about: its name, the digest of its rules, commits, time
    """

    about: Mapping[str, Any]
    cells: tuple[TableCell, ...]

    def with_entry(self, cells: Sequence[TableCell]) -> Table:
        """This table with the cells of an entry, instead of those of the same recipes."""
        entered = {(cell.recipe, cell.norm) for cell in cells}
        others = [cell for cell in self.cells if (cell.recipe, cell.norm) not in entered]
        return replace(self, cells=(*others, *cells))

    def records(self, names: Iterable[str]) -> Records:
        """The runs of some recipes as a report reads them."""
        known, wanted = recipes(self.about["benchmark"]), set(names)
        cells = [cell for cell in self.cells if cell.recipe in wanted]
        return Records([run for cell in cells for run in _runs_of(cell, known[cell.recipe].shared)])


def _runs_of(cell: TableCell, shared: Mapping[str, Any]) -> Iterator[RunRow]:
    norm, _, knob = cell.norm.partition(" alpha_init=")
    config = {
        **shared,
        "norm": norm,
        **({"norm.alpha_init": float(knob)} if knob else {}),
        "norm_batch_size": cell.norm_batch_size,
        "lr": cell.lr,
        "mixes_samples": cell.about["mixes_samples"],
        "chance_accuracy": cell.about["chance"],
    }
    folder = Path(cell.recipe, f"{cell.norm}-{cell.norm_batch_size}-{cell.lr:g}")
    environment = {"cpu": cell.about["cpu"]} if "cpu" in cell.about else {}
    for place, seed in enumerate(cell.seeds):
        metrics = {
            name: float(values[place])
            for name, values in cell.metrics.items()
            if np.isfinite(values[place])
        }
        status, step = (Status.DIVERGED, 0) if cell.diverged[place] else (Status.FINISHED, None)
        result = Result(
            cell.about["id"], seed, status, config, metrics, environment, diverged_at_step=step
        )
        run_dir = folder / f"seed-{seed}"
        samples = {kind: values[place] for kind, values in cell.samples.items()}
        yield RunRow(BENCHMARK, run_dir, result, config, metrics, lambda samples=samples: samples)


# From studies


def cells_below(runs_dir: Path, known: Collection[BenchmarkRecipe]) -> Iterator[TableCell]:
    """The cells of the studies of some recipes, with the seeds of their recipe."""
    for study in sorted({recipe.study for recipe in known}):
        candidates = [recipe for recipe in known if recipe.study == study]
        for cell_dir in sorted({run.parent for run in list_runs(runs_dir / study)}):
            folders = [seed_dir(cell_dir, seed) for seed in list_seeds(cell_dir)]
            read = [read_result(path) for path in folders if (path / RESULT_FILE).is_file()]
            results = [one for one in read if one.status != Status.FAILED]
            if not results or any(one.invalid for one in results):
                continue
            trained = (one for one in candidates if one.trains(results[0].config))
            recipe = next(trained, None)
            if recipe and (own := [one for one in results if one.seed < recipe.num_seeds]):
                yield _pack(cell_dir, recipe, own)


def _pack(cell_dir: Path, recipe: BenchmarkRecipe, results: Sequence[Result]) -> TableCell:
    first, config = results[0], results[0].config
    alpha = config["recipe"]["norm"].get("alpha_init")
    names = sorted({name for one in results for name in one.metrics})
    read = [read_samples(seed_dir(cell_dir, one.seed)) for one in results]
    shapes = {kind: values for samples in read for kind, values in samples.items()}
    about = {
        "id": first.cell_id,
        "commit": first.environment.get("git_commit"),
        **{name: first.environment.get(name) for name in ENVIRONMENT},
    }
    return TableCell(
        recipe=recipe.name,
        norm=f"{config['norm']} alpha_init={alpha}" if recipe.alphas else config["norm"],
        norm_batch_size=config.get("norm_batch_size"),
        lr=config["lr"],
        about={
            **{name: value for name, value in about.items() if value is not None},
            "mixes_samples": config.get("mixes_samples") is not False,
            "chance": config.get("chance_accuracy"),
            "num_parameters": first.num_parameters,
        },
        seeds=tuple(one.seed for one in results),
        diverged=np.array([one.status == Status.DIVERGED for one in results]),
        metrics={
            name: np.array([one.metrics.get(name, np.nan) for one in results])
            for name in names
            if name.partition("/")[2].partition("@")[0] in METRICS
        },
        samples={
            kind: np.stack([samples.get(kind, np.zeros_like(values)) for samples in read])
            for kind, values in shapes.items()
        },
    )


# The file


def write_table(table: Table, path: Path) -> None:
    """Writes a table; losses of language models are kept at the two best learning rates."""
    arrays: dict[str, Any] = {}
    rows = []
    for number, cell in enumerate(table.cells):
        kinds = {}
        for kind, values in cell.samples.items():
            if values.dtype == bool:  # wrong ones: few, so they compress better
                arrays[f"{number}/{kind}"] = np.packbits(~values, axis=1)
                kinds[kind] = values.shape[1]
            elif _is_chosen(table, cell):
                arrays[f"{number}/{kind}"] = values.astype(np.float16)
                kinds[kind] = 0
        own = {key: getattr(cell, key) for key in ("recipe", "norm", "norm_batch_size", "lr")}
        lost = [seed for seed, one in zip(cell.seeds, cell.diverged, strict=True) if one]
        metrics = {
            name: [None if np.isnan(value) else round(float(value), 6) for value in values]
            for name, values in cell.metrics.items()
        }
        rows.append(
            {**own, "about": dict(cell.about), "seeds": list(cell.seeds), "diverged": lost}
            | {"metrics": metrics, "samples": kinds}
        )
    text = json.dumps({"about": dict(table.about), "cells": rows}, separators=(",", ":"))
    arrays["table"] = np.frombuffer(text.encode(), dtype=np.uint8)
    with open_atomic(path) as file:
        np.savez_compressed(file, **arrays)


def _is_chosen(table: Table, cell: TableCell) -> bool:
    """Whether a cell has the best or second best learning rate by the mean on validation."""
    place = (cell.recipe, cell.norm, cell.norm_batch_size)
    known = [
        one
        for one in table.cells
        if (one.recipe, one.norm, one.norm_batch_size) == place and "val/loss" in one.metrics
    ]
    best = sorted(known, key=lambda one: float(np.nanmean(one.metrics["val/loss"])))
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
            return Table(text["about"], cells)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a table of the benchmark ({error})") from error


def _cell_of(number: int, row: Mapping[str, Any], content: Arrays) -> TableCell:
    def samples(kind: str, count: int) -> NDArray[Any]:
        values = content[f"{number}/{kind}"]
        if not count:
            return values.astype(np.float64)
        return ~np.unpackbits(values, axis=1, count=count).astype(bool)

    own = {key: row[key] for key in ("recipe", "norm", "norm_batch_size", "lr", "about")}
    return TableCell(
        **own,
        seeds=tuple(row["seeds"]),
        diverged=np.isin(row["seeds"], row["diverged"]),
        metrics={name: np.array(values, dtype=float) for name, values in row["metrics"].items()},
        samples={kind: samples(kind, count) for kind, count in row["samples"].items()},
    )


def shipped_path(name: str) -> Path:
    """The file of a shipped table, such as benchmark1; a name that ends in .npz is a path.

    Raises:
        UserError: there is none of that name.
    """
    path = Path(name) if name.endswith(".npz") else Path(__file__).parent / f"{name}.npz"
    if not path.is_file():
        raise UserError(
            f"reference={name}: no such table; {BENCHMARK}, or a file made by "
            "python -m normexp.benchmark.table RUNS_DIR FILE"
        )
    return path


def main(runs_dir: Path, file: Path, benchmark: str = BENCHMARK) -> None:
    """Writes the table of the runs of a benchmark."""
    about = {"schema": SCHEMA, "benchmark": benchmark, "rules": digest(benchmark)}
    cells = tuple(cells_below(runs_dir, recipes(benchmark).values()))
    commits = sorted({str(cell.about.get("commit")) for cell in cells})
    now = datetime.now(UTC).isoformat(timespec="minutes")
    write_table(Table(about | {"commits": commits, "time": now}, cells), file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
