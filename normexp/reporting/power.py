"""What a report on planned cells could show, from the spread of those recorded so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from normexp.config.rules import counted
from normexp.config.spec import Outcome
from normexp.records.result import Result, values_of
from normexp.reporting.contrast import pairs_of
from normexp.reporting.frame import StudyRecords, config_row, run_frame
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.slices import build_cells, build_slices
from normexp.stats import seeds_for, smallest_difference


def power_words(planned: Sequence[Outcome], recorded: Sequence[Result]) -> str:
    """The smallest difference that a report on the planned cells would call, and n for a small one.

    Empty if the report would compare nothing.

    Seeds are taken for unrelated between cells, so a difference has twice the variance of a cell:
    the mean variance over seeds of the recorded cells.
    """
    by_cell: dict[str, list[Result]] = {}
    for run in recorded:
        by_cell.setdefault(run.cell_id, []).append(run)
    name = choose_metric({name for run in recorded for name in run.metrics}, None) or ""
    values = [values_of(runs, name) for runs in by_cell.values()]
    variances = [statistics.variance(own) for own in values if len(own) > 1]
    size, n = family_size(planned), max(len(o.results) + len(o.missing) for o in planned)
    if not size:
        return ""
    if not variances:
        return "smallest difference: unknown until two seeds of a cell are recorded"
    metric = describe_metric(name)
    sd = metric.scale * math.sqrt(2 * statistics.mean(variances))
    least, needed = smallest_difference(n, sd, size), seeds_for(metric.tolerance, sd, size)
    takes = f"{needed} seeds" if needed else "more than 1000 seeds"
    return (
        f"with {counted(n, 'seed')} and the spread recorded so far, a report with "
        f"{counted(size, 'verdict')} "
        f"would call a difference of {least:.2g} {metric.unit}".rstrip()
        + f" in 80 % of studies; {metric.tolerance_words} takes {takes}"
    )


def family_size(planned: Sequence[Outcome]) -> int:
    """How many verdicts a report on the cells gives, if every run finishes."""
    cells = {one.cell_id or str(i): config_row(one.record) for i, one in enumerate(planned)}
    runs = run_frame(
        [
            row | {"study": "", "seed": 0, "status": "finished", "cell": cell}
            for cell, row in cells.items()
        ]
    )
    records = StudyRecords(runs, {"": 1}, 0, [], [])
    slices = build_slices(build_cells(records), runs, metric=None, tolerance=None)
    return sum(is_primary for part in slices for _, _, is_primary in pairs_of(part))
