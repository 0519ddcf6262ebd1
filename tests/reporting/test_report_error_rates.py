"""How often whole reports say something false, and how often they find what is there.

Studies are written as records of a real run with other outcomes, and read by `load_report`. Each
test prints its rate with its standard error. tests/stats/test_error_rates.py has these designs and
more without records, in larger numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from normexp.records.history import CommandEntry, append_entries
from scipy.special import expit

import normexp
from normexp.records.samples import write_samples
from normexp.reporting.metric import RULE
from normexp.reporting.report import Report

pytestmark = pytest.mark.slow
Array = np.ndarray
NORMS, SIZES, RATES, n = ("batch", "one", "two", "three"), (2, 32), (0.01, 0.03, 0.1, 0.3, 1.0), 8
MOST = 0.06  # of reports with a false verdict


class Cell(NamedTuple):
    """A cell of a study: what its config has of its own, and its accuracies (n,) or (n, N)."""

    config: Mapping[str, Any]
    accuracies: Array
    validation: Array | None = None


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a simulation need not outlive a power cut, and thousands of syncs take minutes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a real run."""
    root = tmp_path_factory.mktemp("real")
    normexp.run(["norm_batch_size=2", "steps=2", "replicas=1", "study=real", f"runs_dir={root}"])
    (path,) = root.glob("real/*/seed-0/result.json")
    return json.loads(path.read_text())


def report_on(root: Path, record: Mapping[str, Any], cells: Iterable[Cell]) -> Report:
    """The report of a declared study with these cells."""
    study, declared = root / "study", {}
    (study / "study.jsonl").unlink(missing_ok=True)  # every study of a test has the same cells
    for config, accuracies, validation in cells:
        name = "-".join(map(str, config.values()))
        declared[name] = [("", list(range(len(accuracies))))]
        means = accuracies if accuracies.ndim == 1 else accuracies.mean(axis=1)
        for seed, mean in enumerate(means.tolist()):
            metrics = {"test/accuracy": mean}
            metrics |= {} if validation is None else {"val/accuracy": float(validation[seed])}
            content = {"cell_id": name, "seed": seed, "metrics": metrics}
            content = {**record, **content, "config": {**record["config"], **config}}
            folder = study / name / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "result.json").write_text(json.dumps(content))
            if accuracies.ndim == 2:
                write_samples(folder, {"running": accuracies[seed]})
    append_entries(study, [CommandEntry("c", ["normexp-train"], "one", 3, declared, RULE)])
    return normexp.load_report("study", root)


def rate(name: str, events: Iterable[bool]) -> float:
    """The share of true events; prints it with its binomial standard error."""
    happened = np.array(list(events))
    share = float(happened.mean())
    error = np.sqrt(share * (1 - share) / len(happened))
    print(f"{name}: {100 * share:.1f} % (standard error {100 * error:.1f}, n = {len(happened)})")
    return share


def says_that_norms_differ(report: Report) -> bool:
    wrong = {"loses", "gains", "better", "worse"}
    changes = [one.change.kind for one in report.comparisons if one.change]
    return any(one.verdict in wrong for one in report.comparisons) or "changes" in changes


def plain_cells(
    draw: Callable[[int], Array], sizes: Iterable[int] = SIZES, **config: Any
) -> list[Cell]:
    """draw: the accuracies of a cell of that size"""
    return [
        Cell({"norm": norm, "norm_batch_size": size, **config}, draw(size))
        for norm in NORMS
        for size in sizes
    ]


# Designs: equal norms at equal sizes, drawn anew for each study


def images(rng: np.random.Generator, num_samples: int, ease: float, drop: float = 0.0):
    """Right or wrong for each seed and image; each cell has its own hard images.

    ease: mean log odds, less by `drop` at the smallest size
    """
    shared = rng.normal(0, 2, num_samples)

    def draw(size: int) -> Array:
        odds = ease - drop * (size == SIZES[0]) + shared + rng.normal(0, 0.7, num_samples)
        return rng.random((n, num_samples)) < expit(odds + rng.normal(0, 0.05, (n, 1)))

    return draw


def places(rng: np.random.Generator) -> list[Cell]:
    cells = []
    for data in ("digits", "other"):
        for steps in (100, 400):
            config = {"data": data, "num_steps": steps, "epochs": steps / 10}
            cells += plain_cells(lambda _: 0.95 + 0.005 * rng.normal(size=n), **config)
    return cells


def tuned(rng: np.random.Generator, drop: float = 0.0) -> list[Cell]:
    """Five rates; runs of one network share the luck of validation and test."""
    cells = []
    for lr, level in zip(RATES, (0.90, 0.95, 0.96, 0.945, 0.80), strict=True):
        for norm in NORMS:
            level_of_norm = level - drop * (norm != "batch")
            network = level_of_norm + 0.005 * rng.normal(size=n)
            noise = 0.004 * rng.normal(size=(2, n))
            config = {"norm": norm, "norm_batch_size": 32, "lr": lr}
            cells.append(Cell(config, network + noise[0], network + noise[1]))
    return cells


DESIGNS: dict[str, Callable[[np.random.Generator], list[Cell]]] = {
    "new images, 359": lambda rng: plain_cells(images(rng, 359, 4.2)),
    "two data sets, two budgets": places,
    "tuned on a grid": tuned,
}


@pytest.mark.parametrize("design", DESIGNS)
def test_reports_on_equal_norms(tmp_path: Path, record: dict[str, Any], design: str):
    has_many_runs = design in ("tuned on a grid", "two data sets, two budgets")
    rng, count = np.random.default_rng(0), 40 if has_many_runs else 100
    reports = [report_on(tmp_path, record, DESIGNS[design](rng)) for _ in range(count)]
    assert rate(f"false, {design}", map(says_that_norms_differ, reports)) <= MOST
    best = [one.best for report in reports for one in report.rankings if one.ranked]
    assert rate(f"best left out, {design}", (NORMS[1] not in norms for norms in best)) <= MOST


def test_two_points_on_2500_images_are_found(tmp_path: Path, record: dict[str, Any]):
    """The drop is printed."""
    rng = np.random.default_rng(1)
    reports = [
        report_on(tmp_path, record, plain_cells(images(rng, 2500, 4.2, 0.42))) for _ in range(10)
    ]
    along = [one for report in reports for one in report.comparisons if one.is_along_sizes]
    print("mean drop", np.mean([one.gap.estimate for one in along if one.gap.estimate]))
    assert rate("found, 2 points", (one.verdict == "loses" for one in along)) >= 0.8


def test_two_points_between_tuned_norms_are_found(tmp_path: Path, record: dict[str, Any]):
    rng = np.random.default_rng(2)
    reports = [report_on(tmp_path, record, tuned(rng, drop=0.02)) for _ in range(15)]
    found = (one.verdict == "worse" for report in reports for one in report.comparisons)
    assert rate("found, 2 points, tuned", found) >= 0.8


def test_looks_before_the_declared_seeds_have_ended_give_no_verdict(
    tmp_path: Path, record: dict[str, Any]
):
    rng, said = np.random.default_rng(3), []
    for _ in range(12):
        looks = [
            says_that_norms_differ(report_on(tmp_path, record, plain_cells(images(rng, 359, 4.2))))
        ]
        for last in range(n - 1, 2, -1):  # from the last look to the first
            for run in (tmp_path / "study").glob(f"*/seed-{last}"):
                shutil.rmtree(run)
            report = normexp.load_report("study", tmp_path)
            looks.append(says_that_norms_differ(report))
            assert {one.kind for one in report.comparisons} == {"incomplete"}
        said.append(any(looks))
    assert rate("false at any look", said) <= MOST
