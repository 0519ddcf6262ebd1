"""What every figure is made of: axes, marks and colours, and the finish that all share.

A specification names its rows `rows` and holds them once, under `datasets`; they have the columns
`norm` and `size`, which the page filters by. `usermeta.fit` tells the page how the figure may be
resized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from normexp.reporting.frame import Row
from normexp.reporting.metric import Metric
from normexp.reporting.slices import AXIS_TITLES, Slice
from normexp.reporting.style import DIVERGED, Style
from normexp.reporting.tables import Table

WIDTH, HEIGHT = 560, 320
SQUARE = (74, 40)  # pixels; wide enough for `0.88` over `[0.47, 1.00]`
LINE, LABEL = 14, 150  # pixels: height of a label at the end of a line, and its greatest width
DARK, LIGHT = "#111111", "#ffffff"  # text on a coloured square
GREY = "#808080"  # readable on light and dark
ROWS = alt.NamedData("rows")
VISIBLE = "indexof(hidden_norms, datum.norm) < 0 && indexof(hidden_sizes, '' + datum.size) < 0"
TIP_TITLES = {
    "text": "mean [95 % interval]",
    "count": "seeds",
    "seeds": "values by seed",
    "samples": "samples seen",
}
CONFIG = {
    "font": "DejaVu Sans, Liberation Sans, Arial, sans-serif",
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
        "orient": "top",
        "columns": 4,
        "labelFontSize": 11,
        "symbolSize": 80,
        "labelLimit": 150,
        "symbolStrokeWidth": 1.6,
    },
    "header": {"labelFontSize": 12, "labelFontWeight": "bold"},
}
Styles = Mapping[str, Style]
Channels = tuple[alt.Color, alt.Shape, alt.StrokeDash]


@dataclass(frozen=True)
class Figure:
    """A finished figure: `spec` is Vega-Lite as JSON."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]

    @property
    def for_paper(self) -> dict[str, Any]:
        """The specification without title and without the strip of counts."""
        bare = {key: value for key, value in self.spec.items() if key != "title"}
        if self.spec["usermeta"]["fit"] == "strip":
            panel, _ = bare.pop("vconcat")
            bare |= panel
        return bare

    @property
    def rows(self) -> Table:
        """The data of the figure."""
        frame = pd.DataFrame(self.spec["datasets"]["rows"], dtype=object)
        return Table(self.name, self.title, list(map(str, frame)), frame)


def make_figure(
    name: str,
    title: str,
    caption: str,
    chart: Any,
    rows: Sequence[Row],
    part: Slice,
    fit: str = "width",
) -> Figure:
    """The figure of a slice."""
    return finish_figure(f"{name}_{part.slug}", title, part.heading, caption, chart, rows, fit)


def finish_figure(
    name: str,
    title: str,
    subtitle: str,
    caption: str,
    chart: Any,
    rows: Sequence[Row],
    fit: str = "width",
) -> Figure:
    """The chart as JSON, with its rows, titles, theme and the page's filter parameters."""
    spec = chart.to_dict(validate=False)
    hidden = [{"name": name, "value": []} for name in ("hidden_norms", "hidden_sizes")]
    spec |= {
        "datasets": {"rows": list(rows)},
        "title": {"text": title, "subtitle": subtitle},
        "params": [*spec.get("params", []), *hidden],
        "usermeta": {"fit": fit},
        "config": CONFIG,
    }
    return Figure(name, title, caption, spec)


def visible(condition: str | None = None) -> alt.Chart:
    """The start of every layer: rows that are not filtered out and satisfy the condition."""
    chart = alt.Chart().transform_filter(VISIBLE)
    return chart if condition is None else chart.transform_filter(condition)


def tooltip(*fields: str) -> list[alt.Tooltip]:
    """fields: column names, with a colon and the type if it is not nominal: `lr:Q`."""
    names = [field.partition(":")[0] for field in fields]
    return [
        alt.Tooltip(field if ":" in field else f"{field}:N", title=TIP_TITLES.get(name, name))
        for field, name in zip(fields, names, strict=True)
    ]


POINT_TIP = ("norm", "size", "text", "count", "seeds", "note", "directory")


# Axes and colours


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


def metric_axis(
    metric: Metric,
    rows: Sequence[Row],
    label: str | None = None,
    outside: Sequence[str] = (),
    most: float = math.inf,
) -> alt.Y:
    """Shows the means and bounds of all norms but those `outside`, which are drawn at the edge.

    An accuracy's axis ends at 0 and 100 %, a loss's at 0 and at `most`.
    """
    shown = [row for row in rows if row["norm"] not in outside]
    ends = [row[key] for row in shown for key in ("low", "high", "mean") if row[key] is not None]
    means = [row["mean"] for row in shown if row["mean"] is not None]
    low, high = min(ends, default=0), max(ends, default=1)
    margin = 0.05 * (min(high, most) - low) or 0.05 * abs(high) or 1
    is_positive = not metric.higher_is_better and min(means, default=0) >= 0
    least, greatest = metric.bounds or (0 if is_positive else -math.inf, most)
    domain = [max(low - margin, least), min(high + margin, greatest)]
    scale = alt.Scale(domain=domain, nice=False, zero=False, clamp=True)
    return alt.Y("mean:Q", title=label or metric.label, scale=scale)


def find_outsiders(metric: Metric, rows: Sequence[Row]) -> list[str]:
    """Norms that are so bad at every size that they would squeeze the others together.

    They are less than half of the norms, and the best of their means is further from the best of
    all than 3 times the reach of the better norms, and 10 tolerances.
    """
    table = pd.DataFrame([row for row in rows if row["mean"] is not None])
    mean = table["mean"].astype(float) * (1 if metric.higher_is_better else -1)
    gaps = (mean.max() - mean).groupby(table["norm"]).agg(["min", "max"]).sort_values("min")
    reach = gaps["max"].cummax().shift()
    is_far = (gaps["min"] > 3 * reach) & (gaps["min"] > 10 * metric.tolerance)
    is_far.iloc[: max(2, len(gaps) // 2 + 1)] = False
    return list(gaps.index[is_far.cummax()])


def shortfall(metric: Metric, rows: Sequence[Row]) -> tuple[alt.Color, list[Row]]:
    """Colours by how far each mean is behind the best, in powers, so that the good ones differ.

    The rows get `behind`, and a readable `ink`.
    """
    sign = 1 if metric.higher_is_better else -1
    best = max((sign * row["mean"] for row in rows if row["mean"] is not None), default=0)
    behind = [None if row["mean"] is None else best - sign * row["mean"] for row in rows]
    most = max([2 * metric.tolerance or 1e-9, *(gap for gap in behind if gap is not None)])
    unit = most / 50  # the scale is linear below, logarithmic above
    inks = [
        DIVERGED if gap is None else DARK if math.log1p(gap / unit) < 1.7 else LIGHT
        for gap in behind
    ]
    scale = alt.Scale(
        type="symlog", constant=unit, scheme="viridis", domain=[0, most], reverse=True, nice=False
    )
    told = [
        row | {"behind": gap, "ink": ink} for row, gap, ink in zip(rows, behind, inks, strict=True)
    ]
    title = f"{metric.unit or metric.label} behind the best"
    return alt.Color("behind:Q", title=title, scale=scale), told


def encode_norm(norms: Sequence[str], styles: Styles, *, legend: bool = True) -> Channels:
    """Colour, marker and dash of the norms."""
    own = {norm: styles[norm] for norm in norms}
    colour, shape, dash = encode_style("norm", own)
    if legend:
        return colour.legend(symbolStrokeWidth=0), shape, dash
    return colour.legend(None), shape.legend(None), dash.legend(None)


def encode_style(field: str, styles: Styles, title: str | None = None) -> Channels:
    """Channels with equal domains, so their legends become one."""
    domain, own = list(styles), styles.values()
    colour = alt.Scale(domain=domain, range=[style.colour for style in own])
    shape = alt.Scale(domain=domain, range=[style.marker for style in own])
    dash = alt.Scale(domain=domain, range=[list(style.dash) for style in own])
    return (
        alt.Color(f"{field}:N", title=title, scale=colour),
        alt.Shape(f"{field}:N", title=title, scale=shape),
        alt.StrokeDash(f"{field}:N", title=title, scale=dash),
    )


# Marks


def end_labels(
    rows: Sequence[Row],
    x: alt.X,
    y: alt.Y,
    channels: Channels,
    outside: Sequence[str] = (),
    height: float = HEIGHT,
) -> list[Any]:
    """Layers that name each line at the right edge, in place of a legend.

    Labels keep apart; a thin line leads from the last point to its label.

    Args:
        rows: with `mean` and the column of `x`, ordered along each line.
        outside: norms beyond the scale, whose labels have an arrow and their best mean.
    """
    low, high = y["scale"]["domain"]
    field = str(x["shorthand"]).partition(":")[0]
    last = {row["norm"]: row for row in rows if row["mean"] is not None}
    wanted = [(high - row["mean"]) / (high - low) * height for row in last.values()]
    placed = _spread([min(max(place, 0.0), height) for place in wanted], height)
    ends = [
        {
            "norm": norm,
            field: row[field],
            "mean": row["mean"],
            "label": f"{norm} {_beyond(norm, rows, low)}" if norm in outside else norm,
            "place": high - place / height * (high - low),
        }
        for (norm, row), place in zip(last.items(), placed, strict=True)
    ]
    colour, shape, _ = channels
    at = alt.Y("place:Q", scale=y["scale"])
    base = visible().properties(data=alt.Data(values=ends))
    lead = base.transform_filter(_inside(outside)).mark_rule(strokeWidth=0.7, opacity=0.6)
    marker = base.mark_point(filled=True, opacity=1, size=50, xOffset=9)
    name = base.mark_text(align="left", dx=18, limit=LABEL)
    edge = {"x": alt.value("width"), "y": at}
    return [
        lead.encode(x, y, x2=alt.value("width"), y2=alt.Y2("place:Q"), color=colour),
        marker.encode(**edge, color=colour, shape=shape),
        name.encode(**edge, text="label:N"),
    ]


def _inside(outside: Sequence[str]) -> str:
    return f"indexof({list(outside)}, datum.norm) < 0"


def _beyond(norm: str, rows: Sequence[Row], low: float) -> str:
    """`↓ 83.3`: the best mean of a norm outside the scale, and on which side."""
    means = [row["mean"] for row in rows if row["norm"] == norm and row["mean"] is not None]
    return f"↓ {max(means):.3g}" if means[0] < low else f"↑ {min(means):.3g}"


def _spread(wanted: Sequence[float], height: float) -> list[float]:
    """The positions nearest to the wanted ones that are LINE apart (isotonic regression)."""
    order = np.argsort(wanted, kind="stable")
    gap = min(LINE, height / max(1, len(order) - 1))
    blocks: list[list[float]] = []  # each pools neighbours that would overlap
    for rank, place in enumerate(np.asarray(wanted, float)[order]):
        blocks.append([place - rank * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    free = np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])
    most = height - gap * (len(order) - 1)
    places = np.clip(free, 0, max(0, most)) + gap * np.arange(len(order))
    return [float(place) for _, place in sorted(zip(order, places, strict=True))]


def lines(
    x: alt.X,
    y: alt.Y,
    channels: Channels,
    tip: list[alt.Tooltip],
    *,
    intervals: bool = True,
    size: int = 64,
    outside: Sequence[str] = (),
) -> list[Any]:
    """Layers of lines with their markers and, from the columns `low` and `high`, intervals.

    Norms `outside` the scale are arrows at its edge.
    """
    colour, shape, dash = channels
    marks = {"x": x, "y": y, "color": colour, "tooltip": tip}
    inside = _inside(outside)
    line = visible(inside).mark_line(strokeWidth=1.6).encode(x, y, colour, dash)
    rule = visible(inside).mark_rule(strokeWidth=1.6)
    dots = visible(f"!datum.independent && {inside}").mark_point(filled=True, opacity=1, size=size)
    rings = visible(f"datum.independent && {inside}")
    rings = rings.mark_point(strokeWidth=1.6, opacity=1, size=size)
    bars = [rule.encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour)] if intervals else []
    found = [line, *bars, *(layer.encode(**marks, shape=shape) for layer in (dots, rings))]
    if outside:
        arrow = visible(f"!({inside})").mark_point(
            shape="arrow",
            filled=True,
            opacity=1,
            size=200,
            yOffset=alt.expr(f"datum.mean < {y['scale']['domain'][0]} ? -7 : 7"),
            strokeWidth=1.6,
            angle=alt.expr(f"datum.mean < {y['scale']['domain'][0]} ? 180 : 0"),
        )
        found.append(arrow.encode(**marks))
    return found


def squares(
    x: alt.X,
    y: alt.Y,
    colour: alt.Color,
    tip: list[alt.Tooltip],
    *,
    step: tuple[int, int] = SQUARE,
    measured: str = "mean",
    framed: str = "false",
) -> Any:
    """Coloured squares with the texts `value` and, below it, `under`, both in the colour `ink`.

    Squares without a number in the column `measured` are grey; those in `framed` are framed.
    """
    ink, lift = alt.Color("ink:N", scale=None), 8 if step == SQUARE else 0
    layers = [
        visible(f"!isValid(datum.{measured})").mark_rect(fill="#d9d9d9"),
        visible(f"isValid(datum.{measured})").mark_rect().encode(colour),
        visible(framed).mark_rect(fillOpacity=0, stroke=DARK, strokeWidth=2.5),
        visible().mark_text(dy=-lift, fontSize=12).encode(alt.Text("value:N"), ink, tooltip=tip),
        visible().mark_text(dy=lift, fontSize=9).encode(alt.Text("under:N"), ink),
    ]
    chart = alt.layer(*(layer.encode(x, y) for layer in layers), data=ROWS)
    width, height = map(alt.Step, step)
    return chart.resolve_scale(color="independent").properties(width=width, height=height)


def in_panels(panel: Any, part: Slice) -> Any:
    """A panel per norm, each with its own x-axis, else the last row has axes without a panel."""
    return panel.facet(facet=alt.Facet("norm:N", title=None, sort=part.norms), columns=3)
