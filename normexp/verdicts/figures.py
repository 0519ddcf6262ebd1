"""The figures of a report: by norm batch size, by arm, error against lr, curves, ranking.

Every colour has a contrast of 3 or more on white and on the dark page. A norm has one colour and
marker, and its curves one dash, in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import ORDER, order_arms
from normexp.verdicts.cells import CellRow, mean_of_seeds
from normexp.verdicts.compare import Ranking
from normexp.verdicts.interval import Interval
from normexp.verdicts.metric import Metric, describe_metric
from normexp.verdicts.slices import AXIS_WORDS, Slice
from normexp.words import format_count

vl_convert: Any = import_module("vl_convert") if find_spec("vl_convert") else None
WIDTH, HEIGHT = 560, 300  # pixels; on the page the width follows the window
PANEL = 230  # pixels: the width of each of several panels
LINE = 24  # pixels: the height of a row of norms
POINTS = 60  # the most points of a curve
CONFIG = {
    "font": "DejaVu Sans, Liberation Sans, Arial, sans-serif",
    "view": {"stroke": None, "continuousWidth": WIDTH},
    "axis": {"titleFontWeight": "normal", "gridOpacity": 0.4, "labelSeparation": 6},
    "legend": {
        "orient": "top",
        "columns": 4,
        "labelLimit": 110,
        "titleFontWeight": "normal",
        "symbolOpacity": 1,
    },
    "mark": {"tooltip": {"content": "data"}},
    "point": {"opacity": 1, "size": 80, "strokeWidth": 2},
}
DOT = {"size": 6, "opacity": 0.8, "strokeWidth": 3}  # a stroke, so that legends show open marks
DOTS = "Open marks are means, with 95 % intervals from 4 seeds on; each dot is a seed"
VERDICTS = {"better": "#009e73", "worse": "#d55e00", "tie": "#2b86d9", "undecided": "#848484"}
COLOURS = (
    "#d55e00",
    "#2b86d9",
    "#cc6fa7",
    "#009e73",
    "#b88600",
    "#8f74dc",
    "#848484",
    "#e010e0",  # from here on those of other norms: far from all before
    "#f0145a",
    "#00a500",
    "#6644ff",
    "#2a9fc4",
)
SIZE_COLOURS = (
    "#2b86d9",
    "#a06fd8",
    "#cf5791",
    "#d9603b",
    "#b07d1e",
    "#2f9e6b",
)  # from the smallest
# 12 colours and 7 markers have no common divisor, so that norms of one colour differ in marker.
MARKERS = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
DASHES = ((1, 0), (6, 2), (2, 2), (8, 2, 2, 2), (4, 4))
IS_MEAN = "datum.kind == 'mean'"
IS_SEED = "datum.kind == 'seed'"
Datum = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A chart with its rows: one specification for page, SVG and PNG.

    name: of its files
    height: in pixels, or of a row; there is a panel for each value of the column `panel`
    rows: those of `kind` "mean" have an interval, those of `kind` "seed" one value each
    """

    name: str
    title: str
    caption: str
    chart: Any
    rows: Sequence[Datum]
    height: Any = HEIGHT

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite as plain values."""
        data = alt.NamedData("rows")
        panels = list(dict.fromkeys(row["panel"] for row in self.rows if "panel" in row))
        if len(panels) > 1:
            panel = alt.Facet("panel:N", title=None, sort=panels)
            chart = self.chart.properties(width=PANEL, height=PANEL * 0.7)
            chart = chart.facet(panel, columns=2, data=data)
        else:
            fit = alt.AutoSizeParams(type="fit-x", contains="padding")
            chart = self.chart.properties(width="container", height=self.height, data=data)
            chart = chart.properties(autosize=fit)
        values = {"values": list(self.rows)}
        return {**chart.to_dict(validate=False), "data": values, "config": CONFIG}


def draw_figures(slice_: Slice, rankings: Sequence[Ranking]) -> list[Figure]:
    """Every figure for which the slice has data, the main one first; none without vl-convert."""
    if vl_convert is None:
        return []
    figures = [draw_by_size(slice_) if len(slice_.sizes) > 1 else draw_by_norm(slice_)]
    if any(len(side.cells) > 1 for side in slice_.arms_at_sizes):
        figures.append(draw_rates(slice_))
    if any(len(ranking.places) > 2 for ranking in rankings):
        figures.append(draw_ranking(rankings))
    return [figure for figure in (*figures, *draw_curves(slice_)) if figure.rows]


def draw_by_size(slice_: Slice) -> Figure:
    """The metric against the size that varies, a line per arm; arms stand beside each other."""
    metric, axis = slice_.metric, AXIS_WORDS[slice_.axis]
    rows: list[Datum] = []
    for line in slice_.lines.values():
        for size, side in line.items():
            rows += _points(side, size=size)
    x = alt.X("size:O", title=axis).axis(labelAngle=0).scale(paddingInner=0.6, paddingOuter=0.2)
    y = alt.Y("value:Q", title=metric.label).scale(zero=False)
    offset = alt.XOffset("arm:N", sort=slice_.arms)
    chart = _lines(x, y, slice_).encode(xOffset=offset)
    caption = _dots_words(slice_)
    if slice_.independent:
        names = ", ".join(arm for arm in slice_.arms if arm in slice_.independent)
        caption += f" The same runs stand at every size where no samples are mixed: {names}."
    title = f"{metric.label} by {axis}"
    return Figure(f"by_size_{slice_.slug}", title, caption, chart, rows)


def draw_by_norm(slice_: Slice) -> Figure:
    """The metric of each norm, the best first."""
    metric = slice_.metric
    ordered = sorted(
        slice_.at(slice_.compared_at[0]).values(),
        key=lambda side: -metric.sign * (side.mean.estimate or 0.0),
    )
    rows = [row for side in ordered for row in _points(side)]
    x = alt.X("value:Q", title=metric.label).scale(zero=False)
    y = _arm_axis(side.arm for side in ordered)
    look = _look_of_arms(slice_)
    chart = _marks(x, y, look.colour.legend(None), look.marker.legend(None))
    title, height = f"{metric.label} by {slice_.arm_key}", alt.Step(LINE)
    return Figure(f"by_norm_{slice_.slug}", title, _dots_words(slice_), chart, rows, height)


def _points(side: ArmAtSize, **keys: object) -> list[Datum]:
    """The mean and the seeds; a tuned norm has the seeds of its best learning rate."""
    values = side.best.values(side.metric)
    return _rows(side.mean, values, arm=side.arm, **keys)


def _dots_words(slice_: Slice) -> str:
    is_tuned = any(side.tuning is not None for side in slice_.arms_at_sizes)
    at = ", at the best learning rate of its norm" if is_tuned else ""
    return f"{DOTS}{at}. {slice_.scope}."


def draw_rates(slice_: Slice) -> Figure:
    """The error at each learning rate; a panel per size where sizes vary."""
    metric = slice_.metric
    best, sign = (metric.bounds[1], -1) if metric.bounds else (0.0, 1)
    rows: list[Datum] = []
    for arm, line in slice_.lines.items():
        for size in dict.fromkeys((slice_.sizes[0], slice_.sizes[-1])):
            panel = f"{AXIS_WORDS[slice_.axis]} {size}"
            for cell in line[size].cells if size in line else ():
                values = cell.values(metric)
                errors = {seed: best + sign * value for seed, value in values.items()}
                mean = mean_of_seeds([*errors.values()], cell.step(metric), metric)
                rows += _rows(mean, errors, arm=arm, lr=cell.tuned, panel=panel)
    label = metric.label.replace("accuracy", "error")
    rates = sorted({row["lr"] for row in rows})
    x = alt.X("lr:Q", title="learning rate").axis(values=rates, format=".3~g", grid=False)
    x = x.scale(type="log", nice=False, padding=12)
    y = alt.Y("value:Q", title=label).scale(type="sqrt", zero=False)
    caption = f"{DOTS}. A diverged run or one at chance counts as chance level."
    title = f"{label} against learning rate"
    return Figure(f"rates_{slice_.slug}", title, caption, _lines(x, y, slice_), rows)


def draw_curves(slice_: Slice) -> Iterator[Figure]:
    """Training loss and validation: the sizes of a norm in one panel, or all norms in one."""
    look, by_size = _look_of_arms(slice_), len(slice_.sizes) > 1
    colour, dash = look.colour, look.dash
    if by_size:
        sizes = [str(size) for size in slice_.sizes]
        if slice_.independent:
            sizes.append("any")
        title = AXIS_WORDS[slice_.axis]
        colour = alt.Color("size:N", title=title).scale(domain=sizes, range=SIZE_COLOURS)
        dash = alt.StrokeDash("size:N", title=title).scale(domain=sizes, range=DASHES)
    for name in ("train/loss", slice_.metric.selection_name):
        metric = describe_metric(name)
        rows: list[Datum] = []
        for side in slice_.arms_at_sizes:
            arm = side.arm
            size = "any" if arm in slice_.independent else str(side.size)
            keys = {"arm": arm, "size": size, "panel": arm if by_size else ""}
            rows += [keys | row for row in _curve(side.best, metric)]
        if len({row["samples"] for row in rows}) < 2:
            continue
        x = alt.X("samples:Q", title="training samples seen").axis(format="~s", tickCount=4)
        y = alt.Y("value:Q", title=metric.label).scale(zero=False)
        base = alt.Chart().encode(x, y, colour.legend(symbolType="stroke", symbolSize=400))
        lines = base.mark_line(strokeWidth=1.5).encode(dash)
        ends = base.mark_point(**DOT)
        yield Figure(
            name=f"curves_{name.replace('/', '_')}_{slice_.slug}",
            title=f"{metric.label} during training",
            caption="Means over seeds at the best learning rate; dots: each seed's last value.",
            chart=alt.layer(lines.transform_filter(IS_MEAN), ends.transform_filter(IS_SEED)),
            rows=rows,
        )


def _curve(cell: CellRow, metric: Metric) -> Iterator[Datum]:
    """The mean of the seeds, in bins where all have a value, and the last value of each seed."""
    points = [
        (run.seed, row.samples_seen, metric.scale * row.value)
        for run in cell.runs
        for row in run.history()
        if row.name == metric.name
    ]
    if not points:
        return
    frame = pd.DataFrame(points, columns=["seed", "samples", "value"])
    width = frame["samples"].max() / POINTS
    frame["samples"] = (frame["samples"] / width).round() * width
    by_seed = frame.pivot_table("value", index="samples", columns="seed")
    for samples, value in by_seed.dropna().mean(axis="columns").items():
        yield {"kind": "mean", "samples": samples, "value": value}
    for seed, curve in by_seed.items():
        end = curve.dropna()
        yield {"kind": "seed", "seed": seed, "samples": end.index[-1], "value": end.iloc[-1]}


def draw_ranking(rankings: Sequence[Ranking]) -> Figure:
    """The difference of each arm to the reference, in a panel for each size."""
    slice_, first = rankings[0].slice, rankings[0]
    rows: list[Datum] = []
    for ranking in rankings:
        panel = {"panel": slice_.at_words(ranking.size).strip()} if len(rankings) > 1 else {}
        for place in ranking.places:
            if place.comparison:
                verdict, best = place.comparison.verdict or "undecided", bool(place.may_be_best)
                keys = {"arm": place.arm, "verdict": verdict, "best": best, **panel}
                rows += _rows(place.comparison.gap, {}, **keys)
    words = f"difference to {first.reference}"
    x = alt.X("value:Q", title=f"{words} ({slice_.metric.unit})").scale(zero=False)
    y = _arm_axis(place.arm for place in first.places)
    colour = alt.Color("verdict:N").scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
    shape = alt.Shape("best:N", legend=None).scale(domain=[True, False], range=["circle", "square"])
    zero = alt.Chart().mark_rule(strokeDash=[3, 3], color="#848484").encode(x=alt.X(datum=0))
    chart = alt.layer(zero, _marks(x, y, colour, shape))
    caption = (
        "Right of the dashed line is better. Each interval is a 95 % interval by itself; verdicts "
        f"(colours) are corrected for {format_count(first.family_size, 'comparison')}. "
        "A circle: may be the best."
    )
    title = f"{slice_.metric.label}: {words}"
    if len(rankings) == 1:
        title += slice_.at_words(first.size)
    return Figure(f"ranking_{slice_.slug}", title, caption, chart, rows, alt.Step(LINE))


# Rows, marks and channels


def _rows(mean: Interval, seeds: Mapping[int, float], **keys: Any) -> list[Datum]:
    """A row for a mean, if it is known, and one for each seed with a finite value."""
    rows = []
    if mean.estimate is not None:
        row = {"kind": "mean", "n": mean.n, "value": mean.estimate}
        rows.append(keys | row | {"low": mean.low, "high": mean.high})
    for seed, value in seeds.items():
        if math.isfinite(value):
            rows.append(keys | {"kind": "seed", "seed": seed, "value": value})
    return rows


def _marks(x: alt.X, y: alt.Y, colour: alt.Color, shape: alt.Shape) -> Any:
    """Every seed as a dot, each mean as an open mark with its 95 % interval.

    x or y is the column `value`.
    """
    base = alt.Chart().encode(x, y, colour)
    end = alt.X2 if x["shorthand"] == "value:Q" else alt.Y2
    mean = base.transform_filter(IS_MEAN)
    bar = mean.mark_rule(strokeWidth=1.5)
    return alt.layer(
        bar.encode(end("low:Q")),
        bar.encode(end("high:Q")),
        base.mark_point(**DOT).transform_filter(IS_SEED),
        mean.mark_point().encode(shape),
    )


def _lines(x: alt.X, y: alt.Y, slice_: Slice) -> Any:
    """A line per norm through its means, with their intervals and every seed."""
    look = _look_of_arms(slice_)
    line = alt.Chart().mark_line(strokeWidth=1.5).encode(x, y, look.colour)
    return alt.layer(line.transform_filter(IS_MEAN), _marks(x, y, look.colour, look.marker))


def _arm_axis(arms: Iterable[str]) -> alt.Y:
    return alt.Y("arm:N", title=None, sort=list(arms)).axis(labelLimit=140, grid=True)


class Look(NamedTuple):
    """How norms are told apart; the three share one legend."""

    colour: alt.Color
    marker: alt.Shape
    dash: alt.StrokeDash


def _look_of_arms(slice_: Slice) -> Look:
    places = place_arms(slice_.arm_names)

    def scale(styles: Sequence[Any]) -> alt.Scale:
        of_arms = [styles[places[arm] % len(styles)] for arm in slice_.arms]
        return alt.Scale(domain=slice_.arms, range=of_arms)

    return Look(
        alt.Color("arm:N", title=slice_.arm_key, scale=scale(COLOURS)),
        alt.Shape("arm:N", title=slice_.arm_key, scale=scale(MARKERS)),
        alt.StrokeDash("arm:N", title=slice_.arm_key, scale=scale(DASHES)),
    )


def place_arms(names: Mapping[str, str]) -> dict[str, int]:
    """The place of each norm in COLOURS, MARKERS and DASHES, which repeat.

    Norms of ORDER always have the same place. Others take free places, first those that no norm of
    ORDER has.

    names: the name of each norm, by label
    """
    places: dict[str, int] = {}
    others = []
    for label in order_arms(names):
        name = names[label]
        if name in ORDER and ORDER.index(name) not in places.values():
            places[label] = ORDER.index(name)  # the first variant has the norm's place
        else:
            others.append(label)
    reserved, count = len(ORDER), len(COLOURS)
    turns = (*range(reserved, count), *range(reserved), *range(count, count + len(others)))
    free = [place for place in turns if place not in places.values()]
    return places | dict(zip(others, free, strict=False))
