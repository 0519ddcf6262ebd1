"""Which norms may be the best, and where the others stand: a ranking with ties.

Norms stand in groups; within a group the report claims no order, although the lines are in order of
the mean:

- `best`: the best norm is one of these. A norm is left out if another one is better by a verdict.
- `better`, `level`, `worse`: of the rest, by the verdict on the comparison with the reference;
  `level` is tied or undecided, and has the reference itself.
- `diverged`: every run diverged, so there is no mean.
- `unranked`: without a verdict, for the reason that is given.

All tests share the error rate of the report (normexp.reporting.verdict). Those against the
reference are members of the family anyway. Testing all pairs would add k (k - 1) / 2 members, and
so ask a lab with twelve norms for differences a third larger. "The best is one of these" takes
less: it is false only if the one best norm was left out, for which one of k - 1 one-sided tests
must be false, and that against the reference is a member already (subset selection: Gupta 1965, "On
some multiple decision rules"; Hsu 1984, "Constrained simultaneous confidence intervals for multiple
comparisons with the best"). If several norms are equally good, one of them is in the group. Norms
that a later command added are compared with each other and with the reference: a test against every
earlier norm would cost them their own verdict.

The means of norms whose learning rates were searched on a complete grid are cross-fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from normexp.config.rules import as_typed
from normexp.reporting.metric import APART_WORDS, COUNT_MARKS, format_mean
from normexp.reporting.model import AXIS_WORDS, CellRow, Slice
from normexp.reporting.rows import count_words
from normexp.reporting.sentences import MOST_NAMES, gap_words, listed, needed_words, seeds_words
from normexp.reporting.verdict import (
    Comparison,
    compare_cells,
    contenders,
    reference_of,
    round_of,
)
from normexp.stats.family import MAX_SEEDS
from normexp.stats.interval import Interval

Group = Literal["best", "better", "level", "worse", "diverged", "unranked"]
GROUPS: tuple[Group, ...] = ("best", "better", "level", "worse", "diverged", "unranked")
TITLES: Mapping[Group, str] = {
    "best": "may be the best",
    "better": "better than {reference}",
    "level": "not told from {reference}",
    "worse": "worse than {reference}",
    "diverged": "diverged",
    "unranked": "not ranked",
}
GROUP_OF: Mapping[str, Group] = {
    "better": "better",
    "worse": "worse",
    "tie": "level",
    "open": "level",
    "apart": "level",
}


@dataclass(frozen=True, eq=False)
class Place:
    """Where one norm stands.

    cell: at the smallest size; of several learning rates the best
    value: the mean as shown, see `Slice.mean`
    comparison: with the reference; None for the reference
    """

    cell: CellRow
    value: Interval
    group: Group
    comparison: Comparison | None = None

    @property
    def norm(self) -> str:
        return self.cell.norm


@dataclass(frozen=True, eq=False)
class Ranking:
    """The norms of a slice at its smallest size, in order of groups and then of means.

    reference: label of the norm that the others were compared with
    """

    part: Slice
    reference: str
    places: Sequence[Place]

    @property
    def ranked(self) -> list[Place]:
        return [place for place in self.places if place.group not in ("diverged", "unranked")]

    @property
    def best(self) -> list[str]:
        return [place.norm for place in self.places if place.group == "best"]

    @property
    def heading(self) -> str:
        """Settings, budget, size, and the search if it is the same for every norm."""
        part = self.part
        size = f"{AXIS_WORDS[part.axis]} {part.sizes[0]}" if len(part.sizes) > 1 else ""
        budget = "" if part.budget in part.title else part.budget
        return ", ".join(filter(None, (part.heading, budget, size, self._search)))

    @property
    def _search(self) -> str:
        """`tuned over 5 rates`; empty if it is not the same for every norm."""
        words = {self.part.search_words(place.cell).partition(", ")[0] for place in self.places}
        return words.pop() if len(words) == 1 else ""

    @property
    def sentence(self) -> str:
        """The best norms, and where the user's own stand.

        `The best of 8 norms is one of 2: batch or rms. LpNorm against batch: worse by 8.2 points`
        """
        own = [place for place in self.places if place.cell.is_own and place.comparison]
        return ". ".join(
            [
                self._best_words,
                *(f"{one.norm} against {self.reference}: {self.standing(one)}" for one in own),
            ]
        )

    @property
    def _best_words(self) -> str:
        best, num_ranked = [*map(self._marked, self.best)], len(self.ranked)
        num_cut = sum(" (" in norm for norm in best[MOST_NAMES - 1 :])
        more = f", {num_cut} of these with seeds at chance" if len(best) > MOST_NAMES else ""
        more *= bool(num_cut)
        if all(place.group == "diverged" for place in self.places):
            return "No norm is ranked: every run diverged"
        if not best:
            compared = [place.comparison for place in self.places if place.comparison]
            keys = sorted({key for comparison in compared for key in comparison.unlike})
            unlike = [f"their {listed(keys)} differ"] if keys else []
            whys = [c.why_no_verdict or "" for c in compared if not c.unlike]
            return f"No norm is ranked: {'; '.join(dict.fromkeys([*unlike, *whys]))}"
        if num_ranked == 1:
            return f"Only {best[0]} is ranked"
        if len(best) == num_ranked:
            return f"Any of these {num_ranked} norms may be the best: {listed(best)}{more}"
        if len(best) == 1:
            return f"The best of {num_ranked} norms is {best[0]}"
        return f"The best of {num_ranked} norms is one of {len(best)}: {listed(best, 'or')}{more}"

    def _marked(self, norm: str) -> str:
        """`dyt (2 of 5 seeds at chance)`."""
        cell = self.part.smallest[norm]
        count = len(self.part.at_chance(cell))
        return f"{norm} ({count} of {len(cell.runs)} seeds at chance)" if count else norm

    def title(self, place: Place) -> str:
        """The group in words; without a verdict, why there is none."""
        title = TITLES[place.group].format(reference=self.reference)
        compared = [place, *self.places]  # the reference stands with the norm compared with it
        comparison = next((one.comparison for one in compared if one.comparison), None)
        if place.group != "unranked" or comparison is None or comparison.unlike:
            return title
        return f"{title}: {comparison.why_no_verdict}"

    @property
    def columns(self) -> list[str]:
        """The heads of `rows` after that of the group in words, `place`."""
        return ["norm", self.part.metric.label, "seeds", f"against {self.reference}", "to decide"]

    @property
    def rows(self) -> list[list[str]]:
        """For each place: its title, norm, mean, seeds, difference, and what would decide it."""
        rows = []
        for place in self.places:
            yours = " (yours)" if place.cell.is_own else ""
            value = format_mean(place.value, self.part.metric)
            num_finished = len(place.cell.values(self.part.metric))
            at_chance = len(self.part.at_chance(place.cell))
            seeds = count_words(place.cell, num_finished, at_chance)
            search = self.part.search_words(place.cell).removeprefix(self._search)
            words = [self._difference(place), search.removeprefix(", ")]
            needed = place.comparison and needed_words(place.comparison)
            shown = [place.norm + yours, value, seeds, "; ".join(filter(None, words)), needed or ""]
            rows.append([self.title(place), *shown])
        return rows

    def _difference(self, place: Place) -> str:
        """`-8.2 [-14.4, -2.0] points, worse`: positive where the norm is better."""
        comparison = place.comparison
        if comparison is None:
            return "reference"
        if comparison.unlike:
            pairs = comparison.unlike.items()
            words = ", ".join(f"{key} {_shown(a)} and {_shown(b)}" for key, (a, b) in pairs)
            return f"not compared: {words}"
        if comparison.gap.estimate is None:
            return "no result of both under one seed"
        kind = {
            **dict.fromkeys(("better", "worse"), comparison.kind),
            "tie": f"tied within {self.part.metric.amount_words(comparison.margin)}",
            "apart": "but for seeds that lie apart",
        }.get(comparison.kind, "")
        bound = "at most" if comparison.diverged[0] else "at least"
        bound = bound if comparison.diverged[0] != comparison.diverged[1] else ""
        shown = f"{bound} {self.part.metric.format(comparison.gap)}".lstrip()
        return ", ".join(filter(None, (shown, kind)))

    def standing(self, place: Place) -> str:
        """`worse by 8.2 [2.0, 14.4] points`, as against the reference, or why nothing is said."""
        comparison = place.comparison
        if comparison is not None and comparison.kind in ("better", "worse"):
            shown = gap_words(comparison, comparison.kind, comparison.gap)
            least = "at least " * comparison.has_diverged
            return f"{comparison.kind} by {least}{shown}"
        words = self._difference(place)
        if comparison is not None and comparison.kind in ("open", "apart"):
            words += f", undecided{seeds_words(comparison)}"
        if place.group == "unranked" and comparison is not None and not comparison.unlike:
            words += f": {comparison.why_no_verdict}"
        return words

    @property
    def note(self) -> str:
        """What the columns mean, as far as they are used."""
        rows = [row[1:] for row in self.rows]
        needed = {row[-1] for row in rows}
        compared = [place.comparison for place in self.places if place.comparison]
        samples = max((comparison.num_samples for comparison in compared), default=0)
        parts = {
            f"Against {self.reference}: positive is better.": compared,
            "To decide: what a new study takes to decide a difference as large as this one, in "
            "80 % of cases: a difference, or one within the margin; what lies between takes most "
            "seeds.": needed - {""},
            f"More test samples: {samples} are few; more would save over half of the seeds "
            "(another data set, or data.test_fraction where it has one).": needed
            & {"more test samples"},
            f"Over {MAX_SEEDS} seeds: seeds differ much.": needed & {f"over {MAX_SEEDS} seeds"},
            f"Lie apart: {APART_WORDS}; without them the verdict would be another.": [
                one for one in compared if one.kind == "apart"
            ],
            f"Seeds: finished/wanted, {COUNT_MARKS}.": [row for row in rows if "/" in row[2]],
        }
        return " ".join(words for words, is_used in parts.items() if is_used)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else as_typed(value)


def rank_norms(
    part: Slice, comparisons: Sequence[Comparison], reference: str | None = None
) -> list[Ranking]:
    """A ranking for each study of a slice in which two or more norms meet.

    comparisons, reference: of the report, see `compare`
    """
    return [
        _ranking(part, cells, comparisons, reference_of(list(cells), reference))
        for cells in contenders(part)
        if len(cells) > 1
    ]


def _ranking(
    part: Slice, cells: Mapping[str, CellRow], comparisons: Sequence[Comparison], reference: str
) -> Ranking:
    against = {
        comparison.first.norm: comparison
        for comparison in comparisons
        if comparison.part is part
        and not comparison.is_along_sizes
        and comparison.second is cells[reference]
    }
    judged = {norm: one for norm, one in against.items() if one.kind in GROUP_OF}
    values = {norm: part.mean(cell) for norm, cell in cells.items()}
    sign = 1.0 if part.metric.higher_is_better else -1.0

    def level(norm: str) -> float:
        """-inf without a value, as if all runs diverged."""
        value = values[norm].estimate
        return -math.inf if value is None else sign * value

    diverged = {norm for norm, cell in cells.items() if cell.diverged and level(norm) == -math.inf}
    known = [reference, *judged] if judged else []
    ranked = sorted((norm for norm in known if norm not in diverged), key=level, reverse=True)
    sizes = {comparison.round: comparison.family_size for comparison in comparisons}

    def is_beaten(norm: str) -> bool:
        rivals = ranked[: ranked.index(norm)]
        return any(_beats(rival, norm) for rival in rivals)

    def _beats(rival: str, norm: str) -> bool:
        if norm == reference:
            return judged[rival].kind == "better"
        if rival == reference:
            return judged[norm].kind == "worse"
        size, number = part.sizes[0], round_of(part, cells[norm])
        if round_of(part, cells[rival]) != number:
            return False
        pair = compare_cells(part, cells[rival], cells[norm], (size, size), is_primary=False)
        pair = replace(pair, family_size=sizes.get(number, max(sizes.values())))
        has_interval = not pair.unlike and pair.gap.low is not None
        return has_interval and pair.decision == "better"

    def places() -> Iterator[Place]:
        for norm, cell in cells.items():
            group: Group = "diverged" if norm in diverged else "unranked"
            if norm in ranked and not is_beaten(norm):
                group = "best"
            elif norm in ranked:
                group = "level" if norm == reference else GROUP_OF[judged[norm].kind]
            yield Place(cell, values[norm], group, against.get(norm))

    found = [*places()]
    title = Ranking(part, reference, found).title
    order = sorted(found, key=lambda p: (GROUPS.index(p.group), title(p), -level(p.norm)))
    return Ranking(part, reference, order)
