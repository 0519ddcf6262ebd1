"""The verdict of a study: sentences that follow from confidence intervals.

Two families of sentences: what a norm loses from the largest size to the smallest, and how a norm
compares with the reference norm at the smallest size. This rule declares the comparisons before any
result is known; they are judged with Holm's correction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from normexp.reporting.frame import Row, plain_rows
from normexp.reporting.metric import (
    Metric,
    describe_metric,
    format_interval,
    format_signed,
    negated,
)
from normexp.reporting.slices import AXIS_WORDS, Slice, group_by_data
from normexp.reporting.style import base_of
from normexp.stats import (
    Interval,
    Sensitivity,
    batch_size_sensitivity,
    holm,
    p_value,
    paired_difference,
    paired_improvement,
    stratified_difference,
)

ALPHA = 0.05
REFERENCE = "batch"  # the reference norm; a slice without it takes its first norm
NOTHING = Interval(None, None, None, 0.95, 0)


@dataclass(frozen=True)
class Loss:
    """What one norm loses along the sizes.

    kind: `loses`, `gains`, `holds` (within the tolerance), `unclear`, `no interval`, `no data`,
        `independent` (of the norm batch size, by measurement), `one size` or `invalid`
    """

    norm: str
    kind: str
    text: str
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True)
class Comparison:
    """One norm against the reference at one size.

    difference: positive if the norm is better
    improvement: probability that the norm beats the reference under one seed
    p, adjusted_p: of the difference, before and after Holm's correction; None without an interval
    kind: `better`, `worse`, `tie` (within the tolerance), `unclear`, `no interval` or `no data`
    """

    norm: str
    reference: str
    size: int
    difference: Interval
    improvement: Interval
    counts: str
    p: float | None = None
    adjusted_p: float | None = None
    kind: str = ""
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """All sentences about one slice, or about several that differ only in data set."""

    heading: str
    parts: list[Slice]
    losses: list[Loss]
    comparisons: list[Comparison]
    note: str

    @property
    def sentences(self) -> list[Loss | Comparison]:
        return [*self.losses, *self.comparisons]


def answer_slice(part: Slice) -> Answer:
    """The sentences about one slice."""
    losses, comparisons = describe_losses(part), compare_norms(part)
    notes = [_searched_note(part), _family_note(comparisons)]
    return Answer(part.heading, [part], losses, comparisons, " ".join(filter(None, notes)))


def answer_over_data(slices: Sequence[Slice]) -> list[Answer]:
    """The sentences on averages over data sets, for each group of slices that differ only there."""
    answers = []
    for parts in group_by_data(slices):
        names = ", ".join(part.data for part in parts)
        heading = f"Over {len(parts)} data sets ({names}), {parts[0].fixed}"
        note = (
            "Mean of the differences within each data set, all with the same weight; 95 % t "
            "intervals with Satterthwaite's degrees of freedom. Comparisons have Holm's correction "
            f"at {ALPHA:.0%}. Other data sets may differ."
        )
        losses, comparisons = _losses_over_data(parts), _compare_over_data(parts)
        if losses or comparisons:
            answers.append(Answer(heading, parts, losses, comparisons, note))
    return answers


def describe_losses(part: Slice) -> list[Loss]:
    """One sentence per norm."""
    return [_describe_loss(norm, points, part) for norm, points in part.lines()]


def compare_norms(part: Slice) -> list[Comparison]:
    """Each norm against the reference at the smallest size, paired by seed; a family per study."""
    invalid = part.points["norm"][part.points["invalid"].notna()]
    present = part.smallest[~part.smallest["norm"].isin(invalid)]
    size, metric = part.sizes[0], part.metric
    compared = []
    for _, own in present.groupby("study", sort=False):
        points = {point["norm"]: point for point in plain_rows(own)}
        reference = points[reference_of(list(points))]
        drafts = [
            _draft(point, reference, part) for point in points.values() if point is not reference
        ]
        compared += _judge(drafts, metric, f"At {AXIS_WORDS[part.axis]} {size}")
    return compared


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])


def paired_values(a: str, b: str, values: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Values of two cells at the seeds that finished in both, in order of seed."""
    both = pd.DataFrame({"a": values[a], "b": values[b]}).dropna()
    return both["a"].to_numpy(), both["b"].to_numpy()


def oriented(interval: Interval, metric: Metric) -> Interval:
    """A difference turned so that positive means better."""
    return interval if metric.higher_is_better else negated(interval)


# Losses


def _describe_loss(norm: str, points: pd.DataFrame, part: Slice) -> Loss:
    axis, metric = AXIS_WORDS[part.axis], part.metric
    rows = plain_rows(points)
    first, last = rows[0], rows[-1]
    invalid = next((row["invalid"] for row in rows if row["invalid"]), None)
    if invalid:
        return Loss(norm, "invalid", f"{norm} is not compared: {invalid}.")
    if first["independent"]:
        counts = _counts(first, metric, first["recorded"], "seeds")
        text = (
            f"{norm} does not depend on the {axis} (measured: it does not mix samples; {counts})."
        )
        return Loss(norm, "independent", text)
    sizes = [row["size"] for row in rows]
    if len(sizes) < 2:
        return Loss(norm, "one size", f"{norm} was run at one {axis} only ({sizes[0]}).")
    own = part.runs["seed"][part.runs["cell"].isin(points["cell"])]
    found = batch_size_sensitivity(
        part.values.loc[sorted(own.unique()), points["cell"]],
        sizes,
        higher_is_better=metric.higher_is_better,
        tolerance=metric.tolerance,
    )
    kind, words = _loss_words(found.drop, metric, f"from {axis} {sizes[-1]} to {sizes[0]}")
    counts = _counts(first, metric, found.drop.n, "seeds")
    lost = _lost_words(last, metric)
    other = f"; at {sizes[-1]}: {lost}" if lost else ""
    text = f"{norm} {words} ({counts}{other})." + _size_words(found, metric, axis)
    return Loss(norm, kind, text, found)


def _loss_words(drop: Interval, metric: Metric, where: str) -> tuple[str, str]:
    """Kind and words of a drop: between the norm and the counts."""
    if drop.estimate is None:
        return "no data", f"has no seed that finished at both ends, {where}"
    if drop.low is None or drop.high is None:
        verb = "loses" if drop.estimate >= 0 else "gains"
        amount = f"{abs(drop.estimate):.{metric.digits}f} {metric.unit}".strip()
        return "no interval", f"{verb} {amount} {where}; too few seeds for an interval or a verdict"
    shown = metric.format(drop)
    if drop.low > 0:
        return "loses", f"loses {shown} {where}"
    if drop.high < 0:
        return "gains", f"gains {metric.format(negated(drop))} {where}"
    if max(-drop.low, drop.high) <= metric.tolerance:
        return "holds", f"holds its level within {metric.tolerance_words} {where}: loss {shown}"
    return "unclear", f"shows no clear loss {where}: {shown}; more seeds would tell"


def _size_words(found: Sensitivity, metric: Metric, axis: str) -> str:
    """The sizes where a loss beyond the tolerance is shown, and those where it is not ruled out."""
    limit = metric.tolerance
    shown, unknown = [], []
    for size, loss in found.losses.items():
        if loss.low is not None and loss.low > limit:
            shown.append(str(size))
        elif loss.high is None or loss.high > limit:
            unknown.append(str(size))
    if not shown:
        return ""
    where = f" A loss of more than {metric.tolerance_words} is shown at {axis} {', '.join(shown)}"
    return where + (f" and not ruled out at {', '.join(unknown)}." if unknown else ".")


def _losses_over_data(parts: list[Slice]) -> list[Loss]:
    """The drop of each norm that every data set has at both ends."""
    part = parts[0]
    smallest, largest = part.sizes[0], part.sizes[-1]
    where = f"on average from {AXIS_WORDS[part.axis]} {largest} to {smallest}"
    losses = []
    by_place = [_by_norm_and_size(one) for one in parts]
    for norm in _shared_norms(parts, lambda points: {smallest, largest} <= set(points["size"])):
        ends = [points[norm, size] for size in (largest, smallest) for points in by_place]
        if smallest == largest or any(point["independent"] for point in ends):
            continue
        drop, counts = _difference_over_data(ends[: len(parts)], ends[len(parts) :], parts)
        kind, words = _loss_words(drop, part.metric, where)
        losses.append(Loss(norm, kind, f"{norm} {words} ({counts})."))
    return losses


# Comparisons


def _draft(point: Row, reference: Row, part: Slice) -> Comparison:
    metric = part.metric
    a, b = paired_values(point["cell"], reference["cell"], part.values)
    difference = oriented(paired_difference(a, b), metric)
    improvement = paired_improvement(a, b, higher_is_better=metric.higher_is_better)
    counts, lost = _counts(point, metric, len(a), "pairs"), _lost_words(reference, metric)
    counts += f"; {reference['norm']}: {lost}" if lost else ""
    names = point["norm"], reference["norm"]
    return Comparison(*names, part.sizes[0], difference, improvement, counts)


def _compare_over_data(parts: list[Slice]) -> list[Comparison]:
    """Each norm against the reference at the smallest size, on average over data sets."""
    size = parts[0].sizes[0]
    norms = _shared_norms(parts, lambda points: size in set(points["size"]))
    if len(norms) < 2:
        return []
    reference = reference_of(norms)
    by_place = [_by_norm_and_size(part) for part in parts]
    others = [points[reference, size] for points in by_place]
    drafts = []
    for norm in norms:
        if norm != reference:
            own = [points[norm, size] for points in by_place]
            difference, counts = _difference_over_data(own, others, parts)
            drafts.append(Comparison(norm, reference, size, difference, NOTHING, counts))
    return _judge(drafts, parts[0].metric, f"At {AXIS_WORDS[parts[0].axis]} {size}")


def _judge(drafts: Sequence[Comparison], metric: Metric, where: str) -> list[Comparison]:
    """The drafts, one family, with Holm's correction and words.

    Comparisons without an interval are not part of the family.
    """
    p_values = {
        one.norm: p_value(one.difference) for one in drafts if one.difference.low is not None
    }
    adjusted = holm(p_values)
    judged = []
    for one in drafts:
        one = replace(one, p=p_values.get(one.norm), adjusted_p=adjusted.get(one.norm))
        kind, words = _comparison_words(one, metric)
        judged.append(replace(one, kind=kind, text=f"{where}, {one.norm} {words} ({one.counts})."))
    return judged


def _comparison_words(one: Comparison, metric: Metric) -> tuple[str, str]:
    """Kind and words: between `At size 2, <norm>` and the counts."""
    gap, reference = one.difference, one.reference
    if gap.estimate is None:
        return "no data", f"and {reference} have no finished seed in common"
    if gap.low is None or gap.high is None or one.adjusted_p is None:
        amount = f"{format_signed(gap.estimate, metric.digits)} {metric.unit}".strip()
        return "no interval", f"differs from {reference} by {amount}; too few seeds for a verdict"
    if one.adjusted_p <= ALPHA:
        kind, amount = ("better", gap) if gap.estimate >= 0 else ("worse", negated(gap))
        chance = _chance_words("", one.improvement, kind)
        return kind, f"is {kind} than {reference} by {metric.format(amount)}{chance}"
    shown = metric.format(gap)
    if max(-gap.low, gap.high) <= metric.tolerance:
        words = f"and {reference} are tied within {metric.tolerance_words}: difference {shown}"
        return "tie", words
    after = " after Holm's correction" if gap.low > 0 or gap.high < 0 else ""
    chance = _chance_words(f"{one.norm} ", one.improvement, "better")
    return "unclear", f"and {reference} cannot be told apart{after}: difference {shown}{chance}"


def _chance_words(who: str, improvement: Interval, kind: str) -> str:
    """`; better with probability 0.97 [0.63, 1.00]`, in pairs of runs with one seed."""
    if improvement.estimate is None:
        return ""
    chance = improvement if kind == "better" else complement(improvement)
    return f"; {who}{kind} with probability {format_interval(chance, 2)}"


def complement(chance: Interval) -> Interval:
    """1 - p, with its interval."""
    turned = negated(chance)
    shifted = {
        name: 1 + value
        for name in ("estimate", "low", "high")
        if (value := getattr(turned, name)) is not None
    }
    return replace(turned, **shifted)


# Several data sets


def _difference_over_data(
    first: Sequence[Row], second: Sequence[Row], parts: Sequence[Slice]
) -> tuple[Interval, str]:
    """The stratified difference, positive if `first` is better, with its details.

    The details show data sets that disagree, and what is missing:
    `digits +4.0, cifar10 -3.9; n = 14 pairs; batch on digits: 2 of 8 diverged`.
    """
    metric = parts[0].metric
    sign = 1 if metric.higher_is_better else -1
    strata = [
        paired_values(a["cell"], b["cell"], part.values)
        for a, b, part in zip(first, second, parts, strict=True)
    ]
    each = [
        f"{point['data']} {format_signed(sign * float((a - b).mean()), metric.digits)}"
        if len(a)
        else f"{point['data']} without a pair"
        for point, (a, b) in zip(first, strata, strict=True)
    ]
    lost = dict.fromkeys(
        f"{point['norm']} on {point['data']}: {words}"
        for point in [*first, *second]
        if (words := _lost_words(point, metric))
    )
    found = oriented(stratified_difference(strata), metric)
    return found, "; ".join([", ".join(each), f"n = {found.n} pairs", *lost])


def _shared_norms(parts: Sequence[Slice], has: Callable[[pd.DataFrame], bool]) -> list[str]:
    """Norms that every data set has and that may be compared, in order."""
    present = [
        {norm for norm, points in part.lines() if points["invalid"].isna().all() and has(points)}
        for part in parts
    ]
    return [norm for norm in parts[0].norms if all(norm in found for found in present)]


def _by_norm_and_size(part: Slice) -> dict[tuple[str, int], Row]:
    return {(row["norm"], row["size"]): row for row in plain_rows(part.points)}


# Notes and counts


def _searched_note(part: Slice) -> str:
    if part.searched.empty:
        return ""
    label = describe_metric(part.metric.selection_name).label
    return (
        "If several learning rates were run, each norm and size is shown with the one that has the "
        f"best mean {label}."
    )


def _family_note(comparisons: Sequence[Comparison]) -> str:
    """The note on the family-wise error rate."""
    references = [one.reference for one in comparisons if one.adjusted_p is not None]
    if not references:
        return ""
    words = " and ".join(
        f"{references.count(name)} with {name}" for name in dict.fromkeys(references)
    )
    return (
        f"Comparisons declared beforehand: {words}, at the smallest size. Family-wise error rate "
        f"at most {ALPHA:.0%} for each reference (Holm). Intervals are 95 % each (t, paired by "
        "seed), without correction."
    )


def _counts(point: Row, metric: Metric, n: int, noun: str) -> str:
    """`n = 5 seeds; 2 of 8 diverged, 1 of 8 missing`."""
    lost = _lost_words(point, metric)
    noun = noun[:-1] if n == 1 else noun
    return f"n = {n} {noun}" + (f"; {lost}" if lost else "")


def _lost_words(point: Row, metric: Metric) -> str:
    """`2 of 8 diverged, 1 of 8 missing`: a number over the others is optimistic."""
    lost = {word: point[word] for word in ("diverged", "failed", "missing")}
    lost[f"without {metric.name}"] = point["finished"] - point["recorded"]
    parts = [f"{count} of {point['expected']} {word}" for word, count in lost.items() if count]
    return ", ".join(parts)
