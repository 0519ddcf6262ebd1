"""The parts of every figure: axes, marks, colours and the common style."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression

from normexp.reporting.metric import Metric
from normexp.reporting.model import Slice
from normexp.reporting.rows import plain_rows
from normexp.reporting.style import DIVERGED, Style

WIDTH, HEIGHT = 560, 320
SQUARE = (74, 40)  # pixels; wide enough for `0.88` over `[0.47, 1.00]`
LINE, LABEL = 14, 150  # pixels: height of a label at the end of a line, and its greatest width
DARK, LIGHT = "#111111", "#ffffff"  # text on a coloured square
ROWS = alt.NamedData("rows")
VISIBLE = "indexof(hidden_norms, datum.norm) < 0 && indexof(hidden_sizes, '' + datum.size) < 0"
TIP_TITLES = {
    "text": "mean [95 % interval]",
    "count": "seeds",
    "seeds": "values by seed",
    "samples": "samples seen",
}
POINT_TIP = ("norm", "size", "text", "count", "seeds", "note", "directory")
AXIS_TITLES = {
    "norm_batch_size": "norm batch size (samples that share statistics)",
    "batch_size": "batch size (samples per optimizer step)",
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
Channels = tuple[Any, Any, Any]  # colour, shape and dash


@dataclass(frozen=True)
class Figure:
    """A figure: how it is drawn, and its data.

    chart: an Altair chart of the rows of `table`
    table: the data, with the columns `norm` and `size` by which the page filters
    kind: the question that it answers, the same for every slice
    row: figures of one row of the page have about the same height
    fit: how the page may resize it: its `width`, each panel of a `facet`, a panel with a `strip` of
        counts below it, or only the steps between squares (`none`)
    """

    name: str
    title: str
    caption: str
    chart: Any
    table: pd.DataFrame
    fit: str = "width"
    subtitle: str = ""
    kind: str = ""
    row: int = 0

    @property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite as JSON; the page replaces the values of its two parameters."""
        return self.chart.properties(data=ROWS).to_dict(validate=False) | {
            "datasets": {"rows": plain_rows(self.table)},
            "transform": [{"filter": VISIBLE}],
            "title": {"text": self.title, "subtitle": self.subtitle},
            "params": [{"name": name, "value": []} for name in ("hidden_norms", "hidden_sizes")],
            "usermeta": {"fit": self.fit},
            "config": CONFIG,
        }

    @property
    def for_paper(self) -> dict[str, Any]:
        """The specification without title and without the strip of counts."""
        bare = self.spec
        del bare["title"]
        return bare | bare.pop("vconcat")[0] if self.fit == "strip" else bare


def tooltip(*fields: str) -> list[alt.Tooltip]:
    """fields: column names, with a colon and the type if it is not nominal: `lr:Q`."""
    names = [field.partition(":")[0] for field in fields]
    return [
        alt.Tooltip(field if ":" in field else f"{field}:N", title=TIP_TITLES.get(name, name))
        for field, name in zip(fields, names, strict=True)
    ]


# Axes and colours


def size_axis(
    part: Slice, field: str, *, grid: bool = False, labels: bool = True, title: str | None = None
) -> alt.X:
    """The sizes of a slice on a logarithmic axis."""
    x = alt.X(f"{field}:Q", title=(title or AXIS_TITLES[part.axis]) if labels else None)
    domain = [part.sizes[0] / 1.7, part.sizes[-1] * 1.7]
    shown = {"labels": labels, "ticks": labels, "domain": labels, "labelOverlap": "greedy"}
    x = x.axis(values=part.sizes, format="d", grid=grid, **shown)
    return x.scale(type="log", base=2, nice=False, domain=domain)


def metric_axis(
    metric: Metric, table: pd.DataFrame, label: str | None = None, most: float = math.inf
) -> alt.Y:
    """An axis that fits the columns `mean`, `low` and `high`.

    An accuracy's stays within 0 and 100 %, a loss's within 0 and `most`.
    """
    shown = table[["mean", "low", "high"]].astype(float)
    low, high = shown.min().min(), shown.max().max()
    margin = 0.05 * (min(high, most) - low) or 0.05 * abs(high) or 1
    is_positive = not metric.higher_is_better and not (shown["mean"] < 0).any()
    least, greatest = metric.bounds or (0 if is_positive else -math.inf, most)
    domain = [max(low - margin, least), min(high + margin, greatest)]
    y = alt.Y("mean:Q", title=label or metric.label)
    return y.scale(domain=domain, nice=False, zero=False, clamp=True)


def find_outsiders(metric: Metric, table: pd.DataFrame) -> list[str]:
    """Norms that are so bad at every size that they would squeeze the others together.

    Less than half of the norms: those whose best mean is behind the best of all by more than 10
    tolerances and more than 3 times as far as any mean of the better norms, and beyond the
    intervals of all others.
    """
    behind = _behind_best(metric, table).dropna()
    gaps = behind.groupby(table["norm"]).agg(["min", "max"]).sort_values("min")
    reach = gaps["max"].cummax().shift()
    is_far = (gaps["min"] > 3 * reach) & (gaps["min"] > 10 * metric.tolerance)
    is_far.iloc[: max(2, len(gaps) // 2 + 1)] = False
    norms, outside = [], list(gaps.index[is_far.cummax()])
    while outside != norms:
        norms = outside
        low, high = metric_axis(metric, table[~table["norm"].isin(norms)])["scale"]["domain"]
        is_beyond = (table["mean"] < low) | (table["mean"] > high)
        outside = [norm for norm in norms if is_beyond[table["norm"] == norm].all()]
    return outside


def shade_shortfall(metric: Metric, table: pd.DataFrame) -> tuple[alt.Color, pd.DataFrame]:
    """A colour scale of how far each mean is behind the best, finer near it.

    The table gets the columns `behind` and `ink`, a text colour that is readable on it.
    """
    behind = _behind_best(metric, table)
    most = np.nanmax([2 * metric.tolerance or 1e-9, *behind])
    unit = most / 50  # the scale is linear below, logarithmic above
    ink = np.select([behind.isna(), np.log1p(behind / unit) < 1.7], [DIVERGED, DARK], LIGHT)
    colour = alt.Color("behind:Q", title=f"{metric.unit or metric.label} behind the best")
    scale = {"constant": unit, "scheme": "viridis", "domain": [0, most], "reverse": True}
    return colour.scale(type="symlog", nice=False, **scale), table.assign(behind=behind, ink=ink)


def _behind_best(metric: Metric, table: pd.DataFrame) -> pd.Series:
    mean = table["mean"].astype(float) * (1 if metric.higher_is_better else -1)
    return mean.max() - mean


def encode_style(
    styles: Styles, field: str = "norm", title: str | None = None, *, legend: bool = True
) -> Channels:
    """Colour, marker and dash by a column; as their domains are equal, they share one legend."""
    known = styles.values()
    ranges = {
        alt.Color: [style.colour for style in known],
        alt.Shape: [style.marker for style in known],
        alt.StrokeDash: [list(style.dash) for style in known],
    }
    colour, shape, dash = (
        channel(f"{field}:N", title=title, scale=alt.Scale(domain=list(styles), range=values))
        for channel, values in ranges.items()
    )
    if legend:
        return colour.legend(symbolStrokeWidth=0), shape, dash
    return colour.legend(None), shape.legend(None), dash.legend(None)


# Marks


def draw_lines(
    x: alt.X,
    y: alt.Y,
    channels: Channels,
    tip: list[alt.Tooltip],
    *,
    intervals: bool = True,
    size: int = 64,
    outside: Collection[str] = (),
) -> list[Any]:
    """Layers of lines with their markers and, from the columns `low` and `high`, intervals.

    Markers are hollow where the column `independent` is true. Norms `outside` the scale are arrows
    at its edge.
    """
    colour, shape, dash = channels
    marks = {"x": x, "y": y, "color": colour, "tooltip": tip}
    inside = _inside(outside)
    line = alt.Chart().mark_line(strokeWidth=1.6).encode(x, y, colour, dash)
    rule = alt.Chart().mark_rule(strokeWidth=1.6)
    rule = rule.encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour)
    point = alt.Chart().encode(**marks, shape=shape)
    dots = point.mark_point(filled=True, opacity=1, size=size)
    rings = point.mark_point(strokeWidth=1.6, opacity=1, size=size)
    layers = [
        line,
        *([rule] if intervals else []),
        dots.transform_filter("!datum.independent"),
        rings.transform_filter("datum.independent"),
    ]
    layers = [layer.transform_filter(inside) for layer in layers]
    if outside:
        arrow = _arrow(y["scale"]["domain"][0]).encode(**marks)
        layers.append(arrow.transform_filter(f"!({inside})"))
    return layers


def _arrow(low: float) -> alt.Chart:
    """Arrows at the lower edge for means below `low`, else at the upper edge."""
    return alt.Chart().mark_point(
        shape="arrow",
        filled=True,
        opacity=1,
        size=200,
        strokeWidth=1.6,
        yOffset=alt.expr(f"datum.mean < {low} ? -7 : 7"),
        angle=alt.expr(f"datum.mean < {low} ? 180 : 0"),
    )


def label_ends(
    table: pd.DataFrame,
    x: alt.X,
    y: alt.Y,
    channels: Channels,
    outside: Collection[str] = (),
    *,
    height: float,
) -> list[Any]:
    """Layers that name each line at the right edge, in place of a legend.

    Labels do not overlap; a thin line leads from the last point to its label.

    Args:
        table: with `mean` and the column of `x`, ordered along each line.
        outside: norms beyond the scale, whose labels have an arrow and their best mean.
    """
    field = str(x["shorthand"]).partition(":")[0]
    known = table.loc[table["mean"].notna(), ["norm", field, "mean"]]
    ends = _place_labels(known, y["scale"]["domain"], outside, height)
    base = alt.Chart(alt.Data(values=plain_rows(ends))).transform_filter(VISIBLE)
    lead = base.transform_filter(_inside(outside)).mark_rule(strokeWidth=0.7, opacity=0.6)
    marker = base.mark_point(filled=True, opacity=1, size=50, xOffset=9)
    name = base.mark_text(align="left", dx=18, limit=LABEL)
    colour, shape, _ = channels
    edge = {"x": alt.value("width"), "y": alt.Y("place:Q", scale=y["scale"])}
    return [
        lead.encode(x, y, x2=alt.value("width"), y2=alt.Y2("place:Q"), color=colour),
        marker.encode(**edge, color=colour, shape=shape),
        name.encode(**edge, text="label:N"),
    ]


def _place_labels(
    table: pd.DataFrame, domain: tuple[float, float], outside: Collection[str], height: float
) -> pd.DataFrame:
    """The last row of each norm, with its `label` and the label's `place` on the y-axis."""
    low, high = domain
    pixel = (high - low) / height
    last = table.drop_duplicates("norm", keep="last")
    wanted = np.clip((high - last["mean"].to_numpy(float)) / pixel, 0, height)
    beyond = {
        norm: f"{norm} ↓ {means.max():.3g}"
        if means.iloc[0] < low
        else f"{norm} ↑ {means.min():.3g}"
        for norm, means in table.groupby("norm")["mean"]
        if norm in outside
    }
    labels = [str(beyond.get(norm, norm)) for norm in last["norm"]]
    return last.assign(label=labels, place=high - _keep_apart(wanted, height) * pixel)


def _inside(outside: Collection[str]) -> str:
    return f"indexof({list(outside)}, datum.norm) < 0"


def _keep_apart(wanted: np.ndarray, height: float) -> np.ndarray:
    """The positions nearest to the wanted ones that are LINE pixels apart, or less if crowded."""
    order = np.argsort(wanted, kind="stable")
    least = min(LINE, height / max(1, len(order) - 1)) * np.arange(len(order))
    free = isotonic_regression(wanted[order] - least).x
    places = np.empty_like(wanted)
    places[order] = np.clip(free, 0, max(0, height - least[-1])) + least
    return places


def draw_squares(
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

    Squares without a number in the column `measured` are grey; `framed` is a Vega expression.
    """
    ink, lift = alt.Color("ink:N", scale=None), 8 if step == SQUARE else 0
    square, text = alt.Chart().mark_rect(), alt.Chart().mark_text
    layers = [
        square.transform_filter(f"!isValid(datum.{measured})").mark_rect(fill="#d9d9d9"),
        square.transform_filter(f"isValid(datum.{measured})").encode(colour),
        square.transform_filter(framed).mark_rect(fillOpacity=0, stroke=DARK, strokeWidth=2.5),
        text(dy=-lift, fontSize=12).encode(alt.Text("value:N"), ink, tooltip=tip),
        text(dy=lift, fontSize=9).encode(alt.Text("under:N"), ink),
    ]
    width, height = map(alt.Step, step)
    chart = alt.layer(*(layer.encode(x, y) for layer in layers))
    return chart.resolve_scale(color="independent").properties(width=width, height=height)


def in_panels(panel: Any, part: Slice, **independent: str) -> Any:
    """A panel per norm, each with its own x-axis: a shared one also shows in empty places."""
    facet = alt.Facet("norm:N", title=None, sort=part.norms)
    panels = panel.facet(facet, columns=3, data=ROWS)
    return panels.resolve_axis(x="independent", **independent)
