"""The answer over several data sets: differences within each, averaged with the same weight.

Only norms and sizes that every data set has are in it, and nothing is said about data sets that
were not tried (`stats.stratified_difference`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normexp.reporting.cells import Cell
from normexp.reporting.comparisons import (
    ALPHA,
    Comparison,
    comparison_words,
    judge,
    oriented,
    paired_values,
    reference_of,
)
from normexp.reporting.metric import Metric
from normexp.reporting.numbers import format_signed
from normexp.reporting.slices import AXIS_WORDS, Line, Slice
from normexp.reporting.verdict import Loss, loss_words, lost_words
from normexp.stats import Interval, stratified_difference

NO_CHANCE = Interval(None, None, None, 0.95, 0, "")  # of a share there is no stratified interval


@dataclass(frozen=True)
class Overall:
    """What holds over the data sets of `parts`, which are alike in everything else."""

    parts: list[Slice]
    losses: list[Loss]
    comparisons: list[Comparison]

    @property
    def heading(self) -> str:
        names = ", ".join(data_of(part) for part in self.parts)
        return f"Over {len(self.parts)} data sets ({names}), {self.parts[0].fixed}"

    @property
    def note(self) -> str:
        return (
            "Differences within each data set, averaged with the same weight; 95 % t intervals "
            "with Satterthwaite's degrees of freedom. Comparisons have Holm's correction at "
            f"{ALPHA:.0%}. Other data sets may differ."
        )


def describe_overall(slices: Sequence[Slice]) -> list[Overall]:
    """One answer per group of slices that differ in their data alone, if there are any."""
    found = [Overall(parts, _losses(parts), _compare(parts)) for parts in group_by_data(slices)]
    return [one for one in found if one.losses or one.comparisons]


def group_by_data(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices of one metric, axis and sizes, each of another data set; by model where needed."""
    alike: dict[Any, list[Slice]] = defaultdict(list)
    for part in slices:
        alike[part.axis, part.metric.name, part.fixed, part.sizes[0], part.sizes[-1]].append(part)
    groups = []
    for members in alike.values():
        if _one_per_data(members):
            groups.append(members)
            continue
        by_model: dict[str, list[Slice]] = defaultdict(list)
        for part in members:
            by_model[part.cells[0].model].append(part)
        groups += [own for own in by_model.values() if _one_per_data(own)]
    return [group for group in groups if len(group) > 1]


def data_of(part: Slice) -> str:
    return part.cells[0].data


def _one_per_data(parts: Sequence[Slice]) -> bool:
    return len({data_of(part) for part in parts}) == len(parts)


def _losses(parts: list[Slice]) -> list[Loss]:
    """The drop of each norm that every data set has at both ends."""
    part = parts[0]
    first, last = part.sizes[0], part.sizes[-1]
    where = f"on average from {AXIS_WORDS[part.axis]} {last} to {first}"
    losses = []
    for norm in _shared(parts, lambda line: line.at(first) and line.at(last)):
        lines = [part.lines[norm] for part in parts]
        if first == last or any(line.independent for line in lines):
            continue
        large, small = ([line.cells[size] for line in lines] for size in (last, first))
        drop, counts = _difference(large, small, part.metric)
        kind, words = loss_words(drop, part.metric)
        losses.append(Loss(norm, kind, f"{norm} {words.format(where=where)} ({counts}).", None))
    return losses


def _compare(parts: list[Slice]) -> list[Comparison]:
    """Each norm against the reference at the smallest size."""
    size, metric = parts[0].sizes[0], parts[0].metric
    norms = _shared(parts, lambda line: line.at(size))
    if len(norms) < 2:
        return []
    cells = {norm: [_cell(part, norm, size) for part in parts] for norm in norms}
    reference = reference_of(norms)
    drafts = []
    for norm in norms:
        if norm != reference:
            gap, counts = _difference(cells[norm], cells[reference], metric)
            drafts.append(Comparison(norm, reference, size, gap, NO_CHANCE, None, "", counts))
    judgements = judge(drafts)
    judged = []
    for draft in drafts:
        judgement = judgements.get(draft.norm)
        kind, words = comparison_words(draft, judgement, metric)
        text = f"At {AXIS_WORDS[parts[0].axis]} {size}, {draft.norm} {words} ({draft.text})."
        judged.append(replace(draft, judgement=judgement, kind=kind, text=text))
    return judged


def _difference(
    first: Sequence[Cell], second: Sequence[Cell], metric: Metric
) -> tuple[Interval, str]:
    """The stratified difference, positive where `first` is better, and what stands behind it.

    `digits +4.0, cifar10 -3.9; n = 14 pairs; batch on digits: 2 of 8 diverged`: data sets that
    disagree are seen to.
    """
    strata = [paired_values(a, b, metric) for a, b in zip(first, second, strict=True)]
    sign = 1 if metric.higher_is_better else -1
    each = [
        f"{cell.data} {format_signed(sign * float((a - b).mean()), metric.digits)}"
        if len(a)
        else f"{cell.data} without a pair"
        for cell, (a, b) in zip(first, strata, strict=True)
    ]
    lost = dict.fromkeys(
        f"{cell.norm} on {cell.data}: {words}"
        for cell in [*first, *second]
        if (words := lost_words(cell, metric))
    )
    found = oriented(stratified_difference(strata), metric)
    return found, "; ".join([", ".join(each), f"n = {found.n} pairs", *lost])


def _shared(parts: Sequence[Slice], has: Callable[[Line], object]) -> list[str]:
    """Norms that every data set has, in order; those that may not be compared are left out."""
    return [
        norm
        for norm in parts[0].lines
        if all(
            norm in part.lines
            and has(part.lines[norm])
            and not any(cell.invalid for cell in part.lines[norm].all_cells)
            for part in parts
        )
    ]


def _cell(part: Slice, norm: str, size: int) -> Cell:
    cell = part.lines[norm].at(size)
    assert cell is not None  # _shared saw it
    return cell
