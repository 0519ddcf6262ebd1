"""Curves and diagnostics of training, read from each run's metrics.csv."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.charts import (
    HEIGHT,
    LINE,
    ROWS,
    WIDTH,
    Figure,
    Styles,
    draw_lines,
    encode_style,
    label_ends,
    metric_axis,
    tooltip,
)
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.model import AXIS_WORDS, RunRow, Slice
from normexp.reporting.rows import Row, interval_row, plain_rows
from normexp.reporting.style import DIVERGED, STATISTICS_STYLES
from normexp.stats.interval import mean

WILD = 1.5  # times the highest first loss; a diverging norm leaves the scale there
MAX_POINTS = 60  # of one curve; more cannot be told apart at the width of a figure
MAX_POINTS_OF_SEED = 40  # of the curve of one run, in the small figures of an opened cell
DIGITS = 5  # of the values of such a curve
CROSS = "M-1,-1L1,1M1,-1L-1,1"
DIAGNOSTICS = {
    "output_rms": "rms of the output",
    "input_std": "sd of the input",
    "dead": "share of channels that are dead after a ReLU",
    "running_gap": "|batch mean - running mean| / running sd",
    "saturated": "share of values where the norm is flat",
    "grad_norm": "gradient norm of the norm's parameters",
}

SCATTER = {"mean_scatter": "means of groups", "var_scatter": "variances of groups"}
DISTANCES = {"mean_distance": "running mean", "var_distance": "running variance"}
RATES = {"grad_norm": "gradient norm", "effective_lr": "effective learning rate"}


def curve_table(runs: Sequence[RunRow]) -> pd.DataFrame:
    """Every finite value of these runs: `seed`, `name`, `samples` and `value`."""
    rows = [
        (run.seed, row.name, row.samples_seen, row.value) for run in runs for row in run.history()
    ]
    return pd.DataFrame(rows, columns=["seed", "name", "samples", "value"])


def _thinned(curve: Any, most: int) -> Any:
    """At most `most` points in equal steps, the last point among them."""
    every = math.ceil(len(curve) / most)
    return curve[(len(curve) - 1) % every :: every]


# Figures of a slice


def draw_history(part: Slice, styles: Styles) -> Iterator[Figure]:
    """Curves at the smallest and the largest size, and diagnostics at the smallest."""
    tables = []
    for size, cell in part.points:
        if size not in (part.sizes[0], part.sizes[-1]):
            continue
        table = curve_table([run for run in cell.runs if run.result.status != "failed"])
        words = {"norm": cell.norm, "size": size, "cell": str(cell.directory)}
        tables.append(table.assign(**words, diverged=cell.diverged))
    values = pd.concat(tables, ignore_index=True)
    yield from _draw_curves(part, styles, values)
    if len(part.sizes) > 1:
        yield from _draw_groups(part, values)
    yield from _draw_sites(part, styles, values[values["size"] == part.sizes[0]])


def _draw_curves(part: Slice, styles: Styles, values: pd.DataFrame) -> Iterator[Figure]:
    """Training loss and validation metric over samples: a panel for each size."""
    leaking = dict.fromkeys(
        cell.norm for _, cell in part.points if cell.config.get("leaks_future_in_training") is True
    )
    for name in dict.fromkeys(["train/loss", part.metric.selection_name]):
        metric, curve_values = describe_metric(name), values[values["name"] == name]
        curves = [
            _mean_curve(curve, metric, max(cell.step(metric) for cell in part.values))
            for _, curve in curve_values.groupby(["norm", "size"], sort=False)
        ]
        if max(map(len, curves), default=0) < 2:  # a single validation is a point, not a curve
            continue
        table = pd.DataFrame(sum(curves, []))
        panels = [
            _panel(part, styles, metric, curve_values) for _, curve_values in table.groupby("size")
        ]
        caption = (
            f"{metric.label} over training samples: mean over seeds with its 95 % interval as "
            "band. A cross marks the last value of a norm with diverged seeds; the mean then "
            "continues over the remaining seeds. A loss far above its start is drawn at the upper "
            "edge."
        )
        if name == "train/loss" and len(leaking):
            caption += (
                f" Not comparable: {', '.join(leaking)}. In training, later positions influence "
                "earlier outputs of these norms, so this loss is meaningless."
            )
        title = f"{metric.label} during training"
        yield Figure(
            f"curves_{name.replace('/', '_')}", title, caption, alt.vconcat(*panels), table
        )


def _mean_curve(curve: pd.DataFrame, metric: Metric, step: float) -> list[Row]:
    """The mean over seeds of one norm at one size, with its interval, by samples seen.

    step: see `CellRow.step`
    """
    (point,) = plain_rows(curve[["norm", "size", "cell", "diverged"]].head(1))
    rows = [
        {"norm": point["norm"], "size": point["size"], "samples": samples, "lost": False}
        | interval_row(mean(metric.scale * seed_values, step=step, bounds=metric.bounds), metric)
        | {"directory": point["cell"]}
        for samples, seed_values in _thinned(list(curve.groupby("samples")["value"]), MAX_POINTS)
    ]
    rows[-1]["lost"] = point["diverged"] > 0
    return rows


def _panel(part: Slice, styles: Styles, metric: Metric, table: pd.DataFrame) -> Any:
    """The curves at one size."""
    size, height = table["size"].iloc[0], max(HEIGHT * 0.65, LINE * len(styles))
    channels = encode_style(styles, legend=False)
    colour, _, dash = channels
    x = alt.X("samples:Q", title="training samples seen").scale(zero=True, nice=False)
    x = x.axis(format="~s", tickCount=6, labelExpr="datum.value ? datum.label : '0'")
    most = math.inf
    if not metric.higher_is_better:
        most = WILD * table.drop_duplicates("norm")["mean"].max()
    y = metric_axis(metric, table, most=most)
    tip = tooltip("norm", "samples", "text", "n", "directory")
    chart = alt.Chart()
    cross = chart.mark_point(shape=CROSS, size=50, stroke=DIVERGED, strokeWidth=2)
    layers = [
        chart.mark_area(opacity=1, fillOpacity=0.15).encode(
            x, alt.Y("low:Q"), alt.Y2("high:Q"), colour
        ),
        chart.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        chart.mark_point(filled=True, fillOpacity=0, size=60).encode(x, y, tooltip=tip),
        cross.transform_filter("datum.lost").encode(x, y),
    ]
    layers = [layer.transform_filter(f"datum.size == {size}") for layer in layers]
    labels = label_ends(table, x, y, channels, height=height)
    title = f"{AXIS_WORDS[part.axis]} {size}"
    return alt.layer(*layers, *labels).properties(width=WIDTH, height=height, title=title)


def _draw_sites(part: Slice, styles: Styles, values: pd.DataFrame) -> Iterator[Figure]:
    """Each diagnostic at the end of training: norm sites in order of depth, a line per norm."""
    values = values[values["name"].str.match("diagnostics/")]
    last = values["samples"] == values.groupby(["cell", "name"])["samples"].transform("max")
    table = values[last].groupby(["norm", "size", "cell", "name"], sort=False)["value"]
    table = table.agg(value="mean", n="size").reset_index()
    table[["site", "diagnostic"]] = table["name"].str.extract("diagnostics/(.*)/(.*)")
    columns = ["norm", "size", "site", "diagnostic", "value", "n", "directory"]
    table = table.rename(columns={"cell": "directory"})[columns]
    where = f"{AXIS_WORDS[part.axis]} {part.sizes[0]}"
    tip = tooltip("norm", "site", "value:Q", "n:Q", "directory")
    for name, title in DIAGNOSTICS.items():
        of_diagnostic = table[table["diagnostic"] == name]
        if of_diagnostic.empty:
            continue
        x = alt.X("site:N", title="norm site, by depth", sort=list(of_diagnostic["site"].unique()))
        x = x.axis(labelAngle=-45, labelLimit=130, labelOverlap="greedy")
        y = alt.Y("value:Q", title=title).scale(zero=False)
        lines = draw_lines(x, y, encode_style(styles), tip, intervals=False, size=44)
        chart = alt.layer(*lines).properties(width=WIDTH, height=220)
        caption = f"{title} at each norm site after training, {where}; mean over seeds."
        yield Figure(f"sites_{name}", f"{title}, {where}", caption, chart, of_diagnostic)


# Why a norm that mixes samples falls at its smallest size


def _draw_groups(part: Slice, values: pd.DataFrame) -> Iterator[Figure]:
    """Statistics of groups, averages and gradients at the smallest and the largest size."""
    values = values[~values["norm"].isin(part.independent)]
    values = values.assign(
        site=values["name"].str.extract("diagnostics/(.*)/", expand=False),
        measured=values["name"].str.extract("([^/]*)$", expand=False),
    )
    scatter = values[values["measured"].isin(SCATTER)]
    if part.axis != "norm_batch_size" or scatter["size"].nunique() < 2:
        return
    known = scatter.groupby("norm")["size"].nunique() == 2
    values = values[values["norm"].isin(known.index[known])]
    small, large = part.sizes[0], part.sizes[-1]
    styles = {
        f"{AXIS_WORDS[part.axis]} {size}": STATISTICS_STYLES[place]
        for place, size in enumerate((small, large))
    }
    law = f"{small}, expected from {large}"
    last = values["samples"] == values.groupby(["cell", "name"])["samples"].transform("max")
    table = _table_of_sizes(part, values[last], SCATTER, ["site"])
    factor = math.sqrt(large / small)
    expected = table[table["size"] == large].assign(size=small, series=law, n=None)
    expected[["mean", "low", "high"]] = expected[["mean", "low", "high"]].astype(float) * factor
    with_law = {**styles, law: STATISTICS_STYLES[2]}
    x = alt.X("site:N", title="norm site, by depth", sort=list(table["site"].unique()))
    x = x.axis(labelAngle=-45, labelLimit=110, labelOverlap="greedy")
    yield _figure_of_sizes(
        "group_scatter",
        "How the statistics of groups scatter",
        "After training, over groups of samples that share statistics: the standard deviation of "
        "their means, in standard deviations of all values, and of their variances, in variances "
        "of all values; mean over channels, then over seeds with its 95 % interval. Of independent "
        f"samples the variance of a statistic falls as 1 / size: the third line is {factor:.3g} "
        f"times that of size {large}.",
        pd.concat([table, expected]),
        x,
        with_law,
    )
    x = alt.X("samples:Q", title="training samples seen").scale(zero=True, nice=False)
    x = x.axis(format="~s", tickCount=4)
    if values["measured"].isin(DISTANCES).any():  # a norm may keep no averages
        yield _figure_of_sizes(
            "averages_distance",
            "Running averages against the statistics of groups",
            "How far running mean and variance are from those of all values, in standard "
            "deviations of the statistic between groups, its noise: mean over channels and sites, "
            "then over seeds with its 95 % interval. Groups of the largest size are few, so some "
            "tenths are the error of this measurement.",
            _table_of_sizes(part, values, DISTANCES, ["samples"]),
            x,
            styles,
        )
    is_whole = values["name"] == "train/grad_norm"
    of_runs = values[is_whole | (values["measured"] == "effective_lr")]
    yield _figure_of_sizes(
        "gradient_and_rate",
        "Gradient norm and effective learning rate",
        "Norm of the gradient over all parameters, after any clipping, at single steps; and "
        "lr / |w|^2, of weights before a norm, which undoes their scale (arXiv:1706.05350), of "
        "SGD, mean over sites. Mean over seeds with its 95 % interval.",
        _table_of_sizes(part, of_runs, RATES, ["samples"]),
        x,
        styles,
    )


def _table_of_sizes(
    part: Slice, values: pd.DataFrame, panels: Mapping[str, str], by: list[str]
) -> pd.DataFrame:
    """The mean over seeds of what was measured, with its interval; a panel for each quantity."""
    keys = ["norm", "size", "measured", *by]
    values = values[values["measured"].isin(panels)]
    values = values.sort_values("measured", key=lambda m: m.map([*panels].index), kind="stable")
    of_seeds = values.groupby([*keys, "seed"], sort=False)["value"].mean().reset_index()
    norms, rows = values["norm"].nunique(), []
    for key, group in of_seeds.groupby(keys, sort=False):
        row: Row = dict(zip(keys, key, strict=True))
        interval = mean(group["value"])
        words = panels[row["measured"]]
        row |= {"mean": interval.estimate, "low": interval.low, "high": interval.high}
        row |= {"n": interval.n, "panel": words if norms == 1 else f"{row['norm']}: {words}"}
        rows.append(row | {"series": f"{AXIS_WORDS[part.axis]} {row['size']}"})
    table = pd.DataFrame(rows)
    if "samples" in by:  # curves of single steps have many points
        curves = [
            _thinned(curve, MAX_POINTS)
            for _, curve in table.groupby(["panel", "series"], sort=False)
        ]
        table = pd.concat(curves)
    return table


def _figure_of_sizes(
    name: str, title: str, caption: str, table: pd.DataFrame, x: alt.X, styles: Styles
) -> Figure:
    """A panel for each quantity, each with its own axes; the sizes beside each other as lines."""
    y = alt.Y("mean:Q", title=None).scale(zero=True).axis(format="~g", tickCount=5)
    tip = tooltip("norm", "series", str(x["shorthand"]), "mean:Q", "low:Q", "high:Q", "n:Q")
    lines = draw_lines(x, y, encode_style(styles, "series"), tip, size=30)
    panel = alt.layer(*lines).properties(width=200, height=150)
    facet = alt.Facet("panel:N", title=None, sort=list(table["panel"].unique()))
    chart = panel.facet(facet, columns=2, data=ROWS)
    chart = chart.resolve_axis(x="independent", y="independent").resolve_scale(y="independent")
    return Figure(name, title, caption, chart, table, fit="facet")
