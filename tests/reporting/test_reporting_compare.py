"""Two studies of one grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_study import make_runs, write_runs

from normexp.reporting.compare import Change
from normexp.reporting.report import build_report


def write_both(root: Path, gain: float) -> None:
    rng = np.random.default_rng(0)
    for study, shift, version in (("old", 0.0, "one"), ("new", gain, "two")):
        for size in (2, 128):
            values = dict(enumerate((0.9 + shift + rng.normal(0, 0.001, 6)).tolist()))
            runs = make_runs(
                "batch",
                values,
                root=root,
                study=study,
                norm_batch_size=size,
                epochs=3 if study == "old" else 5,
                environment={"python": "3.11", "code_version": version},
            )
            write_runs(runs)
    write_runs(
        make_runs(
            "group",
            {0: 0.9},
            root=root,
            study="new",
            environment={"python": "3.11", "code_version": "two"},
        )
    )


def change_of(root: Path) -> Change:
    (change,) = build_report(root, ["old", "new"], metric=None, tolerance=None).changes
    return change


@pytest.mark.parametrize(("gain", "verdict"), [(0.02, "better"), (0.0, "tie"), (-0.02, "worse")])
def test_differences_are_paired_by_seed_and_judged(tmp_path: Path, gain: float, verdict: str):
    write_both(tmp_path, gain)
    change = change_of(tmp_path)
    assert [row["norm"] for row in change.rows] == ["batch", "batch"]
    assert {row["verdict"] for row in change.rows} == {verdict}
    assert {row["n pairs"] for row in change.rows} == {6}
    for row in change.rows:
        assert row["gain"].low < 100 * gain < row["gain"].high


def test_what_differs_in_config_and_environment_is_listed(tmp_path: Path):
    write_both(tmp_path, 0.0)
    change = change_of(tmp_path)
    assert change.config == ["epochs: 3 -> 5"]
    assert change.environment == ["code_version: one -> two"]
    assert change.alone == ["only in new: group, resnet on cifar10, batch size 128"]


def test_verdicts_stay_within_a_study(tmp_path: Path):
    write_both(tmp_path, 0.02)
    report = build_report(tmp_path, ["old", "new"], metric=None, tolerance=None)
    pairs = [(one.norm, one.reference) for s in report.sections for one in s.comparisons]
    assert pairs == [("group · new", "batch · new")]
