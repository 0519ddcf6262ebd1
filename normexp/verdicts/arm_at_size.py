"""An arm at one size: its outcomes over seeds and test samples, and how it was tuned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from normexp.verdicts.cells import CellRuns, mean_of_seeds
from normexp.verdicts.crossfit import AT_EDGE, CrossFit, cross_fit
from normexp.verdicts.interval import Array, Interval
from normexp.verdicts.metric import Estimate, Metric, over_seeds
from normexp.verdicts.rows import Row, Status
from normexp.verdicts.waves import waves_of
from normexp.words import format_count


@dataclass(frozen=True, eq=False)
class ArmAtSize:
    """An arm at one size: its cells differ in the tuned setting alone, and the smallest is first.

    size: along the axis of its slice; an arm that stands at every size has the smallest
    """

    arm: str
    cells: Sequence[CellRuns]
    metric: Metric
    size: int = 0

    @property
    def tried(self) -> list[float | None]:
        return [cell.tuned for cell in self.cells]

    @cached_property
    def scores(self) -> list[dict[int, float]]:
        """For each cell, by seed, the score that chooses a tuned value; -inf if diverged."""
        name, of_cells = self.metric.selection_name, []
        sign = (self.metric.chosen_by or self.metric).sign
        for cell in self.cells:
            scores = {}
            for run in cell.runs:
                if run.status == Status.DIVERGED:
                    scores[run.seed] = -np.inf
                elif name in run.metrics:
                    scores[run.seed] = sign * run.metrics[name]
            of_cells.append(scores)
        return of_cells

    @cached_property
    def best(self) -> CellRuns:
        """The cell with the fewest failed runs, and the best mean on validation."""

        def rank(pair: tuple[CellRuns, dict[int, float]]) -> tuple[int, float]:
            cell, scores = pair
            mean = over_seeds([*scores.values()])[0] if scores else -np.inf
            return -cell.lost.get("failed", 0), mean

        return max(zip(self.cells, self.scores, strict=True), key=rank)[0]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of the best cell; of a tuned arm all cells have these seeds."""
        return sorted(self.best.values(self.metric))

    @property
    def why_incomplete(self) -> str:
        """Why it allows no verdict: `5 of 8 seeds of group`; empty if it does."""
        for cell in self.cells:
            values, wanted = cell.values(self.metric), format_count(len(cell.wanted), "seed")
            if diverged := cell.without_value(self.metric):
                return f"{diverged} of {wanted} of {cell.arm} diverged"
            if not cell.wanted <= values.keys():
                return f"{len(values)} of {wanted} of {cell.arm}"
        return self._why_not_tuned if len(self.cells) > 1 else ""

    @property
    def _why_not_tuned(self) -> str:
        """Why its tuned values cannot be cross-fitted; empty if they can."""
        tuned = self.best.roles.tuned
        if len(self.seeds) < 3:
            return f"to tune {tuned} takes 3 seeds, not {len(self.seeds)}"
        if any(cell.values(self.metric).keys() != {*self.seeds} for cell in self.cells):
            return f"seeds differ between values of {tuned}"
        if any(scores.keys() != {*self.seeds} for scores in self.scores):
            return f"{self.metric.selection_name} is missing, by which {tuned} is chosen"
        return ""

    @cached_property
    def tuning(self) -> CrossFit | None:
        """Cross-fitted outcomes, higher is better; None unless several values tune it.

        With test samples if every value that some split chooses has them.
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

    @property
    def has_chance_run(self) -> bool:
        """True if a run counts as chance level, and so as equal for all test samples."""
        return any(run.value(self.metric) != run.recorded(self.metric) for run in self.best.runs)

    @cached_property
    def waves(self) -> Array | None:
        """Of the mean over seeds along the test text, (NUM_TRIED,); None without sequences."""
        if self.outcomes.ndim == 1 or not any(run.has_text for run in self.best.runs):
            return None
        return waves_of(self.outcomes).mean(axis=0)

    def _num_samples(self, cells: Sequence[CellRuns]) -> int:
        """The test samples that every finished run has; 0 without."""
        counts = {
            len(run.samples(self.metric))
            for run in self._runs_of(cells)
            if run.status == Status.FINISHED
        }
        return counts.pop() if len(counts) == 1 and counts != {1} else 0

    def _outcomes_of(self, cells: Sequence[CellRuns], num_samples: int = 0) -> Array:
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

    def _runs_of(self, cells: Sequence[CellRuns]) -> list[Row]:
        return [run for cell in cells for run in cell.runs if run.seed in self.seeds]

    @property
    def values(self) -> dict[int, float]:
        """By seed, as shown; of the pseudo-values of a tuned arm only the mean has a meaning."""
        if self.tuning is None:
            return self.best.values(self.metric)
        means = self.outcomes if self.outcomes.ndim == 1 else self.outcomes.mean(axis=1)
        return dict(zip(self.seeds, (self.metric.sign * means).tolist(), strict=True))

    @cached_property
    def mean(self) -> Interval:
        """As tables and figures show it; cross-fitted if the arm is tuned."""
        values, step = list(self.values.values()), self.best.step(self.metric)
        return mean_of_seeds(values, step, self.metric)

    def estimate(self, **more: Any) -> Estimate:
        """The mean with its interval, or with its few seeds unless the arm is tuned."""
        seeds = self.values.values() if self.tuning is None else ()
        return Estimate(self.mean, self.metric.digits, seeds, **more)

    @cached_property
    def _lost(self) -> Counter[str]:
        """How many runs are lost in each way, over the tuned values that some split chooses."""
        chosen = [self.best]
        if self.tuning is not None:
            shares = zip(self.cells, self.tuning.shares, strict=True)
            chosen = [cell for cell, share in shares if share]
        counts = Counter[str]()
        for cell in chosen:
            counts.update(cell.lost)
        return counts

    @property
    def lost(self) -> str:
        """`1 diverged, 2 at chance`."""
        counts = self._lost.items()
        return ", ".join(f"{count} {what}" for what, count in counts if what != "missing")

    @property
    def num_diverged(self) -> int:
        return self._lost["diverged"]

    @property
    def is_at_chance(self) -> bool:
        """True if every run of the best cell counts as chance level; False before any has ended."""
        return bool(self.best.runs) and all(
            run.value(self.metric) == run.chance(self.metric) is not None for run in self.best.runs
        )

    @property
    def tuned(self) -> float | None:
        """The best value of the tuned setting; of several the one that is chosen most often."""
        if self.tuning is None:
            return self.best.tuned
        return self.tried[int(self.tuning.shares.argmax())]

    @cached_property
    def _chosen(self) -> tuple[list[float], list[float]]:
        """The values that were tried, the smallest first, and how often each was chosen."""
        if self.tuning is not None:
            return [value or 0.0 for value in self.tried], self.tuning.shares.tolist()
        values = self.best.search.rates if self.best.search else []
        return values, [float(value == self.best.tuned) for value in values]

    @property
    def beyond(self) -> float | None:
        """The value to add where the best one is at an edge; None where it is not."""
        values, shares = self._chosen
        if len(values) < 2:
            return None
        ends = [(shares[-1], values[-1], values[-2])]
        if values[0] != 0:  # below a lowest value of 0 there is nothing to add
            ends.append((shares[0], values[0], values[1]))
        if sum(share for share, _, _ in ends) < AT_EDGE:
            return None
        _, end, inner = max(ends, key=lambda of_end: of_end[0])
        return end**2 / inner if min(end, inner) > 0 else 2 * end - inner

    @property
    def why_at_edge(self) -> str:
        """`best lr of group at the edge: add 0.09`; empty if it is not: a better one may exist."""
        if self.beyond is None:
            return ""
        return f"best {self.best.roles.tuned} of {self.arm} at the edge: add {self.beyond:.2g}"

    @property
    def search_words(self) -> str:
        """`most often of 5; at the edge: add 0.9`: how its tuned value was found."""
        words = []
        if self.tuning is not None:
            words.append(f"most often of {len(self.cells)}")
        elif len(self.cells) > 1:
            words.append(f"best of {len(self.cells)}")
        if self.beyond is not None:
            words.append(f"at the edge: add {self.beyond:.2g}")
        return "; ".join(words)
