"""The figures of a slice: one Vega-Lite specification each, for the page, the SVG and the PNG.

`make_figure` finishes every one. A specification names its rows `rows` and holds them once, under
`datasets`; they have the columns `norm` and `size`, which the page filters by. `usermeta.fit` tells
the page how the figure may be resized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.frame import Row, metric_names, plain_rows, summarize, values_of
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.slices import AXIS_TITLES, AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED, ORDER, SLOTS, STATISTICS_STYLES, Style
from normexp.reporting.verdict import paired_values
from normexp.stats import paired_improvement

WIDTH = 560
HEIGHT = 320
SQUARE = 74  # pixels; wide enough for `0.88` over `[0.47, 1.00]`
DARK, LIGHT = "#111111", "#ffffff"  # text on a coloured square
ROWS = alt.NamedData("rows")
VISIBLE = "indexof(hidden_norms, datum.norm) < 0 && indexof(hidden_sizes, '' + datum.size) < 0"
FONT = "DejaVu Sans, Liberation Sans, Arial, sans-serif"
SUMMARY = [
    *("norm", "model", "data", "mean", "low", "high", "n", "text", "expected", "diverged"),
    *("failed", "missing", "count", "seeds", "directory", "size"),
]
TIP_TITLES = {
    "text": "mean [95 % interval]",
    "count": "seeds",
    "seeds": "values by seed",
    "samples": "samples seen",
}
Styles = dict[str, Style]
CONFIG = {
    "font": FONT,
    "background": "#ffffff",
    "view": {"stroke": None},
    "axis": {
        "gridColor": "#e4e4e4",
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titleLimit": 420,
    },
    "title": {
        "anchor": "start",
        "fontSize": 14,
        "subtitleFontSize": 11,
        "subtitleColor": "#555555",
        "limit": 560,
        "offset": 10,
    },
    "legend": {
        "orient": "bottom",
        "columns": 4,
        "labelFontSize": 11,
        "symbolSize": 80,
        "labelLimit": 150,
        "symbolStrokeWidth": 1.6,
    },
    "header": {"labelFontSize": 12, "labelFontWeight": "bold"},
}


@dataclass(frozen=True)
class Figure:
    """A finished figure: `spec` is Vega-Lite as JSON."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


def draw_answer(part: Slice, styles: Styles) -> list[Figure]:
    """Draws the figures of the metric for which there is data."""
    found = [
        draw_metric(part, styles),
        draw_heat_map(part),
        draw_improvement(part),
        draw_statistics(part),
        draw_learning_rates(part, styles),
        draw_rate_map(part),
        draw_groups(part, styles),
    ]
    return [figure for figure in found if figure is not None]


def draw_cost(part: Slice, styles: Styles) -> list[Figure]:
    """Training speed, and GPU memory where it was measured: one point per cell."""
    rows = _timing_rows(part)
    with_memory = [row for row in rows if row["peak_memory_mb"] is not None]
    speed = (
        "Training speed, one point per cell: the median over its runs. The runs of a stack share "
        "one time, so there is no interval over seeds."
    )
    memory = (
        "Peak memory of tensors during training and evaluation, in 10^6 bytes, one point per cell. "
        "Measured for the whole stack, so it grows with the number of seeds trained together."
    )
    return [
        make_figure(name, title, caption, _cost_chart(part, styles, field, axis), own, part)
        for name, title, caption, field, axis, own in (
            ("throughput", "Throughput", speed, "samples_per_second", SPEED_TITLE, rows),
            ("memory", "Memory", memory, "peak_memory_mb", MEMORY_TITLE, with_memory),
        )
        if own
    ]


SPEED_TITLE = "training samples per second, of the whole stack"
MEMORY_TITLE = "peak GPU memory of the whole stack (MB)"


# What all figures share


def make_figure(
    name: str,
    title: str,
    caption: str,
    chart: Any,
    rows: Sequence[Row],
    part: Slice,
    fit: str = "width",
) -> Figure:
    """The chart as JSON, with its rows, title, theme and the page's filter parameters."""
    spec = chart.to_dict(validate=False)
    spec["datasets"] = {"rows": list(rows)}
    spec["title"] = {"text": title, "subtitle": part.heading}
    hidden = [{"name": name, "value": []} for name in ("hidden_norms", "hidden_sizes")]
    spec["params"] = [*spec.get("params", []), *hidden]
    spec["usermeta"] = {"fit": fit}
    spec["config"] = CONFIG
    return Figure(f"{name}_{part.slug}", title, caption, spec)


def visible() -> alt.Chart:
    """The start of every layer: rows that are not filtered out."""
    return alt.Chart().transform_filter(VISIBLE)


def tooltip(*fields: str) -> list[alt.Tooltip]:
    """fields: column names, with a colon and the type if it is not nominal: `lr:Q`."""
    names = [field.partition(":")[0] for field in fields]
    return [
        alt.Tooltip(field if ":" in field else f"{field}:N", title=TIP_TITLES.get(name, name))
        for field, name in zip(fields, names, strict=True)
    ]


POINT_TIP = ("norm", "size", "text", "count", "seeds", "note", "directory")


def size_axis(
    part: Slice, field: str, *, grid: bool, labels: bool = True, title: str | None = None
) -> alt.X:
    axis = alt.Axis(
        values=part.sizes,
        format="d",
        grid=grid,
        labels=labels,
        ticks=labels,
        domain=labels,
        labelOverlap="greedy",
    )
    domain = [part.sizes[0] / 1.7, part.sizes[-1] * 1.7]
    scale = alt.Scale(type="log", base=2, nice=False, domain=domain)
    words = (title or AXIS_TITLES[part.axis]) if labels else None
    return alt.X(f"{field}:Q", title=words, axis=axis, scale=scale)


def metric_axis(metric: Metric, rows: Sequence[Row], label: str | None = None) -> alt.Y:
    """Means and bounds of `rows`; an accuracy's axis ends at 0 and 100 %, its intervals may not."""
    bounds = [row[key] for row in rows for key in ("low", "high") if row[key] is not None]
    scale = alt.Scale(zero=False)
    if metric.unit == "points" and min(bounds, default=0) < 0:
        scale = alt.Scale(zero=False, clamp=True, domainMin=0)
    if metric.unit == "points" and max(bounds, default=0) > 100:
        scale.clamp, scale.domainMax = True, 100
    return alt.Y("mean:Q", title=label or metric.label, scale=scale)


def encode_norm(
    norms: Sequence[str], styles: Styles
) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    """Colour, marker and dash of the norms."""
    colour, shape, dash = _encode("norm", None, norms, [styles[norm] for norm in norms])
    return colour.legend(symbolStrokeWidth=0), shape, dash


def _encode(
    field: str, title: str | None, domain: Sequence[str], styles: Sequence[Style]
) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    """Channels with equal domains, so their legends become one."""
    colour, shape, dash = (
        alt.Scale(domain=list(domain), range=values)
        for values in (
            [style.colour for style in styles],
            [style.marker for style in styles],
            [list(style.dash) for style in styles],
        )
    )
    return (
        alt.Color(f"{field}:N", title=title, scale=colour),
        alt.Shape(f"{field}:N", title=title, scale=shape),
        alt.StrokeDash(f"{field}:N", title=title, scale=dash),
    )


def _summary(part: Slice, cells: pd.DataFrame, metric: Metric | None = None) -> pd.DataFrame:
    """`summarize` with `directory`, and `x`: the size moved sideways to keep intervals apart."""
    values = part.values if metric is None else values_of(part.runs, metric)
    table = summarize(cells, values, metric or part.metric).assign(directory=cells["cell"])
    place = {norm: position for position, norm in enumerate(part.norms)}
    step = min(0.09, 0.66 / len(place))
    shift = (cells["norm"].map(place).astype(float) - (len(place) - 1) / 2) * step
    return table.assign(x=cells["size"].astype(float) * 2.0**shift)


def point_rows(part: Slice) -> list[Row]:
    """A row per norm and size; an independent norm shows its interval in one row, `shown`."""
    table = _summary(part, part.points)
    notes = pd.Series("", table.index)
    notes[table["cell"].isin(part.searched["cell"])] = "learning rate chosen on validation"
    notes[table["independent"]] = "one cell: independent of the norm batch size by measurement"
    table = table.assign(shown=~table["independent"] | (table["size"] == part.sizes[-1]))
    return plain_rows(table.assign(note=notes), [*SUMMARY, "x", "independent", "shown", "note"])


# The metric against the size


def draw_metric(part: Slice, styles: Styles) -> Figure | None:
    """The metric against the size: a line per norm, intervals over seeds, and a strip of counts."""
    rows = point_rows(part)
    if all(row["mean"] is None for row in rows):
        return None
    chart = alt.vconcat(_metric_panel(part, styles, rows), _count_strip(part), spacing=12)
    caption = (
        f"{part.metric.label} against the {AXIS_TITLES[part.axis]}: mean and 95 % t interval over "
        "seeds, cut at the limits of an accuracy; points are moved sideways a little so that "
        "intervals stay apart. Below, the number of seeds behind each point: ×k diverged, !k "
        "failed, ?k missing. Open markers on a level line are a single cell, of a norm measured "
        "not to depend on this size."
    )
    title = f"{part.metric.label} by {AXIS_WORDS[part.axis]}"
    return make_figure("metric_by_size", title, caption, chart, rows, part)


def _metric_panel(part: Slice, styles: Styles, rows: Sequence[Row]) -> Any:
    x, y = size_axis(part, "x", grid=True), metric_axis(part.metric, rows)
    colour, shape, dash = encode_norm(part.norms, styles)
    place = {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tooltip(*POINT_TIP)}
    return alt.layer(
        visible().mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        visible()
        .mark_rule(strokeWidth=1.6)
        .transform_filter("datum.shown")
        .encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour),
        visible()
        .mark_point(filled=True, opacity=1, size=64)
        .transform_filter("!datum.independent")
        .encode(**place),
        visible()
        .mark_point(strokeWidth=1.6, opacity=1, size=64)
        .transform_filter("datum.independent")
        .encode(**place),
        data=ROWS,
    ).properties(width=WIDTH, height=HEIGHT)


def _count_strip(part: Slice) -> alt.Chart:
    """Seeds behind each point, so that every interval shows its n and what diverged."""
    lost = "datum.diverged > 0 || datum.failed > 0"
    return (
        alt.Chart(ROWS)
        .transform_filter(VISIBLE)
        .transform_filter("datum.shown")
        .mark_text(fontSize=10)
        .encode(
            size_axis(part, "size", grid=False, labels=False),
            alt.Y("norm:N", title="seeds", sort=part.norms).axis(
                labelFontSize=10, ticks=False, domain=False, labelLimit=150
            ),
            alt.Text("count:N"),
            color=alt.condition(lost, alt.value(DIVERGED), alt.value("#808080")),
            tooltip=tooltip(*POINT_TIP),
        )
        .properties(width=WIDTH, height=alt.Step(15))
    )


def draw_statistics(part: Slice) -> Figure | None:
    """Running, precise and batch statistics in evaluation, one small panel per norm."""
    rows = _statistics_rows(part)
    if not rows:
        return None
    kinds = sorted({row["statistics"] for row in rows}, key=_statistics_rank)
    places = [min(place, len(STATISTICS_STYLES) - 1) for place in range(len(kinds))]
    own = [STATISTICS_STYLES[place] for place in places]
    colour, shape, dash = _encode("statistics", "evaluated with", kinds, own)
    x = size_axis(part, "size", grid=False, title=part.axis.replace("_", " "))
    y = metric_axis(part.metric, rows, label=rows[0]["metric"])
    tip = tooltip("norm", "statistics", *POINT_TIP[1:])
    panel = alt.layer(
        visible().mark_line().encode(x, y, colour, dash),
        visible().mark_rule().encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour),
        visible()
        .mark_point(filled=True, size=40, opacity=1)
        .encode(x, y, colour, shape, tooltip=tip),
        data=ROWS,
    ).properties(width=200, height=150)
    chart = panel.facet(facet=alt.Facet("norm:N", title=None, sort=part.norms), columns=3)
    chart = chart.resolve_axis(x="independent")  # else the last row has axes without a panel
    caption = (
        "The same trained networks evaluated with running averages, with precise statistics and "
        "with those of the evaluation batch (batch: of as many samples as in training). Where they "
        "differ, running averages mislead."
    )
    title = "Evaluation statistics"
    return make_figure("evaluation_statistics", title, caption, chart, rows, part, fit="facet")


def _statistics_rows(part: Slice) -> list[Row]:
    """The metric under each kind of statistics; an independent norm has none."""
    points = part.points[~part.points["independent"]]
    runs = part.runs[part.runs["cell"].isin(points["cell"])]
    names = _names_with_suffix(metric_names(part.runs), part.metric.name.partition("@")[0])
    as_in_training = _batches_as_in_training(points, runs)
    rows = []
    for name in names:
        suffix = name.partition("@")[2] or "running"
        statistics = "batch" if suffix.startswith("batch") and as_in_training else suffix
        table = _summary(part, points, describe_metric(name))
        table = table[table["n"] > 0].assign(
            statistics=statistics, metric=describe_metric(name.partition("@")[0]).label, note=""
        )
        rows += plain_rows(table, [*SUMMARY, "statistics", "metric", "note"])
    return rows


def _names_with_suffix(names: Sequence[str], base: str) -> list[str]:
    """All names of one metric, running first; on the validation split if test has no suffix."""
    for candidate in (base, base.replace("test/", "val/")):
        found = sorted(name for name in names if name.partition("@")[0] == candidate)
        if any("@" in name for name in found):
            return found
    return []


def _batches_as_in_training(points: pd.DataFrame, runs: pd.DataFrame) -> bool:
    """True if each cell was evaluated in batches of its own norm batch size, and these differ."""
    found = {
        (suffix, f"batch{point.norm_batch_size}")
        for point in points.itertuples()
        for name in metric_names(runs[runs["cell"] == point.cell])
        if (suffix := name.partition("@")[2]).startswith("batch")
    }
    return len(found) > 1 and all(suffix == own for suffix, own in found)


def _statistics_rank(name: str) -> tuple[int, int]:
    order = ["running", "precise"]
    digits = name.removeprefix("batch")
    return (order.index(name) if name in order else 2), int(digits) if digits.isdigit() else 0


# Squares


def draw_heat_map(part: Slice) -> Figure | None:
    """Norm against size: the mean as colour and number, with the number of seeds below it."""
    rows = point_rows(part)
    if not _add_square_text(rows, part.metric):
        return None
    for row in rows:
        if row["mean"] is not None and not row["shown"]:
            row["under"] = "same cell"
    base = visible().encode(
        alt.X("size:O", title=AXIS_TITLES[part.axis], sort=part.sizes).axis(labelAngle=0),
        alt.Y("norm:N", title=None, sort=part.norms),
    )
    colour = _mean_colour(part.metric, rows).legend(
        orient="bottom", gradientLength=220, direction="horizontal"
    )
    filled = [
        base.mark_rect(fill="#d9d9d9").transform_filter("datum.mean === null"),
        base.mark_rect().transform_filter("datum.mean !== null").encode(colour),
    ]
    tip = tooltip("norm", "size", "text", "count", "seeds", "directory")
    chart = _two_line_squares(base, filled, "under", tip)
    caption = (
        f"Mean {part.metric.label} by norm and size, and the half width of its 95 % interval with "
        "the number of seeds. Grey: no seed finished; blank: not run. A norm that does not depend "
        "on the norm batch size has a single cell, shown along its row."
    )
    title = f"{part.metric.label} by norm and size"
    return make_figure("heat_map", title, caption, chart, rows, part, fit="none")


def draw_improvement(part: Slice) -> Figure | None:
    """P(the norm of the row beats that of the column) at the smallest size, paired by seed."""
    rows = _improvement_rows(part)
    if not rows:
        return None
    norms = [norm for norm in part.norms if any(row["norm"] == norm for row in rows)]
    top = alt.X("other:N", title="... beats this norm", sort=norms)
    base = visible().encode(
        top.axis(labelAngle=-40, orient="top", domain=False),
        alt.Y("norm:N", title="this norm ...", sort=norms).axis(domain=False),
    )
    colour = (
        alt.Color("probability:Q", title="probability")
        .scale(scheme="purplegreen", domain=[0, 1])
        .legend(orient="bottom", gradientLength=220, direction="horizontal")
    )
    tip = tooltip("norm", "other", "value", "bounds", "n:Q")
    chart = _two_line_squares(base, [base.mark_rect().encode(colour)], "bounds", tip)
    caption = (
        f"Probability that the norm of the row beats the norm of the column at size "
        f"{part.sizes[0]}, in pairs of runs with one seed, with its 95 % Clopper-Pearson interval. "
        "Not corrected for the number of pairs: decisions belong to the verdict."
    )
    title = f"Probability of improvement at size {part.sizes[0]}"
    return make_figure("improvement", title, caption, chart, rows, part, fit="none")


def _improvement_rows(part: Slice) -> list[Row]:
    """One row per ordered pair of norms with two or more seeds in common at the smallest size."""
    valid = part.smallest[part.smallest["invalid"].isna()]
    cells = dict(zip(valid["norm"], valid["cell"], strict=True))
    rows = []
    for norm, other in [(a, b) for a in cells for b in cells if a != b]:
        a, b = paired_values(cells[norm], cells[other], part.values)
        if len(a) < 2:
            continue
        found = paired_improvement(a, b, higher_is_better=part.metric.higher_is_better)
        chance = found.estimate or 0.0
        rows.append(
            {
                "norm": norm,
                "other": other,
                "size": part.sizes[0],
                "value": f"{chance:.2f}",
                "bounds": "" if found.low is None else f"[{found.low:.2f}, {found.high:.2f}]",
                "probability": chance,
                "low": found.low,
                "high": found.high,
                "n": found.n,
                "ink": LIGHT if abs(chance - 0.5) > 0.32 else DARK,
            }
        )
    return rows


def _two_line_squares(
    base: alt.Chart, filled: Sequence[Any], lower: str, tip: list[alt.Tooltip]
) -> Any:
    ink = alt.Color("ink:N", scale=None)
    layers = [
        *filled,
        base.mark_text(dy=-7, fontSize=12).encode(alt.Text("value:N"), ink, tooltip=tip),
        base.mark_text(dy=9, fontSize=9).encode(alt.Text(f"{lower}:N"), ink),
    ]
    chart = alt.layer(*layers, data=ROWS).resolve_scale(color="independent")
    return chart.properties(width=alt.Step(SQUARE), height=alt.Step(40))


def _mean_colour(metric: Metric, rows: Sequence[Row]) -> alt.Color:
    means = [row["mean"] for row in rows if row["mean"] is not None]
    domain = [min(means), max(means)]
    scale = alt.Scale(scheme="viridis", domain=domain, reverse=not metric.higher_is_better)
    return alt.Color("mean:Q", title=metric.label, scale=scale)


def _add_square_text(rows: Sequence[Row], metric: Metric) -> bool:
    """Adds `value`, `under` (half width and n) and a readable `ink`; False if there is no mean."""
    means = [row["mean"] for row in rows if row["mean"] is not None]
    for row in rows:
        if row["mean"] is None:
            reason = f"×{row['diverged']}" if row["diverged"] else f"{row['failed']} failed"
            row |= {"value": reason, "under": row["count"], "ink": DIVERGED}
            continue
        spread = max(means) - min(means)
        share = (row["mean"] - min(means)) / spread if spread else 1.0
        brightness = share if metric.higher_is_better else 1 - share
        half = "" if row["low"] is None else f"±{(row['high'] - row['low']) / 2:.{metric.digits}f} "
        row |= {
            "value": f"{row['mean']:.{metric.digits}f}",
            "under": f"{half}n={row['n']}",
            "ink": DARK if brightness > 0.55 else LIGHT,
        }
    return bool(means)


# Learning rates and groups


def _rate_rows(part: Slice) -> list[Row]:
    """Every searched cell by the validation metric; `chosen` marks those on the lines."""
    if part.searched.empty:
        return []
    metric = describe_metric(part.metric.selection_name)
    return plain_rows(_summary(part, part.searched, metric), [*SUMMARY, "x", "lr", "chosen"])


def draw_learning_rates(part: Slice, styles: Styles) -> Figure | None:
    """Every searched rate as a small point, the chosen one as the norm's marker on its line."""
    rows = _rate_rows(part)
    if not rows:
        return None
    colour, shape, dash = encode_norm(part.norms, styles)
    rates = sorted({row["lr"] for row in rows})
    x = size_axis(part, "x", grid=True)
    y = (
        alt.Y("lr:Q", title="learning rate (log scale)")
        .scale(type="log", nice=False, domain=[rates[0] / 1.6, rates[-1] * 1.6])
        .axis(values=rates, format="~g")
    )
    base = alt.Chart(ROWS).transform_filter(VISIBLE)
    chosen = base.transform_filter("datum.chosen")
    tip = tooltip("norm", "size", "lr:Q", "text", "count", "directory")
    chart = alt.layer(
        base.mark_point(size=14, opacity=0.5, color="#888888").encode(
            size_axis(part, "size", grid=True), y, tooltip=tip
        ),
        chosen.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        chosen.mark_point(filled=True, opacity=1, size=70).encode(x, y, colour, shape, tooltip=tip),
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        "Learning rates that were tried (grey) and the one chosen for each norm and size by mean "
        f"{describe_metric(part.metric.selection_name).label}; nothing is chosen on test data."
    )
    return make_figure("learning_rates", "Learning rate by size", caption, chart, rows, part)


def draw_rate_map(part: Slice) -> Figure | None:
    """Learning rate against size as squares, one panel per norm: how sharp the choice was."""
    rows = _rate_rows(part)
    metric = describe_metric(part.metric.selection_name)
    if not _add_square_text(rows, metric):
        return None
    base = visible().encode(
        alt.X("size:O", title=AXIS_WORDS[part.axis], sort=part.sizes).axis(labelAngle=0),
        alt.Y("lr:O", title="learning rate", sort="descending").axis(format="~g"),
    )
    colour, ink = _mean_colour(metric, rows).legend(None), alt.Color("ink:N", scale=None)
    framed = base.mark_rect(fillOpacity=0, stroke=DARK, strokeWidth=2.5)
    tip = tooltip("norm", "size", "lr:Q", "text", "count", "directory")
    panel = (
        alt.layer(
            base.mark_rect(fill="#d9d9d9").transform_filter("datum.mean === null"),
            base.mark_rect().transform_filter("datum.mean !== null").encode(colour),
            framed.transform_filter("datum.chosen"),
            base.mark_text(fontSize=11).encode(alt.Text("value:N"), ink, tooltip=tip),
            data=ROWS,
        )
        .resolve_scale(color="independent")
        .properties(width=alt.Step(48), height=alt.Step(26))
    )
    chart = panel.facet(facet=alt.Facet("norm:N", title=None, sort=part.norms), columns=3)
    chart = chart.resolve_axis(x="independent", y="independent")
    caption = (
        f"Mean {metric.label} over seeds for every learning rate that was tried; framed: the one "
        "chosen. Grey: no seed finished, ×k diverged. A choice at an edge may not be the best rate."
    )
    title = "Learning rate and size"
    return make_figure("rate_map", title, caption, chart, rows, part, fit="none")


def draw_groups(part: Slice, styles: Styles) -> Figure | None:
    """The metric against the number of groups at the smallest size, with layer and instance."""
    table = _summary(part, part.smallest).assign(groups=part.smallest["num_groups"])
    has_groups = table["groups"].map(lambda value: isinstance(value, int))
    if table["groups"][has_groups].nunique() < 2:
        return None
    is_end = table["norm"].isin(["layer", "instance"]) & ~has_groups
    rows = plain_rows(pd.concat([table[has_groups], table[is_end]]), [*SUMMARY, "groups"])
    style = SLOTS[ORDER.index("group")]
    x = (
        alt.X("groups:Q", title="number of groups")
        .scale(type="log", base=2, nice=False)
        .axis(values=sorted(table["groups"][has_groups].unique().tolist()), format="d")
    )
    y = alt.Y("mean:Q", title=part.metric.label).scale(zero=False)
    tip = tooltip("norm", "groups:Q", "text", "count", "seeds", "directory")
    swept = visible().transform_filter("datum.groups !== null")
    level = visible().transform_filter("datum.groups === null").mark_rule(strokeDash=[5, 3])
    ends = {norm: styles[norm].colour for norm in table["norm"][is_end]}
    colour = alt.Color("norm:N", title="level of")
    dot = {"filled": True, "opacity": 1, "size": 64, "color": style.colour, "shape": style.marker}
    chart = alt.layer(
        swept.mark_line(color=style.colour).encode(x, y),
        swept.mark_rule(color=style.colour).encode(x, alt.Y("low:Q"), alt.Y2("high:Q")),
        swept.mark_point(**dot).encode(x, y, tooltip=tip),
        level.encode(y, colour.scale(domain=list(ends), range=list(ends.values())), tooltip=tip),
        data=ROWS,
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        f"{part.metric.label} of group norm against its number of groups at size {part.sizes[0]}, "
        "mean and 95 % t interval over seeds. Dashed: layer (one group) and instance (one channel "
        "per group), if they were run: the curve must meet them at its ends."
    )
    return make_figure("groups", "From layer to instance", caption, chart, rows, part)


# Cost


def _timing_rows(part: Slice) -> list[Row]:
    """Speed of each cell: the median, since the seeds of a stack share one time."""
    columns = ["samples_per_second", "step_ms", "stack_size", "peak_memory_mb"]
    timing = part.runs.reindex(columns=[f"timing.{name}" for name in columns])
    timing = timing.set_axis(columns, axis=1).assign(cell=part.runs["cell"])
    timing = timing[timing["samples_per_second"].notna()]
    first = timing.drop_duplicates("cell").set_index("cell")
    speed = timing.groupby("cell")["samples_per_second"].agg(lambda x: x.astype(float).median())
    table = part.points.drop_duplicates("cell").join(first.assign(samples_per_second=speed), "cell")
    table = table[table["samples_per_second"].notna()]
    own_size = table[part.axis].map(str).where(~table["independent"], "every size")
    table = table.assign(size=own_size, directory=table["cell"])
    return plain_rows(table, ["norm", "model", "data", "size", *columns, "directory"])


def _cost_chart(part: Slice, styles: Styles, field: str, title: str) -> alt.Chart:
    colour, shape, _ = encode_norm(part.norms, styles)
    points = alt.Chart(ROWS).transform_filter(VISIBLE).mark_point(filled=True, opacity=1, size=70)
    measured = ("samples_per_second:Q", "step_ms:Q", "stack_size:Q", "peak_memory_mb:Q")
    return points.encode(
        alt.X(f"{field}:Q", title=title).scale(zero=True).axis(tickCount=5),
        alt.Y("norm:N", title=None, sort=part.norms),
        colour.legend(None),
        shape.legend(None),
        tooltip=tooltip("norm", "size", *measured, "directory"),
    ).properties(width=WIDTH, height=alt.Step(26))
