"""The tables of a report: cells, sensitivity, comparisons and runs."""

from __future__ import annotations

from collections.abc import Sequence

from normexp.reporting.cells import Cell
from normexp.reporting.comparisons import Comparison
from normexp.reporting.metric import Metric, choose_metric, describe_metric
from normexp.reporting.numbers import format_interval
from normexp.reporting.rows import Row, describe_cell
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.reporting.table import Table
from normexp.reporting.verdict import Loss
from normexp.stats import Interval, Threshold, iqm, mean, median


def cell_table(cells: Sequence[Cell], metric: str | None, tolerance: float | None) -> Table:
    """One row per cell: its sizes, the mean with interval, median, IQM, and every count."""
    available = {name for cell in cells for run in cell.runs for name in run.result.metrics}
    rows = []
    for cell in cells:
        own = {name for run in cell.runs for name in run.result.metrics}
        name = choose_metric(own, metric) or choose_metric(available, metric) or "val/loss"
        rows.append(_cell_row(cell, describe_metric(name, tolerance)))
    columns = [
        "norm",
        "model",
        "data",
        "batch size",
        "norm batch size",
        "lr",
        "metric",
        "mean [95 % interval]",
        "median [95 % interval]",
        "IQM [95 % interval]",
        "n",
        "seeds",
        "diverged",
        "failed",
        "missing",
        "note",
        "directory",
    ]
    return Table("cells", "Cells", columns, rows, numbers=list(_numbers([])))


def sensitivity_table(parts: Sequence[tuple[Slice, list[Loss]]]) -> Table:
    """One row per norm and slice: drop, slope, area and threshold."""
    rows = []
    for part, losses in parts:
        for loss in losses:
            found, digits = loss.sensitivity, part.metric.digits
            row = {
                "norm": loss.norm,
                "setting": f"{part.title}, {part.fixed}",
                "size": AXIS_WORDS[part.axis],
                "metric": part.metric.label,
                "kind": loss.kind,
            }
            if found is not None:
                row |= {
                    "from": found.reference_size,
                    "to": found.smallest_size,
                    "drop": format_interval(found.drop, digits),
                    "loss per halving": format_interval(found.slope, digits + 1),
                    "mean over log2 size": format_interval(found.area, digits),
                    "threshold": _threshold_words(found.threshold),
                    "n": found.drop.n,
                    "seeds": found.num_seeds,
                }
            rows.append(row)
    columns = [
        "norm",
        "setting",
        "size",
        "metric",
        "kind",
        "from",
        "to",
        "drop",
        "loss per halving",
        "mean over log2 size",
        "threshold",
        "n",
        "seeds",
    ]
    return Table("sensitivity", "Batch-size sensitivity", columns, rows)


def comparison_table(answers: Sequence[tuple[str, Slice, list[Comparison]]]) -> Table:
    """One row per declared comparison, with p before and after Holm's correction.

    answers: heading, a slice for its axis and metric, and what was compared
    """
    rows = [
        {
            "norm": one.norm,
            "reference": one.reference,
            "setting": heading,
            "at": f"{AXIS_WORDS[part.axis]} {one.size}",
            "difference (positive: better)": format_interval(one.difference, part.metric.digits),
            "unit": part.metric.unit,
            "probability of improvement": format_interval(one.improvement, 2),
            "p": one.judgement and one.judgement.p_value,
            "p after Holm": one.judgement and one.judgement.adjusted_p_value,
            "n": one.difference.n,
            "verdict": one.kind,
        }
        for heading, part, comparisons in answers
        for one in comparisons
    ]
    columns = [
        "norm",
        "reference",
        "setting",
        "at",
        "difference (positive: better)",
        "unit",
        "probability of improvement",
        "p",
        "p after Holm",
        "n",
        "verdict",
    ]
    return Table("comparisons", "Norms against the reference", columns, rows)


def run_table(cells: Sequence[Cell]) -> Table:
    """Every ended run with all of its metrics as recorded."""
    names = sorted({name for cell in cells for run in cell.runs for name in run.result.metrics})
    rows = [
        {
            "study": run.study,
            "norm": cell.norm,
            "model": cell.model,
            "data": cell.data,
            "batch size": cell.batch_size,
            "norm batch size": cell.norm_batch_size if cell.mixes_samples else None,
            "lr": cell.lr,
            "seed": run.result.seed,
            "status": run.result.status,
            "diverged at step": run.result.diverged_at_step,
            "error": run.result.error,
            "invalid": run.result.invalid,
            **run.result.metrics,
            "directory": str(run.directory),
        }
        for cell in cells
        for run in cell.runs
    ]
    first = [
        "study",
        "norm",
        "model",
        "data",
        "batch size",
        "norm batch size",
        "lr",
        "seed",
        "status",
        "diverged at step",
        "error",
        "invalid",
    ]
    return Table("runs", "Runs", [*first, *names, "directory"], rows)


def _cell_row(cell: Cell, metric: Metric) -> Row:
    found, values = describe_cell(cell, metric), list(cell.values(metric).values())
    return {
        "norm": cell.norm,
        "model": cell.model,
        "data": cell.data,
        "batch size": cell.batch_size,
        "norm batch size": cell.norm_batch_size if cell.mixes_samples else "any",
        "lr": cell.lr,
        "metric": metric.label,
        "mean [95 % interval]": found["text"],
        "median [95 % interval]": _with_level(median(values), metric),
        "IQM [95 % interval]": _with_level(iqm(values), metric),
        "n": found["n"],
        "seeds": found["seeds"],
        "diverged": found["diverged"],
        "failed": found["failed"],
        "missing": found["missing"],
        "note": _note(cell, metric),
        "directory": found["directory"],
        "count": found["count"],
        **_numbers(values),
    }


def _threshold_words(found: Threshold) -> str:
    """Under which size more than the tolerance is lost, as far as the seeds show it."""
    if found.status == "never":
        return "none shown"
    return f"unknown below {found.size}" if found.status == "unknown" else f"below {found.size}"


def _note(cell: Cell, metric: Metric) -> str:
    """Why a row is not like the others; the first error of a failed run among it."""
    notes = [f"INVALID: {cell.invalid}"] if cell.invalid else []
    error = next((run.result.error for run in cell.runs if run.result.error), None)
    if error:
        notes.append(f"failed: {error}")
    finished, values = cell.seeds("finished"), list(cell.values(metric).values())
    if finished and not values:
        notes.append(f"no {metric.name} recorded")
    if len(values) == 1:
        notes.append("one seed: no interval")
    elif values and mean(values).low is None:
        notes.append("few seeds, all alike: no interval")
    return "; ".join(notes)


def _numbers(values: list[float]) -> dict[str, float | None]:
    """What the CSV has beside the texts: mean, median and IQM with their bounds, every digit."""
    found = {"mean": mean(values), "median": median(values), "IQM": iqm(values)}
    return {
        f"{name}{end}": value
        for name, one in found.items()
        for end, value in {"": one.estimate, " low": one.low, " high": one.high}.items()
    }


def _with_level(interval: Interval, metric: Metric) -> str:
    """The median of 5 values has an interval of 93.75 %, and says so."""
    differs = interval.low is not None and abs(interval.level - 0.95) > 0.0005
    note = f" ({interval.level:.1%})".replace("%", " %") if differs else ""
    return format_interval(interval, metric.digits) + note
