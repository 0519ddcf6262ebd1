"""The content of a report: cells, slices, comparisons and sentences; draws and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normexp.config.rules import format_count
from normexp.errors import UserError
from normexp.reporting.cells import build_cells
from normexp.reporting.losses import Losses, losses_of
from normexp.reporting.metric import describe_metric, require_metric
from normexp.reporting.model import CellRow, Slice, differences, metric_names
from normexp.reporting.ranking import Ranking, rank_norms
from normexp.reporting.ratios import answer_over_data
from normexp.reporting.read import RefusedCell, StudyRecords, read_studies
from normexp.reporting.sentences import (
    Answer,
    Claim,
    Section,
    answer_slices,
    group_by_budget,
    needed_words,
    note_on,
)
from normexp.reporting.slices import build_slices
from normexp.reporting.style import base_of, order_norms
from normexp.reporting.verdict import OF_CHANGE, Change, Comparison, compare
from normexp.stats.interval import Interval

SCHEMA = 2  # of report.json


@dataclass(frozen=True)
class Report:
    """What the records of one or more studies say.

    metric, tolerance: as requested; None: the first known metric of a slice, and its tolerance
    comparisons: every difference between cells that the report states; one family
    sections: answers on slices; only their sentences on differences that the report tests
    over_data: ratios over several data sets, which it does not test
    rankings: of each slice where two or more norms meet
    refused: cells that could not be trained, and why
    counts: `12 cells, 90 runs: 84 finished, 6 diverged; 3 not ended`
    waiting: one line for each cell that has no ended run yet
    problems: one line for each result that cannot be read
    """

    runs_dir: Path
    studies: Sequence[str]
    metric: str | None
    tolerance: float | None
    cells: Sequence[CellRow]
    slices: Sequence[Slice]
    comparisons: Sequence[Comparison]
    sections: Sequence[Section]
    over_data: Sequence[Answer]
    rankings: Sequence[Ranking]
    refused: Sequence[RefusedCell]
    counts: str
    waiting: Sequence[str]
    problems: Sequence[str]

    @property
    def title(self) -> str:
        return " and ".join(self.studies)

    @property
    def untested(self) -> list[tuple[str, Claim]]:
        """Intervals outside the family: each with the heading of its slices."""
        answers = [answer for section in self.sections for answer in section.answers]
        known = [(answer.heading, claim) for answer in answers for claim in answer.untested]
        ratios = [(answer.heading, claim) for answer in self.over_data for claim in answer.untested]
        return known + ratios

    @property
    def note(self) -> str:
        return note_on(self.comparisons)

    def rankings_of(self, answer: Answer) -> list[Ranking]:
        return [ranking for ranking in self.rankings if ranking.part in answer.parts]

    @property
    def losses(self) -> Losses:
        return losses_of(self.slices, self.cells, self.refused)

    @property
    def directory(self) -> Path:
        return self.runs_dir / "+".join(self.studies) / "report"


def read_report(
    runs_dir: Path,
    studies: Sequence[str],
    *,
    metric: str | None = None,
    tolerance: float | None = None,
    reference: str | None = None,
) -> Report:
    """Reads the studies and compares their cells.

    Raises:
        UserError: a study that is missing or empty, a metric or a reference that no run has.
    """
    records = read_studies(runs_dir, studies)
    cells = build_cells(records)
    require_metric(metric, metric_names(cells))
    slices = build_slices(cells, metric=metric, tolerance=tolerance)
    reference = _label_of(reference, slices)
    comparisons = compare(slices, reference)
    return Report(
        runs_dir=runs_dir,
        studies=studies,
        metric=metric,
        tolerance=tolerance,
        cells=cells,
        slices=slices,
        comparisons=comparisons,
        sections=group_by_budget(answer_slices(slices, comparisons), comparisons),
        over_data=answer_over_data(slices, comparisons) if len(studies) == 1 else [],
        rankings=[
            ranking for part in slices for ranking in rank_norms(part, comparisons, reference)
        ],
        refused=records.refused,
        counts=_count_words(cells, records),
        waiting=records.waiting,
        problems=records.problems,
    )


def _label_of(reference: str | None, slices: Sequence[Slice]) -> str | None:
    """The name of the reference in the report, from that name or from the words of its training.

    Raises:
        UserError: no slice has it; names the norms there are.
    """
    norms = order_norms(norm for part in slices for norm in part.norms)
    if reference is None or reference in {*norms, *map(base_of, norms)}:
        return reference
    for cell in (cell for part in slices for cell in part.values):
        if reference.rpartition("=")[2] == cell.config.get("norm._target_"):
            return cell.norm
    raise UserError(
        f"reference={reference}: no cell has this norm; the norms are {', '.join(norms)}"
    )


def _count_words(cells: Sequence[CellRow], records: StudyRecords) -> str:
    ended = {
        "finished": sum(cell.finished for cell in cells),
        "diverged": sum(cell.diverged for cell in cells),
        "failed": sum(cell.failed for cell in cells),
    }
    lost = {
        "cells refused": len(records.refused),
        "not ended": records.num_unended,
        "unreadable": len(records.problems),
        "seeds missing": sum(cell.missing for cell in cells),
        "of forgotten commands left out": records.num_ignored,
    }
    head = f"{format_count(len(cells), 'cell')}, {format_count(sum(ended.values()), 'run')}: "
    words = ", ".join(f"{count} {status}" for status, count in ended.items() if count)
    return head + words + "".join(f"; {count} {word}" for word, count in lost.items() if count)


# report.json


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values: cells, comparisons and sentences."""
    ids = {cell: f"{cell.study}/{cell.directory.name}" for cell in report.cells}
    return {
        "schema": SCHEMA,
        "studies": list(report.studies),
        "counts": report.counts,
        "cells": {ids[cell]: _cell_values(cell) for cell in report.cells},
        "refused": [asdict(cell) for cell in report.refused],
        "losses": report.losses.lines,  # refused, failed, diverged, at chance: each with its reason
        "rankings": [_ranking_values(ranking, ids) for ranking in report.rankings],
        "slices": [_slice_values(part, ids) for part in report.slices],
        "comparisons": [_comparison_values(comparison, ids) for comparison in report.comparisons],
        "sections": [
            {
                "heading": section.heading,
                "headline": section.headline and section.headline.claim,
                "sentences": [
                    claim.text for answer in section.answers for claim in answer.sentences
                ],
            }
            for section in report.sections
        ],
        "not_tested": [{"heading": heading, "text": one.text} for heading, one in report.untested],
        "problems": [*report.problems, *report.waiting],
    }


def _cell_values(cell: CellRow) -> dict[str, Any]:
    return {
        "norm": cell.norm,
        "model": cell.model,
        "data": cell.data,
        "lr": cell.lr,
        "batch_size": cell.batch_size,
        "micro_batch_size": cell.micro_batch_size,
        "norm_batch_size": cell.norm_batch_size,
        "mixes_samples": cell.mixes_samples,
        "budget": cell.budget,
        "setting": cell.setting,
        "metrics": {
            name: _interval_values(mean) | {"n": mean.n}
            for name in metric_names([cell])
            if (mean := cell.mean(describe_metric(name))).n
        },  # as shown: accuracies in %; `@precise` names other statistics in evaluation
        "same_as": list(cell.same_as),
        "invalid": cell.invalid,
        "seeds": {run.seed: run.result.status for run in cell.runs},
        "expected_seeds": cell.expected,
        "declared_seeds": sorted(cell.declared),
        "seeds_at_chance": sorted(cell.at_chance),
    }


def _ranking_values(ranking: Ranking, ids: dict[CellRow, str]) -> dict[str, Any]:
    return {
        "heading": ranking.part.heading,
        "size": ranking.part.sizes[0],
        "metric": ranking.part.metric.name,
        "reference": ranking.reference,
        "sentence": ranking.sentence,
        "best": ranking.best,
        "norms": [
            {
                "norm": place.norm,
                "cell": ids[place.cell],
                "group": place.group,
                "mean": _interval_values(place.value),
                "is_tuned": ranking.part.tuned(place.cell) is not None,
                "is_own": place.cell.is_own,
                "standing": ranking.standing(place),
                "seeds_to_decide": place.comparison and place.comparison.seeds_to_decide,
                "to_decide": (place.comparison and needed_words(place.comparison)) or None,
                "seeds_at_chance": sorted(ranking.part.at_chance(place.cell)),
            }
            for place in ranking.places
        ],
    }


def _slice_values(part: Slice, ids: dict[CellRow, str]) -> dict[str, Any]:
    return {
        "heading": part.heading,
        "axis": part.axis,
        "sizes": list(part.sizes),
        "metric": part.metric.name,
        "cells": {
            norm: {size: ids[cell] for size, cell in line.items()}
            for norm, line in part.lines.items()
        },
        "values": {ids[cell]: dict(values) for cell, values in part.values.items()},
        "differences": sorted(part.differences),
    }


def _comparison_values(comparison: Comparison, ids: dict[CellRow, str]) -> dict[str, Any]:
    return {
        "first": ids[comparison.first],
        "second": ids[comparison.second],
        "axis": comparison.part.axis,
        "sizes": list(comparison.sizes),
        "metric": comparison.part.metric.name,
        "unit": comparison.part.metric.unit,
        "budget": comparison.budget,
        "lr": [comparison.first.lr, comparison.second.lr],
        "n": comparison.gap.n,
        "difference": _interval_values(
            comparison.gap
        ),  # positive: first is better, whatever the metric
        "test_samples": comparison.num_samples,  # 0: the interval is over seeds alone
        "rates": [fit and len(fit.shares) for fit in comparison.tuned],  # cross-fitted
        "round": comparison.round,  # of commands that declared cells; each has its own family
        "seeds_apart": comparison.assessment.num_apart,
        "margin": comparison.margin,
        "margin_rule": comparison.part.metric.rule,  # its declared version; 0: not declared
        "verdict": comparison.verdict,
        "why_no_verdict": comparison.why_no_verdict,
        "in_family": comparison.is_judged,
        "family_size": comparison.family_size,
        "p": comparison.p,
        "recipes_differ_in": sorted(differences(comparison.first, comparison.second)),
        "not_compared_for": sorted(comparison.unlike),
        "change": comparison.change and _change_values(comparison.change),
    }


def _change_values(change: Change) -> dict[str, Any]:
    return {
        "budgets": list(change.budgets),
        "difference": _interval_values(change.gap),
        "margin": change.margin,
        "verdict": change.kind if change.kind in OF_CHANGE.values() else None,
    }


def _interval_values(interval: Interval) -> dict[str, Any]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
