"""The figures of a report: by norm batch size, by norm, error against lr, curves, ranking.

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
from typing import Any

import altair as alt
import pandas as pd

from normexp.reporting.cells import ORDER, base_of, mean_of_seeds, order_norms
from normexp.reporting.compare import Ranking
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.slices import AXIS_WORDS, Grid, Slice
from normexp.stats.interval import Interval
from normexp.words import format_count

vl_convert: Any = import_module("vl_convert") if find_spec("vl_convert") else None
WIDTH, HEIGHT = 560, 300  # pixels; on the page the width follows the window
PANEL = 230  # width of each of several panels
LINE = 24  # pixels of a row of norms
POINTS = 60  # of a curve
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
DOT = {"size": 6, "opacity": 0.8, "strokeWidth": 3}  # not filled, so that the legend is open too
DOTS = "Open marks are means, with 95 % intervals over more than 3 seeds; each dot is a seed"
VERDICTS = {"better": "#009e73", "worse": "#d55e00", "tie": "#2b86d9", "undecided": "#848484"}
COLOURS = (
    *("#d55e00", "#2b86d9", "#cc6fa7", "#009e73", "#b88600", "#8f74dc"),
    *("#848484", "#2a9fc4", "#c04a6c", "#86902a", "#ae6e42", "#38a08f"),
)
SIZES = ("#2b86d9", "#a06fd8", "#cf5791", "#d9603b", "#b07d1e", "#2f9e6b")  # in their order
# Their numbers have no divisor in common with that of colours: norms of one colour differ in them.
MARKERS = (
    *("circle", "square", "triangle-up", "diamond", "triangle-down"),
    *("triangle-right", "triangle-left"),
)
DASHES = ((1, 0), (6, 2), (2, 2), (8, 2, 2, 2), (4, 4))
IS_MEAN, IS_SEED = "datum.kind == 'mean'", "datum.kind == 'seed'"
NO_SEEDS: Mapping[int, float] = {}
Row = dict[str, Any]


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
    rows: Sequence[Row]
    height: Any = HEIGHT

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite as plain values."""
        data = alt.NamedData("rows")
        panels = list(dict.fromkeys(row["panel"] for row in self.rows if "panel" in row))
        if len(panels) > 1:
            chart = self.chart.properties(width=PANEL, height=PANEL * 0.7)
            facet = alt.Facet("panel:N", title=None, sort=panels)
            shown = chart.facet(facet, columns=2, data=data).to_dict(validate=False)
        else:
            fit = alt.AutoSizeParams(type="fit-x", contains="padding")
            chart = self.chart.properties(width="container", height=self.height, data=data)
            shown = chart.properties(autosize=fit).to_dict(validate=False)
        return {**shown, "data": {"values": list(self.rows)}, "config": CONFIG}


def draw_figures(part: Slice, ranking: Ranking | None) -> list[Figure]:
    """Every figure for which the slice has data, the main one first; none without vl-convert."""
    if vl_convert is None:
        return []
    drawn = [draw_by_size(part) if len(part.sizes) > 1 else draw_by_norm(part)]
    drawn += [draw_rates(part)] if any(len(grid.cells) > 1 for grid in part.grids) else []
    drawn += [draw_ranking(ranking)] if ranking and len(ranking.places) > 2 else []
    return [figure for figure in (*drawn, *draw_curves(part)) if figure.rows]


def draw_by_size(part: Slice) -> Figure:
    """The metric against the size that varies, a line per norm; norms stand beside each other."""
    rows: list[Row] = []
    for line in part.lines.values():
        for size, grid in line.items():
            rows += _points(grid, size=size)
    x = (
        alt.X("size:O", title=AXIS_WORDS[part.axis])
        .axis(labelAngle=0)
        .scale(paddingInner=0.6, paddingOuter=0.2)
    )
    y = alt.Y("value:Q", title=part.metric.label).scale(zero=False)
    chart = _lines(x, y, part.norms).encode(xOffset=alt.XOffset("norm:N", sort=part.norms))
    words = _dots_words(part)
    if part.independent:
        names = ", ".join(norm for norm in part.norms if norm in part.independent)
        words += f" {names}: not mixing samples, so the same runs at every size."
    title = f"{part.metric.label} by {AXIS_WORDS[part.axis]}"
    return Figure(f"by_size_{part.slug}", title, words, chart, rows)


def draw_by_norm(part: Slice) -> Figure:
    """The metric of each norm, the best first."""
    grids = sorted(
        part.compared.values(), key=lambda grid: -grid.sign * (grid.mean.estimate or 0.0)
    )
    rows = [row for grid in grids for row in _points(grid)]
    x = alt.X("value:Q", title=part.metric.label).scale(zero=False)
    colour, shape, _ = _of_norms(part.norms)
    y = _norm_axis(grid.norm for grid in grids)
    chart = _marks(x, y, colour.legend(None), shape.legend(None))
    title, height = f"{part.metric.label} by norm", alt.Step(LINE)
    return Figure(f"by_norm_{part.slug}", title, _dots_words(part), chart, rows, height)


def _points(grid: Grid, **keys: object) -> list[Row]:
    """The mean of a grid and its seeds; of a tuned norm the seeds at its best learning rate."""
    return _rows(grid.mean, grid.best.values(grid.metric), norm=grid.norm, **keys)


def _dots_words(part: Slice) -> str:
    is_tuned = any(grid.fit is not None for grid in part.grids)
    at = ", at the best learning rate of its norm" if is_tuned else ""
    return f"{DOTS}{at}. {part.scope}."


def draw_rates(part: Slice) -> Figure:
    """The error at each learning rate; a panel per size where sizes vary."""
    best, sign = (part.metric.bounds[1], -1) if part.metric.bounds else (0.0, 1)
    rows: list[Row] = []
    for norm, line in part.lines.items():
        for size in dict.fromkeys((part.sizes[0], part.sizes[-1])):
            for cell in line[size].cells if size in line else []:
                keys = {"norm": norm, "lr": cell.lr, "panel": f"{AXIS_WORDS[part.axis]} {size}"}
                values = cell.values(part.metric)
                errors = {seed: best + sign * value for seed, value in values.items()}
                mean = mean_of_seeds([*errors.values()], cell.step(part.metric), part.metric)
                rows += _rows(mean, errors, **keys)
    kind = part.metric.label.replace("accuracy", "error")
    rates = sorted({row["lr"] for row in rows})
    x = alt.X("lr:Q", title="learning rate").axis(values=rates, format=".3~g", grid=False)
    y = alt.Y("value:Q", title=kind).scale(type="sqrt", zero=False)
    chart = _lines(x.scale(type="log", nice=False, padding=12), y, part.norms)
    words = f"{DOTS}. A diverged run or one at chance counts as chance level."
    return Figure(f"rates_{part.slug}", f"{kind} against learning rate", words, chart, rows)


def draw_curves(part: Slice) -> Iterator[Figure]:
    """Training loss and validation: the sizes of a norm in one panel, or all norms in one."""
    colour, _, dash = _of_norms(part.norms)
    words = "Mean over seeds at the best learning rate; the dots are each seed's last value."
    by_size = len(part.sizes) > 1
    if by_size:
        sizes = [*map(str, part.sizes), *(["any"] if part.independent else [])]
        title = AXIS_WORDS[part.axis]
        colour = alt.Color("size:N", title=title).scale(domain=sizes, range=SIZES)
        dash = alt.StrokeDash("size:N", title=title).scale(domain=sizes, range=DASHES)
    for name in ("train/loss", part.metric.selection_name):
        metric = describe_metric(name)
        rows: list[Row] = []
        for grid in part.grids:
            size = "any" if grid.norm in part.independent else str(grid.size)
            keys = {"norm": grid.norm, "size": size, "panel": grid.norm if by_size else ""}
            rows += [keys | row for row in _curve(grid, metric)]
        x = alt.X("samples:Q", title="training samples seen").axis(format="~s", tickCount=4)
        y = alt.Y("value:Q", title=metric.label).scale(zero=False)
        base = alt.Chart().encode(x, y, colour.legend(symbolType="stroke", symbolSize=400))
        lines = base.mark_line(strokeWidth=1.5).encode(dash)
        ends = base.mark_point(**DOT)
        chart = alt.layer(lines.transform_filter(IS_MEAN), ends.transform_filter(IS_SEED))
        title, file = f"{metric.label} during training", name.replace("/", "_")
        if len({row["samples"] for row in rows}) > 1:
            yield Figure(f"curves_{file}_{part.slug}", title, words, chart, rows)


def _curve(grid: Grid, metric: Metric) -> Iterator[Row]:
    """The mean over seeds in at most POINTS bins, where all have a value; each one's end."""
    points = pd.DataFrame(
        [
            (run.seed, row.samples_seen, metric.scale * row.value)
            for run in grid.best.runs
            for row in run.history()
            if row.name == metric.name
        ],
        columns=["seed", "samples", "value"],
    )
    if points.empty:
        return
    width = points["samples"].max() / POINTS
    points["samples"] = (points["samples"] / width).round() * width
    binned = points.pivot_table("value", index="samples", columns="seed")
    for samples, value in binned.dropna().mean(axis="columns").items():
        yield {"kind": "mean", "samples": samples, "value": value}
    for seed, curve in binned.items():
        end = curve.dropna()
        yield {"kind": "seed", "seed": seed, "samples": end.index[-1], "value": end.iloc[-1]}


def draw_ranking(ranking: Ranking) -> Figure:
    """The difference of each norm to the reference."""
    rows: list[Row] = []
    for place in ranking.places:
        if place.gap is not None:
            verdict, best = place.verdict or "undecided", bool(place.may_be_best)
            rows += _rows(place.gap, norm=place.norm, verdict=verdict, best=best)
    part, title = ranking.part, f"difference to {ranking.reference}"
    x = alt.X("value:Q", title=f"{title} ({part.metric.unit})").scale(zero=False)
    y = _norm_axis(place.norm for place in ranking.places)
    colour = alt.Color("verdict:N").scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
    shape = alt.Shape("best:N", legend=None).scale(domain=[True, False], range=["circle", "square"])
    even = alt.Chart().mark_rule(strokeDash=[3, 3], color="#848484").encode(x=alt.X(datum=0))
    chart = alt.layer(even, _marks(x, y, colour, shape))
    words = (
        "Right of the dashed line is better; 95 % intervals, one at a time, while verdicts "
        f"(colours) are corrected for {format_count(ranking.family_size, 'comparison')}. "
        "A circle: may be the best."
    )
    title = f"{part.metric.label}: {title}{part.at_words}"
    return Figure(f"ranking_{part.slug}", title, words, chart, rows, alt.Step(LINE))


# Rows, marks and channels


def _rows(interval: Interval, seeds: Mapping[int, float] = NO_SEEDS, **keys: Any) -> list[Row]:
    """A row for a mean, if it is known, and one for each seed with a finite value."""
    mean = {"value": interval.estimate, "low": interval.low, "high": interval.high}
    rows = [] if interval.estimate is None else [{"kind": "mean", "n": interval.n, **mean}]
    rows += [
        {"kind": "seed", "seed": seed, "value": value}
        for seed, value in seeds.items()
        if math.isfinite(value)
    ]
    return [keys | row for row in rows]


def _marks(x: alt.X, y: alt.Y, colour: alt.Color, shape: alt.Shape) -> Any:
    """Every seed as a dot, each mean as an open mark with its 95 % interval.

    x or y is the column `value`.
    """
    base = alt.Chart().encode(x, y, colour)
    second = alt.X2 if x["shorthand"] == "value:Q" else alt.Y2
    mean = base.transform_filter(IS_MEAN)
    return alt.layer(
        *(mean.mark_rule(strokeWidth=1.5).encode(second(f"{end}:Q")) for end in ("low", "high")),
        base.mark_point(**DOT).transform_filter(IS_SEED),
        mean.mark_point().encode(shape),
    )


def _lines(x: alt.X, y: alt.Y, norms: Sequence[str]) -> Any:
    """A line per norm through its means, with their intervals and every seed."""
    colour, shape, _ = _of_norms(norms)
    line = alt.Chart().mark_line(strokeWidth=1.5).encode(x, y, colour)
    return alt.layer(line.transform_filter(IS_MEAN), _marks(x, y, colour, shape))


def _norm_axis(norms: Iterable[str]) -> alt.Y:
    return alt.Y("norm:N", title=None, sort=list(norms)).axis(labelLimit=140, grid=True)


def _of_norms(norms: Sequence[str]) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    """Colour, marker and dash of norms, with one legend."""
    places = place_norms(norms)

    def scale(styles: Sequence[Any]) -> alt.Scale:
        shown = [styles[places[norm] % len(styles)] for norm in norms]
        return alt.Scale(domain=list(norms), range=shown)

    return (
        alt.Color("norm:N", scale=scale(COLOURS)),
        alt.Shape("norm:N", scale=scale(MARKERS)),
        alt.StrokeDash("norm:N", scale=scale(DASHES)),
    )


def place_norms(labels: Iterable[str]) -> dict[str, int]:
    """The place of each norm in COLOURS, MARKERS and DASHES, which repeat.

    Norms of ORDER always have their own; others take free ones, first those of no norm of ORDER.
    """
    ordered, own, count = order_norms(labels), len(ORDER), len(COLOURS)
    # The first variant, as `group num_groups=4`, inherits the norm's place.
    heirs = {base_of(label): label for label in reversed(ordered)}
    places = {heirs[norm]: at for at, norm in enumerate(ORDER) if norm in heirs}
    others = [label for label in ordered if label not in places]
    turns = (*range(own, count), *range(own), *range(count, count + len(others)))
    free = [at for at in turns if at not in places.values()]
    return {**places, **dict(zip(others, free, strict=False))}
