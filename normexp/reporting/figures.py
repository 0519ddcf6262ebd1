"""The figures of a slice: a function for each question yields those that have data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.cells import summarize
from normexp.reporting.charts import (
    DARK,
    HEIGHT,
    LIGHT,
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
from normexp.reporting.frame import metric_names, paired_values, values_of
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.slices import AXIS_TITLES, AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED, ORDER, SLOTS, STATISTICS_STYLES, order_norms
from normexp.stats.interval import paired_improvement

GREY = "#808080"  # readable on light and dark
SUMMARY = [
    *("norm", "model", "data", "mean", "low", "high", "n", "text", "expected", "diverged"),
    *("failed", "missing", "count", "seeds", "directory", "size"),
]
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
    own = {norm: styles[norm] for norm in part.norms}
    questions = (
        draw_means,
        draw_improvement,
        draw_statistics,
        draw_learning_rates,
        draw_groups,
        draw_history,
        draw_cost,
    )
    return [
        replace(figure, name=f"{figure.name}_{part.slug}", subtitle=part.heading)
        for draw in questions
        for figure in draw(part, own)
    ]


def _summarize(
    part: Slice, cells: pd.DataFrame, *others: str, metric: Metric | None = None
) -> pd.DataFrame:
    """The mean of each cell over its seeds, with the columns of SUMMARY and the `others`."""
    values = part.values if metric is None else values_of(part.runs, metric)
    table = summarize(cells, values, metric or part.metric).assign(directory=cells["cell"])
    return table[[*SUMMARY, *others]]


# The metric against the size


def draw_means(part: Slice, styles: Styles) -> Iterator[Figure]:
    """The metric against the size: as lines over a strip of counts, and as a heat map."""
    points, step = part.points, min(0.09, 0.66 / len(styles))
    place = {norm: k - (len(styles) - 1) / 2 for k, norm in enumerate(styles)}
    x = points["size"].astype(float) * 2.0 ** (step * points["norm"].map(place).astype(float))
    points = points.assign(x=x, note="")
    is_chosen, is_alone = points["cell"].isin(part.searched["cell"]), points["independent"]
    points.loc[is_chosen, "note"] = "learning rate chosen on validation"
    points.loc[is_alone, "note"] = "one cell: independent of the norm batch size by measurement"
    table = _summarize(part, points, "x", "independent", "note")
    if table["mean"].notna().any():
        yield _metric_by_size(part, styles, table)
        yield _heat_map(part, table)


def _metric_by_size(part: Slice, styles: Styles, table: pd.DataFrame) -> Figure:
    outside = find_outsiders(part.metric, table)
    caption = (
        f"{part.metric.label} against the {AXIS_TITLES[part.axis]}: mean and 95 % interval over "
        "the seeds that finished, which stays within an accuracy's limits; points are moved "
        "sideways a little so that intervals stay apart. Below, the number of seeds behind each "
        "point: ×k diverged, !k failed, ?k missing."
    )
    if table["independent"].any():
        caption += (
            " Hollow markers: a norm that does not depend on this size by measurement, trained "
            "once and drawn at every size."
        )
    if outside:
        caption += f" Arrows at the edge: {', '.join(outside)}, beyond the scale."
    title = f"{part.metric.label} by {AXIS_WORDS[part.axis]}"
    panels = _metric_panel(part, styles, table, outside), _count_strip(part)
    chart = alt.vconcat(*panels, spacing=12)
    return Figure("metric_by_size", title, caption, chart, table, fit="strip")


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


# Pairs of norms, and kinds of statistics


def draw_improvement(part: Slice, _: Styles) -> Iterator[Figure]:
    """P(the norm of the row beats that of the column) at the smallest size, paired by seed."""
    rows = _improvement_rows(part)
    norms = list(dict.fromkeys(row["norm"] for row in rows))
    if not rows:
        return
    x = alt.X("other:N", title="... beats this norm", sort=norms)
    x = x.axis(labelAngle=-40, orient="top", domain=False)
    y = alt.Y("norm:N", title="this norm ...", sort=norms).axis(domain=False)
    colour = alt.Color("shown:Q", title="bound nearest to 0.5")
    colour = _gradient(colour.scale(scheme="purplegreen", domain=[0, 1]))
    tip = tooltip("norm", "other", "value", "under", "n:Q")
    chart = draw_squares(x, y, colour, tip, measured="probability")
    caption = (
        f"Probability that the norm of the row beats the norm of the column at size "
        f"{part.sizes[0]}, in pairs of runs of one seed, with its 95 % Clopper-Pearson interval; "
        "a tie counts half. The colour is that of the bound nearest to 0.5: none where the "
        "interval contains 0.5. A diverged run counts as the worst run. Not corrected for the "
        "number of pairs: decisions belong to the verdict."
    )
    title = f"Probability of improvement at size {part.sizes[0]}"
    yield Figure("improvement", title, caption, chart, pd.DataFrame(rows), fit="none")


def _improvement_rows(part: Slice) -> list[dict[str, Any]]:
    """One row per ordered pair of norms with two or more seeds in common at the smallest size."""
    valid = part.smallest[part.smallest["invalid"].isna()]
    rows = []
    for (norm, cell), (other, second) in permutations(valid[["norm", "cell"]].to_numpy(), 2):
        a, b = paired_values(cell, second, part.outcomes)
        if len(a) < 2:
            continue
        found = paired_improvement(a, b, higher_is_better=part.metric.higher_is_better)
        chance, low, high = found.estimate or 0.0, found.low or 0.0, found.high or 1.0
        shown = min(max(0.5, low), high)
        row = {"norm": norm, "other": other, "size": part.sizes[0], "value": f"{chance:.2f}"}
        row["under"] = "" if found.low is None else f"[{low:.2f}, {high:.2f}]"
        row |= {"probability": chance, "low": found.low, "high": found.high, "n": found.n}
        row |= {"shown": shown, "ink": LIGHT if abs(shown - 0.5) > 0.32 else DARK}
        rows.append(row)
    return rows


def draw_statistics(part: Slice, _: Styles) -> Iterator[Figure]:
    """The metric by kind of evaluation statistics, a panel per norm that depends on the size.

    On the validation split if the test split has running statistics only.
    """
    points = part.points[~part.points["independent"]]
    kinds = _statistics_of(part, points)
    tables = [
        _summarize(
            part,
            points.assign(statistics=kind, metric=describe_metric(name.partition("@")[0]).label),
            *("statistics", "metric"),
            metric=describe_metric(name),
        )
        for name, kind in kinds.items()
    ]
    table = pd.concat([own[own["n"] > 0] for own in tables]) if tables else pd.DataFrame()
    if table.empty:
        return
    first = [kind for kind in ("running", "precise") if kind in set(table["statistics"])]
    found = [*first, *order_norms(set(table["statistics"]) - set(first))]
    last = len(STATISTICS_STYLES) - 1
    own = {kind: STATISTICS_STYLES[min(place, last)] for place, kind in enumerate(found)}
    x = size_axis(part, "size", title=part.axis.replace("_", " "))
    y = metric_axis(part.metric, table, label=table["metric"].iloc[0])
    tip = tooltip("norm", "statistics", *POINT_TIP[1:])
    layers = draw_lines(x, y, encode_style(own, "statistics", "evaluated with"), tip, size=40)
    panel = alt.layer(*layers).properties(width=200, height=150)
    caption = (
        "The same trained networks evaluated with running averages, with precise statistics and "
        "with the statistics of the evaluation batch (batch: the size used in training). Where the "
        "results are apart by more than their intervals, running averages do not stand for the "
        "statistics of the trained network."
    )
    title, name = "Evaluation statistics", "evaluation_statistics"
    yield Figure(name, title, caption, in_panels(panel, part), table.assign(note=""), fit="facet")


def _statistics_of(part: Slice, points: pd.DataFrame) -> dict[str, str]:
    """The kind of statistics behind each metric name, as the legend shows it.

    `batch@<size>` is shortened to `batch` if every cell used its own norm batch size.
    """
    base = part.metric.name.partition("@")[0]
    for candidate in (base, base.replace("test/", "val/")):
        names = [one for one in metric_names(part.runs) if one.partition("@")[0] == candidate]
        if any("@" in name for name in names):
            break
    else:
        return {}
    sizes = points.set_index("cell")["norm_batch_size"]
    used = {
        (name.partition("@batch")[2], str(sizes[cell]))
        for cell, own in part.runs[part.runs["cell"].isin(sizes.index)].groupby("cell")
        for name in metric_names(own)
        if "@batch" in name
    }
    as_in_training = len(used) > 1 and all(size == own for size, own in used)
    kinds = {name: name.partition("@")[2] or "running" for name in names}
    return {
        name: "batch" if as_in_training and kind.startswith("batch") else kind
        for name, kind in kinds.items()
    }


# Learning rates and groups


def draw_learning_rates(part: Slice, _: Styles) -> Iterator[Figure]:
    """Learning rate against size as squares, one panel per norm: how clear the choice was."""
    metric = describe_metric(part.metric.selection_name)
    if part.searched.empty:
        return
    table = _summarize(part, part.searched, "lr", "chosen", metric=metric)
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
    points = part.smallest.assign(groups=part.smallest["num_groups"], series="group")
    has_groups = points["groups"].map(lambda value: isinstance(value, int))
    swept = points[has_groups]
    ends = points[points["norm"].isin(["layer", "instance"]) & ~has_groups]
    groups = sorted(swept["groups"].unique().tolist())
    if len(groups) < 2:
        return
    both = pd.concat([swept, ends.assign(series=ends["norm"])])
    table = _summarize(part, both, "groups", "series")
    x = alt.X("groups:Q", title="number of groups")
    x = x.scale(type="log", base=2, nice=False).axis(values=groups, format="d")
    y = metric_axis(part.metric, table)
    own = {"group": SLOTS[ORDER.index("group")]} | {norm: styles[norm] for norm in ends["norm"]}
    channels = encode_style(own, "series")
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
    timing = part.runs.reindex(columns=[f"timing.{name}" for name in MEASURED])
    timing = timing.set_axis(MEASURED, axis=1).assign(cell=part.runs["cell"])
    timing = timing[timing["samples_per_second"].notna()]
    speed = timing["samples_per_second"].astype(float).groupby(timing["cell"]).median()
    own = timing.drop_duplicates("cell").set_index("cell").assign(samples_per_second=speed)
    table = part.points.drop_duplicates("cell").join(own, "cell", how="inner")
    size = table[part.axis].map(str).where(~table["independent"], "every size")
    table = table.assign(size=size, directory=table["cell"])
    table = table[["norm", "model", "data", "size", *MEASURED, "directory"]]
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
