"""Two studies of one grid, before and after: differences per cell, and what else changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normexp.reporting.cells import Cell, varying_keys
from normexp.reporting.comparisons import ALPHA, oriented, paired_values
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.numbers import format_interval, p_value_of
from normexp.reporting.rows import Row
from normexp.reporting.runs import StudyRuns
from normexp.reporting.table import Table, show
from normexp.stats import judge_family, paired_difference


@dataclass(frozen=True)
class Change:
    """A later study against the first one.

    rows: one per cell that both have, with the difference paired by seed
    alone: cells that only one of them has, in words
    config, environment: what differs, in words
    """

    before: str
    after: str
    rows: list[Row]
    alone: list[str]
    config: list[str]
    environment: list[str]


def compare_studies(
    cells: Sequence[Cell],
    studies: Sequence[StudyRuns],
    metric: str | None,
    tolerance: float | None,
) -> list[Change]:
    """Each later study against the first; cells match by norm, model, data, sizes and rate."""
    by_study = {study.name: [c for c in cells if c.study == study.name] for study in studies}
    searched = len({cell.lr for cell in by_study[studies[0].name]}) > 1
    first = _by_place(by_study[studies[0].name], searched=searched)
    return [
        _change(
            studies[0],
            later,
            first,
            _by_place(by_study[later.name], searched=searched),
            metric,
            tolerance,
        )
        for later in studies[1:]
    ]


def difference_table(changes: Sequence[Change]) -> Table:
    """The differences of all pairs of studies as one table."""
    columns = [
        "before",
        "after",
        "norm",
        "setting",
        "metric",
        "before: mean",
        "after: mean",
        "after - before [95 % interval]",
        "n pairs",
        "p after Holm",
        "verdict",
    ]
    return Table(
        "differences",
        "Differences between the studies",
        columns,
        [row for change in changes for row in change.rows],
    )


def _change(
    before: StudyRuns,
    after: StudyRuns,
    first: Mapping[Any, Cell],
    second: Mapping[Any, Cell],
    metric: str | None,
    tolerance: float | None,
) -> Change:
    rows = [
        row
        for place, cell in first.items()
        if place in second and (row := _row(cell, second[place], metric, tolerance)) is not None
    ]
    p_values = {str(i): row["p"] for i, row in enumerate(rows) if row["p"] is not None}
    judged = judge_family(p_values, alpha=ALPHA) if p_values else {}
    for i, row in enumerate(rows):
        judgement = judged.get(str(i))
        row["p after Holm"] = judgement and judgement.adjusted_p_value
        row["verdict"] = _verdict(row, rejected=judgement is not None and judgement.rejected)
    alone = [
        f"only in {before.name}: {_words(cell)}" for p, cell in first.items() if p not in second
    ]
    alone += [
        f"only in {after.name}: {_words(cell)}" for p, cell in second.items() if p not in first
    ]
    shared = [(cell, second[place]) for place, cell in first.items() if place in second]
    config = sorted({line for a, b in shared for line in _differences(a.config, b.config)})
    environment = _differences(_environment(before), _environment(after))
    return Change(before.name, after.name, rows, alone, config, environment)


def _row(a: Cell, b: Cell, asked: str | None, tolerance: float | None) -> Row | None:
    available = [{m for run in cell.runs for m in run.result.metrics} for cell in (a, b)]
    name = choose_metric(available[0] & available[1], asked)
    if name is None:
        return None
    metric = describe_metric(name, tolerance)
    old, new = paired_values(a, b, metric)
    difference = oriented(paired_difference(new, old), metric)
    raw = paired_difference(new, old)
    return {
        "before": a.study,
        "after": b.study,
        "norm": _base(a),
        "setting": _words(a),
        "metric": metric.label,
        "before: mean": f"{old.mean():.{metric.digits}f}" if len(old) else None,
        "after: mean": f"{new.mean():.{metric.digits}f}" if len(new) else None,
        "after - before [95 % interval]": format_interval(raw, metric.digits),
        "n pairs": raw.n,
        "p": None if raw.low is None else p_value_of(raw),
        "gain": difference,
        "tolerance": metric.tolerance,
    }


def _verdict(row: Row, *, rejected: bool) -> str:
    gain = row["gain"]
    if gain.estimate is None:
        return "no seed in common"
    if gain.low is None:
        return "too few pairs: no verdict"
    if rejected:
        return "better" if gain.estimate > 0 else "worse"
    return "tie" if max(-gain.low, gain.high) <= row["tolerance"] else "unclear"


def _by_place(cells: Sequence[Cell], *, searched: bool) -> dict[Any, Cell]:
    return {
        (
            _base(cell),
            cell.model,
            cell.data,
            cell.batch_size,
            cell.micro_batch_size,
            cell.norm_batch_size if cell.mixes_samples else None,
            cell.lr if searched else None,
        ): cell
        for cell in cells
    }


def _base(cell: Cell) -> str:
    """The label without its study."""
    return cell.norm.replace(f" · {cell.study}", "")


def _words(cell: Cell) -> str:
    size = f", norm batch size {cell.norm_batch_size}" if cell.mixes_samples else ""
    return f"{_base(cell)}, {cell.model} on {cell.data}, batch size {cell.batch_size}{size}"


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`key: before -> after` for every key that differs; an absent value is a dash."""
    return [
        f"{key}: {show(a.get(key))} -> {show(b.get(key))}" for key in sorted(varying_keys([a, b]))
    ]


def _environment(study: StudyRuns) -> dict[str, str]:
    """Each key with all the values that the runs of a study have."""
    keys = {key for run in study.runs for key in run.result.environment}
    return {
        key: ", ".join(sorted({show(run.result.environment.get(key)) for run in study.runs}))
        for key in keys
    }
