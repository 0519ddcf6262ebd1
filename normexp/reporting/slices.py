"""Labels cells and cuts them into slices: norms against one varying size, all else equal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from normexp.norms.slots import SLOTS, Slots
from normexp.reporting.frame import (
    SIZES,
    Row,
    StudyRecords,
    config_columns,
    metric_names,
    plain_rows,
    values_of,
    varying_columns,
)
from normexp.reporting.metric import PREFERRED, Metric, choose_metric, describe_metric
from normexp.reporting.style import order_norms
from normexp.stats.interval import smallest_step
from normexp.stats.sensitivity import (
    Sensitivity,
    batch_size_sensitivity,
    selection_optimism,
)

AXIS_TITLES = {
    "norm_batch_size": "norm batch size (samples that share statistics)",
    "batch_size": "batch size (samples per optimizer step)",
}
AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}
# Config keys that belong to the norm, so they may differ between norms that are compared.
NORM_KEYS = ("norm", *SLOTS)
# Measured, derived from the sizes, or without effect on a result.
IGNORED = ("mixes_samples", "leaks_future", "chance_accuracy", "stacked", "log_every", "split")
# The length of a training in three units; cells are told apart by the one with the fewest values.
BUDGET = ("epochs", "num_steps", "samples")
# May follow from the sizes and the budget (steps, a half-life): they separate cells only if they
# differ between cells that are equal in those.
DERIVED = (*BUDGET, "optim.momentum")


@dataclass(frozen=True)
class Slice:
    """Norms along one size, the axis.

    title: model, data and what else tells the slice from others; `fixed`: the other size, in words
    slug: suffix of file names
    points: a row per norm and size that was run, by norm and size: the columns of `build_cells`,
        `size`, `recorded` (seeds with a value) and `independent`. Along norm_batch_size, a norm
        that does not mix samples is independent: its single cell is repeated at every size.
    values: the metric as (seeds, cells), see `values_of`
    searched: cells that differ only in learning rate, a row each: `size`, `chosen` for the cell in
        `points`, `choice` (equal for those chosen from) and `lost` (diverged and failed runs)
    runs: the runs of all these cells
    """

    title: str
    fixed: str
    slug: str
    axis: str
    sizes: list[int]
    metric: Metric
    points: pd.DataFrame
    values: pd.DataFrame
    searched: pd.DataFrame
    runs: pd.DataFrame

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.fixed}"

    @property
    def norms(self) -> list[str]:
        return list(self.points["norm"].unique())

    @cached_property
    def step(self) -> float:
        """See `smallest_step`."""
        return smallest_step(self.values)

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """`values`, in which a diverged run has the worst value of any run on the lines."""
        own = self.values[self.points["cell"].unique()]
        runs = self.runs[self.runs["status"] == "diverged"]
        if runs.empty:
            return own
        lost = pd.crosstab(runs["seed"], runs["cell"]).reindex(own.index, columns=own.columns)
        worst = own.min().min() if self.metric.higher_is_better else own.max().max()
        return own.mask(lost.fillna(0) > 0, worst)

    @property
    def data(self) -> str:
        return self.points["data"].iloc[0]

    @property
    def model(self) -> str:
        return self.points["model"].iloc[0]

    @property
    def shared(self) -> str:
        """What slices on other data sets have in common with this one: `resnet, epochs=12`."""
        first = self.points.iloc[0]
        words = [self.model, first["budget"], *first["setting"].split(", ")]
        return ", ".join(filter(None, dict.fromkeys(words)))

    @property
    def smallest(self) -> pd.DataFrame:
        """The points at the smallest size."""
        return self.points[self.points["size"] == self.sizes[0]]

    @cached_property
    def lines(self) -> dict[str, list[Row]]:
        """The points of each norm in order of size, as plain rows."""
        lines: dict[str, list[Row]] = {}
        for row in plain_rows(self.points):
            lines.setdefault(row["norm"], []).append(row)
        return lines

    def sensitivity(self, norm: str) -> Sensitivity:
        """What a norm of two or more sizes loses between them."""
        rows = self.lines[norm]
        return batch_size_sensitivity(
            self.outcomes[[row["cell"] for row in rows]].dropna(how="all"),
            [row["size"] for row in rows],
            higher_is_better=self.metric.higher_is_better,
            tolerance=self.metric.tolerance,
            step=self.step,
            limit=self.metric.limit,
        )

    def optimism(self, cell: str) -> float | None:
        """`selection_optimism` of a cell whose learning rate was chosen; None for another cell.

        In the unit of the metric, positive if the choice flatters. Rates at which a run is lost are
        no candidates.
        """
        table = self.searched
        own = table[table["cell"] == cell]
        if own.empty:
            return None
        alike = table[table["choice"].isin(own["choice"])]
        candidates = alike["cell"][alike["lost"] == own["lost"].iloc[0]].unique()
        sign = 1 if self.metric.higher_is_better else -1
        selection = describe_metric(self.metric.selection_name)
        scores = sign * values_of(self.runs, selection)[candidates]
        values = sign * self.values[candidates]
        complete = scores.notna().all(axis=1) & values.notna().all(axis=1)
        return selection_optimism(scores[complete], values[complete])


def build_cells(records: StudyRecords) -> pd.DataFrame:
    """A row per cell, ordered by norm and sizes.

    study, cell (its folder), model, data, lr, invalid, error: as recorded
    norm: the label of its line: the norm with the knobs in which it differs from others of its
        name, and the study if there are several; `base`: the label without the study
    batch_size, micro_batch_size, norm_batch_size: effective, never None; protocol: `full`,
        `accumulated` or `ghost`
    mixes_samples: False if the norm was measured not to look across samples
    settings: what must be equal for cells to be compared; `setting`: how it differs from others, in
        words; `title`: model, data and `setting`
    budget: `epochs=12`; `recipe`: the settings without the budget
    expected, diverged, failed, missing, early (ended before the planned steps): numbers of seeds
    """
    runs = records.runs
    first = runs.drop_duplicates("cell").set_index("cell", drop=False)
    config = _with_budget(first[config_columns(runs)].rename_axis(None))
    cells = _measured_columns(first.rename_axis(None), runs, config, records.num_seeds)
    is_several = len(records.num_seeds) > 1
    names = cells["name"] + (" · " + cells["study"] if is_several else "")
    keys = _setting_keys(cells.assign(norm=names), config, is_several=is_several)
    cells["settings"] = _as_keys(config[keys])
    cells["recipe"] = _as_keys(config[[key for key in keys if key not in BUDGET]])
    budget = _budget_of(config)
    cells["budget"] = budget.map(lambda x: "" if pd.isna(x) else f"{budget.name}={_plain(x)}")
    suffix = _knob_words(cells.assign(norm=names), config)
    suffix += pd.Series(np.where(cells["invalid"].notna(), " INVALID", ""), cells.index)
    suffix += _protocol_words(cells.assign(norm=names + suffix))
    cells["norm"], cells["base"] = names + suffix, cells["name"] + suffix
    cells["setting"] = _setting_words(config[keys])
    parts = cells["model"] + " on " + cells["data"]
    cells["title"] = parts + cells["setting"].where(cells["setting"] == "", ", " + cells["setting"])
    rank = {norm: place for place, norm in enumerate(order_norms(cells["norm"]))}
    order = cells.assign(
        rank=cells["norm"].map(rank), lr=cells["lr"].fillna(0).astype(float), length=budget
    )
    places = ["rank", "batch_size", "norm_batch_size", "lr", "length"]
    order = order.sort_values(places, kind="stable")
    return cells.loc[order.index].reset_index(drop=True)


def build_slices(
    cells: pd.DataFrame, runs: pd.DataFrame, *, metric: str | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the requested metric have none."""
    slices = []
    for _, panel in cells.groupby("settings", sort=False):
        own = runs[runs["cell"].isin(panel["cell"])]
        available = metric_names(own)
        name = choose_metric(available, metric)
        if not available:  # all diverged or failed, which is worth reporting too
            name = metric or PREFERRED[0]
        if name is not None:
            slices += _slices_of(panel, own, describe_metric(name, tolerance))
    return _with_slugs(slices)


def _measured_columns(
    first: pd.DataFrame, runs: pd.DataFrame, config: pd.DataFrame, num_seeds: dict[str, int]
) -> pd.DataFrame:
    """The columns of a cell that need no other cell."""
    absent = pd.Series([None] * len(first), first.index, dtype=object)

    def recorded(key: str) -> pd.Series:
        return config.get(key, absent)

    batch_size = recorded("batch_size").astype(int)
    micro = recorded("micro_batch_size").fillna(batch_size).astype(int)
    norm_size = recorded("norm_batch_size").fillna(micro).astype(int)
    by_cell = runs.groupby("cell", sort=False)
    counts = pd.crosstab(runs["cell"], runs["status"]).reindex(first.index)
    counts = counts.reindex(columns=["finished", "diverged", "failed"], fill_value=0)
    expected = first["study"].map(num_seeds)
    table = first[["study", "cell"]].assign(
        name=recorded("norm").fillna("-").astype(str),
        model=recorded("model").fillna("-").astype(str),
        data=recorded("data").fillna("-").astype(str),
        lr=recorded("lr"),
        batch_size=batch_size,
        micro_batch_size=micro,
        norm_batch_size=norm_size,
        mixes_samples=recorded("mixes_samples").map(lambda x: x is not False).astype(bool),
        protocol=np.select(
            [norm_size < micro, micro < batch_size], ["ghost", "accumulated"], "full"
        ),
        num_groups=recorded("norm.num_groups"),
        leaks_in_training=recorded("leaks_future_in_training")
        .map(lambda x: x is True)
        .astype(bool),
        invalid=by_cell["invalid"].first(),
        error=by_cell["error"].first(),
        early=by_cell["stopped"].count(),
        expected=expected,
        missing=expected - by_cell.size(),
    )
    return table.join(counts)


def _setting_keys(cells: pd.DataFrame, config: pd.DataFrame, *, is_several: bool) -> list[str]:
    """The config keys that separate cells into comparable ones."""
    keys = [
        key
        for key in sorted(map(str, config))
        if key not in (*SIZES, "lr") and not _is_norm_key(key) and not key.startswith(IGNORED)
    ]
    if is_several:  # drop what only tells the studies apart; the comparison of studies lists it
        within = {
            key for _, own in config[keys].groupby(cells["study"]) for key in varying_columns(own)
        }
        between = set(varying_columns(config[keys])) - within
        keys = [key for key in keys if key not in between]
    derived = [key for key in (str(_budget_of(config).name), *DERIVED) if key in keys]
    chosen = [key for key in keys if key not in derived]
    for key in dict.fromkeys(derived):
        alike = cells.assign(settings=_as_keys(config[chosen]))
        if not _follows_from_size(alike, config[key]):
            chosen.append(key)
    return sorted(chosen)


def _with_budget(config: pd.DataFrame) -> pd.DataFrame:
    """With `samples`, the training samples seen, and 12 epochs for 12.0."""
    if "num_steps" in config:
        config = config.assign(samples=config["num_steps"] * config["batch_size"])
    return config.assign(**{key: config[key].map(_plain) for key in BUDGET if key in config})


def _budget_of(config: pd.DataFrame) -> pd.Series:
    """The column of BUDGET with the fewest distinct values, then with whole ones; epochs first."""
    known = config.reindex(columns=list(BUDGET)).dropna(axis="columns", how="all")
    if known.empty:
        return pd.Series(np.nan, config.index, name=BUDGET[0])

    def rank(key: str) -> tuple[int, bool]:
        values = known[key].dropna()
        return values.nunique(), any(isinstance(value, float) for value in values)  # 12 is an int

    return known[min(map(str, known), key=rank)]


def _follows_from_size(cells: pd.DataFrame, column: pd.Series) -> bool:
    """True if the column has one value wherever norm, sizes and settings are equal."""
    place = [cells[key] for key in ("settings", "norm", "batch_size", "norm_batch_size")]
    return column.map(repr).groupby(place).nunique().max() == 1


def _knob_words(cells: pd.DataFrame, config: pd.DataFrame) -> pd.Series:
    """The knobs in which norms of one name differ: ` num_groups=8`."""
    words = pd.Series("", cells.index, dtype=object)
    for _, same in cells.groupby("norm", sort=False):
        own = config.loc[same.index, [key for key in sorted(map(str, config)) if _is_norm_key(key)]]
        for key in varying_columns(own):
            if key == "norm.momentum" and _follows_from_size(same, own[key]):
                continue
            default = getattr(Slots(), key, None)  # of a slot, which is recorded if it is changed
            values = [default if value is None else value for value in own[key]]
            words[same.index] += [f" {key.removeprefix('norm.')}={_typed(x)}" for x in values]
    return words


def _typed(value: Any) -> str:
    """As on the command line: `null`, `true`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _protocol_words(cells: pd.DataFrame) -> pd.Series:
    """` ghost` or ` accumulated` for norms that reach one size in both ways."""
    place = ["settings", "norm", "batch_size", _size_key(cells), cells["lr"].map(repr)]
    ways = cells.groupby(place)["protocol"].transform("nunique")
    doubled = cells["norm"].isin(cells["norm"][ways > 1])
    return (" " + cells["protocol"]).where(doubled, "")


def _setting_words(config: pd.DataFrame) -> pd.Series:
    """For each cell the settings in which it differs from others: `epochs=3, model.width=8`.

    Keys of a model, data set or optimizer count only where two of one name differ in them.
    """
    words = pd.Series("", config.index)
    for key in map(str, config.drop(columns=["model", "data"], errors="ignore")):
        part = key.partition(".")[0]
        is_inside = part != key and part in config
        for _, alike in config.groupby(part) if is_inside else [("", config)]:
            if alike[key].map(repr).nunique() > 1:
                words[alike.index] += alike[key].fillna("null").map(f", {key}={{}}".format)
    return words.str[2:]


def _plain(value: Any) -> Any:
    """12 for 12.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_norm_key(key: str) -> bool:
    return key.partition(".")[0] in NORM_KEYS


def _as_keys(config: pd.DataFrame) -> pd.Series:
    """One hashable value per row, equal for equal rows."""
    texts = config.map(repr).to_numpy().tolist()
    return pd.Series([" ".join(line) for line in texts], config.index)


def _size_key(cells: pd.DataFrame) -> pd.Series:
    """The norm batch size, 0 for all norms that do not mix samples."""
    return cells["norm_batch_size"].where(cells["mixes_samples"], 0).rename("size_key")


def _slices_of(cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric) -> list[Slice]:
    """Slices along the norm batch size if it varies, and along the batch size if that does."""
    mixing = cells[cells["mixes_samples"]] if cells["mixes_samples"].any() else cells
    follows = ~cells["mixes_samples"] | (cells["norm_batch_size"] == cells["batch_size"])
    sizes = {
        size: sorted(mixing["norm_batch_size"][mixing["batch_size"] == size].unique().tolist())
        for size in sorted(mixing["batch_size"].unique().tolist())
    }
    slices = [
        _norm_axis(cells, runs, metric, batch_size, own)
        for batch_size, own in sizes.items()
        if len(own) > 1
    ]
    ways = {"norm batch size = batch size": cells[follows]}
    if not slices:
        for size in sorted(mixing["norm_batch_size"].unique().tolist()):
            is_here = ~cells["mixes_samples"] | (cells["norm_batch_size"] == size)
            ways[f"norm batch size {size}"] = cells[is_here]
    seen: list[set[str]] = []
    for fixed, chosen in ways.items():
        ids = set(chosen["cell"])
        if chosen["batch_size"].nunique() > 1 and not any(ids <= earlier for earlier in seen):
            slices.append(_batch_axis(chosen, runs, metric, fixed))
            seen.append(ids)
    return slices or [
        _norm_axis(cells, runs, metric, size, sizes.get(size) or [size])
        for size in sorted(cells["batch_size"].unique().tolist())
    ]


def _norm_axis(
    cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric, batch_size: int, sizes: list[int]
) -> Slice:
    chosen, searched = _choose_rates(cells[cells["batch_size"] == batch_size], runs, metric)
    alone = chosen["norm"][~chosen["mixes_samples"]]
    points = chosen[~chosen["mixes_samples"] | ~chosen["norm"].isin(alone)]
    fixed, axis = f"batch size {batch_size}", "norm_batch_size"
    points, searched = _at_sizes(points, sizes), _at_sizes(searched, sizes)
    return _slice(axis, fixed, sizes, points, searched, runs, metric)


def _at_sizes(cells: pd.DataFrame, sizes: list[int]) -> pd.DataFrame:
    """Cells at their norm batch size, or at every size if they do not mix samples."""
    mixing, alone = cells[cells["mixes_samples"]], cells[~cells["mixes_samples"]]
    repeated = alone.merge(pd.DataFrame({"size": sizes}), how="cross")
    own = mixing.assign(size=mixing["norm_batch_size"])
    return pd.concat([own.assign(independent=False), repeated.assign(independent=True)])


def _batch_axis(cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric, fixed: str) -> Slice:
    chosen, searched = _choose_rates(cells, runs, metric)
    sizes = sorted(chosen["batch_size"].unique().tolist())
    points = chosen.assign(size=chosen["batch_size"], independent=False)
    searched = searched.assign(size=searched["batch_size"])
    return _slice("batch_size", fixed, sizes, points, searched, runs, metric)


def _slice(
    axis: str,
    fixed: str,
    sizes: list[int],
    points: pd.DataFrame,
    searched: pd.DataFrame,
    runs: pd.DataFrame,
    metric: Metric,
) -> Slice:
    def ordered(table: pd.DataFrame) -> pd.DataFrame:
        rank = {norm: place for place, norm in enumerate(order_norms(points["norm"]))}
        place = table["norm"].map(rank)
        table = table.assign(place=place).sort_values(["place", "size"], kind="stable")
        return table.drop(columns="place").reset_index(drop=True)

    points, searched = ordered(points), ordered(searched)
    own = runs[runs["cell"].isin({*points["cell"], *searched["cell"]})]
    title, values = points["title"].iloc[0], values_of(own, metric)
    points["recorded"] = points["cell"].map(values.count())
    return Slice(title, fixed, "", axis, sizes, metric, points, values, searched, own)


def _choose_rates(
    cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Chooses a cell for each norm and sizes; returns these, and all cells chosen from.

    The learning rate is chosen by the validation metric, never on test: first the fewest runs that
    diverged or failed, then the best mean over seeds.
    """
    selection = describe_metric(metric.selection_name)
    means = values_of(runs[runs["cell"].isin(cells["cell"])], selection).mean()
    score = cells["cell"].map(means) * (1 if metric.higher_is_better else -1)
    ranked = cells.assign(
        choice=_as_keys(cells[["norm", "batch_size"]].join(_size_key(cells))),
        lost=cells["diverged"] + cells["failed"],
        score=score.fillna(-np.inf),
    ).sort_values(["lost", "score"], ascending=[True, False], kind="stable")
    best = ranked.drop_duplicates("choice").index
    ranked = ranked.assign(chosen=ranked.index.isin(best)).sort_index()
    is_choice = ranked.duplicated("choice", keep=False)
    return cells.loc[ranked.index[ranked["chosen"]]], ranked[is_choice]


def _with_slugs(slices: Sequence[Slice]) -> list[Slice]:
    """With short unique names for files."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, part in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{part.title} {part.fixed}".lower()).strip("_")
        named.append(replace(part, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
