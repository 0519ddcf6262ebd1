"""Several data sets in one number: ratios of errors, which do not depend on how hard a set is.

They are outside the family of verdicts, so they have intervals and no verb.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from normexp.reporting.frame import Row, paired_values
from normexp.reporting.metric import format_interval
from normexp.reporting.sentences import Answer, Claim, lost_words
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.verdict import reference_of
from normexp.stats.interval import Interval, log_ratio, stratified_mean


def answer_over_data(slices: Sequence[Slice]) -> list[Answer]:
    """Ratios of errors over data sets, for each group of slices that differ only there."""
    answers = []
    for parts in _group_by_data(slices):
        metric = parts[0].metric
        if metric.higher_is_better and metric.bounds is None:
            continue  # neither an error nor a loss can be made of it
        names = ", ".join(part.data for part in parts)
        shared = f"{_shared_settings(parts[0])}, {parts[0].fixed}"
        heading = f"Over {len(parts)} data sets ({names}), {shared}"
        note = (
            "Ratios are geometric means over the data sets, all with the same weight, with 95 % "
            "intervals over seeds (delta method, Satterthwaite's degrees of freedom). They are not "
            "among the verdicts. Other data sets may differ."
        )
        if claims := [*_ratios_along_sizes(parts), *_ratios_with_reference(parts)]:
            answers.append(Answer(heading, parts, claims, note))
    return answers


def _ratios_along_sizes(parts: Sequence[Slice]) -> Iterator[Claim]:
    smallest, largest = parts[0].sizes[0], parts[0].sizes[-1]
    for norm in _shared_norms(parts, {smallest, largest}):
        low, high = ([_point(part, norm, size) for part in parts] for size in (smallest, largest))
        if smallest < largest and not any(point["independent"] for point in low):
            ratio, noun, details = _ratio(low, high, parts)
            where = f"{norm} at {AXIS_WORDS[parts[0].axis]} {smallest}"
            text = f"{where}: {ratio} times its {noun} at {largest}"
            yield Claim([norm], "interval", text, details, sizes=[smallest, largest])


def _ratios_with_reference(parts: Sequence[Slice]) -> Iterator[Claim]:
    size = parts[0].sizes[0]
    norms = _shared_norms(parts, {size})
    reference = reference_of(norms) if norms else ""
    for norm in norms:
        if norm != reference:
            own, other = (
                [_point(part, name, size) for part in parts] for name in (norm, reference)
            )
            ratio, noun, details = _ratio(own, other, parts)
            where = f"At {AXIS_WORDS[parts[0].axis]} {size}, {norm}"
            text = f"{where}: {ratio} times the {noun} of {reference}"
            yield Claim([norm], "interval", text, details, sizes=[size], reference=reference)


def _ratio(
    first: Sequence[Row], second: Sequence[Row], parts: Sequence[Slice]
) -> tuple[str, str, str]:
    """The ratio of errors with its interval, what it is a ratio of, and the details.

    The details show data sets that disagree, and what is missing:
    `digits 0.80, cifar10 1.30; n = 14 pairs; batch on digits: 2 of 8 diverged`.
    """
    metric = parts[0].metric
    logs = []
    for a, b, part in zip(first, second, parts, strict=True):
        first_values, second_values = paired_values(a["cell"], b["cell"], part.outcomes)
        if metric.higher_is_better:
            first_values, second_values = 100 - first_values, 100 - second_values
        logs.append(log_ratio(first_values, second_values))
    each = [
        f"{point['data']} " + (f"{np.exp(values.mean()):.2f}" if len(values) else "without a ratio")
        for point, values in zip(first, logs, strict=True)
    ]
    lost = dict.fromkeys(
        f"{point['norm']} on {point['data']}: {words}"
        for point in [*first, *second]
        if (words := lost_words(point, metric))
    )
    found = stratified_mean(logs)
    centre, low, high = (
        None if x is None else math.exp(x) for x in (found.estimate, found.low, found.high)
    )
    ratio = Interval(centre, low, high, found.level, found.n)
    noun = "errors" if metric.higher_is_better else metric.label
    details = [", ".join(each), f"n = {found.n} pairs", *lost]
    return format_interval(ratio, 2), noun, "; ".join(details)


def _shared_norms(parts: Sequence[Slice], sizes: set[int]) -> list[str]:
    """Norms that every data set has at these sizes and that may be compared, in order."""
    present = [
        {
            norm
            for norm, rows in part.lines.items()
            if not any(row["invalid"] for row in rows) and sizes <= {row["size"] for row in rows}
        }
        for part in parts
    ]
    return [norm for norm in parts[0].norms if all(norm in found for found in present)]


def _point(part: Slice, norm: str, size: int) -> Row:
    return next(row for row in part.lines[norm] if row["size"] == size)


def _shared_settings(part: Slice) -> str:
    """What slices on other data sets have in common with this one: `resnet, epochs=12`."""
    first = part.points.iloc[0]
    words = [part.model, first["budget"], *first["setting"].split(", ")]
    return ", ".join(filter(None, dict.fromkeys(words)))


def _group_by_data(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Groups slices that differ only in data set: model, budget and other settings are equal."""
    alike: dict[Any, list[Slice]] = {}
    for part in slices:
        ends = (part.sizes[0], part.sizes[-1])
        key = (part.axis, part.metric.name, part.fixed, _shared_settings(part), *ends)
        alike.setdefault(key, []).append(part)
    return [parts for parts in alike.values() if len({part.data for part in parts}) > 1]
