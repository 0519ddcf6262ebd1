"""metrics.csv and samples.npz: what was written comes back, also after a kill."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import numpy as np
import pytest

from normexp.errors import UserError
from normexp.records.metrics import HEADER, MetricRow, MetricsWriter, read_metrics
from normexp.records.samples import read_samples, write_samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def write_steps(writer: MetricsWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.add(step, step // 4, 32 * step, {"train/loss": 1 / step, "val/accuracy": step / 7})


def test_rows_come_back_with_every_digit(path: Path):
    with MetricsWriter(path) as writer:
        writer.add(3, 1, 96, {"train/loss": 0.1 + 0.2, "val/loss": 1e-300})
        assert not path.exists()  # rows wait until flush
        writer.add(4, 1, 128, {"train/loss": 1})
    assert path.read_text().splitlines() == [
        "step,epoch,samples_seen,name,value",
        "3,1,96,train/loss,0.30000000000000004",
        "3,1,96,val/loss,1e-300",
        "4,1,128,train/loss,1.0",
    ]
    assert read_metrics(path)[0] == MetricRow(3, 1, 96, "train/loss", 0.1 + 0.2)


def test_header_is_written_once_by_several_writers_in_turn(path: Path):
    for step in (1, 2, 3):
        with MetricsWriter(path) as writer:
            write_steps(writer, step, step)
            writer.flush()
    assert path.read_text().count(HEADER) == 1
    assert [row.step for row in read_metrics(path)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.slow
def test_history_of_a_resumed_run_is_the_undisturbed_one_byte_for_byte(tmp_path: Path):
    with MetricsWriter(tmp_path / "undisturbed.csv") as writer:
        write_steps(writer, 1, 9)
    expected = (tmp_path / "undisturbed.csv").read_bytes()
    for length in range(len(expected) + 1):  # killed after any byte, with a checkpoint of step 4
        path = tmp_path / "resumed.csv"
        rows_to_4 = expected.find(b"5,1,160,")
        path.write_bytes(expected[: max(length, rows_to_4)])
        with MetricsWriter(path) as writer:
            writer.truncate_after(4)
            write_steps(writer, 5, 9)
        assert path.read_bytes() == expected


def test_truncate_keeps_the_rows_of_the_step_and_drops_waiting_ones(path: Path):
    with MetricsWriter(path) as writer:
        write_steps(writer, 1, 9)
        writer.flush()
        write_steps(writer, 10, 12)
        writer.truncate_after(3)
    assert {row.step for row in read_metrics(path)} == {1, 2, 3}
    MetricsWriter(path).truncate_after(-1)
    assert path.read_text() == HEADER + "\n"


@pytest.mark.parametrize("content", ["", "step,ep"])
def test_torn_header_is_an_empty_history(path: Path, content: str):
    path.write_text(content)
    assert read_metrics(path) == []
    with MetricsWriter(path) as writer:
        write_steps(writer, 1, 1)
    assert len(read_metrics(path)) == 2
    assert path.read_text().startswith(HEADER + "\n")


def test_full_disk_leaves_whole_rows_and_nothing_is_lost(path: Path):
    with MetricsWriter(path) as writer:
        write_steps(writer, 1, 1)
    before = path.read_bytes()
    write_steps(writer, 2, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    writer.flush()
    assert [row.step for row in read_metrics(path)] == [1, 1, 2, 2]


def test_loss_that_is_not_finite_is_recorded_as_such(path: Path):
    with MetricsWriter(path) as writer:
        writer.add(1, 0, 32, {"train/loss": math.inf})
        writer.add(2, 0, 64, {"train/loss": math.nan})
    first, second = read_metrics(path)
    assert first.value == math.inf
    assert math.isnan(second.value)


@pytest.mark.parametrize("name", ["", "a,b", 'a"b', "a\nb"])
def test_name_that_would_break_the_csv_is_refused(path: Path, name: str):
    with pytest.raises(ValueError, match="metric name"):
        MetricsWriter(path).add(1, 0, 32, {name: 1.0})


def test_broken_line_and_foreign_file_are_named(path: Path):
    path.write_text(f"{HEADER}\n1,0,32,train/loss,0.5\noops\n")
    for action in (lambda: read_metrics(path), lambda: MetricsWriter(path).truncate_after(0)):
        with pytest.raises(UserError, match=r"metrics.csv line 3 .*'oops'"):
            action()
    path.write_text("a,b\n1,2\n")
    for name in ("metrics.csv", "missing.csv"):
        with pytest.raises(UserError, match=name):
            read_metrics(path.with_name(name))


def test_rows_that_were_written_after_the_last_checkpoint_are_not_doubled(path: Path):
    """A run that is killed after its test resumes from its last step, and tests once more."""
    with MetricsWriter(path) as writer:
        writer.add(8, 1, 64, {"val/loss": 0.25})  # a checkpoint follows
        writer.add(8, 1, 64, {"test/loss": 0.5})
    whole = path.read_bytes()
    with MetricsWriter(path) as resumed:
        resumed.truncate_after(8)
        resumed.add(8, 1, 64, {"test/loss": 0.5})
    assert path.read_bytes() == whole


# --- samples.npz ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 8, 13, 360])
def test_right_or_not_is_packed_and_read_back(tmp_path: Path, num_samples: int):
    rng = np.random.default_rng(0)
    samples = {kind: rng.random(num_samples) < 0.7 for kind in ("running", "batch32")}
    write_samples(tmp_path, samples)
    found = read_samples(tmp_path)
    assert found.keys() == samples.keys()
    for kind, right in samples.items():
        assert found[kind].dtype == bool
        assert np.array_equal(found[kind], right)
    with np.load(tmp_path / "samples.npz") as content:
        assert np.array_equal(content["running"], np.packbits(samples["running"]))


def test_losses_are_float32(tmp_path: Path):
    write_samples(tmp_path, {"running": np.array([1.5, 2.25])})
    (found,) = read_samples(tmp_path).values()
    assert found.dtype == np.float32
    assert found.tolist() == [1.5, 2.25]


def test_run_without_the_file_has_none_and_a_torn_one_is_refused(tmp_path: Path):
    assert read_samples(tmp_path) == {}
    write_samples(tmp_path, {"running": np.ones(100, bool)})
    path = tmp_path / "samples.npz"
    for torn in (path.read_bytes()[:40], b""):
        path.write_bytes(torn)
        with pytest.raises(UserError, match=r"samples\.npz"):
            read_samples(tmp_path)
