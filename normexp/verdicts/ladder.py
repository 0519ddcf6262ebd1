"""Ladders: whether the sign of a difference holds at all widths, depths or budgets of a study.

A ladder is decided where each of its rungs is: that all verdicts are the same is no further test,
since it is false only if one of them is (an intersection-union test; Berger 1982, "Multiparameter
hypothesis testing and acceptance sampling").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from normexp.verdicts.compare import Comparison
from normexp.verdicts.family import half_width
from normexp.verdicts.interval import LEVEL, Interval
from normexp.verdicts.rows import comparable

TURNS = "turns"  # better at one value, worse at another


@dataclass(frozen=True)
class Ladder:
    """Comparisons that differ in one number alone, the rungs, the smallest first.

    key: the setting whose values are the rungs
    """

    key: str
    rungs: Sequence[float]
    comparisons: Sequence[Comparison]

    @property
    def verdict(self) -> str:
        """The verdict of all rungs; `turns` if two of them are opposite, else `undecided`."""
        verdicts = {comparison.verdict for comparison in self.comparisons}
        if len(verdicts) == 1:
            return verdicts.pop() or "undecided"
        return TURNS if {"better", "worse"} <= verdicts else "undecided"

    @property
    def why(self) -> str:
        """`better at 8, 16; undecided at 32`; empty if all rungs have one verdict."""
        places: dict[str, list[str]] = {}
        for rung, comparison in zip(self.rungs, self.comparisons, strict=True):
            places.setdefault(comparison.verdict or "no verdict", []).append(f"{rung:g}")
        if len(places) == 1 and "no verdict" not in places:
            return ""
        return "; ".join(f"{verdict} at {', '.join(at)}" for verdict, at in places.items())

    @property
    def least(self) -> Interval:
        """The smallest difference of all rungs, in the direction of their mean, with its interval.

        The lower bound is the lowest of all rungs; the upper one is the lowest of upper bounds that
        hold at once.
        """
        gaps = [comparison.gap for comparison in self.comparisons]
        estimates = np.array([gap.estimate for gap in gaps], dtype=np.float64)
        n = min(gap.n for gap in gaps)
        if np.isnan(estimates).any():
            return Interval(None, None, None, n)
        sign = -1.0 if estimates.mean() < 0 else 1.0
        least = float((sign * estimates).min())
        if any(gap.low is None for gap in gaps):
            return Interval(sign * least, None, None, n)
        tail = (1 - LEVEL) / 2
        low = min(sign * e - half_width(gap, tail) for e, gap in zip(estimates, gaps, strict=True))
        tail /= len(gaps)
        high = min(sign * e + half_width(gap, tail) for e, gap in zip(estimates, gaps, strict=True))
        ends = sorted((sign * low, sign * high))
        return Interval(sign * least, ends[0], ends[1], n)


def find_ladders(comparisons: Sequence[Comparison]) -> list[Ladder]:
    """The ladders of a report: the same two arms at several values of a number, all else equal."""
    found: dict[Hashable, dict[float, Comparison]] = defaultdict(dict)
    keys: dict[Hashable, str] = {}
    for comparison in comparisons:
        if comparison.is_along_sizes or not comparison.is_comparable:
            continue
        separating = comparison.first.best.separating
        for key, value in separating.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                others = {name: other for name, other in separating.items() if name != key}
                pair = (comparison.slice.arm_key, comparison.arm, comparison.against)
                place = (key, *pair, comparison.sizes, comparable(others))
                found[place][value] = comparison
                keys[place] = key
    ladders = []
    for place, by_value in found.items():
        if len(by_value) > 1:
            rungs = sorted(by_value)
            ladders.append(Ladder(keys[place], rungs, [by_value[rung] for rung in rungs]))
    return ladders
