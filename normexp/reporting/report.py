"""One report, worked out but not yet written: verdicts, figures and tables of its studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normexp.reporting.cells import Cell, build_cells
from normexp.reporting.compare import Change, compare_studies, difference_table
from normexp.reporting.comparisons import Comparison, compare_norms, family_note
from normexp.reporting.curves import draw_curves, read_history
from normexp.reporting.figures import Figure, draw_metric
from normexp.reporting.groups import draw_groups
from normexp.reporting.learning_rates import draw_learning_rates, draw_rate_map, searched_note
from normexp.reporting.matrices import draw_heat_map, draw_improvement
from normexp.reporting.metric import require_metric
from normexp.reporting.overall import Overall, describe_overall
from normexp.reporting.runs import StudyRuns, load_runs
from normexp.reporting.sites import draw_sites
from normexp.reporting.slices import Slice, build_slices
from normexp.reporting.statistics import draw_statistics
from normexp.reporting.style import Style, assign_styles
from normexp.reporting.table import Table
from normexp.reporting.tables import (
    cell_table,
    comparison_table,
    run_table,
    sensitivity_table,
)
from normexp.reporting.throughput import draw_memory, draw_throughput
from normexp.reporting.verdict import Loss, describe_losses


@dataclass(frozen=True)
class Section:
    """One slice with all that is said and shown of it."""

    part: Slice
    losses: list[Loss]
    comparisons: list[Comparison]
    figures: list[Figure]

    @property
    def heading(self) -> str:
        return f"{self.part.title}, {self.part.fixed}"

    @property
    def note(self) -> str:
        return " ".join(filter(None, [searched_note(self.part), family_note(self.comparisons)]))


@dataclass(frozen=True)
class Report:
    """What is written to a folder.

    overall: answers over several data sets; none for one data set, or where studies are compared
    waiting: one line for each cell that has no ended run yet
    problems: one line for each result that cannot be read
    """

    title: str
    directory: Path
    overall: list[Overall]
    sections: list[Section]
    changes: list[Change]
    tables: list[Table]
    cells: list[Cell]
    num_unended: int
    waiting: list[str]
    problems: list[str]

    @property
    def verdicts(self) -> list[Overall | Section]:
        """Everything that has sentences: the answer over all data sets first."""
        return [*self.overall, *self.sections]


def build_report(
    runs_dir: Path, names: Sequence[str], *, metric: str | None, tolerance: float | None
) -> Report:
    """Reads the studies and works out everything; writes nothing.

    Raises:
        UserError: a study that is missing or empty, or a metric that no run has.
    """
    studies = [load_runs(runs_dir, name) for name in names]
    available = {m for s in studies for run in s.runs for m in run.result.metrics}
    require_metric(metric, available)
    cells = build_cells(studies)
    slices = build_slices(cells, metric=metric, tolerance=tolerance)
    sections = _sections(slices, cells)
    overall = describe_overall(slices) if len(studies) == 1 else []
    changes = compare_studies(cells, studies, metric, tolerance) if len(studies) > 1 else []
    tables = [
        cell_table(cells, metric, tolerance),
        sensitivity_table([(one.part, one.losses) for one in sections]),
        comparison_table(
            [(one.heading, one.parts[0], one.comparisons) for one in overall]
            + [(one.heading, one.part, one.comparisons) for one in sections]
        ),
        run_table(cells),
    ]
    if changes:
        tables.insert(0, difference_table(changes))
    return Report(
        title=" and ".join(names),
        directory=report_directory(runs_dir, names),
        overall=overall,
        sections=sections,
        changes=changes,
        tables=tables,
        cells=cells,
        num_unended=sum(len(study.unended) for study in studies),
        waiting=[line for study in studies for line in _waiting(study)],
        problems=[problem for study in studies for problem in study.problems],
    )


def report_directory(runs_dir: Path, names: Sequence[str]) -> Path:
    """runs/NAME/report, or runs/A+B/report for several."""
    return runs_dir / "+".join(names) / "report"


def describe_counts(report: Report) -> str:
    """`12 cells, 90 runs: 84 finished, 6 diverged; 3 not ended`."""
    runs = [run for cell in report.cells for run in cell.runs]
    counts = {
        status: sum(run.result.status == status for run in runs)
        for status in ("finished", "diverged", "failed")
    }
    missing = sum(len(cell.missing) for cell in report.cells)
    words = [f"{count} {status}" for status, count in counts.items() if count]
    rest = {
        "not ended": report.num_unended,
        "unreadable": len(report.problems),
        "seeds missing": missing,
    }
    tail = "".join(f"; {count} {word}" for word, count in rest.items() if count)
    numbers = [
        f"{count} {noun}{'s' * (count != 1)}"
        for noun, count in {"cell": len(report.cells), "run": len(runs)}.items()
    ]
    return f"{', '.join(numbers)}: {', '.join(words)}{tail}"


def _waiting(study: StudyRuns) -> list[str]:
    """Cells of which no run has ended, and so have no row: still training, or interrupted."""
    begun = Counter(run_dir.parent for run_dir in study.unended)
    ended = {run.directory.parent for run in study.runs}
    return [
        f"{cell.name}: {count} run{'s' * (count > 1)} begun, none ended"
        for cell, count in begun.items()
        if cell not in ended
    ]


def _sections(slices: Sequence[Slice], cells: Sequence[Cell]) -> list[Section]:
    styles = assign_styles(cell.norm for cell in cells)
    return [
        Section(part, describe_losses(part), compare_norms(part), _figures(part, styles))
        for part in slices
    ]


def _figures(part: Slice, styles: dict[str, Style]) -> list[Figure]:
    """Those that there is data for, the answer first."""
    ends = {part.sizes[0], part.sizes[-1]}
    shown = {c.id: c for line in part.lines.values() for c in map(line.at, ends) if c is not None}
    histories = {cell_id: read_history(cell) for cell_id, cell in shown.items()}
    found = [
        draw_metric(part, styles),
        draw_heat_map(part),
        draw_improvement(part),
        draw_statistics(part),
        draw_learning_rates(part, styles),
        draw_rate_map(part),
        draw_groups(part, styles),
        *draw_curves(part, styles, histories),
        *draw_sites(part, styles, histories),
        draw_throughput(part, styles),
        draw_memory(part, styles),
    ]
    return [figure for figure in found if figure is not None]
