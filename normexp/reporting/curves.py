"""Figures of what happened during training, read from each run's metrics.csv."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from normexp.errors import UserError
from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE
from normexp.reporting.figures import (
    HEIGHT,
    ROWS,
    WIDTH,
    Figure,
    Styles,
    encode_norm,
    make_figure,
    metric_axis,
    tooltip,
    visible,
)
from normexp.reporting.frame import Row, interval_row, plain_rows
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED
from normexp.stats import mean

MOST_POINTS = 60  # of one curve; more cannot be told apart at the width of a figure
History = dict[str, dict[str, pd.DataFrame]]  # by cell and metric
CROSS = "M-1,-1L1,1M1,-1L-1,1"
DIAGNOSTICS = {
    "output_rms": "rms of the output",
    "input_std": "sd of the input",
    "dead": "share of channels that are dead after a ReLU",
    "running_gap": "|batch mean - running mean| / running sd",
    "saturated": "share of values where the norm is flat",
    "grad_norm": "gradient norm of the norm's parameters",
}


def draw_history(part: Slice, styles: Styles) -> list[Figure]:
    """Draws training loss and validation metric over samples, and diagnostics after training.

    Curves show the smallest and the largest size, diagnostics the smallest.
    """
    history = _read_history(part)
    metrics = dict.fromkeys(["train/loss", part.metric.selection_name])
    curves = [_draw_curve(part, styles, history, describe_metric(name)) for name in metrics]
    return [*filter(None, curves), *_draw_sites(part, styles, history)]


def _read_history(part: Slice) -> History:
    """Finite values of all seeds, by cell and metric: columns `samples` and `value`.

    The curve of a diverged seed ends with its values. A run with a torn file has no curve, but does
    not fail the report.
    """
    ends = part.points["cell"][part.points["size"].isin([part.sizes[0], part.sizes[-1]])]
    runs = part.runs[part.runs["cell"].isin(ends) & (part.runs["status"] != "failed")]
    rows = []
    for cell, directory in zip(runs["cell"], runs["directory"], strict=True):
        with suppress(UserError):
            for row in read_metrics(Path(directory) / METRICS_FILE):
                if math.isfinite(row.value):
                    rows.append((cell, row.name, row.samples_seen, row.value))
    table = pd.DataFrame(rows, columns=["cell", "name", "samples", "value"])
    return {
        str(cell): {str(name): own for name, own in of_cell.groupby("name", sort=False)}
        for cell, of_cell in table.groupby("cell", sort=False)
    }


def _draw_curve(part: Slice, styles: Styles, history: History, metric: Metric) -> Figure | None:
    rows = [
        row
        for point in plain_rows(part.points)
        if point["size"] in (part.sizes[0], part.sizes[-1])
        for row in _curve(point, history.get(point["cell"], {}).get(metric.name), metric)
    ]
    counts = Counter((row["norm"], row["size"]) for row in rows)
    if max(counts.values(), default=0) < 2:  # a single validation is a point, not a curve
        return None
    panels = [
        _panel(part, styles, metric_axis(metric, own), size)
        for size in sorted({part.sizes[0], part.sizes[-1]})
        if (own := [row for row in rows if row["size"] == size])
    ]
    chart = alt.vconcat(*panels, data=ROWS) if len(panels) > 1 else panels[0].properties(data=ROWS)
    caption = (
        f"{metric.label} over training samples: mean over seeds with its 95 % t interval as band. "
        "A cross marks the last value of a norm with diverged seeds; the mean then continues "
        "over the remaining seeds."
    )
    leaking = part.points["norm"][part.points["leaks_in_training"]].unique()
    if metric.name == "train/loss" and len(leaking):
        caption += (
            f" Not comparable: {', '.join(leaking)}. In training, later positions influence "
            "earlier outputs of these norms, so this loss is meaningless."
        )
    name = "curves_" + metric.name.replace("/", "_")
    return make_figure(name, f"{metric.label} during training", caption, chart, rows, part)


def _curve(point: Row, values: pd.DataFrame | None, metric: Metric) -> list[Row]:
    """At most MOST_POINTS rows of one norm at one size, the last point always among them."""
    if values is None:
        return []
    points = list(values.groupby("samples")["value"])
    every = math.ceil(len(points) / MOST_POINTS)
    rows = [
        {"norm": point["norm"], "size": point["size"], "samples": samples, "lost": False}
        | interval_row(mean(metric.scale * own, bounds=metric.bounds), metric.digits)
        | {"directory": point["cell"]}
        for samples, own in points[(len(points) - 1) % every :: every]
    ]
    rows[-1]["lost"] = point["diverged"] > 0
    return rows


def _panel(part: Slice, styles: Styles, y: alt.Y, size: int) -> Any:
    colour, _, dash = encode_norm(part.norms, styles)
    colour = colour.legend(
        symbolType="stroke", symbolStrokeWidth=2, symbolOpacity=1, symbolSize=300
    )
    x = (
        alt.X("samples:Q", title="training samples seen")
        .axis(format="~s", tickCount=6, labelExpr="datum.value ? datum.label : '0'")
        .scale(zero=True, nice=False)
    )
    # The loss of a seed about to diverge has many digits.
    y = y.axis(labelExpr="abs(datum.value) < 1e6 ? datum.label : format(datum.value, '.2~e')")
    base = visible().transform_filter(f"datum.size == {size}")
    cross = base.mark_point(shape=CROSS, size=50, stroke=DIVERGED, strokeWidth=2)
    tip = tooltip("norm", "samples", "text", "n", "directory")
    return alt.layer(
        base.mark_area(opacity=1, fillOpacity=0.15).encode(
            x, alt.Y("low:Q"), alt.Y2("high:Q"), colour
        ),
        base.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        base.mark_point(filled=True, fillOpacity=0, size=60).encode(x, y, tooltip=tip),
        cross.transform_filter("datum.lost").encode(x, y),
    ).properties(width=WIDTH, height=HEIGHT * 0.65, title=f"{AXIS_WORDS[part.axis]} {size}")


def _draw_sites(part: Slice, styles: Styles, history: History) -> list[Figure]:
    """One figure per diagnostic: norm sites in order of depth, a line per norm."""
    rows = _site_rows(part, history)
    where = f"{AXIS_WORDS[part.axis]} {part.sizes[0]}"
    figures = []
    for name, title in DIAGNOSTICS.items():
        own = [row for row in rows if row["diagnostic"] == name]
        if own:
            chart = _site_chart(part, styles, title, list(dict.fromkeys(r["site"] for r in own)))
            caption = f"{title} at each norm site after training, {where}; mean over seeds."
            heading = f"{title}, {where}"
            figures.append(make_figure(f"sites_{name}", heading, caption, chart, own, part))
    return figures


def _site_chart(part: Slice, styles: Styles, title: str, sites: list[str]) -> Any:
    colour, shape, dash = encode_norm(part.norms, styles)
    x = alt.X("site:N", title="norm site, by depth", sort=sites).axis(
        labelAngle=-45, labelLimit=130, labelOverlap="greedy"
    )
    y = alt.Y("value:Q", title=title).scale(zero=False)
    tip = tooltip("norm", "site", "value:Q", "n:Q", "directory")
    dots = visible().mark_point(filled=True, opacity=1, size=44)
    return alt.layer(
        visible().mark_line(strokeWidth=1.4).encode(x, y, colour, dash),
        dots.encode(x, y, colour, shape, tooltip=tip),
        data=ROWS,
    ).properties(width=560, height=220)


def _site_rows(part: Slice, history: History) -> list[Row]:
    rows = []
    for point in plain_rows(part.smallest):
        for name, values in history.get(point["cell"], {}).items():
            if name.startswith("diagnostics/"):
                site, _, diagnostic = name.removeprefix("diagnostics/").rpartition("/")
                last = values["value"][values["samples"] == values["samples"].max()]
                rows.append(
                    {
                        "norm": point["norm"],
                        "size": point["size"],
                        "site": site,
                        "diagnostic": diagnostic,
                        "value": float(last.mean()),
                        "n": len(last),
                        "directory": point["cell"],
                    }
                )
    return rows
