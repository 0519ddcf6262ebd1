"""The figures of a slice: one Vega-Lite specification each, for the page, the SVG and the PNG.

A specification names its rows `rows` and holds them once under `datasets`; `usermeta` says to the
page how it may be resized. Rows have the columns `norm` and `size`, which the page filters by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from normexp.reporting.metric import Metric
from normexp.reporting.rows import Row, size_rows
from normexp.reporting.slices import AXIS_TITLES, AXIS_WORDS, Slice
from normexp.reporting.style import DIVERGED, Style

WIDTH = 560
HEIGHT = 320
ROWS = alt.NamedData("rows")
VISIBLE = "indexof(hidden_norms, datum.norm) < 0 && indexof(hidden_sizes, '' + datum.size) < 0"
FONT = "DejaVu Sans, Liberation Sans, Arial, sans-serif"


@dataclass(frozen=True)
class Figure:
    """A finished figure: `spec` is Vega-Lite as JSON, `rows` its data."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]
    rows: list[Row]
    model: str
    data: str


def draw_metric(part: Slice, styles: dict[str, Style]) -> Figure | None:
    """The metric against the size: a line per norm, intervals over seeds, and a strip of counts."""
    rows = size_rows(part)
    if not any(row["mean"] is not None for row in rows):
        return None
    norms = list(part.lines)
    panel = _metric_panel(part, norms, styles, rows)
    chart = alt.vconcat(panel, _count_strip(part, norms), spacing=12)
    caption = (
        f"{part.metric.label} against the {AXIS_TITLES[part.axis]}: mean and 95 % t interval over "
        "seeds, drawn no further than accuracies go; points are moved sideways a little so that "
        "intervals stay apart. Below, the number of seeds behind each point: ×k diverged, !k "
        "failed, ?k missing. Open markers on a level line are one cell, of a norm measured not to "
        "depend on this size."
    )
    return finish(
        "metric_by_size",
        f"{part.metric.label} by {AXIS_WORDS[part.axis]}",
        caption,
        chart,
        rows,
        part,
    )


def finish(
    name: str,
    title: str,
    caption: str,
    chart: Any,
    rows: Sequence[Row],
    part: Slice,
    fit: str = "width",
) -> Figure:
    """The chart as JSON with its data, title, theme and the parameters that the page filters by."""
    spec = chart.to_dict(validate=False)
    spec["datasets"] = {"rows": list(rows)}
    spec["title"] = {"text": title, "subtitle": f"{part.title}, {part.fixed}"}
    hidden = [{"name": name, "value": []} for name in ("hidden_norms", "hidden_sizes")]
    spec["params"] = [*spec.get("params", []), *hidden]
    spec["usermeta"] = {"fit": fit}
    spec["config"] = _config()
    return Figure(
        f"{name}_{part.slug}",
        title,
        caption,
        spec,
        list(rows),
        part.cells[0].model,
        part.cells[0].data,
    )


def _metric_panel(
    part: Slice, norms: list[str], styles: dict[str, Style], rows: Sequence[Row]
) -> Any:
    x, y = size_axis(part, "x", grid=True), metric_axis(part.metric, rows)
    colour, shape, dash = encode_norm(norms, styles)
    base = alt.Chart().transform_filter(VISIBLE)
    points = base.mark_point(strokeWidth=1.6, opacity=1, size=64)
    filled = base.mark_point(filled=True, opacity=1, size=64)
    place = (x, y, colour, shape)
    return alt.layer(
        base.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        base.mark_rule(strokeWidth=1.6)
        .transform_filter("datum.shown")
        .encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour),
        filled.transform_filter("!datum.independent").encode(*place, tooltip=tooltip()),
        points.transform_filter("datum.independent").encode(*place, tooltip=tooltip()),
        data=ROWS,
    ).properties(width=WIDTH, height=HEIGHT)


def _count_strip(part: Slice, norms: list[str]) -> alt.Chart:
    """Seeds behind each point, so that no bar stands without its n and nothing diverged hides."""
    return (
        alt.Chart(ROWS)
        .transform_filter(VISIBLE)
        .transform_filter("datum.shown")
        .mark_text(fontSize=10)
        .encode(
            size_axis(part, "size", grid=False, labels=False),
            alt.Y("norm:N", title="seeds", sort=norms).axis(
                labelFontSize=10, ticks=False, domain=False, labelLimit=150
            ),
            alt.Text("count:N"),
            color=alt.condition(
                "datum.diverged > 0 || datum.failed > 0", alt.value(DIVERGED), alt.value("#808080")
            ),
            tooltip=tooltip(),
        )
        .properties(width=WIDTH, height=alt.Step(15))
    )


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
    scale = alt.Scale(
        type="log", base=2, nice=False, domain=[part.sizes[0] / 1.7, part.sizes[-1] * 1.7]
    )
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
    norms: list[str], styles: dict[str, Style]
) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    """Colour, marker and dash of the norms; equal domains, so that their legends are one."""
    colours = [styles[norm].colour for norm in norms]
    markers = [styles[norm].marker for norm in norms]
    dashes = [list(styles[norm].dash) for norm in norms]
    return (
        alt.Color("norm:N", title=None, scale=alt.Scale(domain=norms, range=colours)).legend(
            symbolStrokeWidth=0
        ),
        alt.Shape("norm:N", title=None, scale=alt.Scale(domain=norms, range=markers)),
        alt.StrokeDash("norm:N", title=None, scale=alt.Scale(domain=norms, range=dashes)),
    )


def tooltip(*extra: str) -> list[alt.Tooltip]:
    columns = {
        "norm": "norm",
        **{name: name for name in extra},
        "size": "size",
        "text": "mean [95 % interval]",
        "count": "seeds",
        "seeds": "values by seed",
        "note": "note",
        "directory": "directory",
    }
    return [alt.Tooltip(f"{column}:N", title=title) for column, title in columns.items()]


def _config() -> dict[str, Any]:
    return {
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
