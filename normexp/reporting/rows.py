"""The numbers behind a figure or a table as plain rows: one dict per point."""

from __future__ import annotations

from statistics import median
from typing import Any

from normexp.reporting.cells import Cell
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.numbers import format_interval
from normexp.reporting.slices import Line, Slice
from normexp.stats import Interval, mean

Row = dict[str, Any]


def describe_cell(cell: Cell, metric: Metric) -> Row:
    """Mean with its interval, the counts, every seed's value and where the runs lie."""
    values = cell.values(metric)
    interval = mean(list(values.values()))
    shown = ", ".join(f"{seed}: {value:.{metric.digits + 1}f}" for seed, value in values.items())
    return {
        "norm": cell.norm,
        "model": cell.model,
        "data": cell.data,
        **interval_columns(interval),
        "text": format_interval(interval, metric.digits),
        "expected": len(cell.expected),
        "diverged": len(cell.seeds("diverged")),
        "failed": len(cell.seeds("failed")),
        "missing": len(cell.missing),
        "count": count_words(cell, interval.n),
        "seeds": shown or "none finished",
        "directory": str(cell.directory),
    }


def interval_columns(interval: Interval, name: str = "mean") -> Row:
    """Estimate, bounds and n as columns; what is not there is None."""
    return {name: interval.estimate, "low": interval.low, "high": interval.high, "n": interval.n}


def count_words(cell: Cell, n: int) -> str:
    """`8`, or `5/8` where runs are lacking, with a cross for diverged ones."""
    lost = {"×": cell.seeds("diverged"), "!": cell.seeds("failed"), "?": cell.missing}
    marks = " ".join(f"{mark}{len(seeds)}" for mark, seeds in lost.items() if seeds)
    return f"{n}/{len(cell.expected)} {marks}" if marks else str(n)


def size_rows(part: Slice) -> list[Row]:
    """One row per norm and size; an independent norm has its one cell at every size.

    `x` is the size moved a little sideways, so that intervals of several norms do not cover each
    other. `first` marks the row of an independent norm that shows its interval.
    """
    rows = []
    for position, line in enumerate(part.lines.values()):
        for size in part.sizes:
            cell = line.at(size)
            if cell is None:
                continue
            independent = line.independent is not None
            rows.append(
                describe_cell(cell, part.metric)
                | {
                    "size": size,
                    "x": size * 2 ** dodge(position, len(part.lines)),
                    "independent": independent,
                    "shown": not independent or size == part.sizes[-1],
                    "note": _note(line, part),
                }
            )
    return rows


def statistics_rows(part: Slice) -> list[Row]:
    """The metric under running, precise and batch statistics, where an evaluation recorded them."""
    base = part.metric.name.partition("@")[0]
    rows = []
    as_in_training = _batches_as_in_training(part)
    for name in _names_with_suffix(part, base):
        metric = describe_metric(name)
        suffix = name.partition("@")[2] or "running"
        place = {
            "statistics": "batch" if suffix.startswith("batch") and as_in_training else suffix,
            "metric": describe_metric(name.partition("@")[0]).label,
        }
        for line in part.lines.values():
            for size, cell in line.cells.items():  # an independent norm has no such statistics
                if cell.values(metric):
                    rows.append(describe_cell(cell, metric) | place | {"size": size, "note": ""})
    return rows


def timing_rows(part: Slice) -> list[Row]:
    """Samples per second of each cell: the median, since the seeds of a stack share one time.

    Peak memory is that of a stack too, and is there only where it was trained on a GPU.
    """
    rows = []
    for cell in part.cells:
        timings = [
            run.result.timing for run in cell.runs if "samples_per_second" in run.result.timing
        ]
        if not timings:
            continue
        speeds = [timing["samples_per_second"] for timing in timings]
        size = cell.norm_batch_size if part.axis == "norm_batch_size" else cell.batch_size
        independent = not cell.mixes_samples and part.axis == "norm_batch_size"
        rows.append(
            {
                "norm": cell.norm,
                "model": cell.model,
                "data": cell.data,
                "size": "every size" if independent else str(size),
                "samples_per_second": median(speeds),
                "step_ms": timings[0].get("step_ms"),
                "stack_size": timings[0].get("stack_size"),
                "peak_memory_mb": timings[0].get("peak_memory_mb"),
                "directory": str(cell.directory),
            }
        )
    return rows


def _names_with_suffix(part: Slice, base: str) -> list[str]:
    """All names of one metric, running first; the validation split where test has no suffix."""
    names = {name for cell in part.cells for run in cell.runs for name in run.result.metrics}
    for candidate in (base, base.replace("test/", "val/")):
        found = sorted(name for name in names if name.partition("@")[0] == candidate)
        if any("@" in name for name in found):
            return found
    return []


def _batches_as_in_training(part: Slice) -> bool:
    """Whether each cell was evaluated in batches of its own norm batch size, and these differ."""
    found = {
        (suffix, f"batch{cell.norm_batch_size}")
        for line in part.lines.values()
        for cell in line.cells.values()
        for run in cell.runs
        for name in run.result.metrics
        if (suffix := name.partition("@")[2]).startswith("batch")
    }
    return len(found) > 1 and all(suffix == own for suffix, own in found)


def dodge(position: int, count: int) -> float:
    """How far the norm at `position` of `count` is moved sideways, in powers of 2."""
    step = min(0.09, 0.66 / count)
    return (position - (count - 1) / 2) * step


def _note(line: Line, part: Slice) -> str:
    if line.independent is not None:
        return "one cell: independent of the norm batch size by measurement"
    lr = [cell.lr for cell in line.cells.values() if cell.id in part.searched]
    return "learning rate chosen on validation" if lr else ""
