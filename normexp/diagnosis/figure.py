"""The figure of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.charts import CONFIG
from normexp.reporting.style import DIVERGED

BLUE, WIDTH = "#0072b2", 420
LABELS = {
    "rest": "dropout, other modules",
    "small_batch": "few samples per batch",
    "own_share": "own share of a sample",
    "dropout_shift": "statistics behind dropout",
    "averages": "running averages",
    "not_analysed": "norms not analysed",
    "left_in_training": "left in training mode",
}


def draw(diagnosis: Mapping[str, Any]) -> alt.VConcatChart:
    """Draws a diagnosis as plain values.

    Above the terms of the gap with twice their standard errors, below the distance of each site.
    """
    panels = [_terms(diagnosis), *_sites(diagnosis)]
    return alt.vconcat(*panels, spacing=24).configure(**CONFIG)


def _terms(diagnosis: Mapping[str, Any]) -> Any:
    rows = [
        {"term": LABELS[name], "value": term["value"], "error": term["error"]}
        for name, term in diagnosis["terms"].items()
        if term["value"] or term["error"]
    ]
    table = pd.DataFrame(rows, columns=["term", "value", "error"])
    table["low"], table["high"] = (table["value"] + k * table["error"] for k in (-2, 2))
    y = alt.Y("term:N", sort=None, title=None)
    base = alt.Chart(table, title="Evaluation minus training mode, by cause")
    bars = base.mark_bar(height=14).encode(
        x=alt.X("value:Q", title="change of the loss (line: 2 standard errors)"),
        y=y,
        color=alt.condition("datum.value > 0", alt.value(DIVERGED), alt.value(BLUE)),
    )
    errors = base.mark_rule().encode(x="low:Q", x2="high:Q", y=y)
    return (bars + errors).properties(width=WIDTH)


def _sites(diagnosis: Mapping[str, Any]) -> list[Any]:
    rows = [
        {"site": row["name"], "distance": value, "moment": moment}
        for row in diagnosis["sites"]
        for moment, value in (("mean", row["mean_distance"]), ("variance", row["var_distance"]))
        if value is not None
    ]
    if not rows:
        return []
    chart = alt.Chart(pd.DataFrame(rows), title="Running against precise statistics, by site")
    points = chart.mark_point(filled=True, size=50).encode(
        x=alt.X("distance:Q", title="standard deviations between batches, median channel"),
        y=alt.Y("site:N", sort=None, title=None),
        color=alt.Color("moment:N", title=None),
        shape="moment:N",
    )
    return [points.properties(width=WIDTH)]
