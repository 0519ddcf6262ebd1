"""The benchmark's report as a folder: index.html, report.json, figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import altair as alt
import pandas as pd

from normexp.benchmark.claims import Verdict, words_of
from normexp.benchmark.report import BenchmarkReport
from normexp.benchmark.score import GROUPS, Standings
from normexp.benchmark.show import (
    cost_note,
    error_words,
    fall_words,
    group_words,
    heading,
    notes_of,
    published_words,
    rate_words,
    ratio_words,
    unit_of,
)
from normexp.reporting.charts import Figure, tooltip
from normexp.reporting import page
from normexp.reporting.sentences import listed
from normexp.reporting.style import SLOTS
from normexp.reporting.tables import to_csv
from normexp.stats.ratio import as_ratio

# Colours of `best`, `better`, `level`, `worse`, of which markers differ too.
STYLES = dict(zip(GROUPS, (SLOTS[3], SLOTS[1], SLOTS[6], SLOTS[0]), strict=True))
LEAST, MOST = 0.5, 4.0  # of the axis of ratios; intervals beyond are cut off
WIDTH, ROW = 460, 16  # pixels


def write_page(report: BenchmarkReport, folder: Path) -> Path:
    """Writes the folder of a report; returns its index.html."""
    tables = {one.recipe.name: _frame(one) for one in report.standings}
    figures = {one.recipe.name: list(_figures(one, report.norm)) for one in report.standings}

    def write(fresh: Path) -> None:
        fresh.mkdir()
        content = json.dumps(report.as_json(), indent=1, allow_nan=False)
        (fresh / "report.json").write_text(content + "\n", encoding="utf-8")
        page.write_page(
            fresh,
            "benchmark.html.j2",
            [figure for drawn in figures.values() for figure in drawn],
            {f"ranking_{name}": to_csv(frame) for name, frame in tables.items()},
            package="normexp.benchmark",
            report=report,
            heading=heading,
            best_words=best_words,
            notes_of=notes_of,
            cost_note=cost_note(report) if report.table.costs else "",
            tables=tables,
            drawn=figures,
            published_words=published_words,
            outcome_words=outcome_words,
            words_of=words_of,
        )

    page.replace_folder(folder, write)
    return folder / "index.html"


def best_words(one: Standings) -> str:
    """`The best of 23 norms is one of 3: batch, layer or rms`."""
    ranked = [place.norm for place in one.places if place.group in GROUPS]
    best = [place.norm for place in one.places if place.group == "best"]
    if len(best) == len(ranked):
        return f"Any of {len(ranked)} norms may be the best" if len(ranked) > 1 else ""
    if len(best) == 1:
        return f"The best of {len(ranked)} norms is {best[0]}"
    return f"The best of {len(ranked)} norms is one of {len(best)}: {listed(best, 'or')}"


def outcome_words(verdict: Verdict) -> str:
    """The outcome, and the seeds that would decide an undecided claim."""
    needed = [one.needed for one in verdict.tested if one.outcome == "undecided" and one.needed]
    if verdict.outcome != "undecided" or not needed:
        return verdict.outcome
    least, most = min(needed), max(needed)
    seeds = f"n = {least}" if least == most else f"n = {least} to {most}"
    return f"undecided at this size; {seeds} would decide its comparisons"


def _frame(one: Standings) -> pd.DataFrame:
    """The ranking as it is shown, a row per norm."""
    rows = [
        {
            "group": group_words(one, place),
            "norm": place.norm,
            f"{unit_of(one)} [95 %]": error_words(place),
            f"of {one.reference}'s": ratio_words(place),
            "2 against full": fall_words(place),
            "rate": rate_words(place),
            "step time": f"{place.cost.step:.2f}" if place.cost else "-",
            "bytes kept": f"{place.cost.kept:.2f}" if place.cost else "-",
        }
        for place in one.places
    ]
    return pd.DataFrame(rows)


# --- Figures -------------------------------------------------------------------------------------


def _figures(one: Standings, norm: str | None) -> Iterator[Figure]:
    frame = _ratios(one, norm)
    if len(frame) > 1:
        yield _ranking_figure(one, frame)
    if frame["step"].notna().sum() > 1:
        yield _cost_figure(one, frame)


def _ratios(one: Standings, norm: str | None) -> pd.DataFrame:
    """Ratio and cost of each ranked norm; the interval as far as the axis goes."""
    rows = []
    for place in one.places:
        if place.group not in GROUPS or place.tuned is None:
            continue
        ratio = as_ratio(place.ratio.gap) if place.ratio else None
        estimate, low, high = (ratio.estimate, ratio.low, ratio.high) if ratio else (1.0, 1.0, 1.0)
        assert estimate is not None
        rows.append(
            {
                "norm": place.norm,
                "label": place.norm + " (yours)" * (place.norm == norm),
                "group": place.group,
                "ratio": estimate,
                "shown": _cut(estimate),
                "low": None if low is None else _cut(low),
                "high": None if high is None else _cut(high),
                "text": ratio_words(place),
                "step": place.cost.step if place.cost else None,
                "kept": place.cost.kept if place.cost else None,
            }
        )
    return pd.DataFrame(rows).astype({"step": float, "kept": float})


def _cut(value: float) -> float:
    return min(max(value, LEAST), MOST)


def _colour_and_shape(one: Standings, groups: Sequence[str]) -> tuple[alt.Color, alt.Shape]:
    """A colour and a marker for each group that occurs, in one legend."""
    known = [group for group in GROUPS if group in groups]
    titles = {
        "best": "may be the best",
        "better": f"better than {one.reference}",
        "level": f"not told from {one.reference}",
        "worse": f"worse than {one.reference}",
    }
    labels = " : ".join(f"datum.label == '{key}' ? '{titles[key]}'" for key in known) + " : ''"
    colour = alt.Color("group:N", title=None).scale(
        domain=known, range=[STYLES[group].colour for group in known]
    )
    shape = alt.Shape("group:N", title=None).scale(
        domain=known, range=[STYLES[group].marker for group in known]
    )
    return colour.legend(labelExpr=labels), shape.legend(labelExpr=labels)


def _ratio_scale(frame: pd.DataFrame) -> alt.Scale:
    values = frame[["shown", "low", "high"]].stack()
    domain = [min(0.9, float(values.min())) / 1.03, max(1.2, float(values.max())) * 1.03]
    return alt.Scale(type="log", domain=domain, nice=False)


def _ranking_figure(one: Standings, frame: pd.DataFrame) -> Figure:
    """The ratio of each norm's error to the reference's with its interval."""
    known = one.reference
    what = "error" if unit_of(one) == "error" else "2^(bits)"
    colour, shape = _colour_and_shape(one, list(frame["group"]))
    x = alt.X("shown:Q", title=f"{what}, multiple of {known}'s", scale=_ratio_scale(frame))
    x = x.axis(values=[0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4], format=".3~g")
    y = alt.Y("label:N", title=None, sort=list(frame["label"])).axis(labelLimit=160, grid=True)
    chart = alt.Chart()
    line = chart.mark_rule(strokeDash=[3, 3], color="#808080").encode(x=alt.datum(1.0))
    rule = chart.mark_rule(strokeWidth=1.6).encode(alt.X("low:Q"), y, colour, x2="high:Q")
    point = chart.mark_point(filled=True, opacity=1, size=60)
    tip = tooltip("norm", "text", "group")
    layers = alt.layer(line, rule, point.encode(x, y, colour, shape, tooltip=tip))
    caption = (
        f"Tuned {what} as a multiple of {known}'s with its 95 % interval, over new seeds and test "
        "samples; the luck of tuning is inside it. The order within a group means nothing."
    )
    beyond = frame[(frame["ratio"] > MOST) | (frame["high"] >= MOST)]
    if len(beyond):
        names = ", ".join(f"{row.norm} {row.text}" for row in beyond.itertuples())
        caption += f" Cut off at {MOST:g}: {names}."
    chart = layers.properties(width=WIDTH, height=alt.Step(ROW))
    return Figure(f"ranking_{one.recipe.name}", f"{one.recipe.name}: ranking", caption, chart, frame)


def _cost_figure(one: Standings, frame: pd.DataFrame) -> Figure:
    """The ratio of errors against the time of a training step."""
    frame = frame[frame["step"].notna()]
    colour, shape = _colour_and_shape(one, list(frame["group"]))
    highest = max(1.1, 1.05 * float(frame["step"].max()))
    domain = [0.95 * float(frame["step"].min()), highest]
    x = alt.X("step:Q", title="time of a training step, multiple of batch's")
    x = x.scale(domain=domain, nice=False, type="log").axis(format=".3~g", tickCount=6)
    y = alt.Y("shown:Q", title=f"of {one.reference}'s error", scale=_ratio_scale(frame))
    y = y.axis(values=[0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4], format=".3~g")
    tip = tooltip("norm", "text", "step:Q", "kept:Q")
    point = alt.Chart().mark_point(filled=True, opacity=1).encode(x, y, colour, shape, tooltip=tip)
    size = alt.Size("kept:Q", title="bytes kept, of batch's").scale(range=[30, 260], zero=True)
    name = alt.Chart().mark_text(align="left", dx=7, fontSize=9).encode(x, y, alt.Text("label:N"))
    layers = alt.layer(point.encode(size.legend(None)), name)
    caption = (
        "Error against cost, both as multiples; the area of a marker is the memory that a forward "
        "keeps for its backward. Lower left is better. Times are of plain PyTorch on a CPU, where "
        "batch and group norm have fused kernels."
    )
    chart = layers.properties(width=WIDTH, height=320)
    name_of_figure = f"cost_{one.recipe.name}"
    return Figure(name_of_figure, f"{one.recipe.name}: error and cost", caption, chart, frame)
