"""Averages over data sets: ratios of errors, which suit easy and hard data sets alike.

They are outside the family of verdicts, so they have intervals and no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from normexp.reporting.metric import format_interval
from normexp.reporting.model import AXIS_WORDS, Slice
from normexp.reporting.sentences import Answer, Claim, given_words, lost_words
from normexp.reporting.verdict import Comparison
from normexp.stats.interval import Interval, log_ratio, stratified_mean

NOTE = (
    "Ratios are geometric means over the data sets, all with the same weight, with 95 % intervals "
    "over seeds (delta method, Satterthwaite's degrees of freedom). They are not among the "
    "verdicts. Other data sets may differ."
)


def answer_over_data(slices: Sequence[Slice], comparisons: Sequence[Comparison]) -> list[Answer]:
    """Ratios of errors for each group of slices that differ only in data set.

    A group gets a ratio for each comparison that all of its data sets have.
    """
    answers = []
    for parts in _group_by_data(slices):
        metric = parts[0].metric
        if metric.higher_is_better and metric.bounds is None:
            continue  # an unbounded score has no error to take the ratio of
        first, *others = (
            {
                comparison.ends: comparison
                for comparison in comparisons
                if comparison.part is part and not comparison.unlike
            }
            for part in parts
        )
        claims = [
            _claim([comparison, *(other[ends] for other in others)])
            for ends, comparison in first.items()
            if all(ends in other for other in others)
        ]
        names = ", ".join(part.data for part in parts)
        heading = f"Over {len(parts)} data sets ({names}), "
        heading += f"{_shared_settings(parts[0])}, {parts[0].fixed}"
        if claims:
            answers.append(Answer(heading, parts, [], claims))
    return answers


def _claim(comparisons: Sequence[Comparison]) -> Claim:
    """The ratio of errors of a comparison on several data sets.

    The details show data sets that disagree, and what is missing:
    `digits 0.80, cifar10 1.30; n = 14 pairs; batch on digits: 2 of 8 diverged`.
    """
    norm, (size, largest) = comparisons[0].first.norm, comparisons[0].sizes
    part, metric = comparisons[0].part, comparisons[0].part.metric
    logs, by_data = [], []
    for comparison in comparisons:
        first, second = comparison.pairs
        if metric.higher_is_better:
            first, second = 100 - first, 100 - second
        values = log_ratio(first, second)
        shown = f"{np.exp(values.mean()):.2f}" if len(values) else "without a ratio"
        by_data.append(f"{comparison.part.data} {shown}")
        logs.append(values)
    ends = [(comparison.first, comparison.part) for comparison in comparisons]
    ends += [(comparison.second, comparison.part) for comparison in comparisons]
    lost = dict.fromkeys(
        f"{cell.norm} on {cell.data}: {words}"
        for cell, slice_ in ends
        if (words := lost_words(cell, slice_))
    )
    average = stratified_mean(logs)
    centre, low, high = (
        None if x is None else math.exp(x) for x in (average.estimate, average.low, average.high)
    )
    ratio = format_interval(Interval(centre, low, high, average.level, average.n), 2)
    times = "no ratio to" if centre is None else f"{ratio} times"
    details = [", ".join(by_data), f"n = {average.n} pairs", *lost]
    if any(comparison.has_diverged for comparison in comparisons):
        details.append("diverged runs count as the worst run of their data set")
    noun, axis = "errors" if metric.higher_is_better else metric.label, AXIS_WORDS[part.axis]
    reference = "" if comparisons[0].is_along_sizes else comparisons[0].second.norm
    text = f"{norm} at {axis} {size}: {times} its {noun} at {largest}"
    if reference:
        text = f"At {axis} {size}, {norm}: {times} the {noun} of {reference}"
    sizes = sorted({size, largest})
    text += given_words(comparisons[0])
    kind = "no data" if centre is None else "interval"
    return Claim([norm], kind, text, "; ".join(details), sizes=sizes, reference=reference)


def _shared_settings(part: Slice) -> str:
    """The settings without the data set, to group slices by: `resnet, epochs=12`."""
    first = part.first
    words = [part.model, first.budget, *first.setting.split(", ")]
    return ", ".join(filter(None, dict.fromkeys(words)))


def _group_by_data(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Groups slices that differ only in data set: model, budget and other settings are equal."""
    alike: dict[Any, list[Slice]] = {}
    for part in slices:
        key = (part.axis, part.metric.name, part.fixed, _shared_settings(part))
        alike.setdefault((*key, part.sizes[0], part.sizes[-1]), []).append(part)
    return [parts for parts in alike.values() if len({part.data for part in parts}) > 1]
