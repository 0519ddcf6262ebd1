"""Several studies of one grid: differences per cell, paired by seed, and what else changed.

The differences are outside the family of verdicts, so they have intervals and no verb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from normexp.reporting.frame import (
    config_columns,
    metric_names,
    paired_values,
    values_of,
    varying_columns,
)
from normexp.reporting.metric import choose_metric, describe_metric, format_interval
from normexp.reporting.tables import Table, show
from normexp.stats.interval import paired_difference

COLUMNS = [
    "before",
    "after",
    "norm",
    "setting",
    "metric",
    "before: mean",
    "after: mean",
    "after - before [95 % interval]",
    "n pairs",
]
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
    names = list(runs["study"].unique())
    key = cells[PLACE].map(repr).agg(" ".join, axis=1)
    key += cells["norm_batch_size"].where(cells["mixes_samples"], 0).map(" {}".format)
    if cells["lr"][cells["study"] == names[0]].map(repr).nunique() > 1:
        key += cells["lr"].map(" {}".format)
    placed = cells.assign(place=key).drop_duplicates(["study", "place"], keep="last")
    by_study = {name: own.set_index("place") for name, own in placed.groupby("study")}
    return [
        _change(by_study[names[0]], by_study[name], names[0], name, runs, metric)
        for name in names[1:]
    ]


def difference_table(changes: Sequence[Change]) -> Table:
    rows = [row for change in changes for row in change.rows]
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    return Table("differences", "Differences between the studies", COLUMNS, frame)


def _change(
    first: pd.DataFrame,
    second: pd.DataFrame,
    before: str,
    after: str,
    runs: pd.DataFrame,
    metric: str | None,
) -> Change:
    shared = [place for place in first.index if place in second.index]
    compared = [_compare(first.loc[place], second.loc[place], runs, metric) for place in shared]
    rows = [row for row in compared if row is not None]
    alone = [
        f"only in {name}: {_words(cell)}"
        for name, own, other in ((before, first, second), (after, second, first))
        for _, cell in own[~own.index.isin(other.index)].iterrows()
    ]
    config = runs.drop_duplicates("cell").set_index("cell")[config_columns(runs)]
    changed = {
        line
        for place in shared
        for line in _differences(
            config.loc[[str(first.loc[place, "cell"]), str(second.loc[place, "cell"])]]
        )
    }
    environment = pd.DataFrame(
        [_environment(runs[runs["study"] == name]) for name in (before, after)]
    )
    return Change(before, after, rows, alone, sorted(changed), _differences(environment))


def _compare(
    a: pd.Series, b: pd.Series, runs: pd.DataFrame, wanted: str | None
) -> dict[str, Any] | None:
    """The row of two cells; None if they share no metric."""
    own = [runs[runs["cell"] == cell["cell"]] for cell in (a, b)]
    name = choose_metric(set(metric_names(own[0])) & set(metric_names(own[1])), wanted)
    if name is None:
        return None
    metric = describe_metric(name)
    old, new = paired_values(a["cell"], b["cell"], values_of(pd.concat(own), metric))
    raw = paired_difference(new, old, limit=metric.limit)
    return {
        "before": a["study"],
        "after": b["study"],
        "norm": a["base"],
        "setting": _words(a),
        "metric": metric.label,
        "before: mean": f"{old.mean():.{metric.digits}f}" if len(old) else None,
        "after: mean": f"{new.mean():.{metric.digits}f}" if len(new) else None,
        "after - before [95 % interval]": format_interval(raw, metric.digits),
        "n pairs": raw.n,
    }


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


def _environment(runs: pd.DataFrame) -> dict[str, str]:
    """Each key with all the values that the runs of a study have."""
    found = runs.filter(regex=r"^environment\.")
    return {
        str(key).removeprefix("environment."): ", ".join(
            sorted({show(value) for value in found[key]})
        )
        for key in found
    }
