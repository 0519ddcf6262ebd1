"""Rows of tables and figures, as dicts of plain values by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from normexp.reporting.metric import Metric, format_interval
from normexp.reporting.model import CellRow, Values, mean_of, step_of
from normexp.stats.interval import Interval
from normexp.stats.outliers import lies_apart

Row = dict[Any, Any]  # column to plain value


def plain_rows(table: pd.DataFrame) -> list[Row]:
    """The rows as dicts of plain Python values; missing is None."""
    return [
        {name: None if value != value else value for name, value in row.items()}  # NaN is not NaN
        for row in table.to_dict("records")
    ]


def frame_of(rows: Sequence[Row], columns: Sequence[str]) -> pd.DataFrame:
    """A table of rows that may lack columns."""
    return pd.DataFrame(rows, columns=list(columns), dtype=object)


def interval_row(interval: Interval, digits: int) -> Row:
    return {
        "mean": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "text": format_interval(interval, digits),
    }


def mean_rows(values: Mapping[CellRow, Values], metric: Metric) -> dict[CellRow, Row]:
    """Each cell with its mean over seeds, and what is missing."""
    of_data = {cell.data: [other for other in values if other.data == cell.data] for cell in values}
    steps = {data: step_of(values[cell] for cell in same) for data, same in of_data.items()}
    return {
        cell: _mean_row(cell, by_seed, metric, steps[cell.data]) for cell, by_seed in values.items()
    }


def _mean_row(cell: CellRow, values: Values, metric: Metric, step: float) -> Row:
    interval = mean_of(values, metric, step)
    worst = (min if metric.higher_is_better else max)(values.values(), default=None)
    shown = ", ".join(f"{seed}: {x:.{metric.digits + 1}f}" for seed, x in values.items())
    return {
        "norm": cell.norm,
        "model": cell.model,
        "data": cell.data,
        **interval_row(interval, metric.digits),
        "worst seed": _rounded(worst, metric.digits),
        "seeds apart": int(lies_apart(list(values.values()), step=step).sum()) or None,
        "expected": cell.expected,
        "diverged": cell.diverged,
        "failed": cell.failed,
        "missing": cell.missing,
        "digits": metric.digits,
        "count": _count_words(cell, interval.n),
        "seeds": shown or "none finished",
        "directory": str(cell.directory),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _count_words(cell: CellRow, n: int) -> str:
    """`8`, or `5/8 ×2 ?1`: ×k diverged, !k failed, ?k missing."""
    lost = {"×": cell.diverged, "!": cell.failed, "?": cell.missing}
    marks = " ".join(f"{mark}{count}" for mark, count in lost.items() if count)
    return f"{n}/{cell.expected} {marks}" if marks else str(n)
