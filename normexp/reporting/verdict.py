"""The sentences of a report: what each says of a contrast, and which of them have a verb.

Only the primary family of `normexp.reporting.contrast` has verdicts. Everything else is shown with
its interval and without a verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from normexp.reporting.contrast import DECIDED, Contrast, contrasts_of
from normexp.reporting.evidence import (
    count_words,
    gap_over_samples,
    lost_words,
    optimism_words,
    rate_words,
    seed_words,
    training_words,
)
from normexp.reporting.frame import measured_on
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.stats.family import p_value
from normexp.stats.interval import Interval
from normexp.stats.sensitivity import Sensitivity, batch_size_sensitivity


@dataclass(frozen=True)
class Claim:
    """One sentence: `claim`, details in brackets, and what the contrast is at other budgets.

    norms: those that it is about; several if all of them are independent of the size
    reference: the norm that it compares with; empty for a norm along the sizes
    sizes: those that it is about
    kind: see `Contrast.kind`; or `independent` (of the norm batch size, by measurement), `one
        size`, `invalid`
    gap: positive if the norm is better than the reference, or better at the smallest size
    over_samples: the gap over new test samples as well as new seeds; None without samples.npz
    p: of the gap, times the size of the family; None outside it
    """

    norms: Sequence[str]
    kind: str
    claim: str
    details: str = ""
    elsewhere: str = ""
    sizes: Sequence[int] = ()
    reference: str = ""
    gap: Interval | None = None
    over_samples: Interval | None = None
    improvement: Interval | None = None
    p: float | None = None
    sensitivity: Sensitivity | None = None

    @property
    def norm(self) -> str:
        return ", ".join(self.norms)

    @property
    def mentions(self) -> list[str]:
        return [*self.norms, *([self.reference] if self.reference else [])]

    @property
    def text(self) -> str:
        return f"{self.claim}{self.details and f' ({self.details})'}.{self.elsewhere}"


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
    def headline(self) -> Claim | None:
        """The first verdict; without one, the first sentence that has a number."""
        order = [*DECIDED, "open", "interval", "no interval", "one size", "invalid", "no data"]
        ranks = {kind: max(0, place + 1 - len(DECIDED)) for place, kind in enumerate(order)}
        return min(self.sentences, key=lambda one: ranks.get(one.kind, len(order)), default=None)

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
        claims = [_claim(one, size, everything) for one in own]
        claims = [*_plain_claims(part), *claims]
        claims.sort(key=lambda one: (bool(one.reference), one.kind == "independent"))
        answers.append(Answer(part.heading, [part], claims, _note(own, size)))
    return answers


def _plain_claims(part: Slice) -> Iterator[Claim]:
    """Norms that are not followed along the sizes, and why; independent ones in one sentence."""
    axis, metric = AXIS_WORDS[part.axis], part.metric
    alike: dict[str, list[str]] = {}
    for norm, rows in part.lines.items():
        first = rows[0]
        invalid = next((row["invalid"] for row in rows if row["invalid"]), None)
        if invalid:
            yield Claim([norm], "invalid", f"{norm} is not compared: {invalid}")
        elif first["independent"]:
            alike.setdefault(count_words(first, metric, first["recorded"], "seeds"), []).append(
                norm
            )
        elif len(rows) < 2:
            text = f"{norm} was run at one {axis} only ({first['size']})"
            yield Claim([norm], "one size", text, sizes=[first["size"]])
    if alike:
        norms = [norm for own in alike.values() for norm in own]
        is_one = len(norms) == 1
        claim = f"{_listed(norms)} {'does' if is_one else 'do'} not depend on the {axis}"
        counts = "; ".join(
            count if len(alike) == 1 else f"{_listed(own)}: {count}" for count, own in alike.items()
        )
        why = f"measured: {'it does' if is_one else 'they do'} not mix samples; {counts}"
        yield Claim(norms, "independent", claim, why)


def _listed(names: Sequence[str]) -> str:
    """`layer, instance and group`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _claim(one: Contrast, family_size: int, everything: Sequence[Contrast]) -> Claim:
    kind, along, metric = one.kind(family_size), one.is_along_sizes, one.part.metric
    is_decided = kind in DECIDED
    over_samples = gap_over_samples(one)
    lost = lost_words(one.second, metric)
    details = [
        count_words(one.first, metric, one.gap.n, "seeds" if along else "pairs"),
        f"{one.second['norm']} at {one.second['size']}: {lost}" if lost else "",
        "diverged runs count as the worst run" if one.has_diverged else "",
        f"over test samples too {_shown(one, kind, over_samples)}" if over_samples else "",
        seed_words(one),
        rate_words(one),
        optimism_words(one),
        training_words(one) if is_decided else "",
    ]
    scope, elsewhere = _budget_words(one, kind, family_size, everything)
    is_judged = one.is_primary and one.gap.low is not None
    return Claim(
        [one.first["norm"]],
        kind,
        _words(one, kind) + (scope if is_decided else ""),
        "; ".join(filter(None, details)),
        elsewhere,
        sizes=sorted({one.first["size"], one.second["size"]}),
        reference="" if along else one.second["norm"],
        gap=one.gap,
        over_samples=over_samples,
        improvement=None if along else one.improvement,
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
    return one.part.metric.format(-gap if is_turned else gap)


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
