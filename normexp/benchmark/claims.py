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
from normexp.config.groups import conf_dir
from normexp.reporting.cells import CellRow, build_cells, metric_names
from normexp.reporting.compare import DIFFERENCE, paired
from normexp.reporting.metric import Estimate, Metric, describe_metric
from normexp.reporting.slices import Grid
from normexp.reporting.tables import Table, table_of
from normexp.stats.family import ALPHA, Verdict, decide, difference, p_value
from normexp.stats.interval import Interval

Outcome = Literal["holds", "fails", "undecided", "no runs", "nothing to explain"]
OPPOSITE = {"better": "worse", "worse": "better"}
NOTE = (
    "Each claim: holds if all of its comparisons do (or any, where it says so), fails if one does. "
    "Differences at learning rates tuned by cross-fitting; positive: the first is better."
)


@dataclass(frozen=True, eq=False)
class Tested:
    """A declared comparison at one budget; gap and verdict are None without runs."""

    norm: str
    against: str
    workload: str
    expected: str
    outcome: Outcome
    gap: Interval | None = None
    verdict: Verdict | None = None
    metric: Metric | None = None


@dataclass(frozen=True, eq=False)
class Claim:
    """What the runs say of one claim."""

    name: str
    statement: str
    source: str
    outcome: Outcome
    tested: tuple[Tested, ...]


@cache
def declared_claims() -> list[dict[str, Any]]:
    """conf/experiment/claims.yaml, which explains its keys."""
    text = (conf_dir() / "experiment" / "claims.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["claims"]


def judge_claims(reference: Reference) -> list[Claim]:
    """The outcome of every claim."""
    declared = declared_claims()
    family = sum(len(one["budgets"]) for claim in declared for one in claim["comparisons"])
    recipes = reference.recipes
    cells = {name: build_cells(reference.records_of([name])) for name in recipes}

    def test(comparison: Mapping[str, Any]) -> list[Tested]:
        return [_test(cells, comparison, budget, family) for budget in comparison["budgets"]]

    judged = []
    for claim in declared:
        tested = tuple(one for comparison in claim["comparisons"] for one in test(comparison))
        outcome = _outcome_of(tested, needs_any=claim.get("rule") == "any")
        needs = test(claim["requires"]) if "requires" in claim else []
        if needs and outcome != "no runs" and all(one.outcome != "holds" for one in needs):
            outcome = "nothing to explain"
        judged.append(Claim(claim["name"], claim["statement"], claim["source"], outcome, tested))
    return judged


def _outcome_of(tested: Sequence[Tested], *, needs_any: bool) -> Outcome:
    """That of a comparison that decides, or the one that all comparisons have."""
    found = {one.outcome for one in tested}
    decides: Outcome = "holds" if needs_any else "fails"
    if decides in found:
        return decides
    return tested[0].outcome if len(found) == 1 else "undecided"


def _test(
    cells: Mapping[str, list[CellRow]], comparison: Mapping[str, Any], budget: str, family: int
) -> Tested:
    workload, expected = comparison["workload"], comparison["expect"]
    sides = [comparison["first"], comparison["second"]]
    grids = [_grid(cells, side, side.get("workload", workload), budget) for side in sides]
    unknown = Tested(
        _words(sides[0]), _words(sides[1]), f"{workload}, {budget}", expected, "no runs"
    )
    first, second = grids
    if first is None or second is None or not all(len(one.seeds) > 1 for one in (first, second)):
        return unknown
    a, b = paired(first, second)
    if not a.size:
        return unknown
    metric = second.metric
    gap = difference(a, b, step=second.best.step(metric), limit=metric.limit)
    verdict = decide(gap, margin=metric.tolerance, family_size=family)
    outcome: Outcome = "undecided"
    if verdict == expected:
        outcome = "holds"
    elif verdict == OPPOSITE.get(expected) or (
        expected == "tie" and _is_beyond(gap, metric.tolerance, family)
    ):
        outcome = "fails"
    return replace(unknown, outcome=outcome, gap=gap, verdict=verdict, metric=metric)


def _is_beyond(gap: Interval, margin: float, family: int) -> bool:
    """Whether the difference is shown to be larger than the margin."""
    estimate = abs(gap.estimate or 0.0) - margin
    return estimate > 0 and family * p_value(replace(gap, estimate=estimate)) <= ALPHA


def _grid(
    cells: Mapping[str, list[CellRow]], side: Mapping[str, Any], workload: str, budget: str
) -> Grid | None:
    """The complete grid of learning rates of a side; None if it has no runs."""
    short = f"{workload}_short"
    recipe = short if budget == "short" and short in cells else workload
    size = side.get("norm_batch_size")
    own = [
        cell
        for cell in cells.get(recipe, ())
        if cell.norm == side["norm"]
        and (not cell.mixes_samples or cell.norm_batch_size == (size or cell.batch_size))
    ]
    if not own:
        return None
    names = metric_names(own)
    kind = "accuracy" if "test/accuracy" in names else "bits_per_byte"
    statistics = f"@{side['statistics']}" if "statistics" in side else ""
    grid = Grid(side["norm"], sorted(own, key=lambda cell: cell.lr or 0.0),
                describe_metric(f"test/{kind}{statistics}"))  # fmt: skip
    return grid if grid.fit is not None else None


def _words(side: Mapping[str, Any]) -> str:
    size, kind = side.get("norm_batch_size"), side.get("statistics")
    batch = f" at batch size {side['batch_size']}" if "batch_size" in side else ""
    words = f"{side['norm']}{batch}" + (f" at {size}" if size else "")
    return words + (f", {kind} statistics" if kind else "")


def claims_table(claims: list[Claim]) -> Table:
    """A row for each claim, followed by its comparisons."""
    rows = []
    for claim in claims:
        words = f"{claim.statement} ({claim.source})"
        rows.append({"claim": words, "outcome": claim.outcome})
        for one in claim.tested:
            where = f"– {one.norm} against {one.against}, {one.workload}"
            row: dict[str, Any] = {"claim": where, "verdict": one.verdict}
            if one.metric and one.gap:
                row |= {DIFFERENCE: Estimate(one.gap, one.metric.digits, is_signed=True)}
                row |= {"unit": one.metric.unit}
            rows.append(row | {"expected": one.expected, "outcome": one.outcome})
    count = sum(len(claim.tested) for claim in claims)
    note = f"{NOTE} Verdicts are corrected for {count} comparisons (5 % for all claims)."
    return table_of("claims", "Claims of the literature", rows, note=note)
