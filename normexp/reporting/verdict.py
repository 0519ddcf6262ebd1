"""The sentences of a report: which may have a verb, and what each is about.

A report has one primary family (normexp.stats.family): in every slice, each norm that mixes samples
at the smallest size against itself at the largest, and each norm at the smallest size against the
reference norm. Both are declared by this rule before any result is known. Only they are said to
lose, to gain, to hold their level, or to be better, worse or tied, and the probability that any of
these sentences is false is at most 5 % for the whole report. Everything else is shown with its
interval and without a verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.samples import read_samples
from normexp.reporting.convergence import training_end
from normexp.reporting.frame import Row, measured_on
from normexp.reporting.metric import Metric, format_signed, negated
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.style import base_of
from normexp.stats import (
    Interval,
    Sensitivity,
    Verdict,
    batch_size_sensitivity,
    crossed_mean,
    decide,
    p_value,
    paired_difference,
    paired_improvement,
)

NONE = np.empty(0)
ROUNDED = 1e-4  # a mean over float32 samples may differ from the metric by this share
REFERENCE = "batch"  # the reference norm; a slice without it takes its first norm
# Kinds of a contrast by verdict: of a norm along the sizes, and of a norm with the reference.
ALONG_SIZES = {"above": "gains", "below": "loses", "within": "holds"}
WITH_REFERENCE = {"above": "better", "below": "worse", "within": "tie"}
DECIDED = (*ALONG_SIZES.values(), *WITH_REFERENCE.values())


@dataclass(frozen=True)
class Contrast:
    """The difference between two cells of a slice, paired by seed.

    first, second: their points: the smallest and the largest size of one norm, or a norm and the
        reference norm at the smallest size
    gap: first - second, positive if the first is better. A diverged run counts as the worst run of
        the slice, so that the gap is a bound: its cell is at most this good.
    is_primary: it is a member of the family
    """

    part: Slice
    first: Row
    second: Row
    gap: Interval
    is_primary: bool

    @property
    def is_along_sizes(self) -> bool:
        return self.first["norm"] == self.second["norm"]

    @property
    def has_diverged(self) -> bool:
        return bool(self.first["diverged"] or self.second["diverged"])

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for contrasts that differ only in the budget."""
        ends = [(end["recipe"], end["base"], end["size"]) for end in (self.first, self.second)]
        return (self.part.axis, self.part.fixed, self.part.metric.name, *ends)

    @property
    def budget(self) -> str:
        """`epochs=12`; empty if the two cells differ in it, as they may along the batch size."""
        budgets = {end["budget"] for end in (self.first, self.second)}
        return budgets.pop() if len(budgets) == 1 else ""

    def kind(self, family_size: int) -> str:
        """One of DECIDED; `open` (undecided), `interval` (not in the family), `no interval` or
        `no data`."""
        if self.gap.estimate is None:
            return "no data"
        if self.gap.low is None:
            return "no interval"
        if not self.is_primary:
            return "interval"
        verdict = decide(self.gap, margin=self.part.metric.tolerance, family_size=family_size)
        if verdict in self._ruled_out():
            verdict = "open"
        return (ALONG_SIZES if self.is_along_sizes else WITH_REFERENCE).get(verdict, "open")

    def _ruled_out(self) -> set[Verdict]:
        """Verdicts that diverged runs could turn, since they may be worse than they count."""
        above: set[Verdict] = {"above", "within"} if self.first["diverged"] else set()
        below: set[Verdict] = {"below", "within"} if self.second["diverged"] else set()
        return above | below


@dataclass(frozen=True)
class Claim:
    """One sentence.

    reference: the norm that it compares with; empty for a norm along the sizes
    kind: see `Contrast.kind`; or `independent` (of the norm batch size, by measurement), `one
        size`, `invalid`
    gap: positive if the norm is better than the reference, or better at the smallest size
    over_samples: the gap over new test samples as well as new seeds; None without samples.npz
    p: of the gap, times the size of the family; None outside it
    """

    norm: str
    kind: str
    text: str
    reference: str = ""
    gap: Interval | None = None
    over_samples: Interval | None = None
    improvement: Interval | None = None
    p: float | None = None
    sensitivity: Sensitivity | None = None


@dataclass(frozen=True)
class Answer:
    """All sentences about one slice, or about several that differ only in data set."""

    heading: str
    parts: list[Slice]
    sentences: list[Claim]
    note: str

    @property
    def measured_on(self) -> str:
        return measured_on(pd.concat([part.runs for part in self.parts]))

    @property
    def losses(self) -> list[Claim]:
        return [one for one in self.sentences if not one.reference]

    @property
    def comparisons(self) -> list[Claim]:
        return [one for one in self.sentences if one.reference]


def answer_slices(slices: Sequence[Slice]) -> list[Answer]:
    """The sentences about the slices of one report, which are one family."""
    found = [list(contrasts_of(part)) for part in slices]
    everything = [contrast for own in found for contrast in own]
    size = sum(one.is_primary and one.gap.low is not None for one in everything)
    answers = []
    for part, own in zip(slices, found, strict=True):
        claims = [*_plain_claims(part), *(_claim(one, size, everything) for one in own)]
        order = {norm: place for place, norm in enumerate(part.norms)}
        claims.sort(key=lambda claim: (bool(claim.reference), order[claim.norm]))
        answers.append(Answer(part.heading, [part], claims, _note(own, size)))
    return answers


def contrasts_of(part: Slice) -> Iterator[Contrast]:
    """Each norm along the sizes, then each against the reference at the smallest size, by study."""
    smallest: dict[str, dict[str, Row]] = {}  # by study and norm
    for norm, rows in part.lines.items():
        if any(row["invalid"] for row in rows):
            continue
        first, last = rows[0], rows[-1]
        if len(rows) > 1 and not first["independent"]:
            yield _contrast(part, first, last, is_primary=first["mixes_samples"])
        if first["size"] == part.sizes[0]:
            smallest.setdefault(first["study"], {})[norm] = first
    for points in smallest.values():
        reference = points[reference_of(list(points))]
        for point in points.values():
            if point is not reference:
                yield _contrast(part, point, reference, is_primary=True)


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])


def paired_values(a: str, b: str, values: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Values of two cells at the seeds that have both, in order of seed."""
    first, second = values[a].to_numpy(), values[b].to_numpy()
    is_both = np.isfinite(first) & np.isfinite(second)
    return first[is_both], second[is_both]


def oriented(interval: Interval, metric: Metric) -> Interval:
    """A difference turned so that positive means better."""
    return interval if metric.higher_is_better else negated(interval)


def _contrast(part: Slice, first: Row, second: Row, *, is_primary: bool) -> Contrast:
    a, b = paired_values(first["cell"], second["cell"], part.outcomes)
    gap = paired_difference(a, b, step=part.step, limit=part.metric.limit)
    return Contrast(part, first, second, oriented(gap, part.metric), is_primary)


# Claims


def _plain_claims(part: Slice) -> Iterator[Claim]:
    """Norms that are not followed along the sizes, and why."""
    axis, metric = AXIS_WORDS[part.axis], part.metric
    for norm, rows in part.lines.items():
        first = rows[0]
        invalid = next((row["invalid"] for row in rows if row["invalid"]), None)
        if invalid:
            yield Claim(norm, "invalid", f"{norm} is not compared: {invalid}.")
        elif first["independent"]:
            counts = _counts(first, metric, first["recorded"], "seeds")
            why = f"measured: it does not mix samples; {counts}"
            yield Claim(norm, "independent", f"{norm} does not depend on the {axis} ({why}).")
        elif len(rows) < 2:
            text = f"{norm} was run at one {axis} only ({first['size']})."
            yield Claim(norm, "one size", text)


def _claim(one: Contrast, family_size: int, everything: Sequence[Contrast]) -> Claim:
    kind, along, metric = one.kind(family_size), one.is_along_sizes, one.part.metric
    is_decided = kind in DECIDED
    over_samples = _over_samples(one)
    counts = _counts(one.first, metric, one.gap.n, "seeds" if along else "pairs")
    lost = lost_words(one.second, metric)
    details = [
        counts,
        f"{one.second['norm']} at {one.second['size']}: {lost}" if lost else "",
        "diverged runs count as the worst run" if one.has_diverged else "",
        f"over test samples too {_shown(one, kind, over_samples)}" if over_samples else "",
        _seed_words(one),
        _optimism_words(one),
        _training_words(one) if is_decided else "",
    ]
    scope, other_budgets = _budget_words(one, kind, family_size, everything)
    words = _words(one, kind) + (scope if is_decided else "")
    is_judged = one.is_primary and one.gap.low is not None
    return Claim(
        one.first["norm"],
        kind,
        f"{words} ({'; '.join(filter(None, details))}).{other_budgets}",
        reference="" if along else one.second["norm"],
        gap=one.gap,
        over_samples=over_samples,
        improvement=None if along else _improvement(one),
        p=min(1.0, family_size * p_value(one.gap)) if is_judged else None,
        sensitivity=_sensitivity(one) if along else None,
    )


def _words(one: Contrast, kind: str) -> str:
    """The sentence without its scope and details."""
    metric, axis = one.part.metric, AXIS_WORDS[one.part.axis]
    (norm, small), (reference, large) = (
        (row["norm"], row["size"]) for row in (one.first, one.second)
    )
    shown = _shown(one, kind, one.gap)
    limit = metric.tolerance_words
    missing = "too few seeds for an" if one.gap.n < 2 else "all seeds are equal, so no"
    end = {"no interval": f"; {missing} interval", "open": "; undecided"}.get(kind, "")
    if one.is_along_sizes:
        where = f"from {axis} {large} to {small}"
        return {
            "loses": f"{norm} loses {shown} {where}",
            "gains": f"{norm} gains {shown} {where}",
            "holds": f"{norm} holds its level within {limit} {where}: loss {shown}",
            "no data": f"{norm} has no seed with a result at both ends, {where}",
        }.get(kind, f"{norm}: loss {shown} {where}{end}")
    where = f"At {axis} {small}, {norm}"
    return {
        "better": f"{where} is better than {reference} by {shown}",
        "worse": f"{where} is worse than {reference} by {shown}",
        "tie": f"{where} and {reference} are tied within {limit}: difference {shown}",
        "no data": f"{where} and {reference} have no seed in common",
    }.get(kind, f"{where} minus {reference}: {shown}{end}")


def _shown(one: Contrast, kind: str, gap: Interval) -> str:
    """The gap as its sentence shows it: losses and `worse by` are positive."""
    is_turned = kind == "worse" or (one.is_along_sizes and kind != "gains")
    return one.part.metric.format(negated(gap) if is_turned else gap)


def _names(one: Contrast) -> tuple[str, str]:
    """What the details call the two cells: `at 2` and `at 128`, or `of group` and `of batch`."""
    if one.is_along_sizes:
        return f"at {one.first['size']}", f"at {one.second['size']}"
    return f"of {one.first['norm']}", f"of {one.second['norm']}"


# What a sentence says in brackets


def _seed_words(one: Contrast) -> str:
    """`ahead with 7 of 8 seeds`, where a tie counts one half; and equality that is no chance."""
    a, b = paired_values(one.first["cell"], one.second["cell"], one.part.outcomes)
    if len(a) > 1 and (a == b).all() and not one.has_diverged:
        return "equal under every seed: is the norm used?"
    chance = _improvement(one)
    if one.is_along_sizes or chance.estimate is None:
        return ""
    ties = " (a tie counts half)" if (a == b).any() else ""
    return f"ahead with {chance.estimate * chance.n:g} of {chance.n} seeds{ties}"


def _improvement(one: Contrast) -> Interval:
    """Probability that the first cell beats the second under one seed."""
    a, b = paired_values(one.first["cell"], one.second["cell"], one.part.outcomes)
    return paired_improvement(a, b, higher_is_better=one.part.metric.higher_is_better)


def _over_samples(one: Contrast) -> Interval | None:
    """The gap over seeds and test samples; None unless every run of the gap has its samples.

    Samples are used where their mean is the metric, as it is for an accuracy.
    """
    if one.has_diverged:  # a diverged run has no samples
        return None
    metric, values = one.part.metric, one.part.values
    cells = [one.first["cell"], one.second["cell"]]
    kind = metric.name.partition("@")[2] or "running"
    tables: list[list[np.ndarray]] = [[], []]
    for seed, *pair in zip(values.index, *(values[cell] for cell in cells), strict=True):
        if not np.isfinite(pair).all():
            continue
        for table, cell, value in zip(tables, cells, pair, strict=True):
            samples = metric.scale * _read_samples(seed_dir(Path(cell), seed)).get(kind, NONE)
            if not len(samples) or abs(samples.mean() - value) > ROUNDED * abs(value):
                return None
            table.append(samples)
    if len(tables[0]) < 2 or len({len(samples) for samples in tables[0] + tables[1]}) > 1:
        return None
    gaps = np.array(tables[0]) - np.array(tables[1])
    return oriented(crossed_mean(gaps, limit=metric.limit), metric)


def _read_samples(directory: Path) -> dict[str, np.ndarray]:
    try:
        return read_samples(directory)
    except UserError:  # a torn file does not fail the report
        return {}


def _optimism_words(one: Contrast) -> str:
    """`learning rates chosen on these seeds: optimism 0.14 points at 2, 0.20 points at 128`."""
    found, metric = [], one.part.metric
    for name, row in zip(_names(one), (one.first, one.second), strict=True):
        if (one.part.searched["cell"] == row["cell"]).any():
            optimism = one.part.optimism(row["cell"])
            amount = (
                "unknown"
                if optimism is None
                else f"{format_signed(optimism, metric.digits + 1)} {metric.unit}".rstrip()
            )
            found.append(f"{amount} {name}")
    return f"learning rates chosen on these seeds: optimism {', '.join(found)}" if found else ""


def _training_words(one: Contrast) -> str:
    """`train loss at 2: 0.67 (still falling), at 128: 0.05 (converged)`."""
    runs, found = one.part.runs, []
    for name, row in zip(_names(one), (one.first, one.second), strict=True):
        is_own = (runs["cell"] == row["cell"]) & (runs["status"] == "finished")
        end = training_end(runs["directory"][is_own])
        found += [f"{name}: {end.words}"] if end is not None else []
    return f"train loss {', '.join(found)}" if found else "train loss not recorded"


def _budget_words(
    one: Contrast, kind: str, family_size: int, everything: Sequence[Contrast]
) -> tuple[str, str]:
    """`, at this budget (epochs=12)`, and what the same contrast is at other budgets.

    The first is empty if every other budget has the same verdict.
    """
    others = [c for c in everything if c.key == one.key and c.budget != one.budget]
    told, survives = "", bool(others)
    for other in others:
        found = other.kind(family_size)
        shown = _shown(other, kind, other.gap)
        if other.gap.estimate is None or one.gap.estimate is None:
            told += f" {other.budget}: no result."
            survives = False
            continue
        is_same_sign = (other.gap.estimate > 0) == (one.gap.estimate > 0)
        survives = survives and found == kind
        both = "sign and verdict survive" if is_same_sign else "the verdict survives"
        verdict = both if found == kind else "the verdict does not survive"
        turned = "" if is_same_sign else ", the sign turns"
        told += f" At {other.budget}: {shown}" + (
            f": {verdict}{turned}." if kind in DECIDED else "."
        )
    budget = f" ({one.budget})" if one.budget else ""
    return ("" if survives else f", at this budget{budget}"), told


def _sensitivity(one: Contrast) -> Sensitivity:
    part, metric = one.part, one.part.metric
    rows = part.lines[one.first["norm"]]
    return batch_size_sensitivity(
        part.outcomes[[row["cell"] for row in rows]].dropna(how="all"),
        [row["size"] for row in rows],
        higher_is_better=metric.higher_is_better,
        tolerance=metric.tolerance,
        step=part.step,
        limit=metric.limit,
    )


# Notes and counts


def _note(own: Sequence[Contrast], family_size: int) -> str:
    """What the verdicts of a slice promise, and what their intervals are about."""
    if not any(one.gap.low is not None for one in own):
        return ""
    references = dict.fromkeys(one.second["norm"] for one in own if not one.is_along_sizes)
    compared = f", and each norm with {' and '.join(references)}" if references else ""
    return (
        "Intervals are 95 % each, for new seeds on the same test samples, paired by seed. The "
        f"number of differences that this report gives a verdict on is {family_size}: each norm "
        f"that mixes samples, from its largest to its smallest size{compared} at the smallest "
        "size. The probability that any of these verdicts is false is at most 5 %. Training counts "
        "as converged where its loss changed by less than 1 % of its first value over the last "
        "fifth of the steps."
    )


def _counts(point: Row, metric: Metric, n: int, noun: str) -> str:
    """`n = 5 seeds; 2 of 8 diverged, 1 of 8 missing`."""
    lost = lost_words(point, metric)
    noun = noun[:-1] if n == 1 else noun
    return f"n = {n} {noun}" + (f"; {lost}" if lost else "")


def lost_words(point: Row, metric: Metric) -> str:
    """`2 of 8 diverged, 1 of 8 missing`."""
    lost = {word: point[word] for word in ("diverged", "failed", "missing")}
    lost[f"without {metric.name}"] = point["finished"] - point["recorded"]
    parts = [f"{count} of {point['expected']} {word}" for word, count in lost.items() if count]
    return ", ".join(parts)
