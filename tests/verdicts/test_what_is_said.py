"""Nothing is said too much: headlines, scopes, reasons, and numbers of few seeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_study import ENVIRONMENT, cell_of, find, report_of_cells

from normexp.training.records.result import flatten
from normexp.verdicts.figures import draw_figures
from normexp.verdicts.report import Report, to_json
from normexp.verdicts.rows import Row

RNG = np.random.default_rng(13)


def draw(mean: float, n: int = 8, spread: float = 0.002) -> list[float]:
    return (mean + spread * RNG.normal(size=n)).tolist()


def measured(cell: Sequence[Row], **values: Any) -> list[Row]:
    """The runs of a cell, with other measured values."""
    others = flatten(values)
    return [replace(run, measured={**run.measured, **others}) for run in cell]


@pytest.mark.parametrize(
    ("n", "shown"), [(2, "95.0 (94.0, 96.0)"), (3, "95.0 (94.0, 95.0, 96.0)"), (4, "95.0 [")]
)
def test_of_three_seeds_or_fewer_the_seeds_are_shown_and_no_interval(n: int, shown: str):
    report = report_of_cells(
        cell_of("batch", draw(0.9, n)), cell_of("rms", [*np.linspace(0.94, 0.96, n)])
    )
    (slice_,) = report.slices
    means, ranking = report.tables_of(slice_)
    cells = next(table for table in report.tables if table.name == "cells")
    for table in (means, ranking, cells):
        texts = dict(zip(table.frame["norm"], table.frame["test accuracy (%)"], strict=True))
        assert texts["rms"].startswith(shown)
    (row,) = (
        r for r in draw_figures(slice_, [])[0].rows if (r["arm"], r["kind"]) == ("rms", "mean")
    )
    assert (row["low"] is None) == (n <= 3)
    assert find(report, "rms").gap.low is not None


def test_the_n_of_a_row_is_that_of_either_side_and_seeds_need_not_be_the_same():
    report = report_of_cells(
        cell_of("batch", draw(0.9, 4)), cell_of("rms", dict(enumerate(draw(0.9, 6), start=9)))
    )
    one = find(report, "rms")
    ranking = report.tables_of(report.slices[0])[-1].frame.set_index("norm")
    assert ranking["n"].to_dict() == {"batch": "4", "rms": "6 and 4"}
    assert one.verdict is not None and to_json(report)["comparisons"][0]["n"] == [6, 4]


def test_a_norm_without_the_metric_has_a_row_and_no_difference():
    right = {seed: np.arange(40) < 30 + seed for seed in range(3)}
    accuracies = {seed: float(samples.mean()) for seed, samples in right.items()}
    measured = cell_of("batch", accuracies, samples=right)
    report = report_of_cells(measured, cell_of("rms", [0.8] * 3, metrics={"val/loss": 0.1}))
    one = find(report, "rms")
    assert (one.why, one.gap.estimate) == ("0 of 3 seeds of rms", None)


def grid(norm: str, seeds: Sequence[int], rates: Sequence[float] = (0.01, 0.1, 1.0)) -> list[list]:
    """The best rate is the largest one."""
    return [
        cell_of(norm, dict(zip(seeds, draw(0.8 + 0.05 * place, len(seeds)), strict=True)), lr=lr)
        for place, lr in enumerate(rates)
    ]


def test_the_best_rate_at_an_edge_is_named_also_where_all_norms_have_it():
    report = report_of_cells(*grid("batch", range(4)), *grid("rms", range(4)))
    means = report.tables_of(report.slices[0])[0]
    assert all("at the edge: add 10" in text for text in means.frame["search"])


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([*grid("batch", range(2)), *grid("rms", range(2))], "to tune lr takes 3 seeds, not 2"),
        ([*grid("batch", range(4)), *grid("rms", range(4))[:2],
          cell_of("rms", draw(0.9, 6), lr=1.0)], "seeds differ between values of lr"),
    ],
)  # fmt: skip
def test_reasons_are_true(cells: list, why: str):
    assert find(report_of_cells(*cells), "rms").why == why


def test_a_norm_that_was_run_at_other_sizes_alone_is_a_row():
    sizes = [cell_of("batch", draw(0.9), norm_batch_size=size) for size in (2, 32)]
    other = cell_of("own", draw(0.9), norm_batch_size=32, mixes_samples=True)
    report = report_of_cells(*sizes, other)
    (ranking,) = report.rankings
    assert ranking.size == 32 and {place.arm for place in ranking.places} == {"batch", "own"}
    assert find(report, "own").sizes == (32, 32)
    elsewhere = cell_of("own", draw(0.9), norm_batch_size=8, mixes_samples=True)
    assert find(report_of_cells(*sizes, elsewhere), "own").why == "not run at norm batch size 2"


def test_the_scope_names_versions_code_and_early_ends_in_which_runs_differ():
    batch, rms = cell_of("batch", draw(0.9)), cell_of("rms", draw(0.9))
    assert "code_version" not in report_of_cells(batch, rms).slices[0].scope
    other = ENVIRONMENT | {"python": "3.12", "code_version": "two"}
    runs = measured(rms, environment=other, stopped="no better loss")
    scope = report_of_cells(batch, runs).slices[0].scope
    assert "python 3.11 and 3.12, code_version one and two, ended early: 8 of rms" in scope
    assert "n = 8 seeds; intervals cover the variation of seeds, not" in scope
    assert "n = 1 seed;" in report_of_cells(batch[:1], rms[:1]).slices[0].scope


def test_early_ends_are_counted_over_all_cells_of_an_arm():
    cells = [cell_of("batch", draw(0.9), lr=lr) for lr in (0.1, 0.3)]
    early = [measured(cell[:1], stopped="no better loss") + cell[1:] for cell in cells]
    assert "ended early: 2 of batch, n" in report_of_cells(*early).slices[0].scope


def many(means: dict[str, float], **more: Any) -> list[list[Row]]:
    return [cell_of(norm, draw(mean), **more) for norm, mean in means.items()]


def sized(*sizes: float, norm: str = "batch", **more: Any) -> list[list[Row]]:
    return [
        cell_of(norm, draw(mean), norm_batch_size=size, mixes_samples=True, **more)
        for size, mean in zip((2, 32), sizes, strict=True)
    ]


def bits(norm: str, value: float, **more: Any) -> list[Row]:
    metrics = [{"test/bits_per_byte": v} for v in draw(value)]
    runs = (cell_of(norm, {k: 0.5}, metrics=m, **more) for k, m in enumerate(metrics))
    return [run for one in runs for run in one]


@pytest.mark.parametrize(
    ("cells", "headline"),
    [
        ([*sized(0.8, 0.9), *many({"layer": 0.95})],
         "At 2, batch norm loses 10.0 pp against 32; layer norm is ahead."),
        ([*sized(0.8, 0.9), *many({"layer": 0.95, "rms": 0.9})],
         "At 2, batch norm loses 10.0 pp against 32; layer norm is ahead."),
        ([*sized(0.8, 0.9), *many({"layer": 0.8, "rms": 0.8})],
         "At 2, batch norm loses 10.0 pp against 32; 3 of 3 norms may lead."),
        (sized(0.9, 0.9), "batch norm at 2 and 32 tie within 1 pp."),
        ([*(bits("batch", 2.2, norm_batch_size=size) for size in (2, 16)),
          bits("layer", 2.0), bits("group", 2.1)],
         "batch norm at 2 and 16 tie; layer norm is ahead."),
        (many({"batch": 0.9, "own": 0.95}), "own is 5.0 pp ahead of batch norm."),
        (many({"batch": 0.9, "own": 0.85}), "batch norm is 5.0 pp ahead of own."),
        (many({"batch": 0.9, "own": 0.9}), "own and batch norm tie within 1 pp."),
        (many({"batch": 0.9, "own": 0.95, "rms": 0.95}), "rms norm"),
        (many({"batch": 0.9}), "nothing to compare: one norm, one size; train another norm"),
        ([*(bits("batch", v, norm_batch_size=s) for s, v in ((2, 2.7), (16, 2.2))),
          bits("layer", 2.0), bits("group", 2.1)],
         "At 2, batch norm loses 0.500 bits per byte against 16; layer norm is ahead."),
        ([*sized(0.7, 0.9, norm="batch", knobs={"momentum": 0.5, "eps": 0.1}),
          *sized(0.8, 0.9, norm="batch", knobs={"momentum": 0.1, "eps": 0.1})], "loses"),
    ],
)  # fmt: skip
def test_a_headline_has_at_most_fifteen_words(cells: list, headline: str):
    report: Report = report_of_cells(*cells)
    (said,) = map(report.headline, report.slices)
    assert len(said.split()) <= 15

    assert re.sub(r"[\d.]+", "0", headline) in re.sub(r"[\d.]+", "0", said)


def test_seeds_that_diverged_stand_in_the_headline():
    """Their means count them as chance level, so the difference is theirs."""
    lost = [None, None, *draw(0.9, 6)]
    report = report_of_cells(cell_of("batch", draw(0.9)), cell_of("own", lost))
    assert report.headline(report.slices[0]).endswith("; own: 2 diverged.")


def test_norms_at_chance_are_never_the_best():
    cells = [cell_of(norm, draw(0.09, spread=0.001)) for norm in ("batch", "own", "rms")]
    report = report_of_cells(*cells)
    assert report.rankings[0].best == []
    assert report.headline(report.slices[0]) == "all are at chance."
    assert "●" not in str(report.tables[0].frame)
    unsure = [0.11, 0.7, 0.12, 0.9, 0.13, 0.11, 0.8, 0.14]
    with_one = report_of_cells(*cells, cell_of("layer", unsure))
    assert find(with_one, "layer").verdict == "undecided"
    assert with_one.rankings[0].best == ["layer"]


def test_cross_fitting_is_named_where_numbers_are_cross_fitted():
    """After a search two norms may differ in their learning rates, and nothing is cross-fitted."""

    def note(cells: Sequence[Sequence[Row]]) -> str:
        tables = report_of_cells(*cells).tables
        return next(table for table in tables if table.name == "cells").note

    assert "cross-fitted" in note(grid("batch", range(4)))
    searched = [cell_of("batch", draw(0.9), lr=0.1), cell_of("own", draw(0.9), lr=0.3)]
    assert note(searched) == ""
