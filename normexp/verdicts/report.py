"""The content of a report: cells, slices, comparisons and tables; draws and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.verdicts.arms import label_cells, order_arms
from normexp.verdicts.causes import Causes, measure_causes
from normexp.verdicts.cells import CellRuns, build_cells, metric_names
from normexp.verdicts.compare import Comparison, Ranking, compare, rank
from normexp.verdicts.headline import headline_of
from normexp.verdicts.ladder import find_ladders
from normexp.verdicts.loops import find_contests, slices_of, tries_table
from normexp.verdicts.metric import Metric, describe_metric
from normexp.verdicts.rows import Rows
from normexp.verdicts.slices import Slice, build_slices
from normexp.verdicts.tables import (
    Table,
    causes_table,
    cell_table,
    difference_table,
    ladder_table,
    lost_table,
    mean_table,
    ranking_table,
    run_frame,
    workload_table,
)
from normexp.words import format_count

SCHEMA = 4  # the version of report.json


@dataclass(frozen=True, repr=False)
class Report:
    """What the records of one or more studies say.

    metric, tolerance: as requested; None: the first known metric of a slice, and its tolerance
    comparisons: every difference that the report states
    rankings: of each slice and size where two or more arms meet
    declared: comparisons beyond those of the slices
    describe_norm: a phrase on a norm, by its name; empty for one that is not known
    folder: where its page is written; None: runs_dir/<studies>/report
    counts: `12 cells, 90 runs: 84 finished, 6 diverged`
    """

    runs_dir: Path
    studies: Sequence[str]
    metric: str | Metric | None
    tolerance: float | None
    rows: Rows
    cells: Sequence[CellRuns]
    slices: Sequence[Slice]
    comparisons: Sequence[Comparison]
    rankings: Sequence[Ranking]
    causes: Sequence[Causes]
    declared: Sequence[Table] = ()
    describe_norm: Callable[[str], str] = field(default=lambda _: "", compare=False)
    folder: Path | None = None

    def __repr__(self) -> str:
        comparisons = format_count(len(self.comparisons), "comparison")
        return f"Report({self.title}: {self.counts}; {comparisons})"

    @property
    def title(self) -> str:
        return " and ".join(self.studies)

    @property
    def directory(self) -> Path:
        return self.folder or self.runs_dir / "+".join(self.studies) / "report"

    @property
    def problems(self) -> Sequence[str]:
        """One line for each result that cannot be read, and each cell without an ended run."""
        return self.rows.problems

    @property
    def notes(self) -> Sequence[str]:
        """What else a reader must know, such as columns of a table that were left out."""
        return self.rows.notes

    @property
    def counts(self) -> str:
        statuses = Counter(str(run.status) for cell in self.cells for run in cell.runs)
        words = ", ".join(f"{count} {status}" for status, count in statuses.items())
        if refused := len(self.rows.refused):
            words += f"; {format_count(refused, 'cell')} refused"
        if missing := sum(cell.num_missing for cell in self.cells):
            words += f"; {format_count(missing, 'run')} missing"
        runs = format_count(statuses.total(), "run")
        cells = {cell.directory for cell in self.cells}  # a confirmed try has runs of two kinds
        return f"{format_count(len(cells), 'cell')}, {runs}: {words}"

    def comparisons_of(self, slice_: Slice) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if comparison.slice is slice_]

    def rankings_of(self, slice_: Slice) -> list[Ranking]:
        """At each size where arms are compared, the first size first."""
        return [ranking for ranking in self.rankings if ranking.slice is slice_]

    def headline(self, slice_: Slice) -> str:
        """The answer to the sweep that was typed, first along the sizes, then between arms."""
        return headline_of(
            slice_, self.comparisons_of(slice_), self.rankings_of(slice_), self.cells
        )

    @cached_property
    def tables(self) -> list[Table]:
        """Every table, in the order of the page."""
        tables = [workload_table(self.rankings)]
        tables += self.declared
        for slice_ in self.slices:
            tables += self.tables_of(slice_)
        tables.append(ladder_table(find_ladders(self.comparisons)))
        tables.append(causes_table(self.causes))
        tables.append(lost_table(self.cells, self.rows.refused))
        is_tuned = any(side.tuning for one in self.slices for side in one.arms_at_sizes)
        of_loops = {cell.directory for one in self.slices if one.no_verdict for cell in one.cells}
        cells = [c for c in self.cells if c.confirmation or c.directory not in of_loops]
        tables.append(cell_table(cells, self.metric, self.tolerance, is_tuned=is_tuned))
        tables.append(Table("runs", "Runs", run_frame(self.rows.runs), has_latex=False))
        return [table for table in tables if len(table.values)]

    def tables_of(self, slice_: Slice) -> list[Table]:
        """Means by size, differences along the sizes, and the ranking."""
        rankings, comparisons = self.rankings_of(slice_), self.comparisons_of(slice_)
        if slice_.no_verdict:
            return [tries_table(slice_, comparisons)]
        tables = [mean_table(slice_, rankings)]
        tables.append(difference_table(slice_, comparisons, has_note=not rankings))
        if rankings:
            tables.append(ranking_table(rankings, comparisons))
        return [table for table in tables if len(table.values)]

    def _repr_html_(self) -> str:
        """In a notebook: the answer, the first figure and the tables of each slice."""
        from normexp.verdicts.figures import draw_figures, vl_convert

        lines = []
        for slice_ in self.slices:
            lines.append(f"<h3>{escape(self.headline(slice_))}</h3><p>{escape(slice_.scope)}</p>")
            for figure in draw_figures(slice_, self.rankings_of(slice_))[:1]:
                lines.append(vl_convert.vegalite_to_svg(figure.spec))
            for table in self.tables_of(slice_):
                rows = table.frame.to_html(index=False, border=0)
                lines.append(f"<p>{escape(table.caption)}</p>{rows}<p>{escape(table.note)}</p>")
        lines += [f"<p>{escape(line)}</p>" for line in (self.counts, *self.notes)]
        return "\n".join(lines)


def report_on(
    rows: Rows,
    runs_dir: Path,
    studies: Sequence[str],
    *,
    metric: str | Metric | None = None,
    tolerance: float | None = None,
    reference: str | None = None,
    tries: int | None = None,
    choose_by: str | None = None,
    at_largest: bool = False,
    describe_norm: Callable[[str], str] = lambda _: "",
) -> Report:
    """The report of rows from anywhere.

    metric, tolerance: None: the first known metric of a slice, and its tolerance
    reference: the arm that the others are compared with; None: batch norm, or what is shipped
    tries: how many were planned before the first: a loop then has verdicts, corrected for as many
        comparisons at least, until a confirmation
    choose_by: the metric by which a learning rate is chosen; None: that of validation data
    at_largest: arms are compared at the largest size alone, not at every one
    describe_norm: as of a Report

    Raises:
        UserError: a metric or a reference that no run has; a choice by test data.
    """
    cells = label_cells(build_cells(rows))
    recorded = metric_names(cells)
    for key, name in (("metric", metric), ("choose_by", choose_by)):
        if isinstance(name, str) and name not in recorded:
            names = ", ".join(recorded) or "no metric at all"
            raise UserError(f"{key}={name}: no run has it; the runs have {names}")
    if choose_by:
        metric = _chosen_by(choose_by, metric, tolerance)
    contests = find_contests(cells, are_planned=tries is not None)
    of_contests = {cell.directory for contest in contests for cell in contest.cells}
    others = [cell for cell in cells if cell.directory not in of_contests]
    slices = build_slices(others, metric=metric, tolerance=tolerance) if others else []
    if at_largest:
        slices = [replace(slice_, compared_at=slice_.sizes[-1:]) for slice_ in slices]
    if contests:
        slices = [*slices_of(contests, metric=metric, tolerance=tolerance), *slices]
        if tries is not None:
            note = f"tries={tries} has no effect after a confirmation"
            rows = replace(rows, notes=[*rows.notes, note])
    tuned = [side for slice_ in slices for side in slice_.arms_at_sizes if len(side.cells) > 1]
    if choose_by and not tuned and not contests:
        raise UserError(f"choose_by={choose_by}: no arm has several learning rates to choose from")
    comparisons = compare(slices, _name_of(reference, slices), tries or 0)
    causes = map(measure_causes, comparisons)
    return Report(
        runs_dir=runs_dir,
        studies=studies,
        metric=metric,
        tolerance=tolerance,
        rows=rows,
        cells=cells,
        slices=slices,
        comparisons=comparisons,
        rankings=[
            ranking
            for slice_ in slices
            if not slice_.no_verdict
            for ranking in rank(slice_, comparisons)
        ],
        causes=[of_drop for of_drop in causes if of_drop],
        describe_norm=describe_norm,
    )


def _chosen_by(choose_by: str, metric: str | Metric | None, tolerance: float | None) -> Metric:
    """The metric that is compared, with another one that chooses learning rates."""
    if not isinstance(metric, str):
        raise UserError(f"choose_by={choose_by}: set metric=... too, which is compared")
    if not choose_by.startswith("val/"):
        raise UserError(f"choose_by={choose_by}: choose by a metric of validation data: val/...")
    return replace(describe_metric(metric, tolerance), chosen_by=describe_metric(choose_by))


def _name_of(reference: str | None, slices: Sequence[Slice]) -> str | None:
    """The name of the reference in the report, from that name or from the words of its training.

    Raises:
        UserError: no slice has it; names the arms there are.
    """
    if reference is None:
        return None
    cells = [cell for slice_ in slices for cell in slice_.cells]
    if reference in {cell.arm for cell in cells}:  # with knobs, as in `group num_groups=4`
        return reference
    word = reference.rpartition("=")[2]
    for cell in cells:
        if word == cell.arm_name:
            return word
        if word == cell.value_of(f"{cell.roles.arm}._target_"):
            return cell.arm
    names = ", ".join(order_arms({cell.arm: cell.arm_name for cell in cells}))
    arm = cells[0].roles.arm
    raise UserError(f"reference={reference}: no cell has this {arm}; there are {names}")


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values: headlines, tables, and each comparison in numbers."""
    slices = []
    for slice_ in report.slices:
        headline = report.headline(slice_)
        words = {"heading": slice_.heading, "scope": slice_.scope, "headline": headline}
        slices.append({"compared": slice_.arm_key, **words})
    tables = {}
    for table in report.tables:
        if table.name != "runs":
            rows = table.frame.to_dict("records")
            tables[table.name] = {"caption": table.caption, "note": table.note, "rows": rows}
    return {
        "schema": SCHEMA,
        "studies": list(report.studies),
        "counts": report.counts,
        "slices": slices,
        "comparisons": [_comparison_json(comparison) for comparison in report.comparisons],
        "tables": tables,
        "problems": list(report.problems),
        "notes": list(report.notes),
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    gap = comparison.gap
    sides = (comparison.first, comparison.second)
    return {
        "id": _id_of(comparison),
        "compared": comparison.slice.arm_key,
        "arm": comparison.arm,
        "against": comparison.against,
        "why": comparison.why,
        "slice": comparison.slice.heading,
        "axis": comparison.slice.axis,
        "sizes": list(comparison.sizes),
        "cells": [[cell.directory.name for cell in side.cells] for side in sides],
        "metric": comparison.slice.metric.name,
        "difference": {"estimate": gap.estimate, "low": gap.low, "high": gap.high},
        "verdict": comparison.verdict,
        "n": list(comparison.seeds),
        "test_samples": comparison.num_samples,
        "family_size": comparison.family_size,
        "alpha": comparison.slice.alpha,
        "seeds_added": comparison.is_extended,
    }


def _id_of(comparison: Comparison) -> str:
    """`norm/norm_batch_size/CELL/CELL`: does not change as the study grows.

    Of several learning rates, the cell that was asked for first.
    """
    confirmation = comparison.first.best.confirmation
    kind = f"confirmation-{confirmation.number}" if confirmation else comparison.slice.arm_key
    ids = []
    for side in (comparison.first, comparison.second):
        first = min(side.cells, key=lambda cell: cell.asked_at)
        ids.append(first.directory.name)
    return "/".join([kind, comparison.slice.axis, *ids])
