"""The benchmark on the terminal and as report.json: ranking, sensitivity, bars, claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from normexp.benchmark.claims import Verdict, words_of
from normexp.benchmark.protocol import WorkloadRecipe
from normexp.benchmark.score import GROUPS, Standing, Standings, overall
from normexp.benchmark.table import Table
from normexp.reporting.terminal import open_console, text_table
from normexp.stats.interval import Interval
from normexp.stats.ratio import as_ratio

TITLES = {
    "best": "may be the best",
    "better": "better than {reference}",
    "level": "not told from {reference}",
    "worse": "worse than {reference}",
    "open": "told from no other",
    "diverges": "diverges at its rate",
    "incomplete": "grid incomplete",
}
ORDINALS = ("first", "second", "third", "fourth")


def print_standings(standings: Iterable[Standings]) -> None:
    """A table for each recipe, and the smallest ratio that could be told from 1."""
    console = open_console()
    for one in standings:
        console.out(f"\n{heading(one)}", highlight=False)
        columns = ("group", "norm", "error", f"of {one.reference}'s", "2 against full", "rate")
        console.print(text_table(columns, _rows(one)))
        if one.bars:
            bars = ", ".join(f"{bar:.2f} at n = {n}" for n, bar in one.bars.items())
            console.out(f"A ratio is told from 1 in 80 % of studies from {bars}.", highlight=False)


def heading(one: Standings) -> str:
    """`convnet: error at the tuned rate, 18 epochs, n = 8`."""
    recipe = one.recipe
    tuned = next(place.tuned for place in one.places if place.norm == one.reference)
    assert tuned is not None
    unit = "error in %" if tuned.is_accuracy else "bits per byte"
    return f"{recipe.name}: {unit} at the tuned rate, {budget_of(recipe)}, n = {recipe.num_seeds}"


def budget_of(recipe: WorkloadRecipe) -> str:
    """`18 epochs`, or `1,500 steps`."""
    return f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.steps:,} steps"


def _rows(one: Standings) -> Iterator[list[str]]:
    for place in one.places:
        title = TITLES[place.group].format(reference=one.reference)
        if place.tuned is None:
            yield [title, place.norm, "-", "-", "-", "-"]
            continue
        rate = f"{place.tuned.rate:g}" + ", edge" * place.tuned.is_at_edge
        yield [title, place.norm, error_words(place), ratio_words(place), _fall(place), rate]


def error_words(place: Standing) -> str:
    """`2.7 [2.4, 3.0]`: error in points, or bits per byte."""
    assert place.tuned is not None
    shown = place.tuned.mean
    if place.tuned.is_accuracy:
        ends = (shown.estimate, shown.high, shown.low)
        bounds = [None if x is None else min(max(100 - x, 0.0), 100.0) for x in ends]
    else:
        bounds = [shown.estimate, shown.low, shown.high]
    return _words(*bounds, digits=2)


def ratio_words(place: Standing) -> str:
    if place.ratio is None:
        return "1" if place.group in GROUPS else "-"
    return interval_words(as_ratio(place.ratio.gap))


def interval_words(interval: Interval) -> str:
    return _words(interval.estimate, interval.low, interval.high, digits=2)


def _fall(place: Standing) -> str:
    if place.sensitivity is None or place.tuned is None:
        return "-"
    gap = place.sensitivity.gap
    return _words(gap.estimate, gap.low, gap.high, digits=1 if place.tuned.is_accuracy else 3)


def _words(estimate: float | None, low: float | None, high: float | None, *, digits: int) -> str:
    if estimate is None:
        return "-"
    bounds = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{estimate:.{digits}f}{bounds}"


def print_claims(verdicts: Iterable[Verdict]) -> None:
    """Each claim with its verdict, the published numbers and ours."""
    console = open_console()
    for verdict in verdicts:
        lines = [f"\n{verdict.claim['statement']}", f"  {verdict.outcome}"]
        lines[-1] += f" ({verdict.reason})" * bool(verdict.reason)
        published = verdict.claim["published"]
        lines.append(f"  published ({published['unit']}): {_published(published)}")
        lines += [
            f"  {one.words}: {words_of(one)}"
            for one in verdict.tested
            if one.assessment is not None
        ]
        console.out("\n".join(lines), highlight=False)


def _published(numbers: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {', '.join(f'{k}: {v}' for k, v in value.items())}"
        if isinstance(value, dict)
        else f"{name} {value}"
        for name, value in numbers.items()
        if name != "unit"
    )


def standing_words(standings: Sequence[Standings], norm: str) -> str:
    """Where a norm stands, in a line.

    `error 0.97 [0.93, 1.02] of batch's over 1 workload, in the first of 3 groups (convnet)`
    """
    places = [(one, place) for one in standings if (place := one.of(norm)) is not None]
    ranked = [(one, place) for one, place in places if place.group in GROUPS]
    if not ranked:
        groups = {TITLES[place.group] for _, place in places} or {"no runs"}
        return f"{norm} is not ranked: {', '.join(sorted(groups))}"
    parts = []
    mean = overall([one for one, _ in ranked], norm)
    references = " and ".join(dict.fromkeys(f"{one.reference}'s" for one, _ in ranked))
    if mean is not None:
        count = f"{len(ranked)} workload" + "s" * (len(ranked) > 1)
        parts.append(f"error {interval_words(mean)} of {references} over {count}")
    for one, place in ranked:
        present = [group for group in GROUPS if any(p.group == group for p in one.places)]
        if place.group == "open":
            parts.append(f"{TITLES['open']} ({one.recipe.name})")
        else:
            ordinal = ORDINALS[present.index(place.group)]
            parts.append(f"in the {ordinal} of {len(present)} groups ({one.recipe.name})")
        if place.sensitivity is not None:
            parts.append(f"sensitivity {interval_words(place.sensitivity.gap)} ({one.recipe.name})")
    return f"{norm}: {', '.join(parts)}"


def as_json(
    table: Table, standings: Iterable[Standings], verdicts: Iterable[Verdict]
) -> dict[str, Any]:
    """Ranking and claims as plain values."""

    def plain(interval: Interval | None) -> list[float | None] | None:
        return None if interval is None else [interval.estimate, interval.low, interval.high]

    return {
        "about": dict(table.about),
        "workloads": {
            one.recipe.name: [
                {
                    "norm": place.norm,
                    "group": place.group,
                    "metric": plain(place.tuned.mean) if place.tuned else None,
                    "ratio": plain(as_ratio(place.ratio.gap)) if place.ratio else None,
                    "sensitivity": plain(place.sensitivity.gap) if place.sensitivity else None,
                    "rate": place.tuned.rate if place.tuned else None,
                    "at_edge": place.tuned.is_at_edge if place.tuned else None,
                }
                for place in one.places
            ]
            for one in standings
        },
        "claims": [
            {
                "name": verdict.name,
                "verdict": verdict.outcome,
                "reason": verdict.reason,
                "comparisons": [
                    {
                        "what": one.words,
                        "expect": one.expect,
                        "outcome": one.outcome,
                        "difference": plain(one.assessment.gap) if one.assessment else None,
                        "seeds_to_decide": one.needed,
                    }
                    for one in verdict.tested
                ],
            }
            for verdict in verdicts
        ],
    }
