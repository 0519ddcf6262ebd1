"""Compares studies of one grid: differences per cell, paired by seed, and changes in config.

The differences are outside the family of verdicts, so they have intervals and no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from normexp.reporting.cells import as_keys, size_key
from normexp.reporting.frame import (
    config_columns,
    metric_names,
    paired_values,
    values_of,
    varying_columns,
)
from normexp.reporting.metric import choose_metric, describe_metric, format_interval
from normexp.reporting.sentences import lost_words
from normexp.reporting.tables import Table, show
from normexp.stats.interval import paired_difference

COLUMNS = ["before", "after", "norm", "setting", "metric", "before: mean", "after: mean"]
COLUMNS += ["after - before [95 % interval]", "n pairs", "note"]
PLACE = ["base", "model", "data", "batch_size", "micro_batch_size"]


@dataclass(frozen=True)
class Change:
    """A later study compared with the first.

    rows: one per cell in both studies, with COLUMNS
    alone: cells in only one study, in words
    config, environment: the differences, `key: before -> after`
    """

    before: str
    after: str
    rows: list[dict[str, Any]]
    alone: list[str]
    config: list[str]
    environment: list[str]


def compare_studies(cells: pd.DataFrame, runs: pd.DataFrame, metric: str | None) -> list[Change]:
    """Compares each later study with the first; cells match by norm, model, data and sizes.

    Cells also match by learning rate if the first study has several.
    """
    first, *later = runs["study"].unique()
    place = cells[PLACE].assign(size=size_key(cells))
    if cells["lr"][cells["study"] == first].map(repr).nunique() > 1:
        place["lr"] = cells["lr"]
    placed = cells.assign(place=as_keys(place)).drop_duplicates(["study", "place"], keep="last")
    by_study = {name: own.set_index("place") for name, own in placed.groupby("study")}
    return [_change(by_study[first], by_study[name], runs, metric) for name in later]


def difference_table(changes: Sequence[Change]) -> Table:
    rows = [row for change in changes for row in change.rows]
    return Table.of_rows("differences", "Differences between the studies", COLUMNS, rows)


def _change(
    first: pd.DataFrame, second: pd.DataFrame, runs: pd.DataFrame, metric: str | None
) -> Change:
    """first, second: the cells of two studies, by place."""
    before, after = first["study"].iloc[0], second["study"].iloc[0]
    pairs = [(first.loc[at], second.loc[at]) for at in first.index if at in second.index]
    rows = [_compare(a, b, runs, metric) for a, b in pairs]
    alone = [
        f"only in {name}: {_words(cell)}"
        for name, own, other in ((before, first, second), (after, second, first))
        for _, cell in own[~own.index.isin(other.index)].iterrows()
    ]
    config = runs.drop_duplicates("cell").set_index("cell")[config_columns(runs)]
    changed = {line for a, b in pairs for line in _differences(config.loc[[a["cell"], b["cell"]]])}
    # Each key of the environment with all the values that the runs of a study have.
    environment = (
        runs.filter(regex=r"^environment\.")
        .groupby(runs["study"])
        .agg(lambda values: ", ".join(sorted(set(map(show, values)))))
    )
    environment.columns = environment.columns.str.removeprefix("environment.")
    moved = _differences(environment.loc[[before, after]])
    return Change(before, after, [row for row in rows if row], alone, sorted(changed), moved)


def _compare(a: pd.Series, b: pd.Series, runs: pd.DataFrame, wanted: str | None) -> dict[str, Any]:
    """The row that compares two cells; empty if they share no metric."""
    own = [runs[runs["cell"] == cell["cell"]] for cell in (a, b)]
    name = choose_metric(set(metric_names(own[0])) & set(metric_names(own[1])), wanted)
    if name is None:
        return {}
    metric = describe_metric(name)
    old, new = paired_values(a["cell"], b["cell"], values_of(pd.concat(own), metric))
    gap = paired_difference(new, old, limit=metric.limit)
    means = [f"{values.mean():.{metric.digits}f}" if len(values) else None for values in (old, new)]
    shown = format_interval(gap, metric.digits)
    lost = {
        cell["study"]: lost_words({**cell, "recorded": cell["finished"]}, metric) for cell in (a, b)
    }
    note = "; ".join(f"{study}: {words}" for study, words in lost.items() if words)
    words = (a["study"], b["study"], a["base"], _words(a), metric.label, *means, shown, gap.n, note)
    return dict(zip(COLUMNS, words, strict=True))


def _words(cell: pd.Series) -> str:
    size = f", norm batch size {cell['norm_batch_size']}" if cell["mixes_samples"] else ""
    return (
        f"{cell['base']}, {cell['model']} on {cell['data']}, batch size {cell['batch_size']}{size}"
    )


def _differences(two_rows: pd.DataFrame) -> list[str]:
    """`key: before -> after` for every column in which the rows differ."""
    return [
        f"{key}: {show(two_rows[key].iloc[0])} -> {show(two_rows[key].iloc[1])}"
        for key in sorted(varying_columns(two_rows))
    ]
