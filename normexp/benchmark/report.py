"""What a table of the benchmark says: rankings, verdicts on claims, and where an entry stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normexp.benchmark.claims import Tested, Verdict, judge
from normexp.benchmark.protocol import BENCHMARK
from normexp.benchmark.ratio import as_ratio
from normexp.benchmark.score import GROUPS, Overall, Standings, rank, rank_overall
from normexp.benchmark.table import Table
from normexp.stats.interval import Interval

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


@dataclass(frozen=True, eq=False)
class BenchmarkReport:
    """The report on a table.

    norm: an entry, and then the recipes where it stands are shown; None: all recipes
    """

    table: Table
    norm: str | None = None

    @cached_property
    def standings(self) -> Sequence[Standings]:
        """Of each ranked recipe with a complete grid of its reference, workloads in their order."""
        recipes = self.table.recipes.values()
        ranked = [rank(self.table, recipe.name) for recipe in recipes if recipe.is_ranked]
        known = [one for one in ranked if one is not None]
        if self.norm is not None:
            known = [one for one in known if one.of(self.norm) is not None]
        return sorted(known, key=lambda one: one.recipe.place)

    @cached_property
    def overall(self) -> Overall | None:
        """Of the norms that are ranked in every workload; None with one workload."""
        overall = rank_overall(self.standings)
        return overall if len(overall.standings) > 1 else None

    @cached_property
    def verdicts(self) -> Sequence[Verdict]:
        return judge(self.table) if self.table.about["benchmark"] == BENCHMARK else []

    @property
    def title(self) -> str:
        """`benchmark1, rules be7aaf0683fc, code 601cd7f`."""
        about = self.table.about
        commits = ", ".join(str(commit)[:7] for commit in about["commits"])
        return f"{about['benchmark']}, rules {about['rules']}, code {commits}"

    @property
    def sentence(self) -> str:
        """Where the entry stands, in a line.

        `rms: error 0.97 [0.93, 1.02] of batch's over 1 workload, in the first of 3 groups ...`
        """
        return "" if self.norm is None else standing_words(self.standings, self.norm)

    def as_json(self) -> dict[str, Any]:
        """Ranking, sensitivity, cost and claims as plain values."""
        return {
            "about": dict(self.table.about),
            "norm": self.norm,
            "standing": self.sentence,
            "overall": self.overall and _places(self.overall),
            "workloads": {one.recipe.name: _places(one) for one in self.standings},
            "bars": {
                one.recipe.name: {str(n): bar for n, bar in one.bars.items()}
                for one in self.standings
            },
            "claims": [_claim(verdict) for verdict in self.verdicts],
        }


def standing_words(standings: Sequence[Standings], norm: str) -> str:
    """Where a norm stands, in a line; see `BenchmarkReport.sentence`."""
    places = [(one, place) for one in standings if (place := one.of(norm)) is not None]
    ranked = [(one, place) for one, place in places if place.group in GROUPS]
    if not ranked:
        groups = {TITLES[place.group] for _, place in places} or {"no runs"}
        return f"{norm} is not ranked: {', '.join(sorted(groups))}"
    parts = []
    overall = rank_overall([one for one, _ in ranked])
    mean = overall.of(norm)
    if mean is not None and mean.ratio is not None:
        count = f"{len(overall.standings)} workload" + "s" * (len(overall.standings) > 1)
        words = interval_words(as_ratio(mean.ratio.gap))
        parts.append(f"error {words} of {overall.references} over {count}")
    for one, place in ranked:
        workload = one.recipe.name
        present = [g for g in GROUPS if g != "open" and any(p.group == g for p in one.places)]
        if place.group == "open":
            parts.append(f"{TITLES['open']} ({workload})")
        else:
            ordinal = ORDINALS[present.index(place.group)]
            title = TITLES[place.group].format(reference=one.reference)
            parts.append(f"in the {ordinal} of {len(present)} groups, {title} ({workload})")
        if place.sensitivity is not None:
            parts.append(f"sensitivity {interval_words(place.sensitivity.gap)} ({workload})")
        if place.cost is not None:
            times = f"step {place.cost.step:.2f} and bytes {place.cost.kept:.2f} times batch's"
            parts.append(f"{times} ({workload})")
    return f"{norm}: {', '.join(parts)}"


def interval_words(interval: Interval, digits: int = 2) -> str:
    """`0.97 [0.93, 1.02]`."""
    return words_of_bounds(interval.estimate, interval.low, interval.high, digits)


def words_of_bounds(
    estimate: float | None, low: float | None, high: float | None, digits: int
) -> str:
    if estimate is None:
        return "-"
    bounds = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{estimate:.{digits}f}{bounds}"


def plain(interval: Interval | None) -> list[float | None] | None:
    """Estimate, low and high."""
    return None if interval is None else [interval.estimate, interval.low, interval.high]


def _places(one: Standings | Overall) -> list[dict[str, Any]]:
    return [
        {
            "norm": place.norm,
            "group": place.group,
            "metric": plain(place.tuned.mean) if place.tuned else None,
            "ratio": plain(as_ratio(place.ratio.gap)) if place.ratio else None,
            "sensitivity": plain(place.sensitivity.gap) if place.sensitivity else None,
            "step_time": place.cost.step if place.cost else None,
            "bytes_kept": place.cost.kept if place.cost else None,
            "rate": place.tuned.rate if place.tuned else None,
            "at_edge": place.tuned.is_at_edge if place.tuned else None,
        }
        for place in one.places
    ]


def _claim(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": verdict.name,
        "statement": verdict.claim["statement"],
        "source": verdict.claim["source"],
        "published": verdict.claim["published"],
        "verdict": verdict.outcome,
        "reason": verdict.reason,
        "comparisons": [_comparison(one) for one in verdict.tested],
        "beside": [
            {**one.declared, "comparisons": [_comparison(tested) for tested in one.tested]}
            for one in verdict.beside
        ],
    }


def _comparison(tested: Tested) -> dict[str, Any]:
    return {
        "what": tested.words,
        "expect": tested.expect,
        "outcome": tested.outcome,
        "unit": tested.unit,
        "difference": plain(tested.assessment.gap) if tested.assessment else None,
        "seeds_to_decide": tested.needed,
        "measured_by_probe": tested.measured,
    }
