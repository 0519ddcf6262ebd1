"""Slices of the cells of a study: norms against one varying size, all else equal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from normexp.config.words import format_count
from normexp.records.provenance import DISTRIBUTIONS
from normexp.records.result import Status
from normexp.reporting.cells import (
    CellRow,
    common,
    mean_of_seeds,
    metric_names,
    order_norms,
    setting_words,
    settings_key,
)
from normexp.reporting.metric import (
    PREFERRED,
    Metric,
    choose_metric,
    describe_metric,
    format_mean,
)
from normexp.stats.crossfit import CrossFit, cross_fit
from normexp.stats.interval import Array, Interval

AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}


@dataclass(frozen=True, eq=False)
class Grid:
    """A norm at one size: a cell, or cells that differ in learning rate alone, in its order.

    size: the smallest one at which it stands, along the axis of its slice
    """

    norm: str
    cells: Sequence[CellRow]
    metric: Metric
    size: int = 0

    @property
    def rates(self) -> list[float | None]:
        return [cell.lr for cell in self.cells]

    @property
    def sign(self) -> float:
        return 1.0 if self.metric.higher_is_better else -1.0

    @cached_property
    def scores(self) -> list[dict[int, float]]:
        """For each cell, by seed, what its learning rate is chosen by; -inf if diverged."""
        name, tables = self.metric.selection_name, []
        for cell in self.cells:
            known = {run.seed: run.metrics.get(name) for run in cell.runs}
            own = {seed: self.sign * x for seed, x in known.items() if x is not None}
            tables.append(own | dict.fromkeys(cell.seeds_with(Status.DIVERGED), -np.inf))
        return tables

    @cached_property
    def best(self) -> CellRow:
        """The cell with the fewest failed runs, and the best mean on validation."""
        means = [float(np.mean([*table.values()])) if table else -np.inf for table in self.scores]
        failed = [cell.count(Status.FAILED) for cell in self.cells]
        ranks = [(-count, mean) for count, mean in zip(failed, means, strict=True)]
        return self.cells[ranks.index(max(ranks))]

    @property
    def why_incomplete(self) -> str:
        """Why it allows no verdict: `5 of 8 seeds of group`; empty if it does."""
        for cell in self.cells:
            known, count = cell.values(self.metric).keys() & cell.wanted, len(cell.wanted)
            if len(known) < count:
                diverged = len(cell.without_value(self.metric))
                which = f"{diverged or len(known)} of {format_count(count, 'seed')} of {cell.norm}"
                return which + " diverged" * bool(diverged)
        if len(self.cells) == 1 or self.fit is not None:
            return ""
        seeds = {*self.seeds}
        if len(seeds) < 3:
            return f"to tune lr takes 3 seeds, not {len(seeds)}"
        if any(cell.values(self.metric).keys() != seeds for cell in self.cells):
            return "seeds differ between learning rates"
        return f"{self.metric.selection_name} is missing, by which lr is chosen"

    @cached_property
    def seeds(self) -> list[int]:
        """Those of the best cell, which all cells have where they tune it."""
        return sorted(self.best.values(self.metric))

    @cached_property
    def fit(self) -> CrossFit | None:
        """Cross-fitted outcomes, higher is better, where all rates have the same 3 or more seeds.

        With test samples where every rate that some split chooses has them.
        """
        seeds, means = self.seeds, [cell.values(self.metric) for cell in self.cells]
        is_whole = all(known.keys() == {*seeds} for known in (*means, *self.scores))
        if len(self.cells) < 2 or len(seeds) < 3 or not is_whole:
            return None
        scores = np.array([[known[seed] for seed in seeds] for known in self.scores])
        values = self.sign * np.array([[known[seed] for seed in seeds] for known in means])
        fit = cross_fit(scores, values)
        tables = [self._samples_of(cell) for cell in self.cells]
        counts = {table.shape[1] for table in tables if table is not None}
        lacking = [share for share, table in zip(fit.shares, tables, strict=True) if table is None]
        if len(counts) != 1 or any(lacking):
            return fit
        full = [  # a rate that no split chooses has its means
            np.repeat(row[:, None], *counts, axis=1) if table is None else table
            for row, table in zip(values, tables, strict=True)
        ]
        return cross_fit(scores, np.stack(full))

    def _samples_of(self, cell: CellRow) -> Array | None:
        """(n, N) over `seeds`, higher is better; each sample of a diverged run is at chance level.

        None if not recorded.
        """
        runs = [run for run in cell.runs if run.seed in self.seeds]
        rows = [run.samples(self.metric) for run in runs]
        counts = {
            len(row) for run, row in zip(runs, rows, strict=True) if run.status == Status.FINISHED
        }
        if len(counts) != 1 or (count := counts.pop()) < 2:
            return None
        full = [
            row if len(row) else np.full(count, run.value(self.metric))
            for run, row in zip(runs, rows, strict=True)
        ]
        return self.sign * np.stack(full)

    @cached_property
    def outcomes(self) -> Array:
        """Higher is better, (n,) over `seeds`, or (n, N) with test samples; cross-fitted."""
        if self.fit is not None:
            return self.fit.values
        table = self._samples_of(self.best)
        if table is not None:
            return table
        values = self.best.values(self.metric)
        return self.sign * np.array([values[seed] for seed in self.seeds], dtype=np.float64)

    @property
    def values(self) -> dict[int, float]:
        """By seed, as shown; of a tuned norm only their mean has a meaning."""
        if self.fit is None:
            return self.best.values(self.metric)
        rows = self.outcomes if self.outcomes.ndim == 1 else self.outcomes.mean(axis=1)
        return dict(zip(self.seeds, (self.sign * rows).tolist(), strict=True))

    @cached_property
    def mean(self) -> Interval:
        """As tables and figures show it: cross-fitted where a grid tunes it."""
        values, step = list(self.values.values()), self.best.step(self.metric)
        return mean_of_seeds(values, step, self.metric)

    @property
    def mean_words(self) -> str:
        """The mean with its interval, or with its few seeds unless they tuned it."""
        seeds = self.values.values() if self.fit is None else ()
        return format_mean(self.mean, self.metric, seeds)

    @property
    def lost(self) -> str:
        """`1 diverged, 2 at chance`, of the rates that some split chooses."""
        shares = [] if self.fit is None else self.fit.shares.tolist()
        cells = [c for c, share in zip(self.cells, shares, strict=False) if share] or [self.best]
        counts = {
            "failed": sum(cell.count(Status.FAILED) for cell in cells),
            "diverged": sum(cell.count(Status.DIVERGED) for cell in cells),
            "at chance": sum(len(cell.at_chance) for cell in cells),
        }
        return ", ".join(f"{count} {words}" for words, count in counts.items() if count)

    @property
    def rate_words(self) -> str:
        """`0.1`, or `tuned over 5, 0.1 most often`, and whether the best is at an edge."""
        if self.fit is not None:
            shares = self.fit.shares
            rates = [rate or 0.0 for rate in self.rates]
            at_edge = (shares[0] > shares[-1], self.fit.is_at_edge)
            words = f"tuned over {len(rates)}, {rates[int(shares.argmax())]:g} most often"
        elif self.best.lr is None:
            return ""
        else:
            rates, lr = self.best.searched_rates, self.best.lr
            at_edge = (lr in rates[:1], lr in (*rates[:1], *rates[-1:]))
            words = f"{lr:g}" + (f", best of {len(self.cells)}" if len(self.cells) > 1 else "")
        is_low, is_at_edge = at_edge
        if not is_at_edge or len(rates) < 3:
            return words
        further = rates[0] ** 2 / rates[1] if is_low else rates[-1] ** 2 / rates[-2]
        return f"{words} (at the edge: add {further:.2g})"


@dataclass(frozen=True, eq=False)
class Slice:
    """Norms along one size, the axis, all else equal.

    title: model, data and other settings that distinguish the slice
    fixed: the other size, in words
    slug: suffix of file names
    lines: each norm at each size that was run. Along norm_batch_size, a norm that does not mix
        samples has one grid, which stands at every size.
    independent: the norms that do not mix samples, along norm_batch_size
    at: the size at which norms are compared with each other
    family: equal for slices that share an error rate: one model, data set and budget
    """

    title: str
    fixed: str
    slug: str
    axis: str
    sizes: Sequence[int]
    metric: Metric
    lines: Mapping[str, Mapping[int, Grid]]
    independent: frozenset[str]
    at: int
    family: Hashable

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.fixed}"

    @property
    def at_words(self) -> str:
        """` at norm batch size 2`; empty where the slice has one size."""
        return f" at {AXIS_WORDS[self.axis]} {self.at}" if len(self.sizes) > 1 else ""

    @property
    def norms(self) -> list[str]:
        return list(self.lines)

    @property
    def grids(self) -> list[Grid]:
        """Every grid once, by norm and then by size."""
        return list(dict.fromkeys(grid for line in self.lines.values() for grid in line.values()))

    @property
    def cells(self) -> list[CellRow]:
        return [cell for grid in self.grids for cell in grid.cells]

    @property
    def compared(self) -> dict[str, Grid]:
        """By norm, the grids that are compared with each other."""
        return {norm: line[self.at] for norm, line in self.lines.items() if self.at in line}

    @cached_property
    def has_samples(self) -> bool:
        """True if test samples are recorded; a comparison without any says so."""
        return any(grid.outcomes.ndim == 2 for grid in self.grids)

    @property
    def scope(self) -> str:
        """What every number of the slice has in common, in words."""
        cells = self.cells
        budget = common(cells, lambda cell: cell.budget) or ""
        lr, optim = common(cells, lambda c: c.lr), common(cells, lambda c: c.config.get("optim"))
        lr = "lr by norm" if lr is None else setting_words("lr", lr)
        rates = sorted({len(grid.cells) for grid in self.grids})
        if rates != [1]:
            lr = f"lr tuned over {'-'.join(map(str, rates))}"
        if searched := sorted({key for cell in cells for key in cell.searched}):
            named = "learning rates" if searched == ["lr"] else " and ".join(searched)
            lr = f"at the {named} that one search chose"
        environments = [run.result.measured.environment for cell in cells for run in cell.runs]
        machines = {one.get("gpu") or one.get("cpu") for one in environments}
        budget = "" if budget in self.title else budget
        words = [self.title, self.fixed, budget, lr, optim, *sorted(filter(None, machines))]
        words += _unequal_conditions(cells)
        counts = sorted({len(grid.seeds) for grid in self.grids})
        n = f"{counts[0]} to " if len(counts) > 1 else ""
        n += format_count(counts[-1], "seed")
        samples = "and test samples" if self.has_samples else "on these test samples"
        words = [*words, f"n = {n}; means over seeds alone, for these test samples"]
        return f"{', '.join(filter(None, words))}; differences over new seeds {samples}"


def _unequal_conditions(cells: Sequence[CellRow]) -> Iterator[str]:
    """What differs between runs: versions and code; and the norms with runs that ended early."""
    results = [run.result for cell in cells for run in cell.runs]
    for name in (*DISTRIBUTIONS, "python"):
        versions = {str(one.measured.environment.get(name, "")) for one in results} - {""}
        if len(versions) > 1:
            yield f"{name} {' and '.join(sorted(versions))}"
    codes = {one.measured.environment.get("code_version") for one in results} - {None}
    if len(codes) > 1:
        yield f"{len(codes)} versions of normexp's code"
    early = Counter(cell.norm for cell in cells for run in cell.runs if run.result.measured.stopped)
    if early:
        yield "ended early: " + " and ".join(f"{count} of {norm}" for norm, count in early.items())


def build_slices(
    cells: Sequence[CellRow], *, metric: str | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the requested metric are left out."""
    panels: dict[Hashable, list[CellRow]] = {}
    for cell in cells:
        panels.setdefault(settings_key(cell), []).append(cell)
    slices = []
    for panel in (one for one in panels.values() if any(cell.runs for cell in one)):
        available = metric_names(panel)
        # Where all diverged or failed, nothing is available; that is worth reporting too.
        name = choose_metric(available or [metric or PREFERRED[0]], metric)
        if name is not None:
            slices += _slices_of(panel, describe_metric(name, tolerance))
    return _with_slugs(slices)


def _slices_of(cells: Sequence[CellRow], metric: Metric) -> list[Slice]:
    """Slices along the norm batch size and along the batch size, each if it varies."""
    # An undeclared norm that does not mix samples was trained at every size, each time the same.
    twins = {(cell.norm, cell.lr, cell.batch_size, cell.norm_batch_size): cell for cell in cells}
    cells = [cell for cell in cells if cell.mixes_samples or cell in twins.values()]
    independent = {cell.norm for cell in cells} - {c.norm for c in cells if c.mixes_samples}
    mixing = [cell for cell in cells if cell.norm not in independent] or cells
    sizes = {
        size: sorted({cell.norm_batch_size for cell in mixing if cell.batch_size == size})
        for size in sorted({cell.batch_size for cell in mixing})
    }

    def along_norm_batch_size(batch_size: int, along: Sequence[int]) -> Slice:
        points = [
            (size, cell)
            for cell in cells
            if cell.batch_size == batch_size
            for size in (along if cell.norm in independent else [cell.norm_batch_size])
        ]
        fixed = f"batch size {batch_size}"
        return _slice("norm_batch_size", fixed, along, points, metric, frozenset(independent))

    slices = [along_norm_batch_size(size, along) for size, along in sizes.items() if len(along) > 1]
    ways = {
        "norm batch size = batch size": {
            cell
            for cell in cells
            if cell.norm in independent or cell.norm_batch_size == cell.batch_size
        }
    }
    for size in [] if slices else sorted({cell.norm_batch_size for cell in mixing}):
        ways[f"norm batch size {size}"] = {
            cell for cell in cells if cell.norm in independent or cell.norm_batch_size == size
        }
    seen: list[set[CellRow]] = []
    for fixed, chosen in ways.items():
        along = sorted({cell.batch_size for cell in chosen})
        if len(along) > 1 and not any(chosen <= earlier for earlier in seen):
            points = [(cell.batch_size, cell) for cell in cells if cell in chosen]
            slices.append(_slice("batch_size", fixed, along, points, metric, frozenset()))
            seen.append(chosen)
    return slices or [
        along_norm_batch_size(size, sizes.get(size) or [size])
        for size in sorted({cell.batch_size for cell in cells})
    ]


def _slice(
    axis: str,
    fixed: str,
    sizes: Sequence[int],
    points: Sequence[tuple[int, CellRow]],
    metric: Metric,
    independent: frozenset[str],
) -> Slice:
    """points: each size with a cell that stands there; several rates of one norm at one size."""
    norms = order_norms(cell.norm for _, cell in points)
    placed: dict[str, dict[int, list[CellRow]]] = {norm: {} for norm in norms}
    for size, cell in sorted(points, key=lambda point: (point[0], point[1].lr or 0)):
        placed[cell.norm].setdefault(size, []).append(cell)
    known: dict[tuple[CellRow, ...], Grid] = {}
    lines = {
        norm: {
            size: known.setdefault(tuple(same), Grid(norm, same, metric, size))
            for size, same in line.items()
        }
        for norm, line in placed.items()
    }
    first, own = points[0][1], independent & lines.keys()
    family = settings_key(first)
    return Slice(first.title, fixed, "", axis, sizes, metric, lines, own, sizes[0], family)


def _with_slugs(slices: Sequence[Slice]) -> list[Slice]:
    """Gives each slice a short unique name for files."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, part in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{part.title} {part.fixed}".lower()).strip("_")
        named.append(replace(part, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
