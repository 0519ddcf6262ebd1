"""The cells of a study, a row each: their labels, and which of them may be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from normexp.norms.slots import SLOTS, Slots
from normexp.reporting.frame import (
    SIZES,
    Row,
    StudyRecords,
    config_columns,
    plain_rows,
    varying_columns,
)
from normexp.reporting.metric import Metric, format_interval
from normexp.reporting.style import order_norms
from normexp.stats.interval import Interval, mean, smallest_step

# Config keys that belong to the norm, so they may differ between norms that are compared.
NORM_KEYS = ("norm", *SLOTS)
# Measured, derived from the sizes, or without effect on a result.
IGNORED = ("mixes_samples", "leaks_future", "chance_accuracy", "stacked", "log_every", "split")
# The length of a training in three units; labels use the one with the fewest distinct values.
BUDGET = ("epochs", "num_steps", "samples")
# These may follow from the sizes and the budget (steps, a half-life), so they separate cells only
# where sizes and budget are equal.
DERIVED = (*BUDGET, "optim.momentum")

# Defaults of keys that are recorded only if they differ from them.
UNRECORDED = {**asdict(Slots()), "val_every_epochs": 1}


def build_cells(records: StudyRecords) -> pd.DataFrame:
    """A row per cell, ordered by norm and sizes.

    study, cell (its folder), model, data, lr, invalid, error: as recorded
    norm: the label of its line: the norm, the knobs in which cells of that norm differ, and the
        study if there are several; `base`: the label without the study
    batch_size, micro_batch_size, norm_batch_size: effective, never None
    protocol: `full`, `accumulated` or `ghost`
    mixes_samples: False if the norm was measured not to mix samples
    settings: a key that is equal for cells that may be compared; `setting`: in words, how the
        settings differ from those of other cells; `title`: model, data and `setting`
    budget: `epochs=12`; `recipe`: the settings without the budget
    num_groups, leaks_in_training: properties of the norm, for figures
    expected, finished, diverged, failed, missing, early (ended before the planned steps): numbers
        of seeds
    """
    runs = records.runs
    first = runs.drop_duplicates("cell").set_index("cell", drop=False).rename_axis(None)
    config = _with_budget(first[config_columns(runs)])
    cells = _measured_columns(first, runs, config, records.num_seeds)
    study = " · " + cells["study"] if len(records.num_seeds) > 1 else ""
    cells = cells.assign(norm=cells["name"] + study)
    cells = cells.join(_setting_columns(cells, config))
    knobs = _knob_words(cells, config)
    cells = cells.assign(norm=cells["norm"] + knobs, base=cells["name"] + knobs)
    order = cells[["batch_size", "norm_batch_size"]].assign(
        rank=norm_ranks(cells),
        lr=cells["lr"].fillna(0).astype(float),
        length=_budget_of(config),
    )
    order = order.sort_values(["rank", "batch_size", "norm_batch_size", "lr", "length"])
    return cells.loc[order.index].reset_index(drop=True)


def norm_ranks(cells: pd.DataFrame) -> pd.Series:
    """The place of each cell's norm in the order of norms."""
    ranks = {norm: place for place, norm in enumerate(order_norms(cells["norm"]))}
    return cells["norm"].map(ranks)


def size_key(cells: pd.DataFrame) -> pd.Series:
    """The norm batch size, 0 for cells that do not mix samples."""
    return cells["norm_batch_size"].where(cells["mixes_samples"], 0)


def as_keys(table: pd.DataFrame) -> pd.Series:
    """One hashable value per row, equal for equal rows."""
    texts = table.map(repr).to_numpy().tolist()
    return pd.Series([" ".join(line) for line in texts], table.index)


def _with_budget(config: pd.DataFrame) -> pd.DataFrame:
    """Adds `samples`, the training samples seen, and turns whole floats of a budget into ints."""
    if "num_steps" in config:
        config = config.assign(samples=config["num_steps"] * config["batch_size"])

    def plain(value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return config.assign(**{key: config[key].map(plain) for key in BUDGET if key in config})


def _measured_columns(
    first: pd.DataFrame, runs: pd.DataFrame, config: pd.DataFrame, num_seeds: dict[str, int]
) -> pd.DataFrame:
    """The columns that depend on one cell alone."""
    recorded = config.reindex(
        columns=["norm", "model", "data", "lr", "micro_batch_size", "norm_batch_size"]
        + ["batch_size", "mixes_samples", "norm.num_groups", "leaks_future_in_training"]
    ).astype(object)
    batch_size = recorded["batch_size"].astype(int)
    micro = recorded["micro_batch_size"].fillna(batch_size).astype(int)
    norm_size = recorded["norm_batch_size"].fillna(micro).astype(int)
    by_cell = runs.groupby("cell", sort=False)
    counts = pd.crosstab(runs["cell"], runs["status"]).reindex(first.index)
    counts = counts.reindex(columns=["finished", "diverged", "failed"], fill_value=0)
    expected = first["study"].map(num_seeds)
    names = recorded[["norm", "model", "data"]].fillna("-").astype(str)
    return (
        first[["study", "cell"]]
        .assign(
            name=names["norm"],
            model=names["model"],
            data=names["data"],
            lr=recorded["lr"],
            batch_size=batch_size,
            micro_batch_size=micro,
            norm_batch_size=norm_size,
            mixes_samples=recorded["mixes_samples"].map(lambda x: x is not False).astype(bool),
            protocol=np.select(
                [norm_size < micro, micro < batch_size], ["ghost", "accumulated"], "full"
            ),
            num_groups=recorded["norm.num_groups"],
            leaks_in_training=recorded["leaks_future_in_training"].eq(True),
            invalid=by_cell["invalid"].first(),
            error=by_cell["error"].first(),
            early=by_cell["stopped"].count(),
            expected=expected,
            missing=expected - by_cell.size(),
        )
        .join(counts)
    )


def _budget_of(config: pd.DataFrame) -> pd.Series:
    """The column of BUDGET with the fewest values; of equals that of whole numbers, then epochs."""
    known = config.reindex(columns=list(BUDGET)).dropna(axis="columns", how="all")
    if known.empty:
        return pd.Series(np.nan, config.index, name=BUDGET[0])

    def rank(key: str) -> tuple[int, bool]:
        values = known[key].dropna()
        return values.nunique(), any(isinstance(value, float) for value in values)  # 12 is an int

    return known[min(map(str, known), key=rank)]


def _setting_columns(cells: pd.DataFrame, config: pd.DataFrame) -> pd.DataFrame:
    """The columns that say which cells are comparable: settings, recipe, setting, title, budget."""
    budget = _budget_of(config)
    keys = _setting_keys(cells, config, str(budget.name))
    everywhere = pd.Series("", config.index)
    groups = {  # `model.width` distinguishes only cells with the same model
        key: config.get(key.partition(".")[0] if "." in key else "", everywhere)
        for key in keys
        if key not in ("model", "data")
    }
    words = _tell_apart(config, groups, ", ")
    columns = {
        "settings": as_keys(config[keys]),
        "recipe": as_keys(config[[key for key in keys if key not in BUDGET]]),
        "setting": words.str.removeprefix(", "),
        "title": cells["model"] + " on " + cells["data"] + words,
        "budget": budget.map(lambda value: "" if pd.isna(value) else f"{budget.name}={value}"),
    }
    return pd.DataFrame(columns)


def _setting_keys(cells: pd.DataFrame, config: pd.DataFrame, budget: str) -> list[str]:
    """The config keys that separate cells; budget: the key in which lengths are counted."""
    keys = [
        key
        for key in sorted(map(str, config))
        if key not in (*SIZES, "lr") and not _is_norm_key(key) and not key.startswith(IGNORED)
    ]
    own = [config.loc[same.index, keys] for _, same in cells.groupby("study")]
    if len(own) > 1:  # drop keys that only differ between studies: their comparison lists them
        within = {key for table in own for key in varying_columns(table)}
        between = set(varying_columns(config[keys])) - within
        keys = [key for key in keys if key not in between]
    chosen = [key for key in keys if key not in DERIVED]
    for key in dict.fromkeys((budget, *DERIVED)):
        places = config[chosen].join(cells[["batch_size", "norm_batch_size"]])
        if key in keys and _varies(config[key], cells["norm"], places).any():
            chosen.append(key)
    return sorted(chosen)


def _is_norm_key(key: str) -> bool:
    return key.partition(".")[0] in NORM_KEYS


def _knob_words(cells: pd.DataFrame, config: pd.DataFrame) -> pd.Series:
    """What follows the name of a norm in its label: differing knobs, INVALID, the protocol."""
    groups = {key: cells["norm"] for key in sorted(map(str, config)) if _is_norm_key(key)}
    if "norm.momentum" in groups:  # it may follow from the size
        places = cells[["settings", "batch_size", "norm_batch_size"]]
        is_free = _varies(config["norm.momentum"], cells["norm"], places)
        groups["norm.momentum"] = cells["norm"].where(is_free)
    words = _tell_apart(config, groups, " ")
    words += np.where(cells["invalid"].notna(), " INVALID", "")
    places = cells[["settings", "batch_size", "lr"]].assign(size=size_key(cells))
    is_double = _varies(cells["protocol"], cells["norm"] + words, places)
    return words + (" " + cells["protocol"]).where(is_double, "")


def _varies(column: pd.Series, norms: pd.Series, places: pd.DataFrame) -> pd.Series:
    """True for every cell of a norm whose column differs between two cells of equal places."""
    values = column.map(repr).groupby([norms, as_keys(places)]).transform("nunique")
    return norms.isin(norms[values > 1])


def _tell_apart(config: pd.DataFrame, groups: Mapping[str, pd.Series], mark: str) -> pd.Series:
    """For each cell, the mark and `key=value` for every key that varies within its group.

    groups: by key, in order, the group of each cell; None: the key is left out
    """
    words = pd.Series("", config.index)
    for key, group in groups.items():
        for _, alike in config[key].groupby(group):
            if alike.map(repr).nunique() > 1:
                name = key.removeprefix("norm.")
                default = UNRECORDED.get(key)
                values = [default if value is None else value for value in alike]
                words[alike.index] += [f"{mark}{name}={_typed(value)}" for value in values]
    return words


def _typed(value: Any) -> str:
    """Writes a value as on the command line: `null`, `true`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# Cells with their means over seeds


def summarize(cells: pd.DataFrame, values: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """Each row of `cells` with its mean over seeds; values: (seeds, cells), from `values_of`.

    Added columns: `mean`, `low`, `high`, `n`, `text` (the interval), `count` (n, with what is
    missing) and `seeds` (the value of each seed, as text).
    """
    found = {}
    by_data = cells.groupby("data")["cell"].unique()
    steps = {data: smallest_step(values[own]) for data, own in by_data.items()}
    for cell, data in cells.drop_duplicates("cell")[["cell", "data"]].itertuples(index=False):
        own = values[cell].dropna()
        shown = ", ".join(f"{seed}: {x:.{metric.digits + 1}f}" for seed, x in own.items())
        found[cell] = interval_row(
            mean(own, step=steps[data], bounds=metric.bounds), metric.digits
        ) | {"seeds": shown or "none finished"}
    columns = ["mean", "low", "high", "n", "text", "seeds"]
    rows = [found[cell] for cell in cells["cell"]]
    table = cells.join(pd.DataFrame(rows, cells.index, columns, dtype=object))
    return table.assign(count=[_count_words(row) for row in plain_rows(table)])


def interval_row(interval: Interval, digits: int) -> dict[str, Any]:
    return {
        "mean": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "text": format_interval(interval, digits),
    }


def _count_words(row: Row) -> str:
    """`8`, or `5/8 ×2 ?1`: ×k diverged, !k failed, ?k missing."""
    lost = {"×": row["diverged"], "!": row["failed"], "?": row["missing"]}
    marks = " ".join(f"{mark}{count}" for mark, count in lost.items() if count)
    return f"{row['n']}/{row['expected']} {marks}" if marks else str(row["n"])
