"""Cost of training by norm: speed, and memory where it was measured."""

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
    title = "training samples per second, of the whole stack"
    chart = _points(part, styles, "samples_per_second", title)
    caption = (
        "Speed of training, one point per cell: the median over its runs. Runs of one stack share "
        "a time, so that there is no interval over seeds."
    )
    return finish("throughput", "Throughput", caption, chart, rows, part)


def draw_memory(part: Slice, styles: dict[str, Style]) -> Figure | None:
    """Peak GPU memory by norm, one point per cell; none where all were trained on a CPU."""
    rows = [row for row in timing_rows(part) if row["peak_memory_mb"] is not None]
    if not rows:
        return None
    chart = _points(part, styles, "peak_memory_mb", "peak GPU memory of the whole stack (MB)")
    caption = (
        "Most memory that tensors held during training and evaluation, in 10^6 bytes, one point "
        "per cell. It is of a whole stack, so it grows with the number of seeds trained together."
    )
    return finish("memory", "Memory", caption, chart, rows, part)


def _points(part: Slice, styles: dict[str, Style], field: str, title: str) -> alt.Chart:
    norms = list(part.lines)
    colour, shape, _ = encode_norm(norms, styles)
    points = alt.Chart(ROWS).transform_filter(VISIBLE).mark_point(filled=True, opacity=1, size=70)
    columns = ["samples_per_second", "step_ms", "stack_size", "peak_memory_mb"]
    return points.encode(
        alt.X(f"{field}:Q", title=title).scale(zero=True).axis(tickCount=5),
        alt.Y("norm:N", title=None, sort=norms),
        colour.legend(None),
        shape.legend(None),
        tooltip=["norm:N", "size:N", *(f"{column}:Q" for column in columns), "directory:N"],
    ).properties(width=WIDTH, height=alt.Step(26))
