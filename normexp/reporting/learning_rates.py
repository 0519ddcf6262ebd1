"""The learning rate that was chosen against the size, where a study searched for one."""

from __future__ import annotations

import altair as alt

from normexp.reporting.figures import (
    HEIGHT,
    ROWS,
    VISIBLE,
    WIDTH,
    Figure,
    encode_norm,
    finish,
    size_axis,
)
from normexp.reporting.matrices import square_text
from normexp.reporting.metric import describe_metric
from normexp.reporting.rows import Row, describe_cell, dodge
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import Style


def draw_learning_rates(part: Slice, styles: dict[str, Style]) -> Figure | None:
    """Every searched rate as a small point, the chosen one as the norm's marker on its line."""
    rows = _rows(part)
    if not rows:
        return None
    norms = list(part.lines)
    colour, shape, dash = encode_norm(norms, styles)
    rates = sorted({row["lr"] for row in rows})
    x = size_axis(part, "x", grid=True)
    y = (
        alt.Y("lr:Q", title="learning rate (log scale)")
        .scale(type="log", nice=False, domain=[rates[0] / 1.6, rates[-1] * 1.6])
        .axis(values=rates, format="~g")
    )
    base = alt.Chart(ROWS).transform_filter(VISIBLE)
    chosen = base.transform_filter("datum.chosen")
    tip = [
        "norm:N",
        "size:N",
        "lr:Q",
        alt.Tooltip("text:N", title="validation, mean"),
        "count:N",
        "directory:N",
    ]
    chart = alt.layer(
        base.mark_point(size=14, opacity=0.5, color="#888888").encode(
            size_axis(part, "size", grid=True), y, tooltip=tip
        ),
        chosen.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        chosen.mark_point(filled=True, opacity=1, size=70).encode(x, y, colour, shape, tooltip=tip),
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        f"Learning rates that were tried (grey) and the one chosen for each norm and size by mean "
        f"{describe_metric(part.metric.selection_name).label}; nothing is chosen on test."
    )
    return finish("learning_rates", "Learning rate by size", caption, chart, rows, part)


def draw_rate_map(part: Slice) -> Figure | None:
    """Learning rate against size as squares, one panel per norm: how sharp the choice was."""
    rows = _rows(part)
    values = [row["mean"] for row in rows if row["mean"] is not None]
    if not values:
        return None
    metric = describe_metric(part.metric.selection_name)
    low, high = min(values), max(values)
    for row in rows:
        row |= square_text(row, low, high, metric)
    base = alt.Chart().encode(
        alt.X("size:O", title=AXIS_WORDS[part.axis], sort=part.sizes).axis(labelAngle=0),
        alt.Y("lr:O", title="learning rate", sort="descending").axis(format="~g"),
    )
    scale = alt.Scale(scheme="viridis", domain=[low, high], reverse=not metric.higher_is_better)
    colour = alt.Color("mean:Q", title=metric.label, scale=scale).legend(None)
    text = alt.Text("value:N")
    tip = ["norm:N", "size:N", "lr:Q", "text:N", "count:N", "directory:N"]
    shown = base.transform_filter(VISIBLE)
    panel = (
        alt.layer(
            shown.mark_rect(fill="#d9d9d9").transform_filter("datum.mean === null"),
            shown.mark_rect().transform_filter("datum.mean !== null").encode(colour),
            shown.mark_rect(fillOpacity=0, stroke="#111111", strokeWidth=2.5).transform_filter(
                "datum.chosen"
            ),
            shown.mark_text(fontSize=11).encode(text, alt.Color("ink:N", scale=None), tooltip=tip),
            data=ROWS,
        )
        .resolve_scale(color="independent")
        .properties(width=alt.Step(48), height=alt.Step(26))
    )
    chart = panel.facet(facet=alt.Facet("norm:N", title=None, sort=list(part.lines)), columns=3)
    chart = chart.resolve_axis(x="independent", y="independent")
    caption = (
        f"Mean {metric.label} over seeds for every learning rate that was tried; framed: the one "
        "chosen. Grey: no seed finished, ×k diverged. A choice at an edge may not be the best rate."
    )
    title = "Learning rate and size"
    return finish("rate_map", title, caption, chart, rows, part, fit="none")


def searched_note(part: Slice) -> str:
    """How a rate was chosen, where there was a choice."""
    if not part.searched:
        return ""
    metric = describe_metric(part.metric.selection_name)
    return (
        f"Where several learning rates were run, each norm and size stands with the one that is "
        f"best by mean {metric.label}."
    )


def _rows(part: Slice) -> list[Row]:
    metric = describe_metric(part.metric.selection_name)
    rows = []
    for position, line in enumerate(part.lines.values()):
        for size in part.sizes:
            chosen = line.at(size)
            if chosen is None or chosen.id not in part.searched:
                continue
            rows += [
                describe_cell(cell, metric)
                | {"size": size, "x": size * 2 ** dodge(position, len(part.lines))}
                | {"lr": cell.lr, "chosen": cell.id == chosen.id}
                for cell in part.searched[chosen.id]
            ]
    return rows
