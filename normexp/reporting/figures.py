"""The figures of a slice: one Vega-Lite specification each, for the page and for the files."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.cells import summarize
from normexp.reporting.charts import (
    DARK,
    GREY,
    HEIGHT,
    LIGHT,
    LINE,
    POINT_TIP,
    ROWS,
    WIDTH,
    Figure,
    Styles,
    encode_norm,
    encode_style,
    end_labels,
    find_outsiders,
    in_panels,
    lines,
    make_figure,
    metric_axis,
    shortfall,
    size_axis,
    squares,
    tooltip,
    visible,
)
from normexp.reporting.curves import draw_history
from normexp.reporting.frame import (
    Row,
    metric_names,
    paired_values,
    plain_rows,
    values_of,
)
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.slices import AXIS_TITLES, AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED, ORDER, SLOTS, STATISTICS_STYLES
from normexp.stats.interval import paired_improvement

SUMMARY = [
    *("norm", "model", "data", "mean", "low", "high", "n", "text", "expected", "diverged"),
    *("failed", "missing", "count", "seeds", "directory", "size"),
]


def draw_figures(part: Slice, styles: Styles) -> list[Figure]:
    """Every figure for which the slice has data, the main one first."""
    rows = _point_rows(part)
    found = [
        *draw_means(part, styles, rows),
        draw_improvement(part),
        draw_statistics(part),
        draw_learning_rates(part),
        draw_groups(part, styles),
        *draw_history(part, styles),
        *draw_cost(part, styles),
    ]
    return [figure for figure in found if figure is not None]


def _summary(part: Slice, cells: pd.DataFrame, metric: Metric | None = None) -> pd.DataFrame:
    """`summarize` with `directory`, and `x`: the size moved sideways to keep intervals apart."""
    values = part.values if metric is None else values_of(part.runs, metric)
    table = summarize(cells, values, metric or part.metric).assign(directory=cells["cell"])
    place = {norm: position for position, norm in enumerate(part.norms)}
    step = min(0.09, 0.66 / len(place))
    shift = (cells["norm"].map(place).astype(float) - (len(place) - 1) / 2) * step
    return table.assign(x=cells["size"].astype(float) * 2.0**shift)


def _point_rows(part: Slice) -> list[Row]:
    """A row per norm and size."""
    table = _summary(part, part.points)
    notes = pd.Series("", table.index)
    notes[table["cell"].isin(part.searched["cell"])] = "learning rate chosen on validation"
    notes[table["independent"]] = "one cell: independent of the norm batch size by measurement"
    return plain_rows(table.assign(note=notes), [*SUMMARY, "x", "independent", "note"])


# The metric against the size


def draw_means(part: Slice, styles: Styles, rows: list[Row]) -> list[Figure]:
    """The metric against the size: as lines over a strip of counts, and as a heat map."""
    if all(row["mean"] is None for row in rows):
        return []
    outside = find_outsiders(part.metric, rows)
    chart = alt.vconcat(
        _metric_panel(part, styles, rows, outside), _count_strip(part), data=ROWS, spacing=12
    )
    caption = (
        f"{part.metric.label} against the {AXIS_TITLES[part.axis]}: mean and 95 % interval over "
        "seeds, which stays within an accuracy's limits; points are moved sideways a little so "
        "that intervals stay apart. Below, the number of seeds behind each point: ×k diverged, !k "
        "failed, ?k missing."
    )
    if any(row["independent"] for row in rows):
        caption += (
            " Hollow markers: a norm that does not depend on this size by measurement, trained "
            "once and drawn at every size."
        )
    if outside:
        caption += f" Arrows at the edge: {', '.join(outside)}, beyond the scale."
    title = f"{part.metric.label} by {AXIS_WORDS[part.axis]}"
    return [
        make_figure("metric_by_size", title, caption, chart, rows, part, fit="strip"),
        _draw_heat_map(part, rows),
    ]


def _metric_panel(part: Slice, styles: Styles, rows: list[Row], outside: list[str]) -> Any:
    x, y = size_axis(part, "x", grid=True), metric_axis(part.metric, rows, outside=outside)
    channels = encode_norm(part.norms, styles, legend=False)
    height = max(HEIGHT, LINE * len(part.norms))
    layers = [
        *lines(x, y, channels, tooltip(*POINT_TIP), outside=outside),
        *end_labels(rows, x, y, channels, outside, height),
    ]
    return alt.layer(*layers).properties(width=WIDTH, height=height)


def _count_strip(part: Slice) -> alt.Chart:
    """Seeds behind each point, so that every interval shows its n and what diverged."""
    lost = "datum.diverged > 0 || datum.failed > 0"
    return (
        visible()
        .mark_text(fontSize=10)
        .encode(
            size_axis(part, "size", grid=False, labels=False),
            alt.Y("norm:N", title="seeds", sort=part.norms).axis(
                labelFontSize=10, ticks=False, domain=False, labelLimit=150
            ),
            alt.Text("count:N"),
            color=alt.condition(lost, alt.value(DIVERGED), alt.value(GREY)),
            tooltip=tooltip(*POINT_TIP),
        )
        .properties(width=WIDTH, height=alt.Step(15))
    )


def _draw_heat_map(part: Slice, rows: list[Row]) -> Figure:
    """Norm against size: the mean as colour and number, with its interval below it."""
    colour, rows = shortfall(part.metric, rows)
    rows = [row | _square_text(row, part.metric) for row in rows]
    x = alt.X("size:O", title=AXIS_TITLES[part.axis], sort=part.sizes).axis(labelAngle=0)
    y = alt.Y("norm:N", title=None, sort=part.norms)
    chart = squares(x, y, _gradient(colour), tooltip(*POINT_TIP))
    caption = (
        f"Mean {part.metric.label} with its 95 % interval, or the number of seeds where some are "
        "lost. The colour is the distance from the best mean, on a scale that is finer near it. "
        "Grey: no seed finished; blank: not run."
    )
    title = f"{part.metric.label} by norm and size"
    return make_figure("heat_map", title, caption, chart, rows, part, fit="none")


def _gradient(colour: alt.Color) -> alt.Color:
    return colour.legend(orient="bottom", gradientLength=220, direction="horizontal", tickCount=4)


def _square_text(row: Row, metric: Metric) -> Row:
    """`value`, and `under`: the interval, or the counts where runs are lost."""
    if row["mean"] is None:
        reason = f"×{row['diverged']}" if row["diverged"] else f"{row['failed']} failed"
        return {"value": reason, "under": row["count"]}
    interval = row["text"].partition(" ")[2]
    is_whole = row["n"] == row["expected"]
    return {
        "value": f"{row['mean']:.{metric.digits}f}",
        "under": interval if is_whole else row["count"],
    }


# Pairs of norms, and kinds of statistics


def draw_improvement(part: Slice) -> Figure | None:
    """P(the norm of the row beats that of the column) at the smallest size, paired by seed."""
    rows = _improvement_rows(part)
    if not rows:
        return None
    norms = [norm for norm in part.norms if any(row["norm"] == norm for row in rows)]
    x = alt.X("other:N", title="... beats this norm", sort=norms)
    x = x.axis(labelAngle=-40, orient="top", domain=False)
    y = alt.Y("norm:N", title="this norm ...", sort=norms).axis(domain=False)
    colour = alt.Color("shown:Q", title="bound nearest to 0.5")
    colour = _gradient(colour.scale(scheme="purplegreen", domain=[0, 1]))
    tip = tooltip("norm", "other", "value", "under", "n:Q")
    chart = squares(x, y, colour, tip, measured="probability")
    caption = (
        f"Probability that the norm of the row beats the norm of the column at size "
        f"{part.sizes[0]}, in pairs of runs with one seed, with its 95 % Clopper-Pearson interval. "
        "The colour is that of the bound nearest to 0.5: none where the interval contains 0.5. A "
        "diverged run counts as the worst run. Not corrected for the number of pairs: decisions "
        "belong to the verdict."
    )
    title = f"Probability of improvement at size {part.sizes[0]}"
    return make_figure("improvement", title, caption, chart, rows, part, fit="none")


def _improvement_rows(part: Slice) -> list[Row]:
    """One row per ordered pair of norms with two or more seeds in common at the smallest size."""
    valid = part.smallest[part.smallest["invalid"].isna()]
    cells = dict(zip(valid["norm"], valid["cell"], strict=True))
    rows = []
    for norm, other in [(a, b) for a in cells for b in cells if a != b]:
        a, b = paired_values(cells[norm], cells[other], part.outcomes)
        if len(a) < 2:
            continue
        found = paired_improvement(a, b, higher_is_better=part.metric.higher_is_better)
        chance, low, high = found.estimate or 0.0, found.low or 0.0, found.high or 1.0
        shown = min(max(0.5, low), high)
        rows.append(
            {
                "norm": norm,
                "other": other,
                "size": part.sizes[0],
                "value": f"{chance:.2f}",
                "under": "" if found.low is None else f"[{low:.2f}, {high:.2f}]",
                "probability": chance,
                "low": found.low,
                "high": found.high,
                "n": found.n,
                "shown": shown,
                "ink": LIGHT if abs(shown - 0.5) > 0.32 else DARK,
            }
        )
    return rows


def draw_statistics(part: Slice) -> Figure | None:
    """Running, precise and batch statistics in evaluation, one small panel per norm."""
    rows = _statistics_rows(part)
    if not rows:
        return None
    kinds = sorted({row["statistics"] for row in rows}, key=_statistics_rank)
    last = len(STATISTICS_STYLES) - 1
    own = {kind: STATISTICS_STYLES[min(place, last)] for place, kind in enumerate(kinds)}
    x = size_axis(part, "size", grid=False, title=part.axis.replace("_", " "))
    y = metric_axis(part.metric, rows, label=rows[0]["metric"])
    tip = tooltip("norm", "statistics", *POINT_TIP[1:])
    layers = lines(x, y, encode_style("statistics", own, "evaluated with"), tip, size=40)
    panel = alt.layer(*layers, data=ROWS).properties(width=200, height=150)
    chart = in_panels(panel, part).resolve_axis(x="independent")
    caption = (
        "The same trained networks evaluated with running averages, with precise statistics and "
        "with the statistics of the evaluation batch (batch: the size used in training). Where the "
        "results differ by more than their intervals, running averages mislead."
    )
    title = "Evaluation statistics"
    return make_figure("evaluation_statistics", title, caption, chart, rows, part, fit="facet")


def _statistics_rows(part: Slice) -> list[Row]:
    """The metric under each kind of statistics, of norms that depend on the size.

    It is that of the validation split if the test split was evaluated in one way only.
    """
    points = part.points[~part.points["independent"]]
    base, names = part.metric.name.partition("@")[0], metric_names(part.runs)
    for candidate in (base, base.replace("test/", "val/")):
        found = [name for name in names if name.partition("@")[0] == candidate]
        if any("@" in name for name in found):
            break
    else:
        return []
    as_in_training = _batches_as_in_training(points, part.runs)
    rows = []
    for name in found:
        suffix = name.partition("@")[2] or "running"
        statistics = "batch" if suffix.startswith("batch") and as_in_training else suffix
        table = _summary(part, points, describe_metric(name))
        table = table[table["n"] > 0].assign(
            statistics=statistics, metric=describe_metric(candidate).label, note=""
        )
        rows += plain_rows(table, [*SUMMARY, "statistics", "metric", "note"])
    return rows


def _batches_as_in_training(points: pd.DataFrame, runs: pd.DataFrame) -> bool:
    """True if each cell was evaluated in batches of its own norm batch size, and these differ."""
    sizes = points.set_index("cell")["norm_batch_size"]
    found = {
        (name.partition("@batch")[2], str(sizes[cell]))
        for cell, own in runs[runs["cell"].isin(sizes.index)].groupby("cell")
        for name in metric_names(own)
        if "@batch" in name
    }
    return len(found) > 1 and all(size == own for size, own in found)


def _statistics_rank(name: str) -> tuple[int, int]:
    order = ["running", "precise"]
    digits = name.removeprefix("batch")
    return (order.index(name) if name in order else 2), int(digits) if digits.isdigit() else 0


# Learning rates and groups


def draw_learning_rates(part: Slice) -> Figure | None:
    """Learning rate against size as squares, one panel per norm: how sharp the choice was."""
    metric = describe_metric(part.metric.selection_name)
    if part.searched.empty:
        return None
    colour, rows = shortfall(
        metric, plain_rows(_summary(part, part.searched, metric), [*SUMMARY, "lr", "chosen"])
    )
    rows = [row | _square_text(row, metric) | {"under": ""} for row in rows]
    x = alt.X("size:O", title=AXIS_WORDS[part.axis], sort=part.sizes).axis(labelAngle=0)
    y = alt.Y("lr:O", title="learning rate", sort="descending").axis(format="~g")
    tip = tooltip("norm", "size", "lr:Q", "text", "count", "directory")
    panel = squares(x, y, colour.legend(None), tip, step=(48, 26), framed="datum.chosen")
    chart = in_panels(panel, part).resolve_axis(x="independent", y="independent")
    caption = (
        f"Mean {metric.label} over seeds for every learning rate that was tried; framed: the one "
        "chosen for this norm and size; nothing is chosen on test data. Grey: no seed finished, "
        "×k diverged. A choice at an edge may not be the best rate."
    )
    title = "Learning rate and size"
    return make_figure("learning_rates", title, caption, chart, rows, part, fit="none")


def draw_groups(part: Slice, styles: Styles) -> Figure | None:
    """The metric against the number of groups at the smallest size, with layer and instance."""
    table = _summary(part, part.smallest).assign(groups=part.smallest["num_groups"])
    has_groups = table["groups"].map(lambda value: isinstance(value, int))
    if table["groups"][has_groups].nunique() < 2:
        return None
    is_end = table["norm"].isin(["layer", "instance"]) & ~has_groups
    swept, ends = table[has_groups].assign(series="group"), table[is_end]
    both = pd.concat([swept, ends.assign(series=ends["norm"])])
    rows = plain_rows(both, [*SUMMARY, "groups", "series"])
    x = (
        alt.X("groups:Q", title="number of groups")
        .scale(type="log", base=2, nice=False)
        .axis(values=sorted(swept["groups"].unique().tolist()), format="d")
    )
    y = metric_axis(part.metric, rows)
    own = {"group": SLOTS[ORDER.index("group")]} | {norm: styles[norm] for norm in ends["norm"]}
    channels = encode_style("series", own)
    tip = tooltip("norm", "groups:Q", "text", "count", "seeds", "directory")
    level = visible("!isValid(datum.groups)").mark_rule(strokeDash=[5, 3])
    layers = lines(x, y, channels, tip)
    chart = alt.layer(
        *(layer.transform_filter("isValid(datum.groups)") for layer in layers),
        level.encode(y, channels[0], tooltip=tip),
        data=ROWS,
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        f"{part.metric.label} of group norm against its number of groups at size {part.sizes[0]}, "
        "mean and 95 % interval over seeds. Dashed: layer (one group) and instance (one channel "
        "per group), if they were run: the curve must meet them at its ends."
    )
    return make_figure("groups", "From layer to instance", caption, chart, rows, part)


# Cost


def draw_cost(part: Slice, styles: Styles) -> list[Figure]:
    """Training speed, and GPU memory where it was measured: one point per cell."""
    speed, memory = (
        "Training speed, one point per cell: the median over its runs. The runs of a stack share "
        "one time, so there is no interval over seeds.",
        "Peak memory of tensors during training and evaluation, in 10^6 bytes, one point per cell. "
        "Measured for the whole stack, so it grows with the number of seeds trained together.",
    )
    found = []
    for name, title, axis, field, caption in (
        ("throughput", "Throughput", SPEED_TITLE, "samples_per_second", speed),
        ("memory", "Memory", MEMORY_TITLE, "peak_memory_mb", memory),
    ):
        rows = [row for row in _timing_rows(part) if row[field] is not None]
        if rows:
            chart = _cost_chart(part, styles, field, axis)
            found.append(make_figure(name, title, caption, chart, rows, part))
    return found


SPEED_TITLE = "training samples per second, of the whole stack"
MEMORY_TITLE = "peak GPU memory of the whole stack (MB)"
MEASURED = ["samples_per_second", "step_ms", "stack_size", "peak_memory_mb"]


def _timing_rows(part: Slice) -> list[Row]:
    """Speed of each cell: the median, since the seeds of a stack share one time."""
    timing = part.runs.reindex(columns=[f"timing.{name}" for name in MEASURED])
    timing = timing.set_axis(MEASURED, axis=1).assign(cell=part.runs["cell"])
    timing = timing[timing["samples_per_second"].notna()]
    first = timing.drop_duplicates("cell").set_index("cell")
    speed = timing["samples_per_second"].astype(float).groupby(timing["cell"]).median()
    points = part.points.drop_duplicates("cell")
    table = points.join(first.assign(samples_per_second=speed), "cell", how="inner")
    own_size = table[part.axis].map(str).where(~table["independent"], "every size")
    table = table.assign(size=own_size, directory=table["cell"])
    return plain_rows(table, ["norm", "model", "data", "size", *MEASURED, "directory"])


def _cost_chart(part: Slice, styles: Styles, field: str, title: str) -> alt.Chart:
    colour, shape, _ = encode_norm(part.norms, styles)
    measured = [f"{name}:Q" for name in MEASURED]
    points = visible().mark_point(filled=True, opacity=1, size=70)
    return points.encode(
        alt.X(f"{field}:Q", title=title).scale(zero=True).axis(tickCount=5),
        alt.Y("norm:N", title=None, sort=part.norms),
        colour.legend(None),
        shape.legend(None),
        tooltip=tooltip("norm", "size", *measured, "directory"),
    ).properties(width=WIDTH, height=alt.Step(26), data=ROWS)
