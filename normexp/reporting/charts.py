"""What every figure shares: its data, axes, colours and the common style."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from normexp.reporting.style import Style
from normexp.stats.interval import Interval

WIDTH, HEIGHT = 560, 300  # pixels; on the page the width follows the window
PANEL = 230  # width of each of several panels
CONFIG = {
    "font": "DejaVu Sans, Liberation Sans, Arial, sans-serif",
    "view": {"stroke": None, "continuousWidth": WIDTH},
    "axis": {"titleFontWeight": "normal", "gridOpacity": 0.4, "labelOverlap": True},
    "legend": {"orient": "top", "columns": 3, "title": None, "labelLimit": 110, "symbolOpacity": 1},
    "point": {"filled": True, "opacity": 1, "size": 60},
}
Row = dict[str, Any]
Styles = Mapping[str, Style]


@dataclass(frozen=True)
class Figure:
    """A chart with its rows: one specification for page, SVG and PNG.

    name: of its files
    rows: those of `kind` "mean" have an interval, those of `kind` "seed" one value each
    """

    name: str
    title: str
    caption: str
    chart: Any
    rows: Sequence[Row]

    @property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite as plain values."""
        spec = self.chart.properties(data=alt.NamedData("rows")).to_dict(validate=False)
        fit = {"type": "fit-x", "contains": "padding"}
        autosize = {"autosize": fit} if spec.get("width") == "container" else {}
        return {**spec, **autosize, "data": {"values": list(self.rows)}, "config": CONFIG}


def interval_row(interval: Interval, **keys: Any) -> list[Row]:
    """The row of a mean; none if it is not known."""
    if interval.estimate is None:
        return []
    bounds = {"value": interval.estimate, "low": interval.low, "high": interval.high}
    return [{**keys, "kind": "mean", **bounds, "n": interval.n}]


def seed_rows(values: Mapping[int, float], **keys: Any) -> list[Row]:
    """A row for each seed with a finite value."""
    known = {seed: value for seed, value in values.items() if math.isfinite(value)}
    return [{**keys, "kind": "seed", "seed": seed, "value": v} for seed, v in known.items()]


def of_norms(styles: Styles) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    """Colour, marker and dash of norms, with one legend."""
    known = styles.values()

    def scale(values: Iterable[Any]) -> alt.Scale:
        return alt.Scale(domain=list(styles), range=list(values))

    return (
        alt.Color("norm:N", scale=scale(style.colour for style in known)),
        alt.Shape("norm:N", scale=scale(style.marker for style in known)),
        alt.StrokeDash("norm:N", scale=scale(list(style.dash) for style in known)),
    )


def dots_and_means(x: alt.X, y: alt.Y, *channels: Any) -> Any:
    """Every seed as a dot, each mean as a mark with its 95 % interval; colour is the first channel.

    x or y is the column `value`.
    """
    base = alt.Chart().encode(x, y, *channels, tooltip=tooltip("norm", "seed", "value", "n"))
    mean, seed = "datum.kind == 'mean'", "datum.kind == 'seed'"
    ends = [axis.copy() for axis in (x, y)]
    for end in ends:
        end["shorthand"] = "low:Q" if end["shorthand"] == "value:Q" else end["shorthand"]
    high = alt.X2("high:Q") if x["shorthand"] == "value:Q" else alt.Y2("high:Q")
    interval = alt.Chart().mark_rule(strokeWidth=1.5).encode(*ends, high, channels[0])
    return alt.layer(
        base.mark_point(size=14, opacity=0.35).transform_filter(seed),
        interval.transform_filter(mean),
        base.mark_point().transform_filter(mean),
    )


def tooltip(*fields: str) -> list[alt.Tooltip]:
    kinds = {"value": "Q", "n": "Q", "seed": "Q"}
    return [alt.Tooltip(f"{field}:{kinds.get(field, 'N')}") for field in fields]
