"""metrics.csv and samples.npz: what was written comes back, also after a kill."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import numpy as np
import pytest

from normexp.errors import UserError
from normexp.records.metrics import HEADER, MetricRow, MetricsWriter, fault_of, read_metrics
from normexp.records.samples import read_samples, write_samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def write_steps(writer: MetricsWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.add(step, step // 4, 32 * step, {"train/loss": 1 / step, "val/accuracy": step / 7})


def test_rows_come_back_with_every_digit_below_one_header(path: Path):
    with MetricsWriter(path) as writer:
        writer.add(3, 1, 96, {"train/loss": 0.1 + 0.2, "val/loss": 1e-300})
        assert not path.exists()  # rows wait until flush
        writer.add(4, 1, 128, {"train/loss": 1})
    with MetricsWriter(path) as again:
        again.add(5, 1, 160, {"train/loss": math.inf})
        again.add(6, 1, 192, {"train/loss": math.nan})
        again.flush()
    assert path.read_text().splitlines() == [
        "step,epoch,samples_seen,name,value",
        "3,1,96,train/loss,0.30000000000000004",
        "3,1,96,val/loss,1e-300",
        "4,1,128,train/loss,1.0",
        "5,1,160,train/loss,inf",
        "6,1,192,train/loss,nan",
    ]
    rows = read_metrics(path)
    assert rows[0] == MetricRow(3, 1, 96, "train/loss", 0.1 + 0.2)
    assert rows[3].value == math.inf and math.isnan(rows[4].value)


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
    whole = path.read_bytes()
    with MetricsWriter(path) as resumed:  # from its last step, at which a run is tested once more
        resumed.truncate_after(3)
        write_steps(resumed, 3, 3)
    assert path.read_bytes() == whole
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


def test_rows_wait_on_a_full_disk(path: Path):
    writer = MetricsWriter(path)
    write_steps(writer, 1, 1)
    writer.flush()
    before = path.read_bytes()
    write_steps(writer, 2, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    writer.flush()
    assert [row.step for row in read_metrics(path)] == [1, 1, 2, 2]


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


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (f"{HEADER}\n1,0,32,train/loss,0.5\n2,0,64,train/loss,nan\n", ""),
        ("", "is empty"),
        (f"{HEADER}\n1,0,32,train/loss,0.5\n2,0,64,train/lo", "is torn at line 3"),
        (f"{HEADER}\noops\n2,0,64,train/loss,0.5\n", "is torn at line 2"),
        ("step,ep\n2,0,64,train/loss,0.5\n", "is torn at line 1"),
        (f"{HEADER}\n1,0,32,train/loss,0.5\n", "ends at step 1 of 2"),
        (f"{HEADER}\n", "ends at step 0 of 2"),
    ],
)
def test_fault_of_a_file_that_lost_rows(path: Path, content: str, fault: str):
    path.write_text(content)
    assert fault_of(path, 2) == fault


def test_a_resumed_run_says_that_earlier_rows_are_lost(
    path: Path, caplog: pytest.LogCaptureFixture
):
    MetricsWriter(path).truncate_after(-1)  # without a checkpoint none was written
    assert not caplog.records
    path.touch()
    MetricsWriter(path).truncate_after(4)
    assert "lost its rows up to step 4" in caplog.text


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
