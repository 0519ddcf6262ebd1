"""The figures of a slice: a function for each question yields those that have data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.charts import (
    AXIS_TITLES,
    HEIGHT,
    LINE,
    POINT_TIP,
    WIDTH,
    Figure,
    Styles,
    draw_lines,
    draw_squares,
    encode_style,
    find_outsiders,
    in_panels,
    label_ends,
    metric_axis,
    shade_shortfall,
    size_axis,
    tooltip,
)
from normexp.reporting.curves import draw_history
from normexp.reporting.metric import COUNT_MARKS, Metric, describe_metric
from normexp.reporting.model import AXIS_WORDS, CellRow, Slice, metric_names
from normexp.reporting.rows import Row, frame_of, interval_row, mean_rows, plain_rows
from normexp.reporting.style import DIVERGED, ORDER, SLOTS, STATISTICS_STYLES, order_norms

GREY = "#808080"  # readable on light and dark
MEANS = [  # columns of a figure of means
    *("norm", "model", "data", "mean", "low", "high", "n", "text", "expected", "diverged"),
    *("failed", "missing", "count", "seeds", "directory", "size"),
]
LEAST_SQUARES = 4  # of a figure of learning rates; fewer are told in the table of cells
Points = Sequence[tuple[int, CellRow]]  # sizes with their cells
MEASURED = ["samples_per_second", "step_ms", "stack_size", "peak_memory_mb"]
COSTS = {
    "samples_per_second": (
        "throughput",
        "Throughput",
        "training samples per second, of the whole stack",
        "Training speed, one point per cell: the median over its runs. The runs of a stack share "
        "one time, so there is no interval over seeds.",
    ),
    "peak_memory_mb": (
        "memory",
        "Memory",
        "peak GPU memory of the whole stack (MB)",
        "Peak memory of tensors during training and evaluation, in 10^6 bytes, one point per cell. "
        "Measured for the whole stack, so it grows with the number of seeds trained together.",
    ),
}


def draw_figures(part: Slice, styles: Styles) -> list[Figure]:
    """Every figure for which the slice has data, the main one first."""
    styles_of_part = {norm: styles[norm] for norm in part.norms}
    rows = (
        (draw_means, draw_statistics, draw_learning_rates, draw_groups),
        (draw_history,),
        (draw_cost,),
    )
    over_rates = (draw_learning_rates, *([draw_means] if part.is_tuned else []))
    return [
        replace(
            figure,
            name=f"{figure.name}_{part.slug}",
            kind=figure.name,
            row=row,
            subtitle=part.heading,
            caption=figure.caption + ("" if draw in over_rates else _rate_words(part)),
        )
        for row, questions in enumerate(rows)
        for draw in questions
        for figure in draw(part, styles_of_part)
    ]


def _rate_words(part: Slice) -> str:
    """` Learning rates, chosen on validation: batch 0.1; group 0.3 at 2, 0.1 at 8.`"""
    rates = {
        norm: {size: cell.lr for size, cell in line.items() if cell.lr is not None}
        for norm, line in part.lines.items()
    }
    distinct = {lr for of_norm in rates.values() for lr in of_norm.values()}
    if len(distinct) < 2:
        return f" Every norm at lr={distinct.pop():g}." if distinct else ""

    def words(norm: str) -> str:
        of_norm = rates[norm]
        if len(set(of_norm.values())) == 1:
            return f"{norm} {next(iter(of_norm.values())):g}"
        return f"{norm} {', '.join(f'{lr:g} at {size}' for size, lr in of_norm.items())}"

    chosen = ", chosen on validation" if part.rates else ""
    return f" Learning rates{chosen}: {'; '.join(words(norm) for norm in rates if rates[norm])}."


def _means_of(part: Slice, points: Points, metric: Metric | None = None) -> list[Row]:
    """For each point, its size and the mean of the cell over its seeds.

    metric: that of the slice if None, and then cells that a grid tunes have their cross-fitted mean
    """
    cells = [cell for _, cell in points]
    rows = mean_rows(cells, metric or part.metric)
    for cell in cells:
        if metric is None and part.tuned(cell) is not None:
            rows[cell] |= interval_row(part.mean(cell), part.metric)
    return [rows[cell] | {"size": size} for size, cell in points]


# The metric against the size


def draw_means(part: Slice, styles: Styles) -> Iterator[Figure]:
    """The metric against the size: as lines over a strip of counts, and as a heat map."""
    step = min(0.09, 0.66 / len(styles))
    place = {norm: k - (len(styles) - 1) / 2 for k, norm in enumerate(styles)}
    rows = _means_of(part, part.points)
    for (size, cell), row in zip(part.points, rows, strict=True):
        row["x"] = size * 2.0 ** (step * place[cell.norm])
        row["independent"] = cell.norm in part.independent
        row["note"] = part.search_words(cell)
        if row["independent"]:
            row["note"] = "one cell: independent of the norm batch size by measurement"
    table = frame_of(rows, [*MEANS, "x", "independent", "note"])
    if table["mean"].notna().any():
        by = _metric_by_size if len(part.sizes) > 1 else _metric_by_norm
        yield by(part, styles, table)
        mixing = len(part.norms) - len(part.independent)
        is_full = 2 * len(part.points) > len(part.norms) * len(part.sizes)
        if len(part.sizes) > 1 and mixing > 1 and is_full:  # else lines show as much
            yield _heat_map(part, table)


def _metric_by_size(part: Slice, styles: Styles, table: pd.DataFrame) -> Figure:
    outside = find_outsiders(part.metric, table)
    caption = (
        f"{part.metric.label} against the {AXIS_TITLES[part.axis]}: mean and 95 % interval over "
        "the seeds that finished, which stays within an accuracy's limits; points are moved "
        "sideways a little so that intervals stay apart. Below, the number of seeds behind each "
        f"point: {COUNT_MARKS}."
    )
    if table["independent"].any():
        caption += (
            " Hollow markers: a norm that does not depend on this size by measurement, trained "
            "once and drawn at every size."
        )
    if part.is_tuned:
        caption += (
            " Learning rates are tuned: some seeds choose the rate, the others report, averaged "
            "over all splits; the interval allows for the luck of the choice."
        )
    if outside:
        caption += f" Arrows at the edge: {', '.join(outside)}, beyond the scale."
    title = f"{part.metric.label} by {AXIS_WORDS[part.axis]}"
    panels = _metric_panel(part, styles, table, outside), _count_strip(part)
    chart = alt.vconcat(*panels, spacing=12)
    return Figure("metric_by_size", title, caption, chart, table, fit="strip")


def _metric_by_norm(part: Slice, styles: Styles, table: pd.DataFrame) -> Figure:
    """A point with its interval for each norm, at the only size."""
    colour, shape, _ = encode_style(styles, legend=False)
    outside = find_outsiders(part.metric, table)
    axis = metric_axis(part.metric, table[~table["norm"].isin(outside)])
    x = alt.X("mean:Q", title=axis["title"], scale=axis["scale"]).axis(tickCount=8)
    y = alt.Y("norm:N", title=None, sort=part.norms).axis(labelLimit=150, grid=True)
    chart = alt.Chart()
    rule = chart.mark_rule(strokeWidth=1.6).encode(alt.X("low:Q"), y, colour, x2="high:Q")
    point = chart.mark_point(filled=True, opacity=1, size=64)
    tip = tooltip(*POINT_TIP)
    layers = alt.layer(rule, point.encode(x, y, colour, shape, tooltip=tip))
    caption = f"{part.metric.label}: mean and 95 % interval over the seeds that finished."
    beyond = ", ".join(
        f"{row['norm']} {row['mean']:.3g}" for row in plain_rows(table) if row["norm"] in outside
    )
    caption += f" Beyond the scale: {beyond}." if beyond else ""
    lost = table[table["count"].str.contains("/")]
    if len(lost):
        counts = ", ".join(f"{row['norm']} {row['count']}" for row in plain_rows(lost))
        caption += f" Seeds ({COUNT_MARKS}): {counts}."
    title = f"{part.metric.label} by norm"
    chart = layers.properties(width=WIDTH, height=alt.Step(26))
    return Figure("metric_by_size", title, caption, chart, table)


def _metric_panel(part: Slice, styles: Styles, table: pd.DataFrame, outside: list[str]) -> Any:
    x = size_axis(part, "x", grid=True)
    y = metric_axis(part.metric, table[~table["norm"].isin(outside)])
    channels = encode_style(styles, legend=False)
    height = max(HEIGHT, LINE * len(styles))
    lines = draw_lines(x, y, channels, tooltip(*POINT_TIP), outside=outside)
    labels = label_ends(table, x, y, channels, outside, height=height)
    return alt.layer(*lines, *labels).properties(width=WIDTH, height=height)


def _count_strip(part: Slice) -> alt.Chart:
    """Seeds behind each point, so that every interval shows its n and what diverged."""
    lost = "datum.diverged > 0 || datum.failed > 0"
    y = alt.Y("norm:N", title="seeds", sort=part.norms)
    y = y.axis(labelFontSize=10, ticks=False, domain=False, labelLimit=150)
    chart = alt.Chart().mark_text(fontSize=10)
    return chart.encode(
        size_axis(part, "size", labels=False),
        y,
        alt.Text("count:N"),
        color=alt.condition(lost, alt.value(DIVERGED), alt.value(GREY)),
        tooltip=tooltip(*POINT_TIP),
    ).properties(width=WIDTH, height=alt.Step(15))


def _heat_map(part: Slice, table: pd.DataFrame) -> Figure:
    colour, table = shade_shortfall(part.metric, table)
    table = _with_square_text(table)
    x = alt.X("size:O", title=AXIS_TITLES[part.axis], sort=part.sizes).axis(labelAngle=0)
    y = alt.Y("norm:N", title=None, sort=part.norms)
    chart = draw_squares(x, y, _gradient(colour), tooltip(*POINT_TIP))
    caption = (
        f"Mean {part.metric.label} with its 95 % interval, or the number of seeds where some are "
        "lost. The colour is the distance from the best mean, on a scale that is finer near it. "
        "Grey: no seed finished; blank: not run."
    )
    title = f"{part.metric.label} by norm and size"
    return Figure("heat_map", title, caption, chart, table, fit="none")


def _gradient(colour: alt.Color) -> alt.Color:
    return colour.legend(orient="bottom", gradientLength=220, direction="horizontal", tickCount=4)


def _with_square_text(table: pd.DataFrame) -> pd.DataFrame:
    """Adds `value`, and `under`: the interval, or the counts if runs are lost."""
    failed = table["failed"].map("{} failed".format).where(table["failed"] > 0, "-")
    lost = table["diverged"].map("×{}".format).where(table["diverged"] > 0, failed)
    is_whole = table["n"] == table["expected"]
    texts = table["text"].str.partition(" ")  # mean, space and interval
    value = texts[0].where(table["mean"].notna(), lost)
    return table.assign(value=value, under=table["count"].where(~is_whole, texts[2]))


# Kinds of statistics


def draw_statistics(part: Slice, _: Styles) -> Iterator[Figure]:
    """The metric by kind of evaluation statistics, a panel per norm that depends on the size.

    On the validation split if the test split has running statistics only.
    """
    points = [(size, cell) for size, cell in part.points if cell.norm not in part.independent]
    kinds = _statistics_of(part, points)
    rows = []
    for name, kind in kinds.items():
        words = {"statistics": kind, "metric": describe_metric(name.partition("@")[0]).label}
        means = _means_of(part, points, describe_metric(name)) if points else []
        rows += [row | words | {"note": ""} for row in means if row["n"]]
    if not rows:
        return
    table = frame_of(rows, [*MEANS, "statistics", "metric", "note"])
    first = [kind for kind in ("running", "precise") if kind in set(table["statistics"])]
    order = [*first, *order_norms(set(table["statistics"]) - set(first))]
    last = len(STATISTICS_STYLES) - 1
    styles_of_kinds = {
        kind: STATISTICS_STYLES[min(place, last)] for place, kind in enumerate(order)
    }
    x = size_axis(part, "size", title=part.axis.replace("_", " "))
    y = metric_axis(part.metric, table, label=table["metric"].iloc[0])
    tip = tooltip("norm", "statistics", *POINT_TIP[1:])
    layers = draw_lines(
        x, y, encode_style(styles_of_kinds, "statistics", "evaluated with"), tip, size=40
    )
    panel = alt.layer(*layers).properties(width=200, height=150)
    caption = (
        f"The same trained networks, evaluated with {'; '.join(map(_statistics_words, order))}. "
        "Where the results are apart by more than their intervals, running averages do not stand "
        "for the statistics of the trained network."
    )
    title, name = "Evaluation statistics", "evaluation_statistics"
    yield Figure(name, title, caption, in_panels(panel, part), table, fit="facet")


def _statistics_words(kind: str) -> str:
    """What a kind of statistics in the legend is."""
    size = kind.removeprefix("batch")
    words = {
        "running": "running averages",
        "precise": "statistics over training samples",
        "own_share": "precise, but each sample shapes its own statistics as much as in training",
        "batch": "those of as many samples as in training",
    }.get(kind, f"those of {size} sample{'s' * (size != '1')}")
    return f"{kind}: {words}"


def _statistics_of(part: Slice, points: Points) -> dict[str, str]:
    """The kind of statistics behind each metric name, as the legend shows it.

    `batch@<size>` is shortened to `batch` if every cell used its own norm batch size.
    """
    base = part.metric.name.partition("@")[0]
    for candidate in (base, base.replace("test/", "val/")):
        names = [name for name in metric_names(part.values) if name.partition("@")[0] == candidate]
        if any("@" in name for name in names):
            break
    else:
        return {}
    used = {
        (name.partition("@batch")[2], str(cell.norm_batch_size))
        for _, cell in points
        for name in metric_names([cell])
        if "@batch" in name
    }
    as_in_training = len(used) > 1 and all(
        size == norm_batch_size for size, norm_batch_size in used
    )
    kinds = {name: name.partition("@")[2] or "running" for name in names}
    return {
        name: "batch" if as_in_training and kind.startswith("batch") else kind
        for name, kind in kinds.items()
    }


# Learning rates and groups


def draw_learning_rates(part: Slice, _: Styles) -> Iterator[Figure]:
    """Learning rate against size as squares, one panel per norm: how clear the choice was."""
    metric = describe_metric(part.metric.selection_name)
    if sum(map(len, part.rates.values())) < LEAST_SQUARES:
        return
    points = [(size, cell) for (_, size), cells in part.rates.items() for cell in cells]
    rows = _means_of(part, points, metric)
    for (size, cell), row in zip(points, rows, strict=True):
        row |= {"lr": cell.lr, "chosen": part.lines[cell.norm][size] is cell}
    table = frame_of(rows, [*MEANS, "lr", "chosen"])
    colour, table = shade_shortfall(metric, table)
    table = _with_square_text(table).assign(under="")
    x = alt.X("size:O", title=AXIS_WORDS[part.axis], sort=part.sizes).axis(labelAngle=0)
    y = alt.Y("lr:O", title="learning rate", sort="descending").axis(format="~g")
    tip = tooltip("norm", "size", "lr:Q", "text", "count", "directory")
    panel = draw_squares(x, y, colour.legend(None), tip, step=(48, 26), framed="datum.chosen")
    chart = in_panels(panel, part, y="independent")
    caption = (
        f"Mean {metric.label} over seeds for every learning rate that was tried; framed: the one "
        "chosen for this norm and size; nothing is chosen on test data. Grey: no seed finished, "
        "×k diverged. A choice at an edge may not be the best rate."
    )
    yield Figure("learning_rates", "Learning rate and size", caption, chart, table, fit="none")


def draw_groups(part: Slice, styles: Styles) -> Iterator[Figure]:
    """The metric against the number of groups at the smallest size, with layer and instance."""
    swept = {
        norm: groups
        for norm, cell in part.smallest.items()
        if isinstance(groups := cell.config.get("norm.num_groups"), int)
    }
    groups, size = sorted(set(swept.values())), part.sizes[0]
    if len(groups) < 2:
        return
    ends = [norm for norm in ("layer", "instance") if norm in part.smallest and norm not in swept]
    norms = [*swept, *(norm for norm in part.smallest if norm in ends)]
    rows = _means_of(part, [(size, part.smallest[norm]) for norm in norms])
    for norm, row in zip(norms, rows, strict=True):
        row |= {"groups": swept.get(norm), "series": norm if norm in ends else "group"}
    table = frame_of(rows, [*MEANS, "groups", "series"])
    x = alt.X("groups:Q", title="number of groups")
    x = x.scale(type="log", base=2, nice=False).axis(values=groups, format="d")
    y = metric_axis(part.metric, table)
    styles_of_series = {"group": SLOTS[ORDER.index("group")]} | {
        norm: styles[norm] for norm in ends
    }
    channels = encode_style(styles_of_series, "series")
    tip = tooltip("norm", "groups:Q", "text", "count", "seeds", "directory")
    level = alt.Chart().transform_filter("!isValid(datum.groups)").mark_rule(strokeDash=[5, 3])
    lines = draw_lines(x, y, channels, tip)
    chart = alt.layer(
        *(layer.transform_filter("isValid(datum.groups)") for layer in lines),
        level.encode(y, channels[0], tooltip=tip),
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        f"{part.metric.label} of group norm against its number of groups at size {part.sizes[0]}, "
        "mean and 95 % interval over the seeds that finished. Dashed, if they were run: layer, "
        "which is one group, and instance, which is one channel per group."
    )
    yield Figure("groups", "From layer to instance", caption, chart, table)


# Cost


def draw_cost(part: Slice, styles: Styles) -> Iterator[Figure]:
    """Training speed, and GPU memory where it was measured: one point per cell."""
    first_sizes = {cell: size for size, cell in reversed(part.points)}
    rows = []
    for cell in dict.fromkeys(cell for _, cell in part.points):
        timings = [run.result.timing for run in cell.runs]
        timings = [timing for timing in timings if "samples_per_second" in timing]
        if not timings:
            continue
        speed = statistics.median(timing["samples_per_second"] for timing in timings)
        size = "every size" if cell.norm in part.independent else str(first_sizes[cell])
        row = {"norm": cell.norm, "model": cell.model, "data": cell.data, "size": size}
        row |= dict.fromkeys(MEASURED) | timings[0] | {"samples_per_second": speed}
        rows.append(row | {"directory": str(cell.directory)})
    table = frame_of(rows, ["norm", "model", "data", "size", *MEASURED, "directory"])
    colour, shape, _ = encode_style(styles, legend=False)
    tip = tooltip("norm", "size", *(f"{name}:Q" for name in MEASURED), "directory")
    for field, (name, title, axis, caption) in COSTS.items():
        if (rows := table[table[field].notna()]).empty:
            continue
        x = alt.X(f"{field}:Q", title=axis).scale(zero=True).axis(tickCount=5)
        y = alt.Y("norm:N", title=None, sort=part.norms)
        chart = alt.Chart().mark_point(filled=True, opacity=1, size=70)
        chart = chart.encode(x, y, colour, shape, tooltip=tip)
        chart = chart.properties(width=WIDTH, height=alt.Step(26))
        yield Figure(name, title, caption, chart, rows)
