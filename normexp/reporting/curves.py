"""Figures of what happened during training, read from each run's metrics.csv."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from normexp.errors import UserError
from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE
from normexp.reporting.cells import interval_row
from normexp.reporting.charts import (
    HEIGHT,
    LINE,
    ROWS,
    WIDTH,
    Figure,
    Styles,
    encode_norm,
    end_labels,
    lines,
    make_figure,
    metric_axis,
    tooltip,
    visible,
)
from normexp.reporting.frame import Row, plain_rows
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED
from normexp.stats.interval import mean

WILD = 1.5  # times the highest first loss; a diverging norm leaves the scale there
MOST_POINTS = 60  # of one curve; more cannot be told apart at the width of a figure
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
    """Training loss and validation metric over samples, and diagnostics after training.

    Curves show the smallest and the largest size, diagnostics the smallest.
    """
    history = _read_history(part)
    metrics = dict.fromkeys(["train/loss", part.metric.selection_name])
    curves = [_draw_curve(part, styles, history, describe_metric(name)) for name in metrics]
    return [*filter(None, curves), *_draw_sites(part, styles, history)]


def _read_history(part: Slice) -> pd.DataFrame:
    """Finite values of all seeds: `name`, `samples` and `value`, with the columns of their point.

    The curve of a diverged seed ends with its values. A run with a torn file has no curve, but does
    not fail the report.
    """
    points = part.points[part.points["size"].isin([part.sizes[0], part.sizes[-1]])]
    runs = part.runs[part.runs["cell"].isin(points["cell"]) & (part.runs["status"] != "failed")]
    rows = []
    for cell, directory in zip(runs["cell"], runs["directory"], strict=True):
        with suppress(UserError):
            for row in read_metrics(Path(directory) / METRICS_FILE):
                if math.isfinite(row.value):
                    rows.append((cell, row.name, row.samples_seen, row.value))
    table = pd.DataFrame(rows, columns=["cell", "name", "samples", "value"])
    return points[["norm", "size", "cell", "diverged"]].merge(table, on="cell")


def _draw_curve(
    part: Slice, styles: Styles, history: pd.DataFrame, metric: Metric
) -> Figure | None:
    own = history[history["name"] == metric.name]
    curves = [_curve(curve, metric) for _, curve in own.groupby(["norm", "size"], sort=False)]
    if max(map(len, curves), default=0) < 2:  # a single validation is a point, not a curve
        return None
    rows = sum(curves, [])
    sizes = sorted({row["size"] for row in rows})
    chart = alt.vconcat(*(_panel(part, styles, metric, rows, size) for size in sizes), data=ROWS)
    caption = (
        f"{metric.label} over training samples: mean over seeds with its 95 % interval as band. "
        "A cross marks the last value of a norm with diverged seeds; the mean then continues "
        "over the remaining seeds. A loss far above its start is drawn at the upper edge."
    )
    leaking = part.points["norm"][part.points["leaks_in_training"]].unique()
    if metric.name == "train/loss" and len(leaking):
        caption += (
            f" Not comparable: {', '.join(leaking)}. In training, later positions influence "
            "earlier outputs of these norms, so this loss is meaningless."
        )
    name = "curves_" + metric.name.replace("/", "_")
    return make_figure(name, f"{metric.label} during training", caption, chart, rows, part)


def _curve(curve: pd.DataFrame, metric: Metric) -> list[Row]:
    """At most MOST_POINTS rows of one norm at one size, the last point always among them."""
    point = plain_rows(curve[["norm", "size", "cell", "diverged"]].head(1))[0]
    values = list(curve.groupby("samples")["value"])
    every = math.ceil(len(values) / MOST_POINTS)
    rows = [
        {"norm": point["norm"], "size": point["size"], "samples": samples, "lost": False}
        | interval_row(mean(metric.scale * own, bounds=metric.bounds), metric.digits)
        | {"directory": point["cell"]}
        for samples, own in values[(len(values) - 1) % every :: every]
    ]
    rows[-1]["lost"] = point["diverged"] > 0
    return rows


def _panel(part: Slice, styles: Styles, metric: Metric, rows: list[Row], size: int) -> Any:
    channels = encode_norm(part.norms, styles, legend=False)
    colour, _, dash = channels
    height = max(HEIGHT * 0.65, LINE * len(part.norms))
    own = [row for row in rows if row["size"] == size]
    x = (
        alt.X("samples:Q", title="training samples seen")
        .axis(format="~s", tickCount=6, labelExpr="datum.value ? datum.label : '0'")
        .scale(zero=True, nice=False)
    )
    first = {row["norm"]: row["mean"] for row in reversed(own)}
    most = math.inf if metric.higher_is_better else WILD * max(first.values())
    y = metric_axis(metric, own, most=most)
    base = visible(f"datum.size == {size}")
    cross = base.mark_point(shape=CROSS, size=50, stroke=DIVERGED, strokeWidth=2)
    tip = tooltip("norm", "samples", "text", "n", "directory")
    return alt.layer(
        base.mark_area(opacity=1, fillOpacity=0.15).encode(
            x, alt.Y("low:Q"), alt.Y2("high:Q"), colour
        ),
        base.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        base.mark_point(filled=True, fillOpacity=0, size=60).encode(x, y, tooltip=tip),
        cross.transform_filter("datum.lost").encode(x, y),
        *end_labels(own, x, y, channels, height=height),
    ).properties(width=WIDTH, height=height, title=f"{AXIS_WORDS[part.axis]} {size}")


def _draw_sites(part: Slice, styles: Styles, history: pd.DataFrame) -> list[Figure]:
    """One figure per diagnostic: norm sites in order of depth, a line per norm."""
    own = history[(history["size"] == part.sizes[0]) & history["name"].str.match("diagnostics/")]
    last = own[own["samples"] == own.groupby(["cell", "name"])["samples"].transform("max")]
    keys = ["norm", "size", "cell", "name"]
    table = last.groupby(keys, sort=False)["value"].agg(["mean", "size"])
    rows = []
    for (norm, size, cell, name), (value, n) in zip(table.index, table.to_numpy(), strict=True):
        site, _, diagnostic = name.removeprefix("diagnostics/").rpartition("/")
        row = {"norm": norm, "size": size, "site": site, "diagnostic": diagnostic}
        rows.append(row | {"value": value, "n": int(n), "directory": cell})
    where = f"{AXIS_WORDS[part.axis]} {part.sizes[0]}"
    figures = []
    for name, title in DIAGNOSTICS.items():
        if shown := [row for row in rows if row["diagnostic"] == name]:
            caption = f"{title} at each norm site after training, {where}; mean over seeds."
            chart = _site_chart(part, styles, title, list(dict.fromkeys(r["site"] for r in shown)))
            heading = f"{title}, {where}"
            figures.append(make_figure(f"sites_{name}", heading, caption, chart, shown, part))
    return figures


def _site_chart(part: Slice, styles: Styles, title: str, sites: list[str]) -> Any:
    x = alt.X("site:N", title="norm site, by depth", sort=sites).axis(
        labelAngle=-45, labelLimit=130, labelOverlap="greedy"
    )
    y = alt.Y("value:Q", title=title).scale(zero=False)
    tip = tooltip("norm", "site", "value:Q", "n:Q", "directory")
    layers = lines(x, y, encode_norm(part.norms, styles), tip, intervals=False, size=44)
    return alt.layer(*layers, data=ROWS).properties(width=WIDTH, height=220)
