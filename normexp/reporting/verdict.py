"""The answer in words, each of them following from an interval.

What a norm loses from the largest size to the smallest (`describe_loss`), and each norm against
the reference norm at the smallest size (`compare_norms`): a small family of comparisons, declared
by this rule before anything is looked at, with Holm's correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from normexp.reporting.cells import Cell
from normexp.reporting.metric import Metric
from normexp.reporting.numbers import format_interval, negated, p_value_of
from normexp.reporting.slices import AXIS_WORDS, Line, Slice, align
from normexp.reporting.style import base_of
from normexp.stats import (
    Interval,
    Judgement,
    Sensitivity,
    batch_size_sensitivity,
    judge_family,
    paired_difference,
    paired_improvement,
)

ALPHA = 0.05
REFERENCE = "batch"  # the norm of reference where the slice has it, else its first


@dataclass(frozen=True)
class Loss:
    """What one norm loses along the sizes.

    kind: `loses`, `gains`, `holds` (within the tolerance), `unclear`, `no interval`, `no data`,
        `independent` (of the norm batch size, by measurement), `one size` or `invalid`
    """

    norm: str
    kind: str
    text: str
    sensitivity: Sensitivity | None


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


def describe_losses(part: Slice) -> list[Loss]:
    """One sentence per norm of the slice."""
    return [describe_loss(line, part) for line in part.lines.values()]


def describe_loss(line: Line, part: Slice) -> Loss:
    """The sentence of one norm; its words follow from the interval of the drop."""
    axis, metric = AXIS_WORDS[part.axis], part.metric
    invalid = next((cell.invalid for cell in line.all_cells if cell.invalid), None)
    if invalid:
        return Loss(line.norm, "invalid", f"{line.norm} is not compared: {invalid}.", None)
    if line.independent is not None:
        counts = _counts(line.independent, len(line.independent.values(metric)), "seeds")
        text = (
            f"{line.norm} does not depend on the {axis} "
            f"(measured: it does not mix samples; {counts})."
        )
        return Loss(line.norm, "independent", text, None)
    sizes = sorted(line.cells)
    if len(sizes) < 2:
        text = f"{line.norm} was run at one {axis} only ({', '.join(map(str, sizes))})."
        return Loss(line.norm, "one size", text, None)
    values, _ = align(line, sizes, metric)
    found = batch_size_sensitivity(
        values, sizes, higher_is_better=metric.higher_is_better, tolerance=metric.tolerance
    )
    kind, words = _loss_words(found, metric)
    where = f"from {axis} {found.reference_size} to {found.smallest_size}"
    counts = _counts(line.cells[found.smallest_size], found.drop.n, "seeds")
    text = f"{line.norm} {words.format(where=where)} ({counts})."
    return Loss(line.norm, kind, text + _threshold_words(found, metric, axis), found)


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
    reference = next((norm for norm in present if base_of(norm) == REFERENCE), next(iter(present)))
    drafts = [
        _draft(cell, present[reference], at, part.metric)
        for norm, cell in present.items()
        if norm != reference
    ]
    family = {
        draft.norm: p_value_of(draft.difference)
        for draft in drafts
        if draft.difference.low is not None
    }
    judgements = judge_family(family, alpha=ALPHA) if family else {}
    return [_judged(draft, judgements.get(draft.norm), present, part) for draft in drafts]


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


def _loss_words(found: Sensitivity, metric: Metric) -> tuple[str, str]:
    drop, unit = found.drop, metric.unit
    if drop.estimate is None:
        return "no data", "has no seed that finished at both ends, {where}"
    if drop.low is None or drop.high is None:
        verb = "loses" if drop.estimate >= 0 else "gains"
        amount = f"{abs(drop.estimate):.{metric.digits}f} {unit}".strip()
        return "no interval", f"{verb} {amount} {{where}} in one seed: no interval, no verdict"
    shown = f"{format_interval(drop, metric.digits)} {unit}".strip()
    if drop.low > 0:
        return "loses", f"loses {shown} {{where}}"
    if drop.high < 0:
        gain = f"{format_interval(negated(drop), metric.digits)} {unit}".strip()
        return "gains", f"gains {gain} {{where}}"
    if max(-drop.low, drop.high) <= metric.tolerance:
        return "holds", f"holds its level within {metric.tolerance_words} {{where}}: loss {shown}"
    return "unclear", f"shows no clear loss {{where}}: {shown}; more seeds would tell"


def _threshold_words(found: Sensitivity, metric: Metric, axis: str) -> str:
    limit, size = metric.tolerance_words, found.threshold.size
    if found.threshold.status == "below":
        return f" It loses more than {limit} below {axis} {size}."
    if found.threshold.status == "always":
        return f" It loses more than {limit} at every {axis} below {size}."
    return ""


def _draft(cell: Cell, reference: Cell, size: int, metric: Metric) -> Comparison:
    a, b = paired_values(cell, reference, metric)
    difference = oriented(paired_difference(a, b), metric)
    improvement = paired_improvement(a, b, higher_is_better=metric.higher_is_better)
    return Comparison(cell.norm, reference.norm, size, difference, improvement, None, "no data", "")


def _judged(
    draft: Comparison, judgement: Judgement | None, present: dict[str, Cell], part: Slice
) -> Comparison:
    kind, words = _comparison_words(draft, judgement, part.metric)
    where = f"At {AXIS_WORDS[part.axis]} {draft.size}"
    counts = _counts(present[draft.norm], draft.difference.n, "pairs")
    lost = _lost_words(present[draft.reference])
    other = f"; {draft.reference}: {lost}" if lost else ""
    text = f"{where}, {draft.norm} {words} ({counts}{other})."
    return replace(draft, judgement=judgement, kind=kind, text=text)


def _comparison_words(
    draft: Comparison, judgement: Judgement | None, metric: Metric
) -> tuple[str, str]:
    gap, reference, unit = draft.difference, draft.reference, metric.unit
    if gap.estimate is None:
        return "no data", f"and {reference} have no finished seed in common"
    if judgement is None or gap.low is None or gap.high is None:
        amount = f"{gap.estimate:+.{metric.digits}f} {unit}".strip()
        return "no interval", f"differs from {reference} by {amount} in one seed: no verdict"
    size = format_interval(gap if gap.estimate >= 0 else negated(gap), metric.digits)
    chance = (
        ""
        if draft.improvement.estimate is None
        else f", ahead in {draft.improvement.estimate * gap.n:g} of {gap.n} pairs"
    )
    amount = f"{size} {unit}".strip()
    if judgement.rejected:
        kind = "better" if gap.estimate > 0 else "worse"
        return kind, f"is {kind} than {reference} by {amount}{chance}"
    signed = f"{format_interval(gap, metric.digits)} {unit}".strip()
    if max(-gap.low, gap.high) <= metric.tolerance:
        return (
            "tie",
            f"and {reference} are tied within {metric.tolerance_words}: difference {signed}",
        )
    after = " after Holm's correction" if gap.low > 0 or gap.high < 0 else ""
    return "unclear", f"and {reference} cannot be told apart{after}: difference {signed}{chance}"


def _counts(cell: Cell, n: int, noun: str) -> str:
    lost = _lost_words(cell)
    noun = noun[:-1] if n == 1 else noun
    return f"n = {n} {noun}" + (f"; {lost}" if lost else "")


def _lost_words(cell: Cell) -> str:
    """`2 of 8 seeds diverged, 1 missing`: a number over the others flatters."""
    groups = {
        "diverged": cell.seeds("diverged"),
        "failed": cell.seeds("failed"),
        "missing": cell.missing,
    }
    parts = [
        f"{len(seeds)} of {len(cell.expected)} {word}" for word, seeds in groups.items() if seeds
    ]
    return ", ".join(parts)
