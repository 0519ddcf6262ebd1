"""The sentences of a report: each has a claim, and details in brackets.

`normexp.reporting.verdict` decides which claims are verdicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from normexp.reporting.causes import words_on_causes
from normexp.reporting.metric import Metric, describe_metric, format_mean, format_signed
from normexp.reporting.model import AXIS_WORDS, CellRow, RunRow, Slice
from normexp.reporting.verdict import (
    DECIDED,
    Change,
    Comparison,
    at_other_budgets,
    contenders,
    margin_at,
)
from normexp.stats.family import MAX_SEEDS
from normexp.stats.interval import Interval

PRECISIONS = {"64-true": "float64", "32-true": "float32", "bf16-mixed": "mixed bfloat16"}
MOST_NAMES = 12  # in one sentence
DIRECTED = ("loses", "gains", "better", "worse")
# The headline of an answer is a claim of the first of these kinds that occurs.
HEADLINES = (
    *(
        *DECIDED,
        "open",
        "apart",
        *("incomplete", "unended", "extended", "undeclared", "search", "given rates", "doubtful"),
        "interval",
        "no interval",
        "one size",
        "unlike",
        "invalid",
    ),
    "no data",
)


@dataclass(frozen=True)
class Claim:
    """One sentence.

    norms: the subject; several norms if all are independent of the size
    kind: see `Comparison.kind`; or `independent` (of the norm batch size, by measurement),
        `one size`, `invalid`, `cause`
    details: follow the claim in brackets
    elsewhere: the same comparison at other budgets, as further sentences
    sizes: the sizes that the claim is about
    reference: the norm compared with; empty for a norm along the sizes
    comparison: the difference that the claim states
    """

    norms: Sequence[str]
    kind: str
    claim: str
    details: str = ""
    elsewhere: str = ""
    sizes: Sequence[int] = ()
    reference: str = ""
    comparison: Comparison | None = None

    @property
    def norm(self) -> str:
        return ", ".join(self.norms)

    @property
    def is_answer(self) -> bool:
        """False if it only says why there is none."""
        return self.kind not in ("unlike", "no data", "invalid")

    def explains(self, other: Claim) -> bool:
        """True if it says what carries the loss that the other claims."""
        is_same = (self.norms, self.sizes) == (other.norms, sorted(set(other.sizes)))
        return self.kind == "cause" and bool(self.details) and is_same

    @property
    def mentions(self) -> list[str]:
        return [*self.norms, *([self.reference] if self.reference else [])]

    @property
    def text(self) -> str:
        return f"{self.claim}{self.details and f' ({self.details})'}.{self.elsewhere}"


@dataclass(frozen=True)
class Answer:
    """All sentences about one slice, or about several that differ only in data set.

    untested: on differences that the report does not test
    """

    heading: str
    parts: list[Slice]
    sentences: list[Claim]
    untested: list[Claim] = field(default_factory=list)

    @property
    def measured_on(self) -> str:
        """`CPU (AMD EPYC, 2 cores), float32, 14,458 parameters`, without what is not recorded."""
        runs = [run for part in self.parts for run in part.runs]
        parts = dict.fromkeys(filter(None, map(_place_words, runs)))
        counts = {run.result.num_parameters for run in runs} - {None}
        if sizes := sorted(count for count in counts if count is not None):
            ends = dict.fromkeys((sizes[0], sizes[-1]))
            parts[f"{' to '.join(f'{count:,}' for count in ends)} parameters"] = None
        return ", ".join(parts)

    @property
    def losses(self) -> list[Claim]:
        claims = (*self.sentences, *self.untested)
        left_out = ("cause", "cost")
        return [claim for claim in claims if not claim.reference and claim.kind not in left_out]

    @property
    def comparisons(self) -> list[Claim]:
        return [claim for claim in (*self.sentences, *self.untested) if claim.reference]


@dataclass(frozen=True)
class Section:
    """The answers about slices that differ only in their budget, and the sentence above them all.

    heading: what the slices have in common
    headline: a verdict that is the same at every budget; else one, and what others say
    """

    heading: str
    answers: list[Answer]
    headline: Claim | None

    def leads(self, rankings: Sequence[Any]) -> bool:
        """True if the headline stands above the rankings, which say more than other claims."""
        headline = self.headline
        return headline is not None and (
            not rankings or (headline.kind in DECIDED and not headline.reference)
        )


def answer_slices(slices: Sequence[Slice], comparisons: Sequence[Comparison]) -> list[Answer]:
    """The sentences about the slices of one report.

    comparisons: all of `normexp.reporting.verdict.compare`, which are one family
    """
    answers = []
    for part in slices:
        of_part = [comparison for comparison in comparisons if comparison.part is part]
        claims = [
            *_plain_claims(part),
            *(_claim(comparison, comparisons) for comparison in of_part),
            *(claim for comparison in of_part for claim in _cause_claims(comparison)),
        ]
        claims.sort(key=lambda claim: (bool(claim.reference), claim.kind == "independent"))
        untested = [one for one in claims if one.comparison and not one.comparison.is_primary]
        tested = [one for one in claims if one not in untested]
        answers.append(Answer(part.heading, [part], tested, untested))
    return answers


def group_by_budget(answers: Sequence[Answer], comparisons: Sequence[Comparison]) -> list[Section]:
    """Answers whose slices differ only in their budget share a section."""
    alike: dict[Hashable, list[Answer]] = {}
    for answer in answers:
        alike.setdefault(answer.parts[0].place, []).append(answer)
    return [
        Section(_common_heading(same), same, headline_of(same, comparisons))
        for same in alike.values()
    ]


def _common_heading(answers: Sequence[Answer]) -> str:
    """The heading without the budget, which stands above each answer where there are several."""
    part = answers[0].parts[0]
    if len(answers) == 1:
        return part.heading
    return ", ".join(words for words in part.heading.split(", ") if words != part.budget)


def headline_of(answers: Sequence[Answer], comparisons: Sequence[Comparison]) -> Claim | None:
    """The first verdict that is the same at every budget, else the first verdict, else a claim.

    With the other budgets, and what carries a loss; its details are those of the causes.
    """
    claims = [claim for answer in answers for claim in answer.sentences]
    budgets = {claim.comparison.budget for claim in claims if claim.comparison is not None}
    ranks = {kind: place for place, kind in enumerate(HEADLINES, start=2)}

    def rank(claim: Claim) -> int:
        comparison = claim.comparison
        if comparison is None or comparison.verdict is None:
            return ranks.get(claim.kind, len(HEADLINES) + 2)
        same = {
            other.budget
            for other in at_other_budgets(comparison, comparisons)
            if other.kind == comparison.kind
        }
        return 0 if {comparison.budget, *same} >= budgets else 1

    first = min(claims, key=rank, default=None)
    if first is None:
        return None
    text = f"{first.claim}.{first.elsewhere}"
    cause = next((one for one in claims if one.comparison is None and one.explains(first)), None)
    if cause is not None:
        text += f" {cause.claim}"
    details = cause.details if cause else ""
    return replace(first, claim=text.removesuffix("."), details=details, elsewhere="")


def _plain_claims(part: Slice) -> Iterator[Claim]:
    """Claims on norms without a comparison along the sizes; independent norms share a sentence."""
    axis = AXIS_WORDS[part.axis]
    alike: dict[str, list[str]] = {}
    for norm, line in part.lines.items():
        size, first = next(iter(line.items()))
        invalid = next((cell.invalid for cell in line.values() if cell.invalid), None)
        if invalid:
            yield Claim([norm], "invalid", f"{norm} is not compared: {invalid}")
        elif norm in part.independent:
            count = _count_words(first, part, len(part.values[first]), "seed")
            alike.setdefault(count, []).append(norm)
        elif len(line) < 2:
            count = _count_words(first, part, len(part.values[first]), "seed")
            text = f"{norm} was run at one {axis} only, {size}"
            value = part.mean(first)
            if value.estimate is not None:
                text += f": {part.metric.label} {format_mean(value, part.metric)}"
            yield Claim([norm], "one size", text, count, sizes=[size])
    if (cost := _cost_words(part)) is not None:
        yield Claim(list(part.lines), "cost", cost)
    if alike:
        norms = [norm for same in alike.values() for norm in same]
        they, do = ("it does", "does") if len(norms) == 1 else ("they do", "do")
        counts = [f"{listed(same)}: {count}" for count, same in alike.items()]
        shown = "; ".join(alike if len(alike) == 1 else counts)
        claim = f"{listed(norms)} {do} not depend on the {axis}"
        details = f"measured by a probe: {they} not mix samples; trained with {shown}"
        yield Claim(norms, "independent", claim, details)


def _cause_claims(comparison: Comparison) -> Iterator[Claim]:
    """What carries a loss along the sizes, or why that is not said."""
    if (words := words_on_causes(comparison)) is not None:
        sizes = sorted(comparison.sizes)
        yield Claim([comparison.first.norm], "cause", *words, sizes=sizes)


def _cost_words(part: Slice) -> str | None:
    """What a step of each of two norms costs; None for more norms, or without measurements."""
    steps, memory = [], []
    for norm, line in part.lines.items():
        timings = [run.result.timing for run in [*line.values()][-1].runs]
        timings = [timing for timing in timings if "backward_mb_per_sample" in timing]
        if not timings:
            return None
        step = statistics.median(timing["step_ms"] / timing["stack_size"] for timing in timings)
        steps.append(f"{step:.3g} ms with {norm}")
        memory.append(f"{1000 * timings[0]['backward_mb_per_sample']:,.3g} kB")
    if len(steps) != 2:
        return None
    return (
        f"A step of one seed takes {listed(steps)}; a forward keeps {listed(memory)} per sample "
        "for its backward"
    )


def listed(names: Sequence[str], last: str = "and") -> str:
    """`layer, instance and group`, or `layer, instance, ... and 94 more`."""
    if len(names) > MOST_NAMES:
        names = [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} more"]
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _claim(comparison: Comparison, comparisons: Sequence[Comparison]) -> Claim:
    kind, along = comparison.kind, comparison.is_along_sizes
    cells = list(dict.fromkeys(cell for other in comparisons for cell in other.part.values))
    lost = lost_words(comparison.second, comparison.part)
    details = [
        _count_words(
            comparison.first, comparison.part, comparison.gap.n, "seed" if along else "pair"
        ),
        f"{comparison.second.norm} at {comparison.sizes[1]}: {lost}" if lost else "",
        _diverged_words(comparison),
        _basis_words(comparison),
        _seed_words(comparison),
        _tuned_words(comparison),
        _rate_words(comparison),
        _search_words(comparison),
        "" if any(comparison.tuned) else _optimism_words(comparison),
        _training_words(comparison, cells) if comparison.verdict else "",
    ]
    budget = f", at {comparison.budget}" if comparison.budget else ""
    elsewhere = [
        _budget_words(comparison, other) for other in at_other_budgets(comparison, comparisons)
    ]
    if comparison.change is not None:
        words = _change_words(comparison, comparison.change)
        elsewhere.append(f" {words[0].upper()}{words[1:]}{given_words(comparison)}.")
    has_scope = comparison.verdict or elsewhere
    scope = budget + _rate_scope(comparison) if has_scope and not comparison.unlike else ""
    return Claim(
        [comparison.first.norm],
        kind,
        _words(comparison, kind) + scope + given_words(comparison),
        "; ".join(filter(None, details)),
        "".join(elsewhere),
        sizes=sorted(set(comparison.sizes)),
        reference="" if along else comparison.second.norm,
        comparison=comparison,
    )


def _words(comparison: Comparison, kind: str) -> str:
    """The sentence without its scope and details."""
    metric, axis = comparison.part.metric, AXIS_WORDS[comparison.part.axis]
    norm, reference, (small, large) = (
        comparison.first.norm,
        comparison.second.norm,
        comparison.sizes,
    )
    shown, limit = gap_words(comparison, kind, comparison.gap), margin_words(comparison)
    missing = "too few seeds for an" if comparison.gap.n < 2 else "the same for every seed, so no"
    apart, n = comparison.assessment.num_apart, comparison.gap.n
    lie = "seeds lie" if apart > 1 else "seeds lies"
    end = {
        "no interval": f"; {missing} interval",
        "open": f"; undecided{seeds_words(comparison)}",
        "apart": f"; undecided: {apart} of {n} {lie} apart, and the verdict hangs on them",
        "search": "; no verdict while the search of learning rates is incomplete",
        "given rates": "; no verdict: given the learning rates that one search chose",
        "undeclared": "; no verdict: the declared number of seeds is unknown",
        "incomplete": f"; no verdict yet: {_declared_words(comparison)}",
        "unended": f"; no verdict yet: {_unended_words(comparison)}",
        "doubtful": "; no verdict: the records contradict themselves, see the top of the report",
        "extended": f"; no verdict: {_added_words(comparison)}",
    }.get(kind, "")
    least = f"at least {shown}" if comparison.has_diverged else shown  # of a verdict
    if comparison.unlike:
        return _unlike_words(comparison)
    loses, gains = ("loses", "gains") if metric.higher_is_better else ("worsens by", "improves by")
    if comparison.is_along_sizes:
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


def gap_words(comparison: Comparison, kind: str, gap: Interval) -> str:
    """The gap as its sentence shows it: what is lost or gained, or the first minus the second."""
    is_loss = kind in ("loses", "worse")
    is_negated = is_loss if kind in DIRECTED else not comparison.part.metric.higher_is_better
    return comparison.part.metric.format(-gap if is_negated else gap)


def seeds_words(comparison: Comparison) -> str:
    """`, 24 seeds would decide`, of an undecided difference; see the note of a report."""
    needed = needed_words(comparison)
    return f", {needed} would decide" if needed else ""


def needed_words(comparison: Comparison) -> str:
    """`24 seeds`, `more test samples`: what would decide an undecided difference."""
    if comparison.kind != "open" or comparison.has_diverged:
        return ""  # the size of a difference to a diverged run is not known
    if comparison.lacks_samples:
        return "more test samples"
    needed = comparison.seeds_to_decide
    return f"over {MAX_SEEDS} seeds" if needed is None else f"{needed} seeds"


def _unlike_words(comparison: Comparison) -> str:
    """`batch and group are not compared: num_steps=200 and 800 differ`."""
    ends = [f"{cell.norm} {name}" for name, cell in _ends(comparison)]
    if not comparison.is_along_sizes:
        ends = [comparison.first.norm, comparison.second.norm]
    values = [f"{key}={a} and {b}" for key, (a, b) in sorted(comparison.unlike.items())]
    return f"{' and '.join(ends)} are not compared, their recipes differ: {', '.join(values)}"


def margin_words(comparison: Comparison) -> str:
    """`a quarter of batch's error (0.62 points)`, or `1 point`."""
    metric, margin = comparison.part.metric, comparison.margin
    words = metric.amount_words(margin)
    is_share = metric.share_of_error and margin < metric.tolerance
    norm = comparison.second.norm
    whose = "its" if comparison.is_along_sizes else f"{norm}'s"
    return f"a quarter of {whose} error ({words})" if is_share else words


def _basis_words(comparison: Comparison) -> str:
    """What the interval does not allow for, and a margin that was not declared."""
    metric = comparison.part.metric
    return "; ".join(
        filter(
            None,
            (
                "" if comparison.num_samples else "on these test samples",
                "added by a later command: a family of its own" * bool(comparison.round),
                "margin not declared before the data"
                * (not metric.rule and not metric.is_tolerance_given),
            ),
        )
    )


def given_words(comparison: Comparison) -> str:
    """`, with tolerance=2 given to the report`: choices that were made after the data."""
    part = comparison.part
    given = [f"metric={part.metric.name}"] if part.is_metric_given else []
    if comparison.is_reference_given:
        given.append(f"reference={comparison.second.base}")
    if part.metric.is_tolerance_given and comparison.is_primary:
        given.append(f"tolerance={part.metric.tolerance:g}")
    return f", with {' and '.join(given)} given to the report" if given else ""


def _rate_scope(comparison: Comparison) -> str:
    """` and lr=0.1` where each cell was trained at one rate."""
    cells = (comparison.first, comparison.second)
    rates = list(dict.fromkeys(f"{cell.lr:g}" for cell in cells if cell.lr is not None))
    is_searched = any(comparison.part.alternatives(cell) for cell in cells)
    return f" and lr={' and '.join(rates)}" if rates and not is_searched else ""


def _budget_words(comparison: Comparison, other: Comparison) -> str:
    """` At epochs=48: 0.8 [0.3, 1.3] points the other way.`"""
    if other.unlike:
        return ""
    if other.gap.estimate is None or comparison.gap.estimate is None:
        return f" At {other.budget}: no result."
    turns = _side(comparison.gap) * _side(other.gap) < 0 and comparison.kind in DIRECTED
    shown = gap_words(other, comparison.kind, -other.gap if turns else other.gap)
    way = " the other way" * turns
    return f" At {other.budget}: {shown}{way}{given_words(other)}."


def _side(gap: Interval) -> int:
    """The sign of an interval that excludes 0, else 0."""
    if gap.low is None or gap.high is None:
        return 0
    return int(gap.low > 0) - int(gap.high < 0)


def _change_words(comparison: Comparison, change: Change) -> str:
    """`from epochs=12 to epochs=48 the difference changes by 2.9 [2.1, 3.7] points`."""
    metric = comparison.part.metric
    gap = change.gap if metric.higher_is_better else -change.gap
    where, shown = " to ".join(change.budgets), metric.format(gap)
    amount = metric.amount_words(change.margin)
    return f"from {where} " + {
        "changes": f"the difference changes by {shown}",
        "does not change": f"the difference does not change by more than {amount}: {shown}",
        "no data": "no seed has a result at both",
        "apart": f"it is undecided whether the difference changes: {shown}, and seeds lie apart",
        "open": f"it is undecided whether the difference changes: {shown}",
    }.get(change.kind, f"the difference changes by {shown}, without a verdict")


def note_on(comparisons: Sequence[Comparison]) -> str:
    """Explains what the intervals and verdicts of a report promise; empty without an interval."""
    if not any(comparison.gap.low is not None for comparison in comparisons):
        return ""
    judged = [comparison for comparison in comparisons if comparison.is_judged]
    references = dict.fromkeys(
        comparison.second.base for comparison in judged if not comparison.is_along_sizes
    )
    members = []
    if any(comparison.is_along_sizes for comparison in judged):
        members.append("each norm that mixes samples, from its largest to its smallest size")
    if references:
        members.append(f"each norm against {listed(list(references))} at the smallest size")
    if any(len(cells) > 2 for part in {c.part for c in judged} for cells in contenders(part)):
        members.append("the choice of the norms that may be the best")
    if any(comparison.change is not None for comparison in judged):
        members.append("its change from the shortest to the longest budget")
    sizes = {comparison.round: comparison.family_size for comparison in judged}
    count = " and ".join(str(sizes[number]) for number in sorted(sizes)) or "0"
    count = ": ".join([count, *filter(None, [", and ".join(members)])])
    return (
        "Intervals of differences are 95 % each, paired by seed, for new seeds and new test "
        "samples; for new seeds alone where it says 'on these test samples', as those of means "
        "always are. The number of "
        f"differences that this report tests is {count}. The probability that any verdict on them "
        "is false is at most 5 %, for those of each command, so a difference may be undecided "
        "although its own interval excludes 0. The seeds that would decide are those of a new "
        "study (another study=NAME): seeds that are added to this one get no verdict. Training "
        "counts as converged where a budget at least twice as long moved neither its loss nor "
        "the metric by the margin."
    )


# Details


def _count_words(cell: CellRow, part: Slice, n: int, noun: str) -> str:
    """`n = 5 seeds; 2 of 8 diverged, 1 of 8 missing`."""
    lost = lost_words(cell, part)
    return f"n = {n} {noun}{'s' * (n != 1)}" + (f"; {lost}" if lost else "")


def lost_words(cell: CellRow, part: Slice) -> str:
    """`2 of 8 diverged, 1 of 8 missing`; also counts runs that a callback ended early."""
    lost = {
        "diverged": cell.diverged,
        "failed": cell.failed,
        "missing": cell.missing,
        "at chance": len(part.at_chance(cell)),
        "ended early": cell.early,
        f"without {part.metric.name}": cell.finished - len(part.values[cell]),
    }
    parts = [f"{count} of {cell.expected} {word}" for word, count in lost.items() if count]
    return ", ".join(parts)


def _diverged_words(comparison: Comparison) -> str:
    """What the difference is where diverged runs, which may be worse, count as the worst run."""
    if not comparison.has_diverged:
        return ""
    bound = ""  # of a verdict: its sentence has `at least`
    if all(comparison.diverged):
        bound = " in both cells, so the difference may be greater or smaller"
    elif comparison.verdict is None:
        bound = f", so the difference is {bound_words(comparison)} this"
    return f"diverged runs count as the worst run{bound}"


def bound_words(comparison: Comparison) -> str:
    """`at most` or `at least`, of first minus second, if runs of one of the two diverged."""
    if comparison.diverged[0] == comparison.diverged[1]:
        return ""
    is_most = comparison.diverged[0] == comparison.part.metric.higher_is_better
    return "at most" if is_most else "at least"


def _seed_words(comparison: Comparison) -> str:
    """`ahead with 6 of 8 seeds, 1 equal`; a warning if all seeds are equal."""
    a, b = comparison.pairs
    if len(a) > 1 and (a == b).all() and not comparison.has_diverged:
        return "equal under every seed: is the norm used?"
    if comparison.is_along_sizes or not len(a) or any(comparison.tuned):
        return ""
    ahead = int((a > b).sum() if comparison.part.metric.higher_is_better else (a < b).sum())
    equal = int((a == b).sum())
    return f"ahead with {ahead} of {len(a)} seeds" + (f", {equal} equal" if equal else "")


def _ends(comparison: Comparison) -> list[tuple[str, CellRow]]:
    """Both cells with their names in details: `at 2` and `at 128`, or `of group` and `of batch`."""
    cells = (comparison.first, comparison.second)
    if comparison.is_along_sizes:
        return [(f"at {size}", cell) for size, cell in zip(comparison.sizes, cells, strict=True)]
    return [(f"of {cell.norm}", cell) for cell in cells]


def _declared_words(comparison: Comparison) -> str:
    """`5 of 8 declared seeds`, of the cell that lacks most."""
    counts = {
        (len({run.seed for run in cell.runs} & cell.declared), len(cell.declared))
        for cell in comparison.cells
        if cell.state_of_seeds != "complete"
    }
    ended, declared = min(counts, default=(0, 0))
    return f"{ended} of {declared} declared seeds"


def _added_words(comparison: Comparison) -> str:
    """`4 seeds were added to the 4 declared, a new study of new seeds would give one`."""
    cells = [cell for cell in comparison.cells if cell.state_of_seeds == "extended"]
    counts = [(len(cell.ended - cell.declared), len(cell.declared)) for cell in cells]
    added, declared = max(counts, default=(0, 0))
    return (
        f"{added} seed{'s were' if added > 1 else ' was'} added to the {declared} declared, "
        "a new study of new seeds would give one"
    )


def _unended_words(comparison: Comparison) -> str:
    """`3 declared cells have not ended or were forgotten, see normexp.status`."""
    count = max(cell.unended for cell in comparison.cells)
    have = "s have not ended or were" if count > 1 else " has not ended or was"
    return f"{count} declared cell{have} forgotten, see normexp.status"


def _tuned_words(comparison: Comparison) -> str:
    """`tuned over 5 rates: 4 of 8 seeds choose, the others report; best rate at an edge ...`."""
    said = []
    for fit, (name, _) in zip(comparison.tuned, _ends(comparison), strict=True):
        if fit is not None:
            n = len(fit.values)
            said = said or [
                f"tuned over {len(fit.shares)} rates: {fit.num_choosing} of {n} seeds choose, the "
                "others report, averaged over all splits"
            ]
            if fit.is_at_edge:
                share = f"{100 * fit.share_at_edges:.0f} %"
                said.append(f"best rate {name} at an edge of the grid in {share} of splits")
    return "; ".join(said)


def _rate_words(comparison: Comparison) -> str:
    """`learning rate 0.1 of group, 0.05 of batch`, where the two differ."""
    if comparison.first.lr == comparison.second.lr or any(comparison.tuned):
        return ""
    said = [f"{cell.lr:g} {name}" for name, cell in _ends(comparison) if cell.lr is not None]
    return f"learning rate {', '.join(said)}"


def _search_words(comparison: Comparison) -> str:
    """`lr searched: 16 points for group, 16 for batch`, where fresh seeds followed one search."""
    cells = {cell.norm: cell for cell in (comparison.first, comparison.second)}
    keys = sorted({key for cell in cells.values() for key in cell.searched})
    counts = [f"{cell.num_points} points for {norm}" for norm, cell in cells.items()]
    return f"{', '.join(keys)} searched: {', '.join(counts)}" if keys else ""


def _optimism_words(comparison: Comparison) -> str:
    """`learning rates chosen on these seeds: optimism +0.14 points at 2, +0.20 points at 128`."""
    amounts, metric = [], comparison.part.metric
    for name, cell in _ends(comparison):
        if comparison.part.alternatives(cell):
            optimism = comparison.part.optimism(cell)
            amount = "unknown"
            if optimism is not None:
                amount = f"{format_signed(optimism, metric.digits + 1)} {metric.unit}".rstrip()
            amounts.append(f"{amount} {name}")
    return f"learning rates chosen on these seeds: optimism {', '.join(amounts)}" if amounts else ""


def _training_words(comparison: Comparison, cells: Sequence[CellRow]) -> str:
    """`train loss at 2: 0.67 (not known to have converged), at 128: 0.05 (converged)`."""
    part = comparison.part
    ends = [(name, _training_end(cell, part, cells)) for name, cell in _ends(comparison)]
    known = [f"{name}: {words}" for name, words in ends if words]
    return f"train loss {', '.join(known)}" if known else "train loss not recorded"


def _training_end(cell: CellRow, part: Slice, cells: Sequence[CellRow]) -> str:
    """`0.67 (not known to have converged)`: the loss over the last fifth of the steps.

    Converged: a budget at least twice as long moved neither this loss nor the metric by as much as
    the margin. Empty without a recorded loss.

    cells: all cells of the report
    """
    level = _last_loss(cell)
    if level is None:
        return ""
    margin = describe_metric("train/loss").tolerance
    is_converged = any(
        (other_level := _last_loss(other)) is not None
        and abs(other_level - level) < margin
        and _moves_less_than_margin(cell, other, part.metric)
        for other in _longer(cell, cells)
    )
    return f"{level:.2g} ({'converged' if is_converged else 'not known to have converged'})"


def _longer(cell: CellRow, cells: Sequence[CellRow]) -> Iterator[CellRow]:
    """The same cell at budgets that are at least twice as long."""
    for other in cells:
        is_same = (other.base, other.lr, other.place) == (cell.base, cell.lr, cell.place)
        sizes = [(c.batch_size, c.micro_batch_size, c.norm_batch_size) for c in (cell, other)]
        lengths = [c.budget.partition("=")[::2] for c in (cell, other)]
        (unit, short), (other_unit, long) = lengths
        is_same = is_same and sizes[0] == sizes[1] and unit == other_unit
        if is_same and short and float(long) >= 2 * float(short):
            yield other


def _moves_less_than_margin(cell: CellRow, other: CellRow, metric: Metric) -> bool:
    means = [np.mean([*values.values()]) for c in (cell, other) if (values := c.values(metric))]
    if len(means) < 2:
        return False
    return bool(abs(means[1] - means[0]) < margin_at(metric, float(means[1])))


@cache
def _last_loss(cell: CellRow) -> float | None:
    """The training loss over the last fifth of the steps, averaged over seeds."""
    levels = []
    for run in cell.runs:
        curve = [row for row in run.history() if row.name == "train/loss"]
        if run.result.status == "finished" and curve:
            end = curve[-1].samples_seen
            levels.append(np.mean([row.value for row in curve if row.samples_seen > 0.8 * end]))
    return float(np.mean(levels)) if levels else None


def _place_words(run: RunRow) -> str:
    """`GPU (4 x NVIDIA H100), float32 with matmul_precision=high`."""
    environment, config = run.result.environment, run.config
    gpu, cpu, cores = (environment.get(name) for name in ("gpu", "cpu", "cpu_count"))
    devices, precision = config.get("devices"), config.get("precision")
    matmul = config.get("matmul_precision")
    count = f"{devices} x " if devices and devices > 1 else ""
    place = f"GPU ({count}{gpu})" if gpu else ""
    if cpu and not gpu:
        place = f"{count}CPU ({cpu}" + (f", {cores} cores)" if cores else ")")
    numbers = PRECISIONS.get(precision or "", precision or "")
    if gpu and precision == "32-true" and matmul:
        numbers += f" with matmul_precision={matmul}"
    return ", ".join(filter(None, (place, numbers)))
