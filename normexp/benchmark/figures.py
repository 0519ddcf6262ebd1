"""The figures of the benchmark: the claim about small batches, the ranking, and cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from normexp.benchmark.protocol import recipe_at
from normexp.benchmark.report import TITLES
from normexp.benchmark.score import Overall, Standing, Standings, Tuned, tune
from normexp.benchmark.show import budget_of, heading, overall_heading, ratio_words
from normexp.benchmark.table import Table
from normexp.reporting.charts import Channels, Figure, encode_style, tooltip
from normexp.reporting.style import SLOTS
from normexp.stats.ratio import as_ratio

SMALL = 2  # samples that share statistics
RATIOS = (0.7, 7.0)  # of the figure of the ranking
RATIOS_OF_WORKLOADS = (0.85, 2.5)  # of the panels over all
TICKS = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 7]
WIDTH_OF_RATES, WIDTH_OF_TUNED, WIDTH_OF_RATIOS, HEIGHT, ROW = 145, 55, 88, 300, 20  # pixels
GREY = "#808080"
COLOURS = {
    "best": "#0072b2",
    "better": "#009e73",
    "level": "#7f7f7f",
    "worse": "#d55e00",
    "open": "#c3c3c3",
}
STYLES = [SLOTS[place] for place in (0, 4, 8, 7, 3, 1)]  # of the series of the figure of rates


def draw_rates(table: Table, workload: str) -> Figure | None:
    """Error, or bits per byte, against the learning rate and, beside it, at the tuned rate.

    One pair of panels per budget.

    Batch norm at two norm batch sizes, with other statistics in evaluation, and two norms that mix
    no samples. None without the grid of batch norm at two samples.
    """
    recipes = [
        name
        for budget in ("long", "short")
        if (name := recipe_at(workload, budget)) in table.recipes
    ]
    rows = pd.DataFrame([row for name in recipes for row in _rows_of_rates(table, name)])
    if rows.empty or SMALL not in set(rows.loc[rows["base"] == "batch", "size"]):
        return None
    drawn = rows.drop_duplicates("norm")
    labels = list(drawn["norm"])
    channels = encode_style(
        {label: STYLES[n] for label, n in zip(labels, drawn["series"], strict=True)}
    )
    rates = sorted(rows["lr"].dropna().unique())
    y = _scale_of_rates(rows, is_accuracy=table.rates_of(recipes[0], "batch", SMALL)[0].is_accuracy)
    panels = [
        panel
        for place, budget in enumerate(dict.fromkeys(rows["budget"]))
        for panel in _panels_of_rates(budget, labels, channels, rates, y, first=place == 0)
    ]
    return Figure(
        f"rates_{workload}",
        f"Batch norm at {SMALL} samples against the learning rate: {workload}",
        "On test samples, at each of the rates (left) and at the tuned one (right, 95 % over new "
        "seeds and samples), per budget. Diverged seeds count as chance level.",
        alt.hconcat(*panels, spacing=12),
        rows,
        "none",
        kind="rates",
    )


def _rows_of_rates(table: Table, recipe: str) -> Iterator[Mapping[str, object]]:
    full = table.recipes[recipe].batch_size
    series = [
        ("batch", None, "running", f"batch, {full} samples"),
        ("batch", SMALL, "running", f"batch, {SMALL} samples"),
        ("batch", SMALL, "precise", f"batch, {SMALL}, precise statistics"),
        ("eval_norm", SMALL, "running", f"eval_norm, {SMALL} samples"),
        ("group", None, "running", "group"),
        ("layer", None, "running", "layer"),
    ]
    for number, (norm, size, kind, label) in enumerate(series):
        cells = table.rates_of(recipe, norm, size)
        if not cells:
            continue
        about = {"budget": budget_of(table.recipes[recipe]), "norm": label, "base": norm}
        about |= {"size": size or full, "series": number}
        for cell in cells:
            yield about | {"lr": cell.lr, "tuned": False} | _shown(tune([cell], kind))
        yield about | {"lr": np.nan, "tuned": True} | _shown(tune(cells, kind))


def _shown(tuned: Tuned) -> dict[str, float]:
    """Mean and ends of the interval: test error in %, or bits per byte."""
    ends = (tuned.mean.estimate, tuned.mean.low, tuned.mean.high)
    mean, low, high = (np.nan if end is None else end for end in ends)
    if tuned.is_accuracy:
        mean, low, high = 100 - mean, 100 - high, 100 - low
    return {"mean": mean, "low": low, "high": high}


def _scale_of_rates(rows: pd.DataFrame, *, is_accuracy: bool) -> alt.Y:
    low, high = rows["mean"].min(), rows["mean"].max()
    if not is_accuracy:
        domain = [low - 0.05 * (high - low), high + 0.05 * (high - low)]
        return alt.Y("mean:Q", title="bits per byte").scale(domain=domain, nice=False, zero=False)
    y = alt.Y("mean:Q", title="test error (%)")
    low, high = low / 1.4, min(100, high * 1.1)
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 30, 40, 50, 70, 100) if low <= tick <= high]
    y = y.scale(type="log", domain=[low, high], clamp=True, nice=False)
    return y.axis(values=ticks, format="d")


def _panels_of_rates(
    budget: str,
    labels: Sequence[str],
    channels: Channels,
    rates: Sequence[float],
    y: alt.Y,
    *,
    first: bool,
) -> list[Any]:
    """The errors at each rate, and beside them those at the tuned rate."""
    colour, shape, dash = channels
    beside = y.copy().title(None)
    y = y if first else beside
    x = alt.X("lr:Q", title="learning rate", axis=alt.Axis(values=rates, format="~g", grid=False))
    x = x.scale(type="log", nice=False, domain=[rates[0] / 1.3, rates[-1] * 1.3])
    here = alt.Chart().transform_filter(alt.datum.budget == budget)
    at_rates = here.transform_filter("!datum.tuned")
    dot = {"filled": True, "opacity": 1, "size": 55}
    tip = tooltip("norm", "lr:Q", "mean:Q")
    lines = alt.layer(
        at_rates.mark_line(strokeWidth=1.6).encode(x, y, colour, dash),
        at_rates.mark_point(**dot).encode(x, y, colour, shape, tooltip=tip),
    ).properties(width=WIDTH_OF_RATES, height=HEIGHT, title=budget)
    place = alt.X(
        "norm:N", sort=list(labels), title="tuned", axis=alt.Axis(labels=False, ticks=False)
    )
    tuned = here.transform_filter("datum.tuned")
    tip = tooltip("norm", "mean:Q", "low:Q", "high:Q")
    means = alt.layer(
        tuned.mark_rule(strokeWidth=1.6).encode(
            place, alt.Y("low:Q", title=None, scale=y["scale"]), alt.Y2("high:Q"), colour
        ),
        tuned.mark_point(**dot).encode(place, beside, colour, shape, tooltip=tip),
    ).properties(width=WIDTH_OF_TUNED, height=HEIGHT)
    return [lines, means]


def draw_ranking(standings: Standings, entry: str | None = None) -> Figure:
    """Every ranked norm's error as a ratio to the reference's, in the groups of the ranking.

    entry: a norm whose name is bold
    """
    rows = pd.DataFrame(list(_rows_of_ranking(standings)))
    low, high = max(RATIOS[0], rows["low"].min() / 1.02), min(RATIOS[1], rows["high"].max() * 1.02)
    shown = rows.assign(
        mean=rows["mean"].clip(low, high),
        low=rows["low"].clip(low),
        high=rows["high"].clip(upper=high),
    )
    title = f"error as a ratio to {standings.reference}'s (log scale)"
    x = alt.X("mean:Q", title=title).scale(type="log", domain=[low, high], nice=False)
    x = x.axis(values=TICKS, format="~g")
    chart = _ratios(rows, list(rows["norm"]), x, entry)
    chart = chart.properties(width=380, height=ROW * len(rows))
    return Figure(
        f"ranking_{standings.recipe.name}",
        heading(standings),
        "95 % over new seeds and test samples; the rate of each norm is chosen on validation by "
        "half of the seeds, and the others are shown. Colours are the groups that the verdicts of "
        "the family allow; the order within a group means nothing. Intervals are cut at the edges.",
        chart,
        shown,
        "width",
        kind="ranking",
    )


def draw_overall(overall: Overall, entry: str | None = None) -> Figure:
    """The mean ratio of every norm that is ranked in all workloads, and its ratio in each.

    entry: a norm whose name is bold
    """
    norms = [place.norm for place in overall.places]
    panels = {"all": overall.places} | {
        one.recipe.name: [place for norm in norms if (place := one.of(norm)) is not None]
        for one in overall.standings
    }
    rows = pd.DataFrame(
        {"workload": name, **_row_of(place, "the reference")}
        for name, places in panels.items()
        for place in places
    )
    low, high = RATIOS_OF_WORKLOADS
    shown = rows.copy()
    shown[["mean", "low", "high"]] = rows[["mean", "low", "high"]].clip(low, high)
    x = alt.X("mean:Q", title=None).scale(type="log", domain=[low, high], nice=False)
    x = x.axis(values=[1, 1.5, 2], format="~g")
    return Figure(
        "ranking_overall",
        overall_heading(overall),
        "The geometric mean (all) and each workload, 95 % over new seeds and test samples; the "
        "rate of each norm is chosen on validation by half of the seeds, and the others are shown. "
        "Colours are the groups that the verdicts of each panel allow; the order within a group "
        "means nothing. A point at the right edge is beyond it.",
        alt.hconcat(
            *(
                _ratios(rows, norms, x, entry, names=place == 0)
                .transform_filter(alt.datum.workload == name)
                .properties(width=WIDTH_OF_RATIOS, height=ROW * len(norms), title=name)
                for place, name in enumerate(panels)
            ),
            spacing=10,
        ),
        shown,
        "none",
        kind="ranking",
    )


def _ratios(
    rows: pd.DataFrame, norms: Sequence[str], x: alt.X, entry: str | None, *, names: bool = True
) -> Any:
    """A row per norm: its ratio with the interval, and a line at 1.

    names: of the norms, on the axis; that of the entry is bold
    """
    colour = _group_colour(rows)
    is_entry = f"datum.value === {json.dumps(entry)}"
    weight = alt.condition(is_entry, alt.value("bold"), alt.value("normal"))
    axis = alt.Axis(grid=True, ticks=False, labels=names, labelFontWeight=weight)
    y = alt.Y("norm:N", sort=list(norms), title=None, axis=axis)
    tip = tooltip("norm", "group", "text", "rate")
    return alt.layer(
        alt.Chart(alt.Data(values=[{"at": 1}])).mark_rule(color=GREY).encode(alt.X("at:Q")),
        alt.Chart().mark_rule(strokeWidth=1.6).encode(alt.X("low:Q"), alt.X2("high:Q"), y, colour),
        alt.Chart().mark_point(filled=True, opacity=1, size=50).encode(x, y, colour, tooltip=tip),
    )


def draw_cost(standings: Standings) -> Figure | None:
    """Error against the time of a training step; None if fewer than two norms were measured."""
    rows = pd.DataFrame(list(_rows_of_ranking(standings))).dropna(subset=["step"])
    if len(rows) < 2:
        return None
    low, high = RATIOS
    shown = rows.assign(mean=rows["mean"].clip(low, high))
    colour = _group_colour(rows)
    x = alt.X("step:Q", title="time of a training step as a ratio to batch's (log scale)")
    times = [0.95 * float(rows["step"].min()), 1.15 * float(rows["step"].max())]
    x = x.scale(type="log", domain=times, nice=False)
    x = x.axis(values=TICKS, format="~g")
    y = alt.Y("mean:Q", title=f"error as a ratio to {standings.reference}'s")
    y = y.scale(type="log", domain=[low, float(shown["mean"].max()) * 1.1], nice=False)
    y = y.axis(values=TICKS, format="~g")
    size = alt.Size("kept:Q", legend=None, scale=alt.Scale(range=[30, 240]))
    tip = tooltip("norm", "group", "text", "step:Q", "kept:Q")
    point = alt.Chart().mark_point(filled=True, opacity=0.9)
    name = alt.Chart().mark_text(align="left", dx=7, fontSize=9, color=GREY)
    chart = alt.layer(
        point.encode(x, y, colour, size, tooltip=tip), name.encode(x, y, alt.Text("norm:N"))
    ).properties(width=380, height=max(HEIGHT, ROW * len(rows) * 0.7))  # room for the names
    return Figure(
        f"cost_{standings.recipe.name}",
        f"{standings.recipe.name}: error and cost",
        "Lower left is better. The area of a point is the memory that a forward keeps for its "
        "backward. Times are of this library on one CPU thread: batch, layer and group norm have "
        "fused kernels there.",
        chart,
        shown,
        kind="cost",
    )


def _group_colour(rows: pd.DataFrame) -> alt.Color:
    known = rows.drop_duplicates("key")
    colours = [COLOURS[key] for key in known["key"]]
    scale = alt.Scale(domain=list(known["group"]), range=colours)
    return alt.Color("group:N", title=None, scale=scale, legend=alt.Legend(columns=2))


def _rows_of_ranking(standings: Standings) -> Iterator[Mapping[str, object]]:
    for place in standings.places:
        if place.group in COLOURS:
            yield _row_of(place, standings.reference)


def _row_of(place: Standing, reference: str) -> dict[str, object]:
    ratio = None if place.ratio is None else as_ratio(place.ratio.gap)
    ends = (1.0, 1.0, 1.0) if ratio is None else (ratio.estimate, ratio.low, ratio.high)
    return {
        "norm": place.norm,
        "key": place.group,
        "group": TITLES[place.group].format(reference=reference),
        "text": ratio_words(place),
        "rate": place.tuned.rate if place.tuned else None,
        "step": place.cost.step if place.cost else None,
        "kept": place.cost.kept if place.cost else None,
        **dict(zip(("mean", "low", "high"), ends, strict=True)),
    }
