"""Speed of training by norm."""

from __future__ import annotations

import altair as alt

from normexp.reporting.figures import ROWS, VISIBLE, WIDTH, Figure, encode_norm, finish
from normexp.reporting.rows import timing_rows
from normexp.reporting.slices import Slice
from normexp.reporting.style import Style


def draw_throughput(part: Slice, styles: dict[str, Style]) -> Figure | None:
    """Samples per second by norm, one point per cell."""
    rows = timing_rows(part)
    if not rows:
        return None
    norms = list(part.lines)
    colour, shape, _ = encode_norm(norms, styles)
    points = alt.Chart(ROWS).transform_filter(VISIBLE).mark_point(filled=True, opacity=1, size=70)
    chart = points.encode(
        alt.X("samples_per_second:Q", title="training samples per second, of the whole stack")
        .scale(zero=True)
        .axis(tickCount=5),
        alt.Y("norm:N", title=None, sort=norms),
        colour.legend(None),
        shape.legend(None),
        tooltip=[
            "norm:N",
            "size:N",
            "samples_per_second:Q",
            "step_ms:Q",
            "stack_size:Q",
            "directory:N",
        ],
    ).properties(width=WIDTH, height=alt.Step(26))
    caption = (
        "Speed of training, one point per cell: the median over its runs. Runs of one stack share "
        "a time, so that there is no interval over seeds."
    )
    return finish("throughput", "Throughput", caption, chart, rows, part)
