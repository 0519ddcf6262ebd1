"""Running, precise and batch statistics in evaluation, against the size."""

from __future__ import annotations

import altair as alt

from normexp.reporting.figures import (
    ROWS,
    VISIBLE,
    Figure,
    finish,
    metric_axis,
    size_axis,
    tooltip,
)
from normexp.reporting.rows import statistics_rows
from normexp.reporting.slices import Slice
from normexp.reporting.style import STATISTICS_STYLES


def draw_statistics(part: Slice) -> Figure | None:
    """Running, precise and batch statistics in evaluation, one small panel per norm."""
    rows = statistics_rows(part)
    if not rows:
        return None
    kinds = sorted({row["statistics"] for row in rows}, key=_statistics_rank)
    colour, shape, dash = _encode_statistics(kinds)
    x = size_axis(part, "size", grid=False, title=part.axis.replace("_", " "))
    y = metric_axis(part.metric, rows, label=rows[0]["metric"])
    base = alt.Chart().transform_filter(VISIBLE)
    points = base.mark_point(filled=True, size=40, opacity=1)
    panel = alt.layer(
        base.mark_line().encode(x, y, colour, dash),
        base.mark_rule().encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour),
        points.encode(x, y, colour, shape, tooltip=tooltip("statistics")),
        data=ROWS,
    ).properties(width=200, height=150)
    chart = panel.facet(facet=alt.Facet("norm:N", title=None, sort=list(part.lines)), columns=3)
    chart = chart.resolve_axis(x="independent")  # else the last row has axes without a panel
    caption = (
        "The same trained networks evaluated with running averages, with precise statistics and "
        "with those of the evaluation batch (batch: of as many samples as in training): where they "
        "part, running averages mislead."
    )
    return finish(
        "evaluation_statistics", "Evaluation statistics", caption, chart, rows, part, fit="facet"
    )


def _encode_statistics(kinds: list[str]) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    styles = [STATISTICS_STYLES[min(i, len(STATISTICS_STYLES) - 1)] for i in range(len(kinds))]
    colour, shape, dash = (
        alt.Scale(domain=kinds, range=[getattr(style, part) for style in styles])
        for part in ("colour", "marker", "dash")
    )
    field, title = "statistics:N", "evaluated with"
    return (
        alt.Color(field, title=title, scale=colour),
        alt.Shape(field, title=title, scale=shape),
        alt.StrokeDash(field, title=title, scale=dash),
    )


def _statistics_rank(name: str) -> tuple[int, int]:
    order = ["running", "precise"]
    digits = name.removeprefix("batch")
    return (order.index(name) if name in order else 2), int(digits) if digits.isdigit() else 0
