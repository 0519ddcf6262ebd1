"""Claims of the literature as declared comparisons; all of them share one error rate.

A comparison holds if its verdict is the expected one. It fails with the opposite one, or, where a
tie is expected, with a difference that is shown to be larger than the margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import yaml

from normexp.benchmark.reference import Reference
from normexp.training.config.groups import conf_dir
from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import label_cells
from normexp.verdicts.cells import CellRuns, build_cells, metric_names
from normexp.verdicts.compare import DIFFERENCE, gap_of
from normexp.verdicts.family import ALPHA, Verdict, decide, p_value
from normexp.verdicts.interval import Interval
from normexp.verdicts.metric import Estimate, Metric, describe_metric
from normexp.verdicts.tables import Table, table_of
from normexp.verdicts.waves import drift_of

Outcome = Literal["holds", "fails", "undecided", "no runs", "nothing to explain"]
OPPOSITE = {"better": "worse", "worse": "better"}
NOTE = (
    "Each claim: holds if all of its comparisons do (or any, where it says so), fails if one does. "
    "Differences at learning rates tuned by cross-fitting; positive: the first is better."
)


@dataclass(frozen=True, eq=False)
class ClaimTest:
    """A declared comparison at one budget; gap, verdict and metric are None without runs."""

    norm: str
    against: str
    workload: str
    expected: str
    outcome: Outcome = "no runs"
    gap: Interval | None = None
    verdict: Verdict | None = None
    metric: Metric | None = None


@dataclass(frozen=True, eq=False)
class Claim:
    """What the runs say about one claim."""

    name: str
    statement: str
    source: str
    outcome: Outcome
    tests: Sequence[ClaimTest]


@cache
def declared_claims() -> list[dict[str, Any]]:
    """conf/experiment/claims.yaml, which explains its keys."""
    text = (conf_dir() / "experiment" / "claims.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["claims"]


def judge_claims(reference: Reference) -> list[Claim]:
    """The outcome of every claim."""
    declared = declared_claims()
    family_size = sum(
        len(comparison["budgets"]) for claim in declared for comparison in claim["comparisons"]
    )
    cells = {}
    for name in reference.recipes:
        cells[name] = label_cells(build_cells(reference.rows_of([name])))

    def tests_of(comparison: Mapping[str, Any]) -> list[ClaimTest]:
        budgets = comparison["budgets"]
        return [_test(cells, comparison, budget, family_size) for budget in budgets]

    claims = []
    for claim in declared:
        tests = [test for comparison in claim["comparisons"] for test in tests_of(comparison)]
        outcome = _outcome_of(tests, decisive="holds" if claim.get("rule") == "any" else "fails")
        required = tests_of(claim["requires"]) if "requires" in claim else []
        is_met = not required or any(test.outcome == "holds" for test in required)
        if outcome != "no runs" and not is_met:
            outcome = "nothing to explain"
        claims.append(Claim(claim["name"], claim["statement"], claim["source"], outcome, tests))
    return claims


def _outcome_of(tests: Sequence[ClaimTest], *, decisive: Outcome) -> Outcome:
    """The decisive outcome if any test has it, or the one that all tests have."""
    outcomes = {test.outcome for test in tests}
    if decisive in outcomes:
        return decisive
    return tests[0].outcome if len(outcomes) == 1 else "undecided"


def _test(
    cells: Mapping[str, list[CellRuns]],
    comparison: Mapping[str, Any],
    budget: str,
    family_size: int,
) -> ClaimTest:
    workload, expected = comparison["workload"], comparison["expect"]
    sides = [comparison["first"], comparison["second"]]
    test = ClaimTest(_words(sides[0]), _words(sides[1]), f"{workload}, {budget}", expected)
    first, second = (
        _arm_at_size(cells, side, side.get("workload", workload), budget) for side in sides
    )
    if first is None or second is None:
        return test
    metric = second.metric
    drift = None if first.waves is None else drift_of([first.waves, second.waves])
    gap, _ = gap_of(first, second, drift)
    if first.why_at_edge or second.why_at_edge:  # a better learning rate may lie outside
        return replace(test, outcome="undecided", gap=gap, metric=metric)
    verdict = decide(gap, margin=metric.tolerance, family_size=family_size)
    is_refuted = verdict == OPPOSITE.get(expected)
    if expected == "tie":
        is_refuted = _is_beyond(gap, metric.tolerance, family_size)
    outcome: Outcome = "fails" if is_refuted else "undecided"
    if verdict == expected:
        outcome = "holds"
    return replace(test, outcome=outcome, gap=gap, verdict=verdict, metric=metric)


def _is_beyond(gap: Interval, margin: float, family_size: int) -> bool:
    """True if the difference is shown to be larger than the margin."""
    excess = abs(gap.estimate or 0.0) - margin
    return excess > 0 and family_size * p_value(replace(gap, estimate=excess)) <= ALPHA


def _arm_at_size(
    cells: Mapping[str, list[CellRuns]], side: Mapping[str, Any], workload: str, budget: str
) -> ArmAtSize | None:
    """The norm of a side with all of its learning rates; None unless they tune it."""
    short = f"{workload}_short"
    recipe = short if budget == "short" and short in cells else workload
    same = []
    for cell in cells.get(recipe, ()):
        size = side.get("norm_batch_size") or cell.batch_size
        is_of_size = not cell.mixes_samples or cell.norm_batch_size == size
        if cell.arm == side["norm"] and is_of_size:
            same.append(cell)
    if not same:
        return None
    kind = "accuracy" if "test/accuracy" in metric_names(same) else "bits_per_byte"
    statistics = f"@{side['statistics']}" if "statistics" in side else ""
    metric = describe_metric(f"test/{kind}{statistics}")
    same.sort(key=lambda cell: cell.tuned or 0.0)
    arm_at_size = ArmAtSize(side["norm"], same, metric)
    return arm_at_size if arm_at_size.tuning is not None else None


def _words(side: Mapping[str, Any]) -> str:
    """`batch at batch size 32 at 2, precise statistics`."""
    words = side["norm"]
    if "batch_size" in side:
        words += f" at batch size {side['batch_size']}"
    if side.get("norm_batch_size"):
        words += f" at {side['norm_batch_size']}"
    if "statistics" in side:
        words += f", {side['statistics']} statistics"
    return words


def claims_table(claims: Sequence[Claim]) -> Table:
    """A row for each claim, followed by its comparisons."""
    rows, count = [], 0
    for claim in claims:
        rows.append({"claim": f"{claim.statement} ({claim.source})", "outcome": claim.outcome})
        for test in claim.tests:
            count += 1
            where = f"– {test.norm} against {test.against}, {test.workload}"
            row: dict[str, Any] = {"claim": where, "verdict": test.verdict}
            if test.metric and test.gap:
                row[DIFFERENCE] = Estimate(test.gap, test.metric.digits, is_signed=True)
                row["unit"] = test.metric.unit
            rows.append(row | {"expected": test.expected, "outcome": test.outcome})
    note = f"{NOTE} Verdicts are corrected for {count} comparisons (5 % for all claims)."
    return table_of("claims", "Claims of the literature", rows, note=note)
