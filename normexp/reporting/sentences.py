"""The sentences of a report: each has a claim, and details in brackets.

`normexp.reporting.verdict` decides which claims are verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.samples import read_samples
from normexp.reporting.curves import read_curves
from normexp.reporting.frame import Row, plain_rows
from normexp.reporting.metric import Metric, format_signed
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.verdict import DECIDED, Contrast, Family, contrasts_of
from normexp.stats.interval import Interval, crossed_mean

ROUNDED = 1e-4  # relative; a mean over float32 samples may differ from the metric by this much
STILL_FALLING = 0.01  # share of the first training loss, from one fifth of the steps to the next
PRECISIONS = {"64-true": "float64", "32-true": "float32", "bf16-mixed": "mixed bfloat16"}
DIRECTED = ("loses", "gains", "better", "worse")
# The headline of an answer is a claim of the first of these kinds that occurs.
HEADLINES = (*DECIDED, "open", "interval", "no interval", "one size", "invalid", "no data")


@dataclass(frozen=True)
class Claim:
    """One sentence.

    norms: the subject; several norms if all are independent of the size
    kind: see `Family.kind`; or `independent` (of the norm batch size, by measurement), `one size`,
        `invalid`
    details: follow the claim in brackets
    elsewhere: the same contrast at other budgets, as further sentences
    sizes: the sizes that the claim is about
    reference: the norm compared with; empty for a norm along the sizes
    contrast: the difference that the claim states
    over_samples: the gap over new test samples as well as new seeds; None without samples.npz
    p: of the gap, times the size of the family; None outside the family
    """

    norms: Sequence[str]
    kind: str
    claim: str
    details: str = ""
    elsewhere: str = ""
    sizes: Sequence[int] = ()
    reference: str = ""
    contrast: Contrast | None = None
    over_samples: Interval | None = None
    p: float | None = None

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
        """`CPU (AMD EPYC, 2 cores), float32, 14,458 parameters`, without what is not recorded."""
        runs = pd.concat([part.runs for part in self.parts])
        columns = ("gpu", "cpu", "cpu_count")
        columns = [*(f"environment.{name}" for name in columns), "devices", "precision"]
        rows = plain_rows(runs.reindex(columns=[*columns, "matmul_precision", "num_parameters"]))
        parts = dict.fromkeys(filter(None, map(_place_words, rows)))
        counts = {int(row["num_parameters"]) for row in rows if row["num_parameters"] is not None}
        if counts:
            ends = dict.fromkeys((min(counts), max(counts)))
            parts[f"{' to '.join(f'{count:,}' for count in ends)} parameters"] = None
        return ", ".join(parts)

    @property
    def headline(self) -> Claim | None:
        """The first verdict, else the first claim in the order of HEADLINES."""
        ranks = {kind: place for place, kind in enumerate(HEADLINES, start=1)}
        ranks |= dict.fromkeys(DECIDED, 0)
        return min(
            self.sentences, key=lambda one: ranks.get(one.kind, len(HEADLINES) + 1), default=None
        )

    @property
    def losses(self) -> list[Claim]:
        return [one for one in self.sentences if not one.reference]

    @property
    def comparisons(self) -> list[Claim]:
        return [one for one in self.sentences if one.reference]


def answer_slices(slices: Sequence[Slice]) -> list[Answer]:
    """The sentences about the slices of one report, which are one family."""
    found = [list(contrasts_of(part)) for part in slices]
    family = Family([contrast for own in found for contrast in own])
    answers = []
    for part, own in zip(slices, found, strict=True):
        claims = [*_plain_claims(part), *(_claim(one, family) for one in own)]
        claims.sort(key=lambda one: (bool(one.reference), one.kind == "independent"))
        answers.append(Answer(part.heading, [part], claims, _note(own, family)))
    return answers


def _plain_claims(part: Slice) -> Iterator[Claim]:
    """Claims on norms without a contrast along the sizes; independent norms share a sentence."""
    axis, metric = AXIS_WORDS[part.axis], part.metric
    alike: dict[str, list[str]] = {}
    for norm, rows in part.lines.items():
        first = rows[0]
        invalid = next((row["invalid"] for row in rows if row["invalid"]), None)
        if invalid:
            yield Claim([norm], "invalid", f"{norm} is not compared: {invalid}")
        elif first["independent"]:
            count = _count_words(first, metric, first["recorded"], "seed")
            alike.setdefault(count, []).append(norm)
        elif len(rows) < 2:
            count = _count_words(first, metric, first["recorded"], "seed")
            text = f"{norm} was run at one {axis} only, {first['size']}"
            yield Claim([norm], "one size", text, count, sizes=[first["size"]])
    if alike:
        norms = [norm for own in alike.values() for norm in own]
        they, do = ("it does", "does") if len(norms) == 1 else ("they do", "do")
        counts = [f"{_listed(own)}: {count}" for count, own in alike.items()]
        told = "; ".join(alike if len(alike) == 1 else counts)
        claim = f"{_listed(norms)} {do} not depend on the {axis}"
        yield Claim(norms, "independent", claim, f"measured: {they} not mix samples; {told}")


def _listed(names: Sequence[str]) -> str:
    """`layer, instance and group`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _claim(one: Contrast, family: Family) -> Claim:
    kind, along, metric = family.kind(one), one.is_along_sizes, one.part.metric
    is_decided = kind in DECIDED
    over_samples = _gap_over_samples(one)
    lost = lost_words(one.second, metric)
    details = [
        _count_words(one.first, metric, one.gap.n, "seed" if along else "pair"),
        f"{one.second['norm']} at {one.second['size']}: {lost}" if lost else "",
        _diverged_words(one, kind),
        _over_samples_words(one, kind, over_samples) if over_samples else "",
        _seed_words(one),
        _rate_words(one),
        _optimism_words(one),
        _training_words(one) if is_decided else "",
    ]
    budget = f" ({one.budget})" if one.budget else ""
    scope = f", at this budget{budget}" if is_decided and not family.survives(one) else ""
    return Claim(
        [one.first["norm"]],
        kind,
        _words(one, kind) + scope,
        "; ".join(filter(None, details)),
        "".join(_budget_words(one, kind, other, family) for other in family.at_other_budgets(one)),
        sizes=sorted({one.first["size"], one.second["size"]}),
        reference="" if along else one.second["norm"],
        contrast=one,
        over_samples=over_samples,
        p=family.p(one),
    )


def _words(one: Contrast, kind: str) -> str:
    """The sentence without its scope and details."""
    metric, axis = one.part.metric, AXIS_WORDS[one.part.axis]
    norm, small = one.first["norm"], one.first["size"]
    reference, large = one.second["norm"], one.second["size"]
    shown, limit = _shown(one, kind, one.gap), metric.tolerance_words
    missing = "too few seeds for an" if one.gap.n < 2 else "the same for every seed, so no"
    end = {"no interval": f"; {missing} interval", "open": "; undecided"}.get(kind, "")
    least = f"at least {shown}" if one.has_diverged else shown  # of a verdict
    loses, gains = ("loses", "gains") if metric.higher_is_better else ("worsens by", "improves by")
    if one.is_along_sizes:
        where = f"from {axis} {large} to {small}"
        return {
            "loses": f"{norm} {loses} {least} {where}",
            "gains": f"{norm} {gains} {least} {where}",
            "holds": f"{norm} holds its level within {limit} {where}: change {shown}",
            "no data": f"{norm} has no seed with a result at both ends, {where}",
        }.get(kind, f"{norm}, {axis} {small} minus {large}: {shown}{end}")
    where = f"At {axis} {small}, {norm}"
    return {
        "better": f"{where} is better than {reference} by {least}",
        "worse": f"{where} is worse than {reference} by {least}",
        "tie": f"{where} and {reference} are tied within {limit}: difference {shown}",
        "no data": f"{where} and {reference} have no seed with a result of both",
    }.get(kind, f"{where} minus {reference}: {shown}{end}")


def _shown(one: Contrast, kind: str, gap: Interval) -> str:
    """The gap as its sentence shows it: what is lost or gained, or the first minus the second."""
    is_loss = kind in ("loses", "worse")
    is_negated = is_loss if kind in DIRECTED else not one.part.metric.higher_is_better
    return one.part.metric.format(-gap if is_negated else gap)


def _over_samples_words(one: Contrast, kind: str, over_samples: Interval) -> str:
    words = _shown(one, kind, over_samples)
    is_same = words == _shown(one, kind, one.gap)
    return "the same over test samples too" if is_same else f"over test samples too {words}"


def _budget_words(one: Contrast, kind: str, other: Contrast, family: Family) -> str:
    """` At epochs=48: 0.8 [0.3, 1.3] points the other way: the verdict does not survive.`"""
    if other.gap.estimate is None or one.gap.estimate is None:
        return f" {other.budget}: no result."
    turns = kind in DIRECTED and other.gap.estimate * one.gap.estimate < 0
    told = f" At {other.budget}: {_shown(other, kind, -other.gap if turns else other.gap)}"
    told += " the other way" * turns
    if kind not in DECIDED:
        return f"{told}."
    survives = "survives" if family.kind(other) == kind else "does not survive"
    return f"{told}: the verdict {survives}."


def _note(own: Sequence[Contrast], family: Family) -> str:
    """Explains what the intervals and verdicts of a report promise."""
    if not any(one.gap.low is not None for one in own):
        return ""
    judged = [one for one in family.contrasts if one.is_judged]
    references = dict.fromkeys(one.second["base"] for one in judged if not one.is_along_sizes)
    members = []
    if any(one.is_along_sizes for one in judged):
        members.append("each norm that mixes samples, from its largest to its smallest size")
    if references:
        members.append(f"each norm against {_listed(list(references))} at the smallest size")
    count = ": ".join([str(family.size), *filter(None, [", and ".join(members)])])
    return (
        "Intervals are 95 % each, for new seeds on the same test samples, paired by seed. The "
        f"number of differences that this report gives a verdict on is {count}. The probability "
        "that any of these verdicts is false is at most 5 %, so a difference may be undecided "
        "although its own interval excludes 0. Training counts as converged where its loss changed "
        "by less than 1 % of its first value over the last fifth of the steps."
    )


# Details


def _count_words(point: Row, metric: Metric, n: int, noun: str) -> str:
    """`n = 5 seeds; 2 of 8 diverged, 1 of 8 missing`."""
    lost = lost_words(point, metric)
    return f"n = {n} {noun}{'s' * (n != 1)}" + (f"; {lost}" if lost else "")


def lost_words(point: Row, metric: Metric) -> str:
    """`2 of 8 diverged, 1 of 8 missing`; also counts runs that a callback ended early."""
    lost = {word: point[word] for word in ("diverged", "failed", "missing")}
    lost["ended early"] = point["early"]
    lost[f"without {metric.name}"] = point["finished"] - point["recorded"]
    parts = [f"{count} of {point['expected']} {word}" for word, count in lost.items() if count]
    return ", ".join(parts)


def _diverged_words(one: Contrast, kind: str) -> str:
    """What the difference is where diverged runs, which may be worse, count as the worst run."""
    if not one.has_diverged:
        return ""
    bound = ""  # of a verdict: its sentence has `at least`
    if one.first["diverged"] and one.second["diverged"]:
        bound = " in both cells, so the difference may be greater or smaller"
    elif kind not in DECIDED:
        is_most = bool(one.first["diverged"]) == one.part.metric.higher_is_better
        bound = f", so the difference is at {'most' if is_most else 'least'} this"
    return f"diverged runs count as the worst run{bound}"


def _seed_words(one: Contrast) -> str:
    """`ahead with 7 of 8 seeds`, where a tie counts one half; a warning if all seeds tie."""
    a, b = one.pairs
    if len(a) > 1 and (a == b).all() and not one.has_diverged:
        return "equal under every seed: is the norm used?"
    chance = one.improvement
    if one.is_along_sizes or chance.estimate is None:
        return ""
    ties = " (a tie counts half)" if (a == b).any() else ""
    return f"ahead with {chance.estimate * chance.n:g} of {chance.n} seeds{ties}"


def _ends(one: Contrast) -> list[tuple[str, Row]]:
    """Both cells with their names in details: `at 2` and `at 128`, or `of group` and `of batch`."""
    word, key = ("at", "size") if one.is_along_sizes else ("of", "norm")
    return [(f"{word} {end[key]}", end) for end in (one.first, one.second)]


def _rate_words(one: Contrast) -> str:
    """`learning rate 0.1 of group, 0.05 of batch`, where the two differ."""
    if one.first["lr"] == one.second["lr"]:
        return ""
    said = [f"{end['lr']:g} {name}" for name, end in _ends(one)]
    return f"learning rate {', '.join(said)}"


def _optimism_words(one: Contrast) -> str:
    """`learning rates chosen on these seeds: optimism +0.14 points at 2, +0.20 points at 128`."""
    found, metric = [], one.part.metric
    for name, end in _ends(one):
        if (one.part.searched["cell"] == end["cell"]).any():
            optimism = one.part.optimism(end["cell"])
            amount = "unknown"
            if optimism is not None:
                amount = f"{format_signed(optimism, metric.digits + 1)} {metric.unit}".rstrip()
            found.append(f"{amount} {name}")
    return f"learning rates chosen on these seeds: optimism {', '.join(found)}" if found else ""


def _training_words(one: Contrast) -> str:
    """`train loss at 2: 0.67 (still falling), at 128: 0.05 (converged)`."""
    runs = one.part.runs[one.part.runs["status"] == "finished"]
    found = []
    for name, end in _ends(one):
        curves = read_curves(runs[runs["cell"] == end["cell"]])
        losses = curves[curves["name"] == "train/loss"]
        found += [] if losses.empty else [f"{name}: {_training_end(losses)}"]
    return f"train loss {', '.join(found)}" if found else "train loss not recorded"


def _training_end(losses: pd.DataFrame) -> str:
    """`0.67 (still falling)`: the loss over the last fifth of the steps, averaged over seeds.

    Still falling: lower than over the fifth before by more than STILL_FALLING of the first loss.
    """
    levels, falls = [], []
    for _, curve in losses.groupby("seed"):
        samples, values = curve["samples"].to_numpy(), curve["value"].to_numpy()
        fifth = np.ceil(5 * samples / samples[-1])
        last, before = values[fifth == 5], values[fifth == 4]
        levels.append(last.mean())
        if len(before):
            falls.append((before.mean() - last.mean()) / values[0])
    end = "converged" if falls else "slope unknown"
    if falls and abs(np.mean(falls)) > STILL_FALLING:
        end = "still falling" if np.mean(falls) > 0 else "rising"
    return f"{np.mean(levels):.2g} ({end})"


def _gap_over_samples(one: Contrast) -> Interval | None:
    """The gap over seeds and test samples; None unless every run recorded its samples.

    Only for metrics that are a mean over samples, such as accuracy.
    """
    if one.has_diverged:  # a diverged run has no samples
        return None
    metric = one.part.metric
    cells = [one.first["cell"], one.second["cell"]]
    paired = one.part.values[cells].dropna()
    found = [
        [_samples_of(cell, seed, value, metric) for seed, value in paired[cell].items()]
        for cell in cells
    ]
    sizes = {len(samples) for own in found for samples in own}
    if len(paired) < 2 or len(sizes) > 1 or 0 in sizes:
        return None
    differences = np.array(found[0]) - np.array(found[1])
    gap = crossed_mean(differences, step=one.part.step, limit=metric.limit)
    return gap if metric.higher_is_better else -gap


def _samples_of(cell: str, seed: object, value: float, metric: Metric) -> np.ndarray:
    """The metric of each test sample, scaled; empty if their mean is not the recorded value."""
    kind = metric.name.partition("@")[2] or "running"
    samples = np.empty(0)
    with suppress(UserError):  # a torn file does not fail the report
        recorded = read_samples(seed_dir(Path(cell), int(str(seed))))
        samples = metric.scale * recorded.get(kind, samples)
    is_metric = len(samples) and abs(samples.mean() - value) <= ROUNDED * abs(value)
    return samples if is_metric else np.empty(0)


def _place_words(run: Row) -> str:
    """`GPU (4 x NVIDIA H100), float32 with matmul_precision=high`."""
    gpu, cpu, cores = (run[f"environment.{name}"] for name in ("gpu", "cpu", "cpu_count"))
    devices, precision, matmul = run["devices"], run["precision"], run["matmul_precision"]
    count = f"{devices} x " if devices and devices > 1 else ""
    place = f"GPU ({count}{gpu})" if gpu else ""
    if cpu and not gpu:
        place = f"{count}CPU ({cpu}" + (f", {cores} cores)" if cores else ")")
    numbers = PRECISIONS.get(precision or "", precision or "")
    if gpu and precision == "32-true" and matmul:
        numbers += f" with matmul_precision={matmul}"
    return ", ".join(filter(None, (place, numbers)))
