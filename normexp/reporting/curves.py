"""Training curves: the metrics.csv of all seeds of a cell as one curve with a band."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import altair as alt

from normexp.errors import UserError
from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE
from normexp.reporting.cells import Cell
from normexp.reporting.figures import (
    HEIGHT,
    ROWS,
    VISIBLE,
    WIDTH,
    Figure,
    encode_norm,
    finish,
    metric_axis,
)
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.numbers import format_interval
from normexp.reporting.rows import Row, interval_columns
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED, Style
from normexp.stats import mean

MOST_POINTS = 60  # of one curve; more cannot be told apart at the width of a figure
History = dict[str, dict[int, list[float]]]  # metric -> samples seen -> one value per seed


def read_history(cell: Cell) -> History:
    """Finite values of all ended seeds by metric and samples seen; no curve where a file is torn.

    A seed that diverged ends where its values do; nothing goes on in its place.
    """
    history: History = defaultdict(lambda: defaultdict(list))
    for run in cell.runs:
        path = run.directory / METRICS_FILE
        if run.result.status == "failed" or not path.exists():
            continue
        try:
            rows = read_metrics(path)
        except UserError:  # the result stands; a curve is not worth failing for
            continue
        for row in rows:
            if math.isfinite(row.value):
                history[row.name][row.samples_seen].append(row.value)
    return history


def draw_curves(
    part: Slice, styles: dict[str, Style], histories: dict[str, History]
) -> list[Figure]:
    """Training loss and the validation metric over samples, at the smallest and largest size."""
    names = ("train/loss", part.metric.selection_name)
    return [
        figure
        for name in dict.fromkeys(names)
        if (figure := _draw(part, styles, histories, describe_metric(name))) is not None
    ]


def _draw(
    part: Slice, styles: dict[str, Style], histories: dict[str, History], metric: Metric
) -> Figure | None:
    sizes = sorted({part.sizes[0], part.sizes[-1]})
    rows = [
        row
        for line in part.lines.values()
        for size in sizes
        if (cell := line.at(size)) is not None
        for row in _curve(cell, histories.get(cell.id, {}), metric, size)
    ]
    counts = Counter((row["norm"], row["size"]) for row in rows)
    if max(counts.values(), default=0) < 2:  # one validation is a point, and no curve
        return None
    norms, axis = list(part.lines), AXIS_WORDS[part.axis]
    panels = [
        _panel(norms, styles, metric_axis(metric, own), size, axis)
        for size in sizes
        if (own := [row for row in rows if row["size"] == size])
    ]
    chart = alt.vconcat(*panels, data=ROWS) if len(panels) > 1 else panels[0].properties(data=ROWS)
    caption = (
        f"{metric.label} over training samples: mean over seeds with its 95 % t interval as band. "
        "A cross marks the last value of a norm of which seeds diverged; the mean then goes on "
        "over the seeds that are left."
    )
    leaking = [norm for norm, line in part.lines.items() if _leaks_in_training(line.all_cells)]
    if metric.name == "train/loss" and leaking:
        caption += (
            f" Not comparable: {', '.join(leaking)}. In training a later position moves an "
            "earlier output there, so that this loss is no likelihood."
        )
    name = "curves_" + metric.name.replace("/", "_")
    return finish(name, f"{metric.label} during training", caption, chart, rows, part)


def _leaks_in_training(cells: Sequence[Cell]) -> bool:
    return any(cell.config.get("leaks_future_in_training") for cell in cells)


def _curve(cell: Cell, history: History, metric: Metric, size: int) -> list[Row]:
    points = sorted(history.get(metric.name, {}).items())
    every = math.ceil(len(points) / MOST_POINTS)
    kept = [point for i, point in enumerate(points) if (len(points) - 1 - i) % max(every, 1) == 0]
    rows = []
    for samples, values in kept:
        interval = mean([metric.scale * value for value in values])
        rows.append(
            {"norm": cell.norm, "size": size, "samples": samples, "lost": False}
            | interval_columns(interval)
            | {"text": format_interval(interval, metric.digits), "directory": str(cell.directory)}
        )
    if rows and cell.seeds("diverged"):
        rows[-1]["lost"] = True
    return rows


def _panel(norms: Sequence[str], styles: dict[str, Style], y: alt.Y, size: int, axis: str) -> Any:
    colour, _, dash = encode_norm(list(norms), styles)
    colour = colour.legend(
        symbolType="stroke", symbolStrokeWidth=2, symbolOpacity=1, symbolSize=300
    )
    x = (
        alt.X("samples:Q", title="training samples seen")
        .axis(format="~s", tickCount=6, labelExpr="datum.value ? datum.label : '0'")
        .scale(zero=True, nice=False)
    )
    # The loss of a seed about to diverge is a number of many digits.
    y = y.axis(labelExpr="abs(datum.value) < 1e6 ? datum.label : format(datum.value, '.2~e')")
    base = alt.Chart().transform_filter(VISIBLE).transform_filter(f"datum.size == {size}")
    tip = [
        alt.Tooltip(f"{field}:N", title=title)
        for field, title in {
            "norm": "norm",
            "samples": "samples seen",
            "text": "mean [95 % interval]",
            "n": "seeds",
            "directory": "directory",
        }.items()
    ]
    return alt.layer(
        base.mark_area(opacity=1, fillOpacity=0.15).encode(
            x, alt.Y("low:Q"), alt.Y2("high:Q"), colour
        ),
        base.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        base.mark_point(filled=True, fillOpacity=0, size=60).encode(x, y, tooltip=tip),
        base.mark_point(shape="M-1,-1L1,1M1,-1L-1,1", size=50, stroke=DIVERGED, strokeWidth=2)
        .transform_filter("datum.lost")
        .encode(x, y),
    ).properties(width=WIDTH, height=HEIGHT * 0.65, title=f"{axis} {size}")
