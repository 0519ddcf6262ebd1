"""What a dry run predicts: runs, time, memory, and the smallest detectable difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from normexp.config.outcome import Outcome
from synthetic_study import write_cell

from normexp.config.spec import CellSpec
from normexp.records.result import Result, Status, write_result
from normexp.reporting.dry_run import (
    expected_seconds,
    family_size,
    power_words,
    print_plan,
    read_runs,
)
from normexp.stats.family import seeds_for, smallest_difference

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
    header, *rows, reason, total = capsys.readouterr().out.splitlines()  # nothing to compare
    assert [row.split("  ")[0].strip() for row in rows] == ["norm=none", "norm=batch"]
    assert rows[0].split()[1:] == ["4", "0", "1,000", "8", "s", ">", "2,500", "MiB"]
    assert rows[1].split()[1:5] == ["2", "0", "1,000", "unknown"]
    assert len({row.index("1,000") for row in rows} | {header.index("steps")}) == 1
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
    """Each difference by its own spread: group is six times as noisy as batch."""
    values = {"batch": [90, 92, 91.5], "layer": [90.1, 92.1, 91.7], "group": [80, 92.3, 84]}
    for norm, of_seeds in values.items():
        for size in (2, 8) if norm == "batch" else (None,):
            shift = 0.5 * (size == 2) * np.array([1, -1, 0.4])
            seeds = dict(enumerate((np.array(of_seeds) + shift) / 100))
            write_cell(tmp_path, norm, seeds, batch_size=8, norm_batch_size=size, num_steps=9)
    runs = read_runs(tmp_path / "synthetic")
    records = {run.directory.parent.name: run.result.config for run in runs}
    planned = [
        Outcome(Status.PLANNED, name, name, description=record, missing=list(range(8)))
        for name, record in records.items()
    ]
    # batch from 8 to 2, layer and group against batch, and the choice of the best
    assert family_size(planned) == 4 and power_words(planned[:1], runs) == ""
    _, first, *others = power_words(planned, runs).splitlines()
    sd = np.std(np.array(values["group"]) - [90.5, 91.5, 91.7], ddof=1)
    assert first.strip().startswith(
        f"group and batch at norm batch size 2: {smallest_difference(8, sd, 4):.2g} points "
        f"(spread of 3 seeds); 1 point takes {seeds_for(1.0, sd, 4)} seeds"
    )
    sd = np.std([0.5, -0.5, 0.2], ddof=1)
    along = f"batch, norm batch size 2 and 8: {smallest_difference(8, sd, 4):.2g} points (spread"
    assert len(others) == 2 and sum(along in line for line in others) == 1
    unknown = power_words(planned, [run for run in runs if run.seed == 0])
    assert f"{smallest_difference(8, 1.0, 4):.2g} times the standard deviation" in unknown
    some = power_words(planned, [run for run in runs if run.config["norm"] == "batch"])
    assert "2 differences unknown until two seeds" in some
    for one in planned:
        one.description = {**one.description, "num_steps": 90}
    assert power_words(planned, runs).count("of trainings unlike these") == 3
    for one in planned:
        one.missing = [0]
    assert "one seed has no spread" in power_words(planned, runs)


@pytest.mark.parametrize(
    ("own", "count"),
    [
        ([{"batch_size": size} for size in (8, 32, 128)], 1),  # from 128 to 8
        ([{"lr": lr} for lr in (0.1, 0.3)], 0),  # no size varies
        # two differences and their change
        ([{"num_steps": s, "norm_batch_size": n} for s in (10, 40) for n in (2, 8)], 3),
        ([{"batch_size": b, "num_steps": 1024 // b} for b in (8, 32, 128)], 1),  # equal samples
    ],
)
def test_verdicts_of_one_norm_are_counted_by_size_and_budget(own: list[dict], count: int):
    known = RECORD | {"norm": "batch", "mixes_samples": True}
    planned = []
    for number, one in enumerate(own):
        steps = one.get("num_steps", 640 // one.get("batch_size", 32))
        record = known | {"num_steps": steps, "epochs": steps / 20} | one
        planned.append(Outcome(Status.PLANNED, "batch", str(number), description=record))
    assert family_size(planned) == count
