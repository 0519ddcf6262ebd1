"""How often whole reports, written as records and read by `load_report`, say something false."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit
from synthetic_study import write_cell

import normexp
from normexp.records.history import CommandEntry, append_entries
from normexp.records.samples import write_samples
from normexp.reporting.report import Report

pytestmark = pytest.mark.slow
NORMS, SIZES = ("batch", "one", "two", "three"), (2, 128)


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a simulation need not outlive a power cut, and thousands of syncs take minutes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def rate(name: str, events: Iterable[bool]) -> float:
    """The share of true events; prints it with its binomial standard error."""
    happened = np.array(list(events))
    share = float(happened.mean())
    error = np.sqrt(share * (1 - share) / len(happened))
    print(f"{name}: {100 * share:.1f} % (standard error {100 * error:.1f}, n = {len(happened)})")
    return share


def report_on(
    root: Path, rng: np.random.Generator, *, ease: float, drop: float, num_samples: int, n: int = 8
) -> Report:
    """Four norms at two sizes; each cell has its own hard images.

    ease: mean log odds of a correct answer, less by `drop` at the smallest size
    """
    shutil.rmtree(root / "study", ignore_errors=True)
    shared = rng.normal(0, 2, num_samples)
    for norm in NORMS:
        for size in SIZES:
            own = rng.normal(0, 0.7, num_samples)
            odds = ease - drop * (size == SIZES[0]) + shared + own + rng.normal(0, 0.05, (n, 1))
            right = rng.random((n, num_samples)) < expit(odds)
            options = {"norm_batch_size": size, "mixes_samples": True, "study": "study"}
            values = dict(enumerate(map(float, right.mean(axis=1))))
            cell = write_cell(root, norm, values, **options)
            for seed, row in enumerate(right):
                write_samples(cell / f"seed-{seed}", {"running": row})
    return normexp.load_report("study", root)


def has_false_verdict(report: Report) -> bool:
    wrong = {"loses", "gains", "better", "worse"}
    return any(one.verdict in wrong for one in report.comparisons)


def test_equal_norms_on_new_images(tmp_path: Path):
    rng = np.random.default_rng(0)
    reports = [report_on(tmp_path, rng, ease=4.2, drop=0.0, num_samples=359) for _ in range(200)]
    assert rate("false, 359 images", map(has_false_verdict, reports)) <= 0.06
    best = [ranking.best for report in reports for ranking in report.rankings]
    assert rate("a best norm left out", ("one" not in norms for norms in best)) <= 0.05


def test_two_points_on_2500_images_are_found(tmp_path: Path):
    """The drop is printed."""
    rng = np.random.default_rng(1)
    reports = [report_on(tmp_path, rng, ease=4.2, drop=0.42, num_samples=2500) for _ in range(25)]
    along = [one for report in reports for one in report.comparisons if one.is_along_sizes]
    print("mean drop", np.mean([one.gap.estimate for one in along if one.gap.estimate]))
    assert rate("found", (one.verdict == "loses" for one in along)) >= 0.8


def test_looks_before_the_declared_seeds_have_ended_give_no_verdict(tmp_path: Path):
    rng, said = np.random.default_rng(2), []
    for _ in range(60):
        report_on(tmp_path, rng, ease=4.2, drop=0.0, num_samples=359)
        study = tmp_path / "study"
        cells = {cell.name: [("", list(range(8)))] for cell in study.glob("*-*")}
        append_entries(study, [CommandEntry("one", ["normexp-train"], "one", 3, cells)])
        looks = []
        for n in range(8, 2, -1):  # from the last look to the first
            report = normexp.load_report("study", tmp_path)
            looks.append(has_false_verdict(report))
            assert n == 8 or {one.kind for one in report.comparisons} == {"incomplete"}
            for run in study.glob(f"*/seed-{n - 1}"):
                shutil.rmtree(run)
        said.append(any(looks))
    assert rate("false at any look", said) <= 0.06
