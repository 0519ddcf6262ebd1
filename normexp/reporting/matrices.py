"""Figures made of squares: norm against size, and norm against norm."""

from __future__ import annotations

import altair as alt

from normexp.reporting.comparisons import paired_values
from normexp.reporting.figures import ROWS, VISIBLE, Figure, finish
from normexp.reporting.metric import Metric
from normexp.reporting.rows import Row, interval_columns, size_rows
from normexp.reporting.slices import AXIS_TITLES, Slice
from normexp.reporting.style import DIVERGED
from normexp.stats import paired_improvement

CELL = 74  # pixels; wide enough for `0.88` over `[0.47, 1.00]`


def draw_heat_map(part: Slice) -> Figure | None:
    """Norm against size: the mean as colour and number, with the number of seeds under it."""
    rows = [row for row in size_rows(part) if row["mean"] is not None or row["expected"]]
    values = [row["mean"] for row in rows if row["mean"] is not None]
    if not values:
        return None
    low, high = min(values), max(values)
    for row in rows:
        row |= square_text(row, low, high, part.metric)
        if row["mean"] is not None and not row["shown"]:
            row["under"] = "same cell"
    base = (
        alt.Chart()
        .transform_filter(VISIBLE)
        .encode(
            alt.X("size:O", title=AXIS_TITLES[part.axis], sort=part.sizes).axis(labelAngle=0),
            alt.Y("norm:N", title=None, sort=list(part.lines)),
        )
    )
    scale = alt.Scale(
        scheme="viridis", domain=[low, high], reverse=not part.metric.higher_is_better
    )
    colour = alt.Color("mean:Q", title=part.metric.label, scale=scale).legend(
        orient="bottom", gradientLength=220, direction="horizontal"
    )
    ink = alt.Color("ink:N", scale=None)
    chart = (
        alt.layer(
            base.mark_rect(fill="#d9d9d9").transform_filter("datum.mean === null"),
            base.mark_rect().transform_filter("datum.mean !== null").encode(colour),
            base.mark_text(dy=-7, fontSize=12).encode(
                alt.Text("value:N"), ink, tooltip=_heat_tooltip()
            ),
            base.mark_text(dy=9, fontSize=9).encode(alt.Text("under:N"), ink),
            data=ROWS,
        )
        .resolve_scale(color="independent")
        .properties(width=alt.Step(CELL), height=alt.Step(40))
    )
    caption = (
        f"Mean {part.metric.label} by norm and size, and the half width of its 95 % interval with "
        "the number of seeds. Grey: no seed finished; blank: not run. A norm that does not depend "
        "on the norm batch size has one cell, shown along its row."
    )
    return finish(
        "heat_map", f"{part.metric.label} by norm and size", caption, chart, rows, part, fit="none"
    )


def draw_improvement(part: Slice) -> Figure | None:
    """P(the norm of the row beats that of the column) at the smallest size, paired by seed."""
    rows = improvement_rows(part)
    if not rows:
        return None
    norms = [norm for norm in part.lines if any(row["norm"] == norm for row in rows)]
    base = (
        alt.Chart()
        .transform_filter(VISIBLE)
        .encode(
            alt.X("other:N", title="... beats this norm", sort=norms).axis(
                labelAngle=-40, orient="top", domain=False
            ),
            alt.Y("norm:N", title="this norm ...", sort=norms).axis(domain=False),
        )
    )
    colour = (
        alt.Color("probability:Q", title="probability")
        .scale(scheme="purplegreen", domain=[0, 1])
        .legend(orient="bottom", gradientLength=220, direction="horizontal")
    )
    ink = alt.Color("ink:N", scale=None)
    tip = ["norm:N", "other:N", "value:N", "bounds:N", "n:Q"]
    chart = (
        alt.layer(
            base.mark_rect().encode(colour),
            base.mark_text(dy=-7, fontSize=12).encode(alt.Text("value:N"), ink, tooltip=tip),
            base.mark_text(dy=9, fontSize=9).encode(alt.Text("bounds:N"), ink),
            data=ROWS,
        )
        .resolve_scale(color="independent")
        .properties(width=alt.Step(CELL), height=alt.Step(40))
    )
    caption = (
        f"Probability that the norm of the row beats the norm of the column at size "
        f"{part.sizes[0]}, in pairs of runs with one seed, with its 95 % Clopper-Pearson interval. "
        "These are not corrected for their number: the verdict is the place for decisions."
    )
    return finish(
        "improvement",
        f"Probability of improvement at size {part.sizes[0]}",
        caption,
        chart,
        rows,
        part,
        fit="none",
    )


def improvement_rows(part: Slice) -> list[Row]:
    """One row per ordered pair of norms with two or more seeds in common at the smallest size."""
    size = part.sizes[0]
    cells = {line.norm: cell for line in part.lines.values() if (cell := line.at(size)) is not None}
    rows = []
    for norm, cell in cells.items():
        for other, against in cells.items():
            a, b = paired_values(cell, against, part.metric)
            if norm == other or len(a) < 2 or cell.invalid or against.invalid:
                continue
            found = paired_improvement(a, b, higher_is_better=part.metric.higher_is_better)
            p = found.estimate or 0.0
            bounds = "" if found.low is None else f"[{found.low:.2f}, {found.high:.2f}]"
            rows.append(
                {"norm": norm, "other": other, "size": size, "value": f"{p:.2f}", "bounds": bounds}
                | interval_columns(found, "probability")
                | {"ink": "#ffffff" if abs(p - 0.5) > 0.32 else "#111111"}
            )
    return rows


def square_text(row: Row, low: float, high: float, metric: Metric) -> Row:
    """Mean and half width of a square, with an ink that can be read on its colour."""
    if row["mean"] is None:
        reason = f"×{row['diverged']}" if row["diverged"] else f"{row['failed']} failed"
        return {"value": reason, "under": row["count"], "ink": DIVERGED}
    share = (row["mean"] - low) / (high - low) if high > low else 1.0
    brightness = share if metric.higher_is_better else 1 - share
    half = "" if row["low"] is None else f"±{(row['high'] - row['low']) / 2:.{metric.digits}f} "
    return {
        "value": f"{row['mean']:.{metric.digits}f}",
        "under": f"{half}n={row['n']}",
        "ink": "#111111" if brightness > 0.55 else "#ffffff",
    }


def _heat_tooltip() -> list[alt.Tooltip]:
    columns = {
        "norm": "norm",
        "size": "size",
        "text": "mean [95 % interval]",
        "count": "seeds",
        "seeds": "values by seed",
        "directory": "directory",
    }
    return [alt.Tooltip(f"{column}:N", title=title) for column, title in columns.items()]
