"""Ladders: whether a difference has one sign at every width."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from synthetic_study import cell_of, report_of_cells

from normexp.verdicts.family import difference
from normexp.verdicts.ladder import Ladder, find_ladders
from normexp.verdicts.report import Report

RNG = np.random.default_rng(41)


def study(leads: Mapping[int, float]) -> Report:
    """Two norms at some widths; leads: of layer norm, in percentage points."""
    cells = []
    for width, lead in leads.items():
        for norm, mean in (("batch", 0.8), ("layer", 0.8 + lead / 100)):
            values = (mean + 0.002 * RNG.normal(size=6)).tolist()
            cells.append(cell_of(norm, values, **{"model.width": width}))
    return report_of_cells(*cells)


def ladder_of(report: Report) -> Ladder:
    """That of the norms; widths of one norm are no ladder."""
    (ladder,) = find_ladders(report.comparisons)
    return ladder


@pytest.mark.parametrize(
    ("leads", "verdict", "why"),
    [
        ({8: 3, 32: 4, 16: 5}, "better", ""),
        ({8: -3, 32: -4}, "worse", ""),
        ({8: 3, 32: -3}, "turns", "better at 8; worse at 32"),
        ({8: 3, 16: 0.1, 32: 3}, "undecided", "better at 8, 32; tie at 16"),
    ],
)
def test_a_sign_holds_where_it_is_shown_at_every_width(
    leads: dict[int, float], verdict: str, why: str
):
    report = study(leads)
    ladder = ladder_of(report)
    assert (ladder.key, ladder.rungs) == ("model.width", sorted(leads))
    assert (ladder.verdict, ladder.why) == (verdict, why)
    table = next(table for table in report.tables if table.name == "ladders")
    (row,) = table.frame.to_dict("records")
    assert row["over"] == f"model.width {', '.join(map(str, sorted(leads)))}"


def test_the_least_difference_covers_the_least_truth():
    """Each bound in 97.5 %, with all rungs equal, where each may be the least."""
    below, above = 0, 0
    for _ in range(1000):
        gaps = [difference(*RNG.normal([[3], [0]], 1, (2, 6))) for _ in range(3)]
        rungs: Any = [SimpleNamespace(gap=gap) for gap in gaps]
        least = Ladder("model.width", (8, 16, 32), rungs).least
        assert least.low is not None and least.high is not None
        below += least.low > 3
        above += least.high < 3
    limit = scipy_stats.binom.ppf(0.999, 1000, 0.025)
    assert below <= limit and above <= limit
