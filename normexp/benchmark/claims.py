"""The verdicts on the declared claims, from the table alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normexp.benchmark.contrast import Assessment, verdict_on
from normexp.benchmark.family import ALPHA, p_value, seeds_for, spread_of
from normexp.benchmark.protocol import claims, recipe_at
from normexp.benchmark.score import Tuned, compare, tune
from normexp.benchmark.table import Table
from normexp.stats.interval import Interval

EXPECTED = {
    "below": "below",
    "above": "above",
    "below_margin": "below by more than the margin",
    "above_margin": "above by more than the margin",
    "within": "within the margin",
}
Outcome = Literal["holds", "fails", "undecided", "not testable here"]


@dataclass(frozen=True, eq=False)
class Tested:
    """One comparison of a claim at one budget, or one answer of a probe.

    words: `batch at 2 minus batch, convnet at the long budget`
    needed: seeds that would decide it; None if not known, or more than 1,000
    measured: of a probe of the built network, which has no error rate; None: a comparison
    """

    words: str
    expect: str
    outcome: Outcome
    assessment: Assessment | None = None
    unit: str = ""
    needed: int | None = None
    measured: bool | None = None


@dataclass(frozen=True, eq=False)
class Beside:
    """Comparisons that are shown beside a verdict and are no part of it.

    declared: `what` differs there, and, if known, `source` and `published`
    """

    declared: Mapping[str, Any]
    tested: tuple[Tested, ...]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the runs say of one claim."""

    name: str
    claim: Mapping[str, Any]
    outcome: Outcome
    tested: tuple[Tested, ...]
    reason: str = ""
    beside: tuple[Beside, ...] = ()


def judge(table: Table) -> list[Verdict]:
    """The verdict on every claim; all comparisons share one error rate."""
    declared = claims()
    family = sum(len(c["budgets"]) for claim in declared for c in claim["comparisons"])
    return [_judge(table, claim, family) for claim in declared]


def _judge(table: Table, claim: Mapping[str, Any], family: int) -> Verdict:
    def test(comparisons: Sequence[Mapping[str, Any]]) -> tuple[Tested, ...]:
        return tuple(
            _test(table, comparison, budget, family)
            for comparison in comparisons
            for budget in comparison["budgets"]
        )

    tested = (*test(claim["comparisons"]), *_probed(table, claim))
    outcome, reason = _decide(tested, claim.get("rule") == "any")
    if outcome != "not testable here" and (needs := claim.get("requires")) is not None:
        fall = test([needs])
        if not any(one.outcome == "holds" for one in fall):
            outcome = "not testable here"
            reason = "there is no fall to give back at any budget: " + "; ".join(
                f"{one.words}: {words_of(one)}" for one in fall
            )
    beside = tuple(
        Beside(declared, test(declared["comparisons"])) for declared in claim.get("beside", [])
    )
    return Verdict(claim["name"], claim, outcome, tested, reason, beside)


def _decide(tested: Sequence[Tested], needs_any: bool) -> tuple[Outcome, str]:
    """The outcome of a claim by those of its comparisons, and what is missing."""
    outcomes = [one.outcome for one in tested]
    known = [outcome for outcome in outcomes if outcome != "not testable here"]
    if "fails" not in known and not any(one.assessment for one in tested):
        return "not testable here", "it has no runs"  # whatever its probes have confirmed
    missing = len(outcomes) - len(known)
    reason = f"{missing} of {len(outcomes)} comparisons have no runs" if missing else ""
    # One comparison refutes a claim that needs all, and proves one that needs any.
    decides, otherwise = ("holds", "fails") if needs_any else ("fails", "holds")
    if decides in known:
        return decides, reason
    if not missing and "undecided" not in known:
        return otherwise, reason
    return "undecided", reason


def _test(table: Table, comparison: Mapping[str, Any], budget: str, family: int) -> Tested:
    first, second = comparison["first"], comparison["second"]
    workload, expect = comparison["workload"], comparison["expect"]
    words = f"{_words(first)} minus {_words(second)}, {workload} at the {budget} budget"
    a, b = (
        _tuned(table, recipe_at(side.get("workload", workload), budget), side)
        for side in (first, second)
    )
    if a is None or b is None:
        return Tested(words, expect, "not testable here")
    assessment = compare(a, b)
    unit = "points" if b.is_accuracy else "bits per byte saved"
    outcome = _outcome(assessment, expect, family)
    needed = None
    if outcome == "undecided":
        needed = _seeds_to_decide(assessment.gap, b, expect, family)
    return Tested(words, expect, outcome, assessment, unit, needed)


def _probed(table: Table, claim: Mapping[str, Any]) -> Iterator[Tested]:
    """What probes of the built networks say, from the table."""
    probe = claim.get("measured_by_probe", {"norms": []})
    for norm in probe["norms"]:
        workload, trait, expect = probe["workload"], probe["trait"], probe["expect"]
        measured = table.traits.get(workload, {}).get(norm, {}).get(trait)
        words = f"{norm} {trait.replace('_', ' ')}, {workload}"
        if measured is None:
            yield Tested(words, str(expect), "not testable here")
        else:
            outcome = "holds" if measured == expect else "fails"
            yield Tested(words, str(expect), outcome, measured=measured)


def _seeds_to_decide(gap: Interval, reference: Tuned, expect: str, family: int) -> int | None:
    """Seeds that tell the difference from zero, or from the margin if the claim names it."""
    spread = spread_of(gap)
    if gap.estimate is None or spread is None:
        return None
    distance = abs(gap.estimate)
    if expect == "within" or expect.endswith("_margin"):
        margin, level = reference.margin.cap, reference.mean.estimate
        if reference.margin.share and level is not None:
            margin = min(margin, reference.margin.share * (reference.margin.perfect - level))
        distance = abs(margin - distance)
    return seeds_for(distance, spread[0], family, spread[1])


def _words(side: Mapping[str, Any]) -> str:
    size, kind = side.get("norm_batch_size"), side.get("statistics")
    batch = f" at batch size {side['batch_size']}" if "batch_size" in side else ""
    words = f"{side['norm']}" + (f" at {size}" if size else "") + batch
    return words + (f" with {kind} statistics" if kind else "")


def _tuned(table: Table, recipe: str, side: Mapping[str, Any]) -> Tuned | None:
    if recipe not in table.recipes:
        return None
    cells = table.rates_of(recipe, side["norm"], side.get("norm_batch_size"))
    kind = side.get("statistics", "running")
    name = "test/accuracy" + ("" if kind == "running" else f"@{kind}")
    if not cells or (kind != "running" and any(name not in cell.metrics for cell in cells)):
        return None
    return tune(cells, kind)


def _outcome(assessment: Assessment, expect: str, family: int) -> Outcome:
    """What a comparison says of the sign or margin that a claim expects."""
    verdict, _ = verdict_on(assessment, family)
    side = "below" if expect.startswith("below") else "above"
    other = "above" if side == "below" else "below"
    if expect == "within":
        if verdict == "within":
            return "holds"
        return "fails" if _is_beyond(assessment, verdict, family) else "undecided"
    if expect.endswith("_margin"):
        if verdict in (other, "within"):
            return "fails"
        return "holds" if verdict == side and _is_beyond(assessment, side, family) else "undecided"
    if verdict == side:
        return "holds"
    return "fails" if verdict == other else "undecided"


def _is_beyond(assessment: Assessment, verdict: str, family: int) -> bool:
    """Whether the difference is shown to be beyond a margin, on the side of its verdict.

    Distances are pairs: from the gap to the margin above it, and to the one below.
    """
    if verdict not in ("above", "below"):
        return False
    with_outliers = [assessment, *filter(None, [assessment.without_apart])]
    return all(_has_beyond(one, verdict, family) for one in with_outliers)


def _has_beyond(assessment: Assessment, verdict: str, family: int) -> bool:
    distances = assessment.distances[0 if verdict == "above" else 1 :: 2]
    return any(_is_negative(distance, family) for distance in distances)


def _is_negative(distance: Interval, family: int) -> bool:
    estimate = distance.estimate
    return estimate is not None and estimate < 0 and family * p_value(distance) <= ALPHA


def words_of(tested: Tested) -> str:
    """`-1.2 [-2.0, -0.4] points, claimed below: holds`."""
    if tested.measured is not None:
        return f"{'yes' if tested.measured else 'no'}, measured by a probe: {tested.outcome}"
    if tested.assessment is None:
        return "no runs"
    gap = tested.assessment.gap
    shown = f"{gap.estimate:.2f}"
    if gap.low is not None and gap.high is not None:
        shown += f" [{gap.low:.2f}, {gap.high:.2f}]"
    more = f", n = {tested.needed} would decide" if tested.needed else ""
    return f"{shown} {tested.unit}, claimed {EXPECTED[tested.expect]}: {tested.outcome}{more}"
