"""The benchmark's report as a folder: index.html, report.json, figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from normexp.benchmark.claims import Verdict, words_of
from normexp.benchmark.figures import draw_cost, draw_overall, draw_ranking, draw_rates
from normexp.benchmark.report import BenchmarkReport
from normexp.benchmark.score import GROUPS, Overall, Standings
from normexp.benchmark.show import (
    cost_note,
    error_words,
    fall_words,
    group_words,
    heading,
    notes_of,
    overall_heading,
    overall_note,
    overall_rows,
    published_words,
    rate_words,
    ratio_words,
    unit_of,
)
from normexp.reporting import page
from normexp.reporting.charts import Figure
from normexp.reporting.sentences import listed
from normexp.reporting.tables import to_csv


def write_page(report: BenchmarkReport, folder: Path) -> Path:
    """Writes the folder of a report; returns its index.html."""
    tables = {one.recipe.name: _frame(one) for one in report.standings}
    figures = {one.recipe.name: list(_figures(one, report)) for one in report.standings}
    if report.overall is not None:
        tables["overall"] = _overall_frame(report.overall)
        figures["overall"] = [draw_overall(report.overall, report.norm)]

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
            overall_heading=overall_heading,
            overall_note=overall_note(report) if report.overall is not None else "",
            best_words=best_words,
            notes_of=notes_of,
            cost_note=cost_note(report) if report.table.costs else "",
            rankings=tables,
            drawn=figures,
            published_words=published_words,
            outcome_words=outcome_words,
            words_of=words_of,
        )

    page.replace_folder(folder, write)
    return folder / "index.html"


def best_words(one: Standings | Overall) -> str:
    """`The best of 23 norms is one of 3: batch, layer or rms`."""
    ranked = [place.norm for place in one.places if place.group in GROUPS]
    best = [place.norm for place in one.places if place.group == "best"]
    num_open = sum(place.group == "open" for place in one.places)
    more = f", if not one of {num_open} that are told from no other" if num_open else ""
    if len(best) == len(ranked):
        return f"Any of {len(ranked)} norms may be the best" if len(ranked) > 1 else ""
    if len(best) == 1:
        return f"The best of {len(ranked)} norms is {best[0]}{more}"
    return f"The best of {len(ranked)} norms is one of {len(best)}: {listed(best, 'or')}{more}"


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


def _overall_frame(overall: Overall) -> pd.DataFrame:
    names = [one.recipe.name for one in overall.standings]
    return pd.DataFrame(list(overall_rows(overall)), columns=["group", "norm", "all", *names])


def _figures(one: Standings, report: BenchmarkReport) -> Iterator[Figure]:
    """Of a recipe; batch norm's rates once, with the long budget of the workload."""
    if sum(place.group in GROUPS for place in one.places) > 1:
        yield draw_ranking(one, report.norm)
    if (cost := draw_cost(one)) is not None:
        yield cost
    if report.norm is None and one.recipe.name == one.recipe.workload:
        rates = draw_rates(report.table, one.recipe.workload)
        if rates is not None:
            yield rates
