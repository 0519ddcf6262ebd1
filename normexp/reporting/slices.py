"""A study cut into slices: norms against the one size that varies, everything else alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from normexp.reporting.cells import Cell, Settings, describe_settings
from normexp.reporting.metric import PREFERRED, Metric, choose_metric, describe_metric
from normexp.reporting.style import order_norms

AXIS_TITLES = {
    "norm_batch_size": "norm batch size (samples that share statistics)",
    "batch_size": "batch size (samples per optimizer step)",
}
AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}


@dataclass(frozen=True)
class Line:
    """One norm along the sizes of a slice.

    cells: by size; a size that was not run is absent
    independent: the one cell of a norm that was measured not to mix samples, where the norm batch
        size varies; it stands for every size and `cells` is empty then
    """

    norm: str
    cells: dict[int, Cell]
    independent: Cell | None = None

    def at(self, size: int) -> Cell | None:
        return self.independent or self.cells.get(size)

    @property
    def all_cells(self) -> list[Cell]:
        return [self.independent] if self.independent else list(self.cells.values())


@dataclass(frozen=True)
class Slice:
    """Norms along one size. `fixed` says in words at which other size."""

    title: str
    fixed: str
    slug: str
    axis: str
    sizes: list[int]
    lines: dict[str, Line]
    metric: Metric
    searched: dict[str, list[Cell]]

    @property
    def cells(self) -> list[Cell]:
        return [cell for line in self.lines.values() for cell in line.all_cells]


def build_slices(
    cells: Sequence[Cell], *, metric: str | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the metric that was asked for have none."""
    panels: dict[Settings, list[Cell]] = defaultdict(list)
    for cell in cells:
        panels[cell.settings].append(cell)
    slices = []
    for settings, members in panels.items():
        available = {name for cell in members for run in cell.runs for name in run.result.metrics}
        name = choose_metric(available, metric)
        if not available:  # all diverged or failed, which is worth saying too
            name = metric or PREFERRED[0]
        if name is not None:
            title = describe_settings(settings, panels)
            slices += _slices_of(members, title, describe_metric(name, tolerance))
    return _with_slugs(slices)


def align(line: Line, sizes: Sequence[int], metric: Metric) -> tuple[np.ndarray, list[int]]:
    """Values (num_seeds, num_sizes) of a line and its seeds; NaN where there is no finished run."""
    columns = [cell.values(metric) if (cell := line.at(size)) else {} for size in sizes]
    seeds = sorted({run.result.seed for cell in line.all_cells for run in cell.runs})
    table = [[column.get(seed, np.nan) for column in columns] for seed in seeds]
    return np.array(table, dtype=np.float64).reshape(len(seeds), len(sizes)), seeds


def choose_lr(cells: Sequence[Cell], metric: Metric) -> Cell:
    """The cell whose learning rate is best on the validation metric; on test nothing is chosen.

    Cells with fewer runs that diverged or failed go first, then the mean over seeds decides.
    """
    sign = 1.0 if metric.higher_is_better else -1.0
    selection = describe_metric(metric.selection_name)

    def rank(cell: Cell) -> tuple[int, float]:
        values = cell.values(selection)
        mean = sign * fmean(values.values()) if values else -np.inf
        return -len(cell.seeds("diverged")) - len(cell.seeds("failed")), mean

    return max(cells, key=rank)


def _slices_of(cells: list[Cell], title: str, metric: Metric) -> list[Slice]:
    mixing = [cell for cell in cells if cell.mixes_samples] or cells
    batch_sizes = sorted({cell.batch_size for cell in cells})
    slices = []
    for batch_size in batch_sizes:
        sizes = {cell.norm_batch_size for cell in mixing if cell.batch_size == batch_size}
        if len(sizes) > 1:
            slices.append(_norm_axis(cells, batch_size, sizes, title, metric))
    follows = [c for c in cells if not c.mixes_samples or c.norm_batch_size == c.batch_size]
    ways = {"norm batch size = batch size": follows}
    if not slices:
        ways |= {
            f"norm batch size {size}": [
                c for c in cells if not c.mixes_samples or c.norm_batch_size == size
            ]
            for size in sorted({c.norm_batch_size for c in mixing})
        }
    seen: list[set[str]] = []
    for fixed, chosen in ways.items():
        ids = {cell.id for cell in chosen}
        if len({cell.batch_size for cell in chosen}) > 1 and not any(ids <= old for old in seen):
            slices.append(_batch_axis(chosen, title, fixed, metric))
            seen.append(ids)
    if slices:
        return slices
    return [
        _norm_axis(
            cells,
            size,
            {c.norm_batch_size for c in mixing if c.batch_size == size} or {size},
            title,
            metric,
        )
        for size in batch_sizes
    ]


def _norm_axis(
    cells: list[Cell], batch_size: int, sizes: set[int], title: str, metric: Metric
) -> Slice:
    here = [cell for cell in cells if cell.batch_size == batch_size]
    chosen, searched = _one_lr(here, metric)
    lines = {}
    for norm in order_norms(cell.norm for cell in chosen):
        own = [cell for cell in chosen if cell.norm == norm]
        alone = next((cell for cell in own if not cell.mixes_samples), None)
        by_size = {} if alone else {cell.norm_batch_size: cell for cell in own}
        lines[norm] = Line(norm, dict(sorted(by_size.items())), alone)
    fixed = f"batch size {batch_size}"
    return Slice(title, fixed, "", "norm_batch_size", sorted(sizes), lines, metric, searched)


def _batch_axis(cells: list[Cell], title: str, fixed: str, metric: Metric) -> Slice:
    chosen, searched = _one_lr(cells, metric)
    lines = {}
    for norm in order_norms(cell.norm for cell in chosen):
        own = {cell.batch_size: cell for cell in chosen if cell.norm == norm}
        lines[norm] = Line(norm, dict(sorted(own.items())))
    sizes = sorted({cell.batch_size for cell in chosen})
    return Slice(title, fixed, "", "batch_size", sizes, lines, metric, searched)


def _one_lr(cells: list[Cell], metric: Metric) -> tuple[list[Cell], dict[str, list[Cell]]]:
    """One cell per norm and sizes, the others' learning rates aside; and what was searched."""
    places: dict[tuple[str, int, int | None], list[Cell]] = defaultdict(list)
    for cell in cells:
        size = cell.norm_batch_size if cell.mixes_samples else None
        places[cell.norm, cell.batch_size, size].append(cell)
    searched = {choose_lr(same, metric).id: same for same in places.values() if len(same) > 1}
    return [choose_lr(same, metric) for same in places.values()], searched


def _with_slugs(slices: list[Slice]) -> list[Slice]:
    """Short names for files, all different."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, part in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{part.title} {part.fixed}".lower()).strip("_")
        named.append(replace(part, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
