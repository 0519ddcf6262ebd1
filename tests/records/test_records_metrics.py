"""metrics.csv and samples.npz: what was written comes back, also after a kill."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from normexp.errors import UserError
from normexp.training.records.metrics import HEADER, MetricRow, read_metrics, write_metrics
from normexp.training.records.samples import read_samples, write_samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def test_broken_line_and_foreign_file_are_named(path: Path):
    path.write_text(f"{HEADER}\n1,0,32,train/loss,0.5\noops\n")
    with pytest.raises(UserError, match=r"metrics.csv cannot be read"):
        read_metrics(path)
    path.write_text("a,b\n1,2\n")
    for name in ("metrics.csv", "missing.csv"):
        with pytest.raises(UserError, match=name):
            read_metrics(path.with_name(name))


def test_rows_come_back_with_every_digit_below_one_header(path: Path):
    rows = [MetricRow(3, 1, 96, "train/loss", 0.1 + 0.2), MetricRow(4, 1, 128, "val/loss", 1e-300)]
    write_metrics(path, [*rows, MetricRow(9, 2, 300, "train/loss", math.inf)])
    write_metrics(path, rows)
    assert path.read_text().splitlines()[:2] == [HEADER, "3,1,96,train/loss,0.30000000000000004"]
    assert read_metrics(path) == rows


# --- samples.npz ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 8, 13, 360])
def test_right_or_not_is_packed_and_losses_are_float32(tmp_path: Path, num_samples: int):
    rng = np.random.default_rng(0)
    right = {kind: rng.random(num_samples) < 0.7 for kind in ("running", "batch32")}
    write_samples(tmp_path, right)
    found = read_samples(tmp_path)
    assert found.keys() == right.keys()
    for kind, values in right.items():
        assert found[kind].dtype == bool and np.array_equal(found[kind], values)
    with np.load(tmp_path / "samples.npz") as content:
        assert np.array_equal(content["running"], np.packbits(right["running"]))
    losses = rng.random(num_samples)
    write_samples(tmp_path, {"running": losses})
    (values,) = read_samples(tmp_path).values()
    assert values.dtype == np.float32 and np.array_equal(values, losses.astype(np.float32))


def test_run_without_the_file_has_none_and_a_torn_one_is_refused(tmp_path: Path):
    assert read_samples(tmp_path) == {}
    write_samples(tmp_path, {"running": np.ones(100, bool)})
    path = tmp_path / "samples.npz"
    for torn in (path.read_bytes()[:40], b""):
        path.write_bytes(torn)
        with pytest.raises(UserError, match=r"samples\.npz"):
            read_samples(tmp_path)
