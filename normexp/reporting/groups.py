"""The groups sweep: one group pools like layer, one group per channel like instance."""

from __future__ import annotations

import altair as alt

from normexp.reporting.figures import HEIGHT, ROWS, VISIBLE, WIDTH, Figure, finish
from normexp.reporting.rows import Row, describe_cell
from normexp.reporting.slices import Slice
from normexp.reporting.style import ORDER, SLOTS, Style

KEY = "norm.num_groups"


def draw_groups(part: Slice, styles: dict[str, Style]) -> Figure | None:
    """The metric against the number of groups at the smallest size, with layer and instance."""
    rows = _rows(part)
    counts = sorted({row["groups"] for row in rows})
    if len(counts) < 2:
        return None
    style = SLOTS[ORDER.index("group")]
    ends = [
        describe_cell(cell, part.metric) | {"size": part.sizes[0], "groups": None}
        for norm in ("layer", "instance")
        if norm in part.lines and (cell := part.lines[norm].at(part.sizes[0])) is not None
    ]
    x = (
        alt.X("groups:Q", title="number of groups")
        .scale(type="log", base=2, nice=False)
        .axis(values=counts, format="d")
    )
    y = alt.Y("mean:Q", title=part.metric.label).scale(zero=False)
    tip = ["norm:N", "groups:Q", "text:N", "count:N", "seeds:N", "directory:N"]
    base = alt.Chart().transform_filter(VISIBLE)
    swept = base.transform_filter("datum.groups !== null")
    colours = {row["norm"]: styles[row["norm"]].colour for row in ends}
    level = base.transform_filter("datum.groups === null").mark_rule(strokeDash=[5, 3])
    chart = alt.layer(
        swept.mark_line(color=style.colour).encode(x, y),
        swept.mark_rule(color=style.colour).encode(x, alt.Y("low:Q"), alt.Y2("high:Q")),
        swept.mark_point(
            filled=True, opacity=1, size=64, color=style.colour, shape=style.marker
        ).encode(x, y, tooltip=tip),
        level.encode(
            y,
            alt.Color("norm:N", title="level of").scale(
                domain=list(colours), range=list(colours.values())
            ),
            tooltip=tip,
        ),
        data=ROWS,
    ).properties(width=WIDTH, height=HEIGHT * 0.75)
    caption = (
        f"{part.metric.label} of group norm against its number of groups at size {part.sizes[0]}, "
        "mean and 95 % t interval over seeds. Dashed: layer (one group) and instance (one channel "
        "per group), where they were run: the ends must meet them."
    )
    return finish("groups", "From layer to instance", caption, chart, rows + ends, part)


def _rows(part: Slice) -> list[Row]:
    cells = [cell for line in part.lines.values() if (cell := line.at(part.sizes[0])) is not None]
    return [
        describe_cell(cell, part.metric) | {"size": part.sizes[0], "groups": cell.config[KEY]}
        for cell in cells
        if isinstance(cell.config.get(KEY), int)
    ]
