"""The learning rate that was chosen against the size, where a study searched for one."""

from __future__ import annotations

import altair as alt

from normexp.reporting.figures import HEIGHT, ROWS, VISIBLE, WIDTH, Figure, encode_norm, finish
from normexp.reporting.metric import describe_metric
from normexp.reporting.rows import Row, describe_cell
from normexp.reporting.slices import AXIS_TITLES, Slice
from normexp.reporting.style import Style


def draw_learning_rates(part: Slice, styles: dict[str, Style]) -> Figure | None:
    """Every searched rate as a small point, the chosen one as the norm's marker on its line."""
    rows = _rows(part)
    if not rows:
        return None
    norms = list(part.lines)
    colour, shape, dash = encode_norm(norms, styles)
    x = (
        alt.X("size:Q", title=AXIS_TITLES[part.axis])
        .scale(type="log", base=2, nice=False)
        .axis(values=part.sizes, format="d")
    )
    y = alt.Y("lr:Q", title="learning rate (log scale)").scale(type="log")
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
        base.mark_point(size=14, opacity=0.5, color="#888888").encode(x, y, tooltip=tip),
        chosen.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        chosen.mark_point(filled=True, opacity=1, size=70).encode(x, y, colour, shape, tooltip=tip),
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        f"Learning rates that were tried (grey) and the one chosen for each norm and size by mean "
        f"{describe_metric(part.metric.selection_name).label}; nothing is chosen on test."
    )
    return finish("learning_rates", "Learning rate by size", caption, chart, rows, part)


def _rows(part: Slice) -> list[Row]:
    metric = describe_metric(part.metric.selection_name)
    rows = []
    for line in part.lines.values():
        for size in part.sizes:
            chosen = line.at(size)
            if chosen is None or chosen.id not in part.searched:
                continue
            rows += [
                describe_cell(cell, metric)
                | {"size": size, "lr": cell.lr, "chosen": cell.id == chosen.id}
                for cell in part.searched[chosen.id]
            ]
    return rows
