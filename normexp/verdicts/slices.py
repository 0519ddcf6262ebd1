"""Slices of the cells of a study: norms against one varying size, all else equal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from normexp.verdicts.cells import (
    CellRow,
    mean_of_seeds,
    metric_names,
    order_norms,
    settings_key,
)
from normexp.verdicts.crossfit import AT_EDGE, CrossFit, cross_fit
from normexp.verdicts.interval import Array, Interval
from normexp.verdicts.metric import (
    PREFERRED,
    Estimate,
    Metric,
    choose_metric,
    over_seeds,
)
from normexp.verdicts.rows import Row, Status
from normexp.words import format_count

# What is recorded of the environment and named where runs differ in it.
VERSIONS = ("torch", "pytorch-lightning", "torchvision", "numpy", "hydra-core", "python")
VERSIONS += ("code_version",)
AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}


@dataclass(frozen=True, eq=False)
class NormAtSize:
    """A norm at one size: its cells differ in learning rate alone, and the smallest is first.

    size: along the axis of its slice; a norm that stands at every size has the smallest
    """

    norm: str
    cells: Sequence[CellRow]
    metric: Metric
    size: int = 0

    @property
    def rates(self) -> list[float | None]:
        return [cell.lr for cell in self.cells]

    @cached_property
    def scores(self) -> list[dict[int, float]]:
        """For each cell, by seed, the score that chooses a learning rate; -inf if diverged."""
        name, of_cells = self.metric.selection_name, []
        for cell in self.cells:
            scores = {}
            for run in cell.runs:
                if run.status == Status.DIVERGED:
                    scores[run.seed] = -np.inf
                elif name in run.metrics:
                    scores[run.seed] = self.metric.sign * run.metrics[name]
            of_cells.append(scores)
        return of_cells

    @cached_property
    def best(self) -> CellRow:
        """The cell with the fewest failed runs, and the best mean on validation."""

        def rank(pair: tuple[CellRow, dict[int, float]]) -> tuple[int, float]:
            cell, scores = pair
            mean = over_seeds([*scores.values()])[0] if scores else -np.inf
            return -cell.lost.get("failed", 0), mean

        return max(zip(self.cells, self.scores, strict=True), key=rank)[0]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of the best cell; of a tuned norm all cells have these seeds."""
        return sorted(self.best.values(self.metric))

    @property
    def why_incomplete(self) -> str:
        """Why it allows no verdict: `5 of 8 seeds of group`; empty if it does."""
        for cell in self.cells:
            values, wanted = cell.values(self.metric), format_count(len(cell.wanted), "seed")
            if diverged := cell.without_value(self.metric):
                return f"{diverged} of {wanted} of {cell.norm} diverged"
            if not cell.wanted <= values.keys():
                return f"{len(values)} of {wanted} of {cell.norm}"
        return self._why_not_tuned if len(self.cells) > 1 else ""

    @property
    def _why_not_tuned(self) -> str:
        """Why its learning rates cannot be cross-fitted; empty if they can."""
        if len(self.seeds) < 3:
            return f"to tune {self.best.roles.tuned} takes 3 seeds, not {len(self.seeds)}"
        if any(cell.values(self.metric).keys() != {*self.seeds} for cell in self.cells):
            return "seeds differ between learning rates"
        if any(scores.keys() != {*self.seeds} for scores in self.scores):
            tuned = self.best.roles.tuned
            return f"{self.metric.selection_name} is missing, by which {tuned} is chosen"
        return ""

    @cached_property
    def tuning(self) -> CrossFit | None:
        """Cross-fitted outcomes, higher is better; None unless several learning rates tune it.

        With test samples if every rate that some split chooses has them.
        """
        if len(self.cells) == 1 or self._why_not_tuned:
            return None
        scores = np.array([[of_cell[seed] for seed in self.seeds] for of_cell in self.scores])
        tuning = cross_fit(scores, self._outcomes_of(self.cells))
        shares = zip(self.cells, tuning.shares, strict=True)
        chosen = [cell for cell, share in shares if share]
        num_samples = self._num_samples(chosen)
        if not num_samples:
            return tuning
        return cross_fit(scores, self._outcomes_of(self.cells, num_samples))

    @cached_property
    def outcomes(self) -> Array:
        """Higher is better, (n,) over `seeds`, or (n, N) with test samples; cross-fitted."""
        if self.tuning is not None:
            return self.tuning.values
        return self._outcomes_of([self.best], self._num_samples([self.best]))[0]

    def _num_samples(self, cells: Sequence[CellRow]) -> int:
        """The test samples that every finished run has; 0 without."""
        counts = {
            len(run.samples(self.metric))
            for run in self._runs_of(cells)
            if run.status == Status.FINISHED
        }
        return counts.pop() if len(counts) == 1 and counts != {1} else 0

    def _outcomes_of(self, cells: Sequence[CellRow], num_samples: int = 0) -> Array:
        """Higher is better, (num_cells, n) over `seeds`, or (num_cells, n, num_samples).

        A run without samples, such as a diverged one, has its value for each of them.
        """
        rows = []
        for run in self._runs_of(cells):
            row: Any = run.value(self.metric)
            if num_samples:
                samples = run.samples(self.metric)
                row = samples if len(samples) == num_samples else np.full(num_samples, row)
            rows.append(row)
        outcomes = self.metric.sign * np.array(rows, dtype=np.float64)
        return outcomes.reshape(len(cells), len(self.seeds), *outcomes.shape[1:])

    def _runs_of(self, cells: Sequence[CellRow]) -> list[Row]:
        return [run for cell in cells for run in cell.runs if run.seed in self.seeds]

    @property
    def values(self) -> dict[int, float]:
        """By seed, as shown; of the pseudo-values of a tuned norm only the mean has a meaning."""
        if self.tuning is None:
            return self.best.values(self.metric)
        means = self.outcomes if self.outcomes.ndim == 1 else self.outcomes.mean(axis=1)
        return dict(zip(self.seeds, (self.metric.sign * means).tolist(), strict=True))

    @cached_property
    def mean(self) -> Interval:
        """As tables and figures show it; cross-fitted if the norm is tuned."""
        values, step = list(self.values.values()), self.best.step(self.metric)
        return mean_of_seeds(values, step, self.metric)

    def estimate(self, **more: Any) -> Estimate:
        """The mean with its interval, or with its few seeds unless the norm is tuned."""
        seeds = self.values.values() if self.tuning is None else ()
        return Estimate(self.mean, self.metric.digits, seeds, **more)

    @property
    def lost(self) -> str:
        """`1 diverged, 2 at chance`, over the learning rates that some split chooses."""
        chosen = [self.best]
        if self.tuning is not None:
            shares = zip(self.cells, self.tuning.shares, strict=True)
            chosen = [cell for cell, share in shares if share]
        counts = Counter[str]()
        for cell in chosen:
            counts.update(cell.lost)
        return ", ".join(f"{count} {what}" for what, count in counts.items() if what != "missing")

    @property
    def lr(self) -> float | None:
        """The best learning rate; for a tuned norm the one that is chosen most often."""
        if self.tuning is None:
            return self.best.lr
        return self.rates[int(self.tuning.shares.argmax())]

    @property
    def search_words(self) -> str:
        """`most often of 5; at the edge: add 0.9`: how its learning rate was found."""
        words = []
        if self.tuning is not None:
            rates, shares = [rate or 0.0 for rate in self.rates], self.tuning.shares.tolist()
            words.append(f"most often of {len(rates)}")
        else:
            rates = self.best.search.rates if self.best.search else []
            shares = [float(rate == self.best.lr) for rate in rates]
            if len(self.cells) > 1:
                words.append(f"best of {len(self.cells)}")
        if len(rates) > 2 and shares[0] + shares[-1] >= AT_EDGE:  # a better rate may lie outside
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
        samples was trained once, and stands at every size.
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
    lines: Mapping[str, Mapping[int, NormAtSize]]
    independent: frozenset[str]
    at: int
    family: Hashable

    @property
    def arm(self) -> str:
        """What is compared: `norm`."""
        return self.cells[0].roles.arm

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.fixed}" if self.fixed else self.title

    @property
    def at_words(self) -> str:
        """` at norm batch size 2`; empty where the slice has one size."""
        return f" at {AXIS_WORDS[self.axis]} {self.at}" if len(self.sizes) > 1 else ""

    @property
    def norms(self) -> list[str]:
        return list(self.lines)

    @property
    def norm_names(self) -> dict[str, str]:
        """By label, the names of the norms."""
        return {cell.norm: cell.norm_name for cell in self.cells}

    @property
    def norms_at_sizes(self) -> list[NormAtSize]:
        """Each once, by norm and then by size."""
        everywhere = [
            norm_at_size for line in self.lines.values() for norm_at_size in line.values()
        ]
        return list(dict.fromkeys(everywhere))

    @property
    def cells(self) -> list[CellRow]:
        return [cell for norm_at_size in self.norms_at_sizes for cell in norm_at_size.cells]

    @property
    def compared(self) -> dict[str, NormAtSize]:
        """The norms at the size at which they are compared with each other."""
        return {norm: line[self.at] for norm, line in self.lines.items() if self.at in line}

    @cached_property
    def has_samples(self) -> bool:
        """True if test samples are recorded; a comparison without any says so."""
        return any(norm_at_size.outcomes.ndim == 2 for norm_at_size in self.norms_at_sizes)

    @property
    def scope(self) -> str:
        """What every number of the slice has in common, in words; and in what its runs differ."""
        words = [self.title, self.fixed]
        words += [cell.budget for cell in self.cells if cell.budget not in self.title]
        words.append(self._lr_words)
        if searched := sorted({key for cell in self.cells for key in cell.searched}):
            keys = "learning rates" if searched == ["lr"] else " and ".join(searched)
            words.append(f"at the {keys} that one search chose")
        words += [cell.config.get("optim") for cell in self.cells]
        words += self._machine_words
        for cell in self.cells:
            early = sum(run.measured.get("stopped") is not None for run in cell.runs)
            if early:
                words.append(f"ended early: {early} of {cell.norm}")
        counts = sorted({len(norm_at_size.seeds) for norm_at_size in self.norms_at_sizes})
        fewest = f"{counts[0]} to " if len(counts) > 1 else ""
        words.append(f"n = {fewest}{format_count(counts[-1], 'seed')}")
        samples = "and test samples" if self.has_samples else "on these test samples"
        scope = ", ".join(filter(None, dict.fromkeys(words)))
        return (
            f"{scope}; intervals of means are over seeds, for these test samples; those of "
            f"differences over new seeds {samples}"
        )

    @property
    def _lr_words(self) -> str:
        """`lr=0.1`, `lr=0.1 to 0.3`, `lr tuned over 5`."""
        counts = sorted({len(norm_at_size.cells) for norm_at_size in self.norms_at_sizes})
        if counts != [1]:
            return f"{self.cells[0].roles.tuned} tuned over {'-'.join(map(str, counts))}"
        rates = sorted({cell.lr for cell in self.cells if cell.lr is not None})
        if not rates:
            return ""
        ends = dict.fromkeys(f"{rate:.3g}" for rate in (rates[0], rates[-1]))
        return f"{self.cells[0].roles.tuned}={' to '.join(ends)}"

    @property
    def _machine_words(self) -> list[str]:
        """The processors, and the versions in which runs differ."""
        environments = [run.part("environment") for cell in self.cells for run in cell.runs]
        words = [found.get("gpu") or found.get("cpu", "") for found in environments]
        for name in VERSIONS:
            versions = sorted(
                {str(environment[name]) for environment in environments if name in environment}
            )
            if len(versions) > 1:
                words.append(f"{name} {' and '.join(versions)}")
        return words


def build_slices(
    cells: Sequence[CellRow], *, metric: str | Metric | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the requested metric are left out."""
    by_settings: dict[Hashable, list[CellRow]] = {}
    for cell in cells:
        by_settings.setdefault(settings_key(cell), []).append(cell)
    slices = []
    for equal in by_settings.values():
        if not any(cell.runs for cell in equal):
            continue
        wanted = metric.name if isinstance(metric, Metric) else metric
        # If all runs diverged or failed, no metric is available; the report says so.
        available = metric_names(equal) or [wanted or PREFERRED[0]]
        described = choose_metric(available, metric, tolerance)
        if described is not None:
            slices += _slices_of(equal, described)
    return _with_slugs(slices)


def _slices_of(cells: Sequence[CellRow], metric: Metric) -> list[Slice]:
    """Slices along the norm batch size and along the batch size, each if it varies."""
    # An undeclared norm that does not mix samples was trained at every size, each time the same:
    # one of these twins stands for all.
    twins = {(cell.norm, cell.lr, cell.batch_size, cell.norm_batch_size): cell for cell in cells}
    cells = [cell for cell in cells if cell.mixes_samples or cell in twins.values()]
    mixing = [cell for cell in cells if cell.mixes_samples]
    independent = frozenset(cell.norm for cell in cells) - {cell.norm for cell in mixing}
    along_norm_batch_size = []
    for size in sorted({cell.batch_size for cell in cells}):
        chosen = [cell for cell in cells if cell.batch_size == size]
        fixed = f"batch size {size}" if size else ""
        norm_sizes = {cell.norm_batch_size for cell in chosen if cell.norm not in independent}
        if len(norm_sizes) == 1 and norm_sizes != {size}:
            fixed += f", norm batch size {norm_sizes.pop()}"
        along_norm_batch_size.append(_slice("norm_batch_size", fixed, chosen, metric, independent))
    slices = [slice_ for slice_ in along_norm_batch_size if len(slice_.sizes) > 1]
    norm_batch_sizes: dict[str, int | None] = {"norm batch size = batch size": None}
    if not slices:
        for size in sorted({c.norm_batch_size for c in cells if c.norm not in independent}):
            norm_batch_sizes[f"norm batch size {size}"] = size
    for fixed, size in norm_batch_sizes.items():
        chosen = [
            cell
            for cell in cells
            if cell.norm in independent or cell.norm_batch_size == (size or cell.batch_size)
        ]
        is_repeated = any({*chosen} <= {*slice_.cells} for slice_ in slices)
        if len({cell.batch_size for cell in chosen}) > 1 and not is_repeated:
            slices.append(_slice("batch_size", fixed, chosen, metric))
    return slices or along_norm_batch_size


def _slice(
    axis: str,
    fixed: str,
    cells: Sequence[CellRow],
    metric: Metric,
    independent: frozenset[str] = frozenset(),
) -> Slice:
    by_place: dict[str, dict[int, list[CellRow]]] = {}
    for cell in sorted(cells, key=lambda cell: (getattr(cell, axis), cell.lr or 0)):
        line = by_place.setdefault(cell.norm, {})
        line.setdefault(getattr(cell, axis), []).append(cell)
    mixing = {size for norm in by_place.keys() - independent for size in by_place[norm]}
    sizes = sorted(mixing) or [cells[0].batch_size]
    lines: dict[str, dict[int, NormAtSize]] = {}
    for norm in order_norms({cell.norm: cell.norm_name for cell in cells}):
        line = by_place[norm]
        if norm in independent:
            at_all_sizes = [cell for at_size in line.values() for cell in at_size]
            lines[norm] = dict.fromkeys(sizes, NormAtSize(norm, at_all_sizes, metric, sizes[0]))
        else:
            lines[norm] = {size: NormAtSize(norm, line[size], metric, size) for size in line}
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
    for number, slice_ in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{slice_.title} {slice_.fixed}".lower()).strip("_")
        named.append(replace(slice_, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
