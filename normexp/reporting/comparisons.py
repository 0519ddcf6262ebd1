"""Each norm against the reference norm at the smallest size, in words that follow from intervals.

A small family of comparisons, declared by this rule before anything is looked at, with Holm's
correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from normexp.reporting.cells import Cell
from normexp.reporting.metric import Metric
from normexp.reporting.numbers import format_interval, format_signed, negated, p_value_of
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import base_of
from normexp.reporting.verdict import lost_words, words_of_n
from normexp.stats import Interval, Judgement, judge_family, paired_difference, paired_improvement

ALPHA = 0.05
REFERENCE = "batch"  # the norm of reference where the slice has it, else its first


@dataclass(frozen=True)
class Comparison:
    """One norm against the reference at one size; `difference` is positive where it is better.

    kind: `better`, `worse`, `tie` (within the tolerance), `unclear`, `no interval` or `no data`
    """

    norm: str
    reference: str
    size: int
    difference: Interval
    improvement: Interval
    judgement: Judgement | None
    kind: str
    text: str


def compare_norms(part: Slice, size: int | None = None) -> list[Comparison]:
    """Each norm against the reference at `size` (the smallest); paired by seed, Holm-corrected."""
    at = part.sizes[0] if size is None else size
    valid = [line for line in part.lines.values() if not any(c.invalid for c in line.all_cells)]
    present = [cell for line in valid if (cell := line.at(at)) is not None]
    studies = dict.fromkeys(cell.study for cell in present)
    return [
        one
        for study in studies  # each is a family of its own; studies are compared elsewhere
        for one in _compare({c.norm: c for c in present if c.study == study}, part, at)
    ]


def _compare(present: dict[str, Cell], part: Slice, at: int) -> list[Comparison]:
    if len(present) < 2:
        return []
    reference = reference_of(list(present))
    drafts = [
        _draft(cell, present[reference], at, part.metric)
        for norm, cell in present.items()
        if norm != reference
    ]
    judgements = judge(drafts)
    return [_judged(draft, judgements.get(draft.norm), present, part) for draft in drafts]


def judge(drafts: Sequence[Comparison]) -> dict[str, Judgement]:
    """Holm's correction over one family, by norm; a comparison without an interval is not in it."""
    family = {
        draft.norm: p_value_of(draft.difference)
        for draft in drafts
        if draft.difference.low is not None
    }
    return judge_family(family, alpha=ALPHA) if family else {}


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])


def paired_values(a: Cell, b: Cell, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Values of both cells at the seeds that finished in both, in order of seed."""
    first, second = a.values(metric), b.values(metric)
    seeds = sorted(first.keys() & second.keys())
    return np.array([first[s] for s in seeds]), np.array([second[s] for s in seeds])


def oriented(interval: Interval, metric: Metric) -> Interval:
    """A difference turned so that positive means better."""
    return interval if metric.higher_is_better else negated(interval)


def family_note(comparisons: Sequence[Comparison]) -> str:
    """What was promised about errors, for a caption."""
    judged = [one for one in comparisons if one.judgement is not None]
    if not judged:
        return ""
    families = [one.reference for one in judged]
    words = " and ".join(
        f"{families.count(reference)} with {reference}" for reference in dict.fromkeys(families)
    )
    return (
        f"Comparisons declared beforehand: {words}, at the smallest size. With Holm's correction "
        f"the probability of any false better or worse among those with one reference is at most "
        f"{ALPHA:.0%}. Intervals are 95 % each (t, paired by seed), without correction."
    )


def _draft(cell: Cell, reference: Cell, size: int, metric: Metric) -> Comparison:
    a, b = paired_values(cell, reference, metric)
    difference = oriented(paired_difference(a, b), metric)
    improvement = paired_improvement(a, b, higher_is_better=metric.higher_is_better)
    return Comparison(cell.norm, reference.norm, size, difference, improvement, None, "no data", "")


def _judged(
    draft: Comparison, judgement: Judgement | None, present: dict[str, Cell], part: Slice
) -> Comparison:
    kind, words = comparison_words(draft, judgement, part.metric)
    where = f"At {AXIS_WORDS[part.axis]} {draft.size}"
    counts = words_of_n(present[draft.norm], part.metric, draft.difference.n, "pairs")
    lost = lost_words(present[draft.reference], part.metric)
    other = f"; {draft.reference}: {lost}" if lost else ""
    text = f"{where}, {draft.norm} {words} ({counts}{other})."
    return replace(draft, judgement=judgement, kind=kind, text=text)


def comparison_words(
    draft: Comparison, judgement: Judgement | None, metric: Metric
) -> tuple[str, str]:
    """Kind and words of a comparison, between `At size 2, <norm>` and the counts."""
    gap, reference, unit = draft.difference, draft.reference, metric.unit
    if gap.estimate is None:
        return "no data", f"and {reference} have no finished seed in common"
    if judgement is None or gap.low is None or gap.high is None:
        amount = f"{format_signed(gap.estimate, metric.digits)} {unit}".strip()
        return "no interval", f"differs from {reference} by {amount} with too few seeds: no verdict"
    ahead = gap.estimate >= 0
    amount = f"{format_interval(gap if ahead else negated(gap), metric.digits)} {unit}".strip()
    if judgement.rejected:
        kind = "better" if ahead else "worse"
        chance = _chance_words("", draft.improvement, kind)
        return kind, f"is {kind} than {reference} by {amount}{chance}"
    signed = f"{format_interval(gap, metric.digits)} {unit}".strip()
    if max(-gap.low, gap.high) <= metric.tolerance:
        return (
            "tie",
            f"and {reference} are tied within {metric.tolerance_words}: difference {signed}",
        )
    after = " after Holm's correction" if gap.low > 0 or gap.high < 0 else ""
    chance = _chance_words(f"{draft.norm} ", draft.improvement, "better")
    return "unclear", f"and {reference} cannot be told apart{after}: difference {signed}{chance}"


def _chance_words(who: str, improvement: Interval, kind: str) -> str:
    """`; better with probability 0.97 [0.63, 1.00]`, in pairs of runs with one seed."""
    if improvement.estimate is None:
        return ""
    chance = improvement if kind == "better" else complement(improvement)
    return f"; {who}{kind} with probability {format_interval(chance, 2)}"


def complement(chance: Interval) -> Interval:
    """1 - p, with its interval."""
    turned = negated(chance)
    bounds = [None if bound is None else 1 + bound for bound in (turned.low, turned.high)]
    estimate = None if turned.estimate is None else 1 + turned.estimate
    return replace(turned, estimate=estimate, low=bounds[0], high=bounds[1])
