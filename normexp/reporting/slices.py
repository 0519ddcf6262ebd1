"""Slices of the cells of a study: norms against one varying size, all else equal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from normexp.records.environment import DISTRIBUTIONS
from normexp.records.result import Status
from normexp.reporting.cells import (
    CellRow,
    mean_of_seeds,
    metric_names,
    order_norms,
    settings_key,
)
from normexp.reporting.metric import (
    PREFERRED,
    Estimate,
    Metric,
    choose_metric,
    describe_metric,
)
from normexp.stats.crossfit import AT_EDGE, CrossFit, cross_fit
from normexp.stats.interval import Array, Interval
from normexp.words import format_count

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
            scores = {
                run.seed: self.sign * run.metrics[name] for run in cell.runs if name in run.metrics
            }
            for run in cell.runs:
                if run.status == Status.DIVERGED:
                    scores[run.seed] = -np.inf
            tables.append(scores)
        return tables

    @cached_property
    def best(self) -> CellRow:
        """The cell with the fewest failed runs, and the best mean on validation."""

        def rank(pair: tuple[CellRow, dict[int, float]]) -> tuple[int, float]:
            cell, scores = pair
            mean = float(np.mean([*scores.values()])) if scores else -np.inf
            return -cell.lost.get("failed", 0), mean

        return max(zip(self.cells, self.scores, strict=True), key=rank)[0]

    @property
    def why_incomplete(self) -> str:
        """Why it allows no verdict: `5 of 8 seeds of group`; empty if it does."""
        for cell in self.cells:
            known, wanted = cell.values(self.metric), format_count(len(cell.wanted), "seed")
            if diverged := cell.without_value(self.metric):
                return f"{diverged} of {wanted} of {cell.norm} diverged"
            if not cell.wanted <= known.keys():
                return f"{len(known)} of {wanted} of {cell.norm}"
        if len(self.cells) == 1 or self.fit is not None:
            return ""
        if len(self.seeds) < 3:
            return f"to tune lr takes 3 seeds, not {len(self.seeds)}"
        if any(cell.values(self.metric).keys() != {*self.seeds} for cell in self.cells):
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

    def estimate(self, **more: Any) -> Estimate:
        """The mean with its interval, or with its few seeds unless they tuned it."""
        seeds = self.values.values() if self.fit is None else ()
        return Estimate(self.mean, self.metric.digits, seeds, **more)

    @property
    def lost(self) -> str:
        """`1 diverged, 2 at chance`, of the rates that some split chooses."""
        shares = [] if self.fit is None else self.fit.shares.tolist()
        cells = [c for c, share in zip(self.cells, shares, strict=False) if share] or [self.best]
        counts = sum((Counter(cell.lost) for cell in cells), Counter[str]())
        return ", ".join(f"{count} {what}" for what, count in counts.items() if what != "missing")

    @property
    def lr(self) -> float | None:
        """The learning rate of its mean: of a tuned norm the one that is chosen most often."""
        return self.best.lr if self.fit is None else self.rates[int(self.fit.shares.argmax())]

    @property
    def search_words(self) -> str:
        """`most often of 5; at the edge: add 0.9`: how its learning rate was found."""
        words, points = [], self.best.search.points if self.best.search else ()
        tried = {word for point, _ in points for word in point.split() if word.startswith("lr=")}
        rates = sorted(float(word.removeprefix("lr=")) for word in tried)
        shares = [float(rate == self.best.lr) for rate in rates]
        if self.fit is not None:
            rates, shares = [rate or 0.0 for rate in self.rates], self.fit.shares.tolist()
            words.append(f"most often of {len(rates)}")
        elif len(self.cells) > 1:
            words.append(f"best of {len(self.cells)}")
        if len(rates) > 2 and shares[0] + shares[-1] >= AT_EDGE:  # a better one may lie outside
            end, inner = rates[:2] if shares[0] > shares[-1] else (rates[-1], rates[-2])
            words.append(f"at the edge: add {end**2 / inner:.2g}")
        return "; ".join(words)


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
        """What every number of the slice has in common, in words; and in what its runs differ."""
        runs = [run for cell in self.cells for run in cell.runs]
        words = [self.title, self.fixed]
        words += [cell.budget for cell in self.cells if cell.budget not in self.title]
        words.append(self._lr_words)
        if searched := sorted({key for cell in self.cells for key in cell.searched}):
            named = "learning rates" if searched == ["lr"] else " and ".join(searched)
            words.append(f"at the {named} that one search chose")
        words += [cell.config.get("optim") for cell in self.cells]
        environments = [run.result.measured.environment for run in runs]
        words += [one.get("gpu") or one.get("cpu") for one in environments]
        for name in (*DISTRIBUTIONS, "python", "code_version"):
            versions = sorted({str(one[name]) for one in environments if name in one})
            words += [f"{name} {' and '.join(versions)}"] if len(versions) > 1 else []
        for cell in self.cells:
            early = sum(run.result.measured.stopped is not None for run in cell.runs)
            words += [f"ended early: {early} of {cell.norm}"] if early else []
        counts = sorted({len(grid.seeds) for grid in self.grids})
        fewest = f"{counts[0]} to " if len(counts) > 1 else ""
        words.append(f"n = {fewest}{format_count(counts[-1], 'seed')}")
        samples = "and test samples" if self.has_samples else "on these test samples"
        return (
            f"{', '.join(filter(None, dict.fromkeys(words)))}; means over seeds alone, for these "
            f"test samples; differences over new seeds {samples}"
        )

    @property
    def _lr_words(self) -> str:
        rates = [cell.lr or 0.0 for cell in self.cells]
        words = " to ".join(f"{rate:.3g}" for rate in sorted({min(rates), max(rates)}))
        counts = sorted({len(grid.cells) for grid in self.grids})
        return f"lr={words}" if counts == [1] else f"lr tuned over {'-'.join(map(str, counts))}"


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
    independent = frozenset(c.norm for c in cells) - {c.norm for c in cells if c.mixes_samples}
    by_batch_size = [
        _slice(
            "norm_batch_size",
            f"batch size {size}",
            [cell for cell in cells if cell.batch_size == size],
            metric,
            independent,
        )
        for size in sorted({cell.batch_size for cell in cells})
    ]
    slices = [part for part in by_batch_size if len(part.sizes) > 1]
    ways: dict[str, int | None] = {"norm batch size = batch size": None}
    if not slices:
        mixing = [cell.norm_batch_size for cell in cells if cell.norm not in independent]
        ways |= {f"norm batch size {size}": size for size in sorted(set(mixing))}
    seen: list[set[CellRow]] = []
    for fixed, size in ways.items():
        chosen = {
            cell
            for cell in cells
            if cell.norm in independent or cell.norm_batch_size == (size or cell.batch_size)
        }
        has_sizes = len({cell.batch_size for cell in chosen}) > 1
        if has_sizes and not any(chosen <= earlier for earlier in seen):
            own = [cell for cell in cells if cell in chosen]
            slices.append(_slice("batch_size", fixed, own, metric))
            seen.append(chosen)
    return slices or by_batch_size


def _slice(
    axis: str,
    fixed: str,
    cells: Sequence[CellRow],
    metric: Metric,
    independent: frozenset[str] = frozenset(),
) -> Slice:
    """The cells by norm and size; several learning rates of one norm at one size are a grid."""
    own = {cell: getattr(cell, axis) for cell in cells}
    mixing = {own[cell] for cell in cells if cell.norm not in independent}
    sizes = sorted(mixing) or [cells[0].batch_size]
    placed: dict[str, dict[int, list[CellRow]]] = {
        norm: {} for norm in order_norms(cell.norm for cell in cells)
    }
    for cell in sorted(cells, key=lambda cell: (own[cell], cell.lr or 0)):
        for size in sizes if cell.norm in independent else [own[cell]]:
            placed[cell.norm].setdefault(size, []).append(cell)
    known: dict[tuple[CellRow, ...], Grid] = {}
    lines = {
        norm: {
            size: known.setdefault(tuple(same), Grid(norm, same, metric, size))
            for size, same in sorted(line.items())
        }
        for norm, line in placed.items()
    }
    return Slice(
        title=cells[0].title,
        fixed=fixed,
        slug="",
        axis=axis,
        sizes=sizes,
        metric=metric,
        lines=lines,
        independent=independent & lines.keys(),
        at=sizes[0],
        family=settings_key(cells[0]),
    )


def _with_slugs(slices: Sequence[Slice]) -> list[Slice]:
    """Gives each slice a short unique name for files."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, part in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{part.title} {part.fixed}".lower()).strip("_")
        named.append(replace(part, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
