"""What a dry run predicts: runs, time, memory, and the smallest detectable difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_study import write_cell

from normexp.config.outcome import Outcome
from normexp.config.spec import CellSpec
from normexp.records.result import Result, Status, read_result, write_result
from normexp.reporting.dry_run import expected_seconds, power_words, print_plan
from normexp.stats.family import smallest_difference

RECORD: dict[str, Any] = {"norm": "batch", "model": "vit", "data": "digits", "batch_size": 32}
RECORD |= {"num_steps": 1000, "micro_batch_size": None, "norm_batch_size": None}
TIMING = {"step_ms": 8.0, "stack_size": 4}  # 2 s for each run of 1000 steps


def planned_cell(folder: Path, name: str, missing: int, **record: object) -> Outcome:
    planned = Outcome(Status.PLANNED, f"{name} on digits", name, folder / "new" / name)
    planned.description = RECORD | {"norm": name} | record
    planned.missing, planned.memory = list(range(missing)), 2500 * 2**20
    return planned


def test_a_plan_has_a_row_for_each_cell_and_the_totals(tmp_path: Path, capsys):
    """Two sizes of a norm that mixes no samples are one cell; another study gives the time."""
    folder = tmp_path / "before" / "c" / "seed-0"
    folder.mkdir(parents=True)
    (tmp_path / "before" / "study.jsonl").touch()
    write_result(folder, Result("c", 0, "finished", RECORD, {}, {}, timing=TIMING))
    norm, other = (
        planned_cell(tmp_path, "none", 4),
        planned_cell(tmp_path, "batch", 2, batch_size=16),
    )
    titles = ["norm=none norm_batch_size=2", "norm=none norm_batch_size=8", "norm=batch"]
    cells = [CellSpec(None, {}, title) for title in [*titles, "norm_batch_size=5"]]
    refused = Outcome(Status.REFUSED, "", error="norm_batch_size=5 does not divide batch_size=32")
    print_plan(cells, [norm, norm, other, refused], num_workers=2)
    header, *rows, reason, total, power = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0].strip() for row in rows] == ["norm=none", "norm=batch"]
    assert rows[0].split()[1:] == ["4", "0", "1,000", "8", "s", ">", "2,500", "MiB"]
    assert rows[1].split()[1:5] == ["2", "0", "1,000", "unknown"]
    assert len({row.index("1,000") for row in rows} | {header.index("steps")}) == 1
    assert "which is unknown until" in power
    assert reason == "refused: norm_batch_size=5: norm_batch_size=5 does not divide batch_size=32"
    assert total.startswith(
        "6 runs of 2 cells to do: 8 s of training, 8 s in 2 workers, and 1 cell of unknown"
    )


def test_a_recorded_cell_takes_no_time_and_one_cell_has_no_difference(tmp_path: Path, capsys):
    print_plan([CellSpec(None, {}, "norm=batch")], [planned_cell(tmp_path, "batch", 0)])
    _, row, total = capsys.readouterr().out.splitlines()
    assert row.split() == ["batch", "on", "digits", "0", "0", "1,000", "-", "-"]
    assert total == "0 runs to do: 0.0 s of training"


def test_one_cell_has_one_worker(tmp_path: Path, capsys):
    """Two sizes of a norm that does not mix samples, and a cell that is recorded."""
    one, done = planned_cell(tmp_path, "none", 4), planned_cell(tmp_path, "batch", 0)
    one.step_seconds = 0.01
    cells = [CellSpec(None, {}, title) for title in ("norm=none", "norm=none", "norm=batch")]
    print_plan(cells, [one, one, done], num_workers=2)
    assert (
        capsys.readouterr()
        .out.splitlines()[3]
        .startswith(
            "4 runs of 1 cell to do: 40 s of training (a first estimate, by a few steps of each)"
        )
    )


def timed(norm: str, step_ms: float, **config: object) -> Result:
    timing = {"step_ms": step_ms, "stack_size": 4}
    return Result("c", 0, "finished", RECORD | {"norm": norm} | config, {}, {}, timing=timing)


@pytest.mark.parametrize(
    ("norm", "config", "seconds"),
    [
        ("batch", {}, 4.0),  # 8 ms for 4 replicas: 2 ms for one, of 1000 steps and 2 replicas
        ("layer", {}, 40.0),  # another norm: the median of the same model, data and batch size
        ("batch", {"model": "other"}, None),
    ],
)
def test_expected_time_is_of_the_runs_most_alike(norm: str, config, seconds: float | None):
    runs = [timed("batch", 8.0), timed("batch", 80.0, norm_batch_size=2), timed("group", 800.0)]
    found = expected_seconds(RECORD | {"norm": norm} | config, 2, runs)
    assert found == (seconds and pytest.approx(seconds))


def test_a_plan_says_what_the_report_could_show(tmp_path: Path):
    values = {"batch": [90, 92, 91.5], "layer": [90.1, 92.1, 91.7]}
    for norm, of_seeds in values.items():
        write_cell(tmp_path, norm, dict(enumerate(np.array(of_seeds) / 100)))
    results = [read_result(path.parent) for path in tmp_path.glob("*/*/*/result.json")]
    planned = [
        Outcome(Status.PLANNED, norm, norm, missing=list(range(3, 8)), results=own)
        for norm in values
        if (own := [run for run in results if run.config["norm"] == norm])
    ]
    sd = np.std(np.subtract(values["layer"], values["batch"]), ddof=1)
    words = power_words(planned)
    assert "8 seeds and 1 comparison" in words
    assert f": {smallest_difference(8, sd, 1):.1f} pp, by the spread" in words
    assert power_words(planned[:1]) == ""
    unknown = [Outcome(Status.PLANNED, "x", "x", missing=list(range(8))) for _ in range(2)]
    assert f"{smallest_difference(8, 1.0, 1):.2g} times the standard" in power_words(unknown)
    for one in unknown:
        one.missing = [0]
    assert "one seed has no spread" in power_words(unknown)
