"""Slices of the cells of a study: norms against one varying size, all else equal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from normexp.reporting.cells import as_keys, norm_ranks, size_key
from normexp.reporting.frame import Row, metric_names, plain_rows, values_of
from normexp.reporting.metric import PREFERRED, Metric, choose_metric, describe_metric
from normexp.stats.interval import smallest_step
from normexp.stats.sensitivity import Sensitivity, batch_size_sensitivity, selection_optimism

AXIS_TITLES = {
    "norm_batch_size": "norm batch size (samples that share statistics)",
    "batch_size": "batch size (samples per optimizer step)",
}
AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}


@dataclass(frozen=True)
class Slice:
    """Norms along one size, the axis.

    title: model, data and other settings that distinguish the slice
    fixed: the other size, in words
    slug: suffix of file names
    points: a row per norm and size that was run, in this order: the columns of `build_cells`,
        `size`, `recorded` (seeds with a value) and `independent`. Along norm_batch_size, a norm
        that does not mix samples is independent: its single cell is repeated at every size.
    values: the metric as (seeds, cells), see `values_of`
    searched: a row per cell where cells differ only in learning rate: `size`, `chosen` (the cell is
        in `points`), `choice` (equal for alternatives) and `lost` (diverged and failed runs)
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
        """`values` in which a diverged run has the worst value of any run in `points`."""
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
        """What a norm of two or more sizes loses between them; without sizes that have no run."""
        rows = self.lines[norm]
        has_value = self.outcomes.notna().any()
        rows = [row for row in rows if row in (rows[0], rows[-1]) or has_value[row["cell"]]]
        return batch_size_sensitivity(
            self.outcomes[[row["cell"] for row in rows]].dropna(how="all"),
            [row["size"] for row in rows],
            higher_is_better=self.metric.higher_is_better,
            tolerance=self.metric.tolerance,
            step=self.step,
            limit=self.metric.limit,
        )

    def optimism(self, cell: str) -> float | None:
        """`selection_optimism` of a cell whose learning rate was chosen; None for other cells.

        In the unit of the metric, positive if the choice flatters. The candidates are the rates at
        which as many runs were lost.
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


def build_slices(
    cells: pd.DataFrame, runs: pd.DataFrame, *, metric: str | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the requested metric are left out."""
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


def _slices_of(cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric) -> list[Slice]:
    """Slices along the norm batch size and along the batch size, each if it varies."""
    alone = ~cells.groupby("norm")["mixes_samples"].transform("any")
    cells = cells.assign(independent=alone)
    mixing = cells if alone.all() else cells[~alone]
    sizes = {
        size: _values(mixing["norm_batch_size"][mixing["batch_size"] == size])
        for size in _values(mixing["batch_size"])
    }

    def along_norm_batch_size(batch_size: int, own: list[int]) -> Slice:
        ranked = _rank_rates(cells[cells["batch_size"] == batch_size], runs, metric)
        following = ranked[~ranked["independent"]]
        repeated = ranked[ranked["independent"]].merge(pd.DataFrame({"size": own}), how="cross")
        placed = [following.assign(size=following["norm_batch_size"]), repeated]
        fixed = f"batch size {batch_size}"
        return _slice("norm_batch_size", fixed, own, pd.concat(placed), runs, metric)

    slices = [along_norm_batch_size(size, own) for size, own in sizes.items() if len(own) > 1]
    is_full = cells["norm_batch_size"] == cells["batch_size"]
    ways = {"norm batch size = batch size": cells[alone | is_full]}
    if not slices:
        for size in _values(mixing["norm_batch_size"]):
            ways[f"norm batch size {size}"] = cells[alone | (cells["norm_batch_size"] == size)]
    seen: list[set[str]] = []
    for fixed, chosen in ways.items():
        ids, own = set(chosen["cell"]), _values(chosen["batch_size"])
        if len(own) > 1 and not any(ids <= earlier for earlier in seen):
            ranked = _rank_rates(chosen, runs, metric)
            placed = ranked.assign(size=ranked["batch_size"], independent=False)
            slices.append(_slice("batch_size", fixed, own, placed, runs, metric))
            seen.append(ids)
    return slices or [
        along_norm_batch_size(size, sizes.get(size) or [size])
        for size in _values(cells["batch_size"])
    ]


def _values(column: pd.Series) -> list[int]:
    return sorted(column.unique().tolist())


def _rank_rates(cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """Adds `choice`, equal for cells that differ only in learning rate, and `chosen`, the best.

    Best on validation, never on test: the fewest runs that diverged or failed (`lost`), then the
    best mean over seeds.
    """
    selection = describe_metric(metric.selection_name)
    means = values_of(runs[runs["cell"].isin(cells["cell"])], selection).mean()
    score = cells["cell"].map(means) * (1 if metric.higher_is_better else -1)
    ranked = cells.assign(
        choice=as_keys(cells[["norm", "batch_size"]].assign(size=size_key(cells))),
        lost=cells["diverged"] + cells["failed"],
        score=score.fillna(-np.inf),
    ).sort_values(["lost", "score"], ascending=[True, False])
    return ranked.assign(chosen=~ranked.duplicated("choice")).sort_index()


def _slice(
    axis: str,
    fixed: str,
    sizes: list[int],
    placed: pd.DataFrame,
    runs: pd.DataFrame,
    metric: Metric,
) -> Slice:
    """placed: ranked cells, a row for each `size` at which a cell stands."""
    placed = placed.assign(rank=norm_ranks(placed)).sort_values(["rank", "size"])
    points = placed[placed["chosen"]].reset_index(drop=True)
    is_choice = placed.duplicated(["choice", "size"], keep=False)
    own = runs[runs["cell"].isin(placed["cell"])]
    values = values_of(own, metric)
    points["recorded"] = points["cell"].map(values.count())
    searched = placed[is_choice].reset_index(drop=True)
    title = points["title"].iloc[0]
    return Slice(title, fixed, "", axis, sizes, metric, points, values, searched, own)


def _with_slugs(slices: Sequence[Slice]) -> list[Slice]:
    """Gives each slice a short unique name for files."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, part in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{part.title} {part.fixed}".lower()).strip("_")
        named.append(replace(part, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
