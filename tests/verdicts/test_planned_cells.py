"""A study that is being trained: what was asked for counts, ended or not."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_study import cell_of, find, report_of_cells, write_cell

import normexp
from normexp.training.records.journal import CommandEntry, Request, append_entry
from normexp.verdicts.report import Report
from normexp.verdicts.rows import PlannedCell, Row

RNG = np.random.default_rng(8)
SEEDS = range(4)


def draw(mean: float) -> list[float]:
    return (mean + 0.002 * RNG.normal(size=len(SEEDS))).tolist()


def planned(**words: Any) -> PlannedCell:
    """A cell of which no run has ended."""
    config = trained(words)[0].config
    cell_id = "-".join(map(str, words.values()))
    return PlannedCell("synthetic", cell_id, Path("runs", "synthetic", cell_id), SEEDS, config)


def request_of(**words: Any) -> Request:
    """As a command asks for the cell."""
    typed = [f"{key}={value}" for key, value in words.items()]
    return Request(typed, [*SEEDS], dict(trained(words)[0].config))


def trained(words: dict[str, Any]) -> list[Row]:
    knobs = {"momentum": words["norm.momentum"]} if "norm.momentum" in words else {}
    typed = {key: value for key, value in words.items() if key != "norm.momentum"}
    mixes = words["norm"] in ("batch", "ghost")
    return cell_of(**typed, accuracies=draw(0.9), mixes_samples=mixes, knobs=knobs)


GRIDS = {
    "norms": {"norm": ["batch", "group", "layer", "rms", "own.Norm"]},
    "sizes": {"norm": ["batch", "ghost"], "norm_batch_size": [2, 8, 32]},
    "budgets": {"norm": ["batch", "group", "rms"], "epochs": [2, 6]},
    "learning rates": {"norm": ["batch", "group", "rms"], "lr": [0.03, 0.3]},
    "data": {"norm": ["batch", "rms"], "data": ["digits", "moons"]},
    "knobs": {"norm": ["batch"], "norm.momentum": [0.1, 0.3, 0.9]},
    "batch sizes": {"norm": ["batch", "ghost"], "batch_size": [16, 64]},
}


def families(report: Report) -> set[tuple[str, int]]:
    return {(one.slice.title, one.family_size) for one in report.comparisons}


@pytest.mark.parametrize("name", GRIDS)
def test_the_family_is_that_of_the_whole_study(name: str):
    grid = GRIDS[name]
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]

    whole = families(report_of_cells(*map(trained, points)))
    cells = [trained(words) for words in points]
    for ended in range(1, len(points)):
        rest = [planned(**words) for words in points[ended:]]
        found = families(report_of_cells(*cells[:ended], planned=rest))
        assert found and found <= whole


def test_a_norm_without_an_ended_run_is_a_row_and_there_is_no_best():
    cells = [cell_of("batch", draw(0.9)), cell_of("layer", draw(0.95))]
    report = report_of_cells(*cells, planned=[planned(norm="rms"), planned(norm="group")])
    one = find(report, "rms")
    assert (one.verdict, one.why) == (None, "0 of 4 seeds of rms")
    assert find(report, "layer").verdict == "better"
    headline = report.headline(report.slices[0])
    assert "2 norms are not ranked" in headline and "layer norm is ahead" not in headline
    assert report.counts == "4 cells, 8 runs: 8 finished; 8 runs missing"


def test_a_size_that_has_not_begun_is_not_at_chance():
    cells = [
        cell_of(norm, draw(0.9), norm_batch_size=8, mixes_samples=True)
        for norm in ("batch", "ghost")
    ]
    rest = [planned(norm=norm, norm_batch_size=2) for norm in ("batch", "ghost")]
    report = report_of_cells(*cells, planned=rest)
    (slice_,) = report.slices
    assert find(report, "batch at 2", "batch at 8").why == "0 of 4 seeds of batch"
    assert "chance" not in report.headline(slice_)
    assert not any(side.is_at_chance for side in slice_.arms_at_sizes)


def test_a_norm_with_a_failed_seed_is_named_in_the_headline():
    cells = [cell_of("batch", draw(0.9)), cell_of("layer", draw(0.95))]
    report = report_of_cells(*cells, cell_of("rms", draw(0.97), failed=[3]))
    assert find(report, "rms").why == "3 of 4 seeds of rms"
    headline = report.headline(report.slices[0])
    assert headline == "layer norm is ahead; rms norm is not ranked."


def test_what_a_command_asked_for_is_read_from_the_study(tmp_path: Path):
    for norm in ("batch", "group"):
        write_cell(tmp_path, norm, dict(enumerate(draw(0.9))))
    known = [path.name for path in (tmp_path / "synthetic").iterdir()]
    asked = {name: request_of(norm=name.split("-")[0]) for name in known}
    asked |= {f"{norm}-x": request_of(norm=norm) for norm in ("layer", "rms")}
    append_entry(tmp_path / "synthetic", CommandEntry("1", ["normexp-train"], "one", asked))
    report = normexp.load_report("synthetic", tmp_path)
    assert find(report, "group").family_size == 4 and find(report, "layer").gap.n == 0
    assert not report.problems


def test_diverged_runs_of_a_metric_without_a_chance_level_are_counted_and_give_no_verdict():
    batch, group = (
        [run for seed in SEEDS for run in cell_of(norm, {seed: value(seed)}, metrics={
            "test/perplexity": 5 + shift + RNG.normal(0, 0.01)})]
        for norm, shift, value in (
            ("batch", 0, lambda _: 0.9), ("group", -2, lambda seed: None if seed == 1 else 0.9))
    )  # fmt: skip
    report = report_of_cells(batch, group, metric="test/perplexity")
    one = find(report, "group")
    assert (one.verdict, one.why) == (None, "1 of 4 seeds of group diverged")
    means = report.tables_of(report.slices[0])[0]
    assert "missing from its mean" in means.note and [*means.frame["n"]] == ["4", "3"]
    assert "group norm is ahead" not in report.headline(report.slices[0])


def test_workloads_stand_beside_each_other_each_with_its_own_mark():
    """No number is over several of them: they may share test samples."""
    means = {"easy": {"batch": 0.99, "rms": 0.95}, "hard": {"batch": 0.6, "rms": 0.7}}
    cells = [
        cell_of(norm, draw(mean), data=data)
        for data, of_norms in means.items()
        for norm, mean in of_norms.items()
    ]
    (table,) = [one for one in report_of_cells(*cells).tables if one.name == "workloads"]
    _, easy, hard = table.frame.columns
    marked = {column: ["●" in text for text in table.frame[column]] for column in (easy, hard)}
    assert [*table.frame["norm"]] == ["batch", "rms"]
    assert marked == {easy: [True, False], hard: [False, True]}
