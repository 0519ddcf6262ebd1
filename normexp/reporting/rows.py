"""Rows of tables and figures, as dicts of plain values by column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from normexp.reporting.metric import Metric, format_mean
from normexp.reporting.model import CellRow
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


def interval_row(interval: Interval, metric: Metric) -> Row:
    return {
        "mean": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "text": format_mean(interval, metric),
    }


def mean_rows(cells: Iterable[CellRow], metric: Metric) -> dict[CellRow, Row]:
    """Each cell with its mean over seeds, and what is missing."""
    return {cell: _mean_row(cell, metric) for cell in dict.fromkeys(cells)}


def _mean_row(cell: CellRow, metric: Metric) -> Row:
    interval, values = cell.mean(metric), cell.values(metric)
    worst = (min if metric.higher_is_better else max)(values.values(), default=None)
    shown = ", ".join(f"{seed}: {x:.{metric.digits + 1}f}" for seed, x in values.items())
    num_apart = int(lies_apart(list(values.values()), step=cell.step(metric)).sum())
    return {
        "norm": cell.norm,
        "model": cell.model,
        "data": cell.data,
        **interval_row(interval, metric),
        "worst seed": None if worst is None else f"{worst:z.{metric.digits}f}",
        "seeds apart": num_apart or None,
        "expected": cell.expected,
        "diverged": cell.diverged,
        "failed": cell.failed,
        "missing": cell.missing,
        "count": count_words(cell, interval.n),
        "seeds": shown or "none finished",
        "directory": str(cell.directory),
    }


def count_words(cell: CellRow, n: int, at_chance: int | None = None) -> str:
    """`8`, or `5/8 ×2 ?1`: see metric.COUNT_MARKS."""
    at_chance = len(cell.at_chance) if at_chance is None else at_chance
    lost = {"×": cell.diverged, "!": cell.failed, "?": cell.missing, "~": at_chance}
    marks = " ".join(f"{mark}{count}" for mark, count in lost.items() if count)
    return f"{n}/{cell.expected} {marks}" if marks else str(n)
