"""The figures of a report: by norm batch size, by norm, error against lr, curves, ranking, cost.

Colours after Okabe and Ito (2008), extended by muted colours of similar lightness, all with a
contrast of 2.4 or more on white and on the dark page. A norm has one colour, marker and dash in
every figure; markers and dashes differ too, so that figures can be read in grey.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import altair as alt

from normexp.config.words import format_count
from normexp.reporting.cells import ORDER, base_of, mean_of_seeds, order_norms
from normexp.reporting.compare import Ranking
from normexp.reporting.metric import describe_metric
from normexp.reporting.slices import AXIS_WORDS, Grid, Slice
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
SPREAD = 0.5  # octaves over which the norms at one size stand beside each other
POINTS = 60  # of a curve
LINE = 20  # pixels of a row of norms
DOTS = "Marks are means, with 95 % intervals over more than 3 seeds; each dot is a seed"
VERDICTS = {"better": "#009e73", "worse": "#d55e00", "tie": "#56a5d9", "undecided": "#8c8c8c"}
COLOURS = (
    *("#d55e00", "#0072b2", "#cc79a7", "#009e73", "#56a5d9", "#c98a00"),
    *("#7f7f7f", "#a8466e", "#8f8f2a", "#8870d0", "#a86a3d", "#3fa294"),
)
STAR = "M0,-1L0.25,-0.3L1,-0.3L0.4,0.15L0.6,0.9L0,0.45L-0.6,0.9L-0.4,0.15L-1,-0.3L-0.25,-0.3Z"
HOURGLASS = "M-0.8,-0.8L0.8,-0.8L-0.8,0.8L0.8,0.8Z"
BAR = "M-0.3,-1L0.3,-1L0.3,1L-0.3,1Z"
MARKERS = (  # one fewer than colours: norms that share a colour have two markers
    *("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", BAR),
    *("triangle-right", "triangle-left", STAR, HOURGLASS),
)
DASHES = (
    *((1, 0), (6, 2), (2, 2), (8, 2), (4, 2), (10, 3)),
    *((3, 3), (12, 2), (5, 5), (7, 4), (2, 4), (9, 5)),
)
Row = dict[str, Any]
Styles = Mapping[str, tuple[str, str, tuple[int, int]]]  # colour, symbol of Vega, dash in pixels


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

    @property
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


def assign_styles(labels: Iterable[str]) -> Styles:
    """A style per label, in order. Norms of ORDER always have their own; others take free styles.

    Beyond 12 norms the colours repeat, each time with another marker.
    """
    ordered, count = order_norms(labels), len(COLOURS)
    # The first variant, as `group num_groups=4`, inherits the norm's style.
    heirs = {base_of(label): label for label in reversed(ordered) if base_of(label) in ORDER}
    places = {label: ORDER.index(base) for base, label in heirs.items()}
    # The styles of norms of ORDER that are absent come after those that belong to no norm.
    turns = (*range(len(ORDER), count), *range(len(ORDER)), *range(count, count + len(ordered)))
    free = [place for place in turns if place not in places.values()]
    places |= zip([label for label in ordered if label not in places], free, strict=False)
    return {
        label: (COLOURS[at % count], MARKERS[at % len(MARKERS)], DASHES[at % count])
        for label in ordered
        for at in [places[label]]
    }


def draw_figures(part: Slice, ranking: Ranking | None) -> list[Figure]:
    """Every figure for which the slice has data, the main one first."""
    styles = assign_styles(part.norms)
    by_size = len(part.sizes) > 1
    drawn = [draw_by_size(part, styles) if by_size else draw_by_norm(part, styles)]
    drawn += [draw_rates(part, styles)] if any(len(grid.cells) > 1 for grid in part.grids) else []
    drawn += [draw_ranking(ranking)] if ranking and len(ranking.places) > 2 else []
    return [one for one in (*drawn, *draw_curves(part, styles), draw_cost(part)) if one.rows]


def _points(grid: Grid, **keys: object) -> list[Row]:
    """The mean of a grid and its seeds; of a tuned norm the seeds at its best learning rate."""
    shown = {"norm": grid.norm, **keys}
    values = grid.best.values(grid.metric)
    return interval_row(grid.mean, **shown) + seed_rows(values, **shown)


def _dots_words(part: Slice) -> str:
    is_tuned = any(grid.fit is not None for grid in part.grids)
    at = ", at the best learning rate of its norm" if is_tuned else ""
    return f"{DOTS}{at}. {part.scope}."


def draw_by_size(part: Slice, styles: Styles) -> Figure:
    """The metric against the size that varies, a line per norm."""
    rows: list[Row] = []
    step = SPREAD / max(len(part.norms), 4)
    for place, (_, line) in enumerate(part.lines.items()):
        beside = 2 ** (step * (place - (len(part.lines) - 1) / 2))
        for size, grid in line.items():
            rows += _points(grid, size=size, at=size * beside)
    x = alt.X("at:Q", title=AXIS_WORDS[part.axis])
    x = x.axis(values=list(part.sizes), format="d", grid=False).scale(
        type="log", base=2, nice=False, padding=9
    )
    y = alt.Y("value:Q", title=part.metric.label).scale(zero=False)
    chart = _lines(x, y, styles)
    words = f"{_dots_words(part)} Norms at one size stand beside each other."
    if part.independent:
        names = ", ".join(norm for norm in part.norms if norm in part.independent)
        words += f" {names}: not mixing samples, so the same runs at every size."
    title = f"{part.metric.label} by {AXIS_WORDS[part.axis]}"
    return Figure(f"by_size_{part.slug}", title, words, chart, rows)


def _lines(x: alt.X, y: alt.Y, styles: Styles) -> Any:
    """A line per norm through its means, with their intervals and every seed."""
    colour, shape, dash = of_norms(styles)
    line = alt.Chart().mark_line(strokeWidth=1.5).encode(x, y, colour, dash)
    return alt.layer(
        line.transform_filter("datum.kind == 'mean'"), dots_and_means(x, y, colour, shape)
    )


def draw_by_norm(part: Slice, styles: Styles) -> Figure:
    """The metric of each norm, the best first."""
    grids = sorted(
        part.compared.values(), key=lambda grid: -grid.sign * (grid.mean.estimate or 0.0)
    )
    rows = [row for grid in grids for row in _points(grid)]
    x = alt.X("value:Q", title=part.metric.label).scale(zero=False)
    y = _norm_axis([grid.norm for grid in grids])
    colour, shape, _ = of_norms(styles)
    chart = dots_and_means(x, y, colour.legend(None), shape.legend(None))
    return Figure(
        name=f"by_norm_{part.slug}",
        title=f"{part.metric.label} by norm",
        caption=_dots_words(part),
        chart=chart,
        rows=rows,
        height=alt.Step(LINE),
    )


def _norm_axis(norms: Sequence[str]) -> alt.Y:
    return alt.Y("norm:N", title=None, sort=list(norms)).axis(labelLimit=140, grid=True)


def draw_rates(part: Slice, styles: Styles) -> Figure:
    """The error at each learning rate; a panel per size where sizes vary."""
    best, sign = (part.metric.bounds[1], -1) if part.metric.bounds else (0.0, 1)
    rows: list[Row] = []
    for norm, line in part.lines.items():
        for size in dict.fromkeys((part.sizes[0], part.sizes[-1])):
            for cell in line[size].cells if size in line else []:
                keys = {"norm": norm, "lr": cell.lr, "panel": f"{AXIS_WORDS[part.axis]} {size}"}
                values = cell.values(part.metric)
                errors = {seed: best + sign * value for seed, value in values.items()}
                interval = mean_of_seeds([*errors.values()], cell.step(part.metric), part.metric)
                rows += interval_row(interval, **keys) + seed_rows(errors, **keys)
    rows = [row for row in rows if row["value"] > 0 and row["lr"] is not None]  # log axes
    floor = min((row["value"] for row in rows), default=1.0)
    rows = [row | {"low": max(row["low"] or row["value"], floor)} if "low" in row else row
            for row in rows]  # fmt: skip
    kind = part.metric.label.replace("accuracy", "error")
    x = (
        alt.X("lr:Q", title="learning rate")
        .scale(type="log")
        .axis(format="~g", tickCount=5, grid=False)
    )
    y = alt.Y("value:Q", title=kind).axis(format="~g", tickCount=6)
    y = y.scale(type="log", nice=False, padding=9)
    chart = _lines(x, y, styles)
    words = f"{DOTS}. A diverged run or one at chance counts as chance level."
    return Figure(f"rates_{part.slug}", f"{kind} against learning rate", words, chart, rows)


def draw_curves(part: Slice, styles: Styles) -> Iterator[Figure]:
    """Training loss and validation: the sizes of a norm in one panel, or all norms in one."""
    by_size = len(part.sizes) > 1
    for name in ("train/loss", part.metric.selection_name):
        metric = describe_metric(name)
        rows: list[Row] = []
        for grid in part.grids:
            curves = [
                [(x.samples_seen, x.value) for x in run.history() if x.name == name]
                for run in grid.best.runs
            ]
            panel = grid.norm if by_size else ""
            keys = {"norm": grid.norm, "size": str(grid.size), "panel": panel}
            rows += _curve(list(filter(None, curves)), metric.scale, keys)
        x = alt.X("samples:Q", title="training samples seen").axis(format="~s", tickCount=4)
        y = alt.Y("value:Q", title=metric.label).scale(zero=False)
        colour, _, dash = of_norms(styles)
        if by_size:
            sizes = [str(size) for size in part.sizes]
            colour = alt.Color("size:N", sort=sizes).scale(scheme="viridis", domain=sizes)
            dash = alt.StrokeDash("size:N", sort=sizes, legend=None)
        base = alt.Chart().encode(x, y, colour, tooltip=tooltip("norm", "size", "value"))
        lines = base.mark_line(strokeWidth=1.5).encode(dash)
        ends = base.mark_point(size=14, opacity=0.5)
        chart = alt.layer(
            lines.transform_filter("datum.kind == 'mean'"),
            ends.transform_filter("datum.kind == 'seed'"),
        )
        words = "Mean over seeds at the best learning rate; the dots are each seed's last value."
        if by_size:
            words += f" Lines of a panel: {AXIS_WORDS[part.axis]}."
        title, file = f"{metric.label} during training", name.replace("/", "_")
        yield Figure(f"curves_{file}_{part.slug}", title, words, chart, rows)


def _curve(curves: Sequence[Sequence[tuple[int, float]]], scale: float, keys: Row) -> list[Row]:
    """The mean of the curves in at most POINTS bins, where all have a value; each one's end."""
    if not curves:
        return []
    width = max(curve[-1][0] for curve in curves) / POINTS
    binned = [
        {place: [value for _, value in points]
         for place, points in groupby(curve, lambda point: round(point[0] / width))}
        for curve in curves
    ]  # fmt: skip
    shared = sorted(set[int].intersection(*map(set, binned)))
    means = [
        {"samples": place * width, "kind": "mean",
         "value": scale * statistics.fmean(statistics.fmean(one[place]) for one in binned)}
        for place in shared
    ]  # fmt: skip
    ends = [
        {"samples": curve[-1][0], "kind": "seed",
         "value": scale * statistics.fmean(one[max(one)])}
        for curve, one in zip(curves, binned, strict=True)
    ]  # fmt: skip
    return [{**keys, **row} for row in means + ends]


def draw_ranking(ranking: Ranking) -> Figure:
    """The difference of each norm to the reference."""
    rows: list[Row] = []
    for place in ranking.places:
        if place.gap is not None:
            verdict = place.verdict or "undecided"
            keys = {"norm": place.norm, "verdict": verdict, "best": bool(place.may_be_best)}
            rows += interval_row(place.gap, **keys)
    label = f"difference to {ranking.reference} ({ranking.part.metric.unit})"
    x = alt.X("value:Q", title=label).scale(zero=False)
    y = _norm_axis([place.norm for place in ranking.places])
    colour = alt.Color("verdict:N").scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
    shape = alt.Shape("best:N", legend=None).scale(domain=[True, False], range=["circle", "square"])
    even = alt.Chart().mark_rule(strokeDash=[3, 3], color="#8c8c8c")
    even = even.encode(x=alt.X(datum=0))
    chart = alt.layer(even, dots_and_means(x, y, colour, shape))
    words = (
        "Right of the dashed line is better; 95 % intervals, one at a time, while verdicts "
        f"(colours) are corrected for {format_count(ranking.family_size, 'comparison')}. "
        "A circle: may be the best."
    )
    name, title = f"ranking_{ranking.part.slug}", f"Ranking {ranking.part.heading}"
    return Figure(name, title, words, chart, rows, alt.Step(LINE))


def draw_cost(part: Slice) -> Figure:
    """The time of a training step of one run, a dot per run."""
    rows: list[Row] = []
    for grid in part.grids:
        is_sized = len(part.sizes) > 1 and grid.norm not in part.independent
        for cell in grid.cells:
            times = {run.seed: run.step_ms for run in cell.runs if run.step_ms is not None}
            rows += seed_rows(times, norm=grid.norm + f" at {grid.size}" * is_sized, lr=cell.lr)
    x = alt.X("value:Q", title="ms per step and run").scale(zero=True)
    y = _norm_axis(list(dict.fromkeys(row["norm"] for row in rows)))
    dots = alt.Chart().mark_point(size=30, opacity=0.5)
    chart = dots.encode(x, y, tooltip=tooltip("norm", "lr", "seed", "value"))
    words = (
        "Training time of an optimizer step over the number of runs trained together, a dot per "
        "run: as noisy as the machine."
    )
    return Figure(
        f"cost_{part.slug}", "Time of a training step", words, chart, rows, alt.Step(LINE)
    )


# Rows and channels


def interval_row(interval: Interval, **keys: Any) -> list[Row]:
    """The row of a mean; none if it is not known."""
    if interval.estimate is None:
        return []
    values = {"value": interval.estimate, "low": interval.low, "high": interval.high}
    return [{**keys, "kind": "mean", **values, "n": interval.n}]


def seed_rows(values: Mapping[int, float], **keys: Any) -> list[Row]:
    """A row for each seed with a finite value."""
    return [
        {**keys, "kind": "seed", "seed": seed, "value": value}
        for seed, value in values.items()
        if math.isfinite(value)
    ]


def of_norms(styles: Styles) -> tuple[alt.Color, alt.Shape, alt.StrokeDash]:
    """Colour, marker and dash of norms, with one legend."""
    norms = list(styles)
    colours, markers, dashes = map(list, zip(*styles.values(), strict=True))
    return (
        alt.Color("norm:N").scale(domain=norms, range=colours),
        alt.Shape("norm:N").scale(domain=norms, range=markers),
        alt.StrokeDash("norm:N").scale(domain=norms, range=list(map(list, dashes))),
    )


def dots_and_means(x: alt.X, y: alt.Y, colour: alt.Color, shape: alt.Shape) -> Any:
    """Every seed as a dot, each mean as a mark with its 95 % interval.

    x or y is the column `value`.
    """
    base = alt.Chart().encode(x, y, colour)
    marks = base.encode(shape, tooltip=tooltip("norm", "seed", "value", "n"))
    mean, seed = "datum.kind == 'mean'", "datum.kind == 'seed'"
    second = alt.X2 if x["shorthand"] == "value:Q" else alt.Y2
    rule = base.mark_rule(strokeWidth=1.5).transform_filter(mean)
    return alt.layer(
        marks.mark_point(size=14, opacity=0.35).transform_filter(seed),
        *(rule.encode(second(f"{end}:Q")) for end in ("low", "high")),
        marks.mark_point().transform_filter(mean),
    )


def tooltip(*fields: str) -> list[alt.Tooltip]:
    numbers = ("value", "n", "seed")
    return [alt.Tooltip(f"{field}:{'Q' if field in numbers else 'N'}") for field in fields]
