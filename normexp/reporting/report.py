"""The content of a report: cells, slices, comparisons and tables; draws and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.reporting.cells import CellRow, base_of, build_cells, metric_names, order_norms
from normexp.reporting.compare import (
    Causes,
    Comparison,
    Ranking,
    compare,
    measure_causes,
    rank,
)
from normexp.reporting.runs import Records, read_studies
from normexp.reporting.slices import Slice, build_slices
from normexp.reporting.tables import (
    Table,
    causes_table,
    cell_table,
    difference_table,
    lost_table,
    mean_table,
    ranking_table,
    run_frame,
    workload_table,
)
from normexp.words import format_count

SCHEMA = 3  # of report.json
MOST_WORDS = 15  # of a headline
ALONG_SIZES = {  # by verdict
    "worse": "At {first}, {norm} loses {gap} against {second}",
    "better": "At {first}, {norm} gains {gap} against {second}",
    "tie": "At {first}, {norm} ties with {second}",
    "undecided": "{norm} at {first} against {second}: undecided",
    None: "{norm} at {first} against {second}: no verdict",
}
BETWEEN_NORMS = {
    "worse": "{against} is {gap} ahead of {norm}",
    "better": "{norm} is {gap} ahead of {against}",
    "tie": "{norm} and {against} tie within {margin}",
    "undecided": "{norm} against {against}: undecided",
    None: "{norm} against {against}: no verdict",
}
PLAIN_NAMES = ("batch", "layer", "instance", "group", "rms")  # known as `batch norm`


@dataclass(frozen=True, repr=False)
class Report:
    """What the records of one or more studies say.

    metric, tolerance: as requested; None: the first known metric of a slice, and its tolerance
    comparisons: every difference that the report states
    rankings: of each slice where two or more norms meet
    declared: comparisons beyond those of the slices
    counts: `12 cells, 90 runs: 84 finished, 6 diverged`
    """

    runs_dir: Path
    studies: Sequence[str]
    metric: str | None
    tolerance: float | None
    records: Records
    cells: Sequence[CellRow]
    slices: Sequence[Slice]
    comparisons: Sequence[Comparison]
    rankings: Sequence[Ranking]
    causes: Sequence[Causes]
    declared: Sequence[Table] = ()

    def __repr__(self) -> str:
        return f"Report({self.title}: {self.counts}; {len(self.comparisons)} comparisons)"

    @property
    def title(self) -> str:
        return " and ".join(self.studies)

    @property
    def directory(self) -> Path:
        return self.runs_dir / "+".join(self.studies) / "report"

    @property
    def problems(self) -> Sequence[str]:
        """One line for each result that cannot be read, and each cell without an ended run."""
        return self.records.problems

    @property
    def counts(self) -> str:
        ended = Counter(str(run.status) for cell in self.cells for run in cell.runs)
        missing = sum(cell.missing for cell in self.cells)
        lost = {"cells refused": len(self.records.refused), "runs missing": missing}
        words = ", ".join(f"{count} {status}" for status, count in ended.items())
        words += "".join(f"; {count} {word}" for word, count in lost.items() if count)
        runs = format_count(ended.total(), "run")
        return f"{format_count(len(self.cells), 'cell')}, {runs}: {words}"

    def ranking_of(self, part: Slice) -> Ranking | None:
        return next((one for one in self.rankings if one.part is part), None)

    def headline(self, part: Slice) -> str:
        """The answer to the sweep that was typed, sizes first; what does not fit is a row."""
        own = [one for one in self.comparisons if one.part is part and one.is_comparable]
        along = [one for one in own if one.is_along_sizes]
        ranking = self.ranking_of(part)
        best = _best_claim(ranking, is_alone=not along) if ranking else ""
        if not along:
            return f"{best}{part.at_words}." if best else "nothing to compare."
        shown = min(along, key=lambda one: (one.verdict != "worse", one.gap.estimate or 0.0))
        size = _claim(shown)
        at = "" if part.at == shown.sizes[0] else f"at {part.at}, "
        for claim in (size, size.replace(f" against {shown.sizes[1]}", "")) if best else ():
            if len((full := f"{claim}; {at}{best}.").split()) <= MOST_WORDS:
                return full
        return f"{size}."

    @cached_property
    def tables(self) -> list[Table]:
        """Every table, in the order of the page."""
        tables = [
            *([workload_table(self.rankings)] if len(self.rankings) > 1 else []),
            *self.declared,
            *(table for part in self.slices for table in self.tables_of(part)),
            causes_table(self.causes),
            lost_table(self.cells, self.records.refused),
            cell_table(self.cells, self.metric, self.tolerance),
            Table("runs", "Runs", run_frame(self.records.runs), has_latex=False),
        ]
        return [table for table in tables if len(table.values)]

    def tables_of(self, part: Slice) -> list[Table]:
        """Means by size, differences along the sizes, and the ranking."""
        ranking = self.ranking_of(part)
        tables = [
            mean_table(part, ranking),
            difference_table(part, self.comparisons, has_note=ranking is None),
            *([ranking_table(ranking, self.comparisons)] if ranking else []),
        ]
        return [table for table in tables if len(table.values)]

    def _repr_html_(self) -> str:
        """In a notebook: the answer, the first figure and the tables of each slice."""
        from normexp.reporting.figures import draw_figures, vl_convert

        shown = []
        for part in self.slices:
            shown += [f"<h3>{escape(self.headline(part))}</h3><p>{escape(part.scope)}</p>"]
            for figure in draw_figures(part, self.ranking_of(part))[:1]:
                shown.append(vl_convert.vegalite_to_svg(figure.spec))
            for table in self.tables_of(part):
                rows = table.frame.to_html(index=False, border=0)
                shown.append(f"<p>{escape(table.caption)}</p>{rows}<p>{escape(table.note)}</p>")
        return "\n".join([*shown, f"<p>{escape(self.counts)}</p>"])


def _claim(one: Comparison) -> str:
    """`At 2, batch norm loses 10.7 pp against 128`, `own is 5.0 pp ahead of batch norm`."""
    metric, sentences = one.part.metric, ALONG_SIZES if one.is_along_sizes else BETWEEN_NORMS
    words = {
        "norm": _named(one.first.norm),
        "against": _named(one.second.norm),
        "first": one.sizes[0],
        "second": one.sizes[1],
        "gap": f"{abs(one.gap.estimate or 0.0):.{metric.digits}f} {metric.unit}".strip(),
        "margin": f"{metric.tolerance:g} {metric.unit}".strip(),
    }
    return sentences[one.verdict].format(**words) + one.mark


def _best_claim(ranking: Ranking, *, is_alone: bool) -> str:
    """`layer norm is ahead`; a norm that is not ranked is named, or there is no best."""
    pairs = [place.comparison for place in ranking.places if place.comparison]
    best, missing = ranking.best, [one.norm for one in pairs if one.verdict is None]
    if is_alone and len(pairs) == 1:
        return _claim(pairs[0])
    if len(missing) > 1:
        return f"{len(missing)} norms are not ranked"
    claims = [f"{_named(norm)} is not ranked" for norm in missing]
    claim = f"{' or '.join(map(_named, best))} {'is ahead' if len(best) == 1 else 'may lead'}"
    if len(best) == len(ranking.places):
        claim = "no norm is ahead"
    elif len(best) > 2:
        claim = f"{len(best)} of {len(ranking.places)} norms may lead"
    mark = max(one.mark for one in pairs)
    return "; ".join([claim + mark, *claims] if best else claims)


def _named(norm: str) -> str:
    return f"{norm} norm" if norm in PLAIN_NAMES else norm


def read_report(runs_dir: Path, studies: Sequence[str], **options: Any) -> Report:
    """Reads the studies and compares their cells. options: of `report_on`.

    Raises:
        UserError: a study that is missing or empty, a metric or a reference that no run has.
    """
    return report_on(read_studies(runs_dir, studies), runs_dir, studies, **options)


def report_on(
    records: Records,
    runs_dir: Path,
    studies: Sequence[str],
    *,
    metric: str | None = None,
    tolerance: float | None = None,
    reference: str | None = None,
    at_largest: bool = False,
) -> Report:
    """The report of records from anywhere; see `read_report`.

    metric, tolerance: None: the first known metric of a slice, and its tolerance
    reference: the norm that the others are compared with; None: batch norm
    at_largest: norms are compared at the largest size, not at the smallest
    """
    cells = build_cells(records)
    known = metric_names(cells)
    if metric is not None and metric not in known:
        names = ", ".join(known) or "no metric at all"
        raise UserError(f"metric={metric}: no run has it; the runs have {names}")
    slices = build_slices(cells, metric=metric, tolerance=tolerance)
    if at_largest:
        slices = [replace(part, at=part.sizes[-1]) for part in slices]
    comparisons = compare(slices, _label_of(reference, slices))
    return Report(
        runs_dir=runs_dir,
        studies=studies,
        metric=metric,
        tolerance=tolerance,
        records=records,
        cells=cells,
        slices=slices,
        comparisons=comparisons,
        rankings=[rank(part, comparisons) for part in slices if len(part.norms) > 1],
        causes=[causes for one in comparisons if (causes := measure_causes(one))],
    )


def _label_of(reference: str | None, slices: Sequence[Slice]) -> str | None:
    """The name of the reference in the report, from that name or from the words of its training.

    Raises:
        UserError: no slice has it; names the norms there are.
    """
    if reference is None:
        return None
    word = reference.rpartition("=")[2]
    norms = {cell.norm: cell for part in slices for cell in part.cells}
    for norm, cell in norms.items():
        if word in (norm, base_of(norm)):
            return word
        if word == cell.value_of("norm._target_"):
            return norm
    names = ", ".join(order_norms(norms))
    raise UserError(f"reference={reference}: no cell has this norm; the norms are {names}")


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values: headlines, tables, and each comparison in numbers."""
    return {
        "schema": SCHEMA,
        "studies": list(report.studies),
        "counts": report.counts,
        "slices": [
            {"heading": part.heading, "scope": part.scope, "headline": report.headline(part)}
            for part in report.slices
        ],
        "comparisons": [
            {
                "norm": one.norm,
                "against": one.against,
                "why": one.why,
                "slice": one.part.heading,
                "axis": one.part.axis,
                "sizes": list(one.sizes),
                "metric": one.part.metric.name,
                "difference": {key: getattr(one.gap, key) for key in ("estimate", "low", "high")},
                "verdict": one.verdict,
                "n": one.gap.n,
                "test_samples": one.num_samples,
                "family_size": one.family_size,
                "seeds_added": one.is_extended,
            }
            for one in report.comparisons
        ],
        "tables": {
            table.name: {
                "caption": table.caption,
                "note": table.note,
                "rows": table.frame.to_dict("records"),
            }
            for table in report.tables
            if table.name != "runs"
        },
        "problems": list(report.problems),
    }
