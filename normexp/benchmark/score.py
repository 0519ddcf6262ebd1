"""Where each norm stands: tuned errors, their ratios to the reference's, groups, sensitivity.

The rate of every norm is chosen by cross-fitting from the complete grid (normexp.stats.crossfit),
so that the luck of tuning is inside every interval. A diverged run counts as chance level: always
predicting the most frequent class, or 8 bits per byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from normexp.benchmark.protocol import WORKLOADS, WorkloadRecipe
from normexp.benchmark.table import Cost, Table, TableCell
from normexp.reporting.metric import RULE
from normexp.stats.contrast import Assessment, Margin, difference, verdict_on
from normexp.stats.crossfit import CrossFit, cross_fit
from normexp.stats.family import smallest_difference, spread_of
from normexp.stats.interval import Interval, crossed_mean, mean
from normexp.stats.ratio import as_ratio, error_ratio, over_workloads

Array = NDArray[np.float64]
Group = Literal["best", "better", "level", "worse", "open", "diverges", "incomplete"]
GROUPS: tuple[Group, ...] = ("best", "better", "level", "worse", "open")  # the ranked ones
UNIFORM_BITS = 8.0  # per byte, of a diverged language model
LN2 = math.log(2)


@dataclass(frozen=True, eq=False)
class Tuned:
    """A norm at its tuned rate, at one size and budget.

    fit: outcomes over seeds (and test samples), higher is better: points, or minus bits per byte
    rates: in the order of `fit.shares`
    diverged: seeds that diverged at the rate that is chosen most often
    """

    fit: CrossFit
    rates: tuple[float, ...]
    is_accuracy: bool
    diverged: int
    num_seeds: int

    @property
    def values(self) -> Array:
        return self.fit.values

    @property
    def mean(self) -> Interval:
        """Accuracy in points or bits per byte, as shown; over new test samples where recorded."""
        interval = mean(self.values) if self.values.ndim == 1 else crossed_mean(self.values)
        return interval if self.is_accuracy else -interval

    @property
    def rate(self) -> float:
        """The rate that is chosen most often."""
        return self.rates[int(self.fit.shares.argmax())]

    @property
    def is_at_edge(self) -> bool:
        return self.rate in (self.rates[0], self.rates[-1])

    @property
    def diverges(self) -> bool:
        return 2 * self.diverged > self.num_seeds

    @property
    def margin(self) -> Margin:
        """Where a difference counts as none: the rule of every report."""
        rule = RULE["margins"]["accuracy" if self.is_accuracy else "bits_per_byte"]
        return Margin(rule["most"], rule.get("share", 0.0))


def tune(cells: Sequence[TableCell], kind: str = "running") -> Tuned:
    """The tuned outcome of a complete grid of rates.

    kind: of the statistics in evaluation; the rate is always chosen with running ones
    """
    is_accuracy = cells[0].is_accuracy
    name = "accuracy" if is_accuracy else "bits_per_byte"
    sign = 1.0 if is_accuracy else -1.0
    metric = f"test/{name}" + ("" if kind == "running" else f"@{kind}")
    scores, outcomes = [], []
    for cell in cells:
        unknown = np.full(len(cell.seeds), np.nan)  # no run has a metric where all diverged
        chosen_by = sign * cell.metrics.get(f"val/{name}", unknown)
        scores.append(np.where(np.isfinite(chosen_by) & ~cell.diverged, chosen_by, -np.inf))
        outcomes.append(_outcomes(cell, metric, kind))
    if len({np.shape(one) for one in outcomes}) > 1:  # no samples were kept at some rates
        outcomes = _filled(outcomes)
    fit = cross_fit(np.stack(scores), np.stack(outcomes))
    best = cells[int(fit.shares.argmax())]
    return Tuned(
        fit,
        tuple(cell.lr for cell in cells),
        is_accuracy,
        int(best.diverged.sum()),
        len(best.seeds),
    )


def _outcomes(cell: TableCell, metric: str, kind: str) -> Array:
    """Points, or minus bits per byte, of each seed (n,), or of each test sample (n, N)."""
    is_accuracy = metric.startswith("test/accuracy")
    values = cell.metrics.get(metric, np.full(len(cell.seeds), np.nan))
    lost = cell.diverged | ~np.isfinite(values)
    at_chance = 100 * (cell.about["chance"] or 0.0) if is_accuracy else -UNIFORM_BITS
    values = np.where(lost, 0.0, values)
    shown = np.where(lost, at_chance, 100 * values if is_accuracy else -values)
    samples = cell.samples.get(kind)
    if samples is None:
        return shown
    table = samples.astype(np.float64)
    means = table.mean(axis=1)
    factor = np.divide(shown, means, out=np.zeros_like(shown), where=means != 0)
    return np.where(lost[:, None], shown[:, None], table * factor[:, None])


def _filled(outcomes: Sequence[Array]) -> list[Array]:
    """Outcomes with samples, where the mean stands for those that are missing.

    A rate without samples is one that is hardly ever chosen.
    """
    count = next(one.shape[1] for one in outcomes if one.ndim == 2)
    return [one if one.ndim == 2 else np.repeat(one[:, None], count, axis=1) for one in outcomes]


def compare(first: Tuned, second: Tuned) -> Assessment:
    """first - second in points, or in bits per byte saved; `second` is the reference."""
    return difference(*_alike(first, second), second.margin)


def ratio(first: Tuned, second: Tuned) -> Assessment:
    """The first error as a multiple of the second, on the logarithmic scale of stats.ratio.

    For bits per byte 2^(first - second).
    """
    a, b = _alike(first, second)
    if first.is_accuracy:
        return error_ratio(a, b)
    return difference(LN2 * a, LN2 * b, Margin(math.inf))


def _alike(first: Tuned, second: Tuned) -> tuple[Array, Array]:
    """Outcomes of the same shape: without test samples if one has none."""
    a, b = first.values, second.values
    if a.ndim == b.ndim:
        return a, b
    return (a if a.ndim == 1 else a.mean(axis=1)), (b if b.ndim == 1 else b.mean(axis=1))


# --- Ranking -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Standing:
    """Where a norm stands in a recipe.

    ratio: of its error to the reference's; None for the reference and for what is not ranked
    sensitivity: full batch minus norm batch 2, in the unit of the metric; None: it mixes no samples
        or has not both sizes
    cost: None if it was not measured
    """

    norm: str
    group: Group
    tuned: Tuned | None = None
    ratio: Assessment | None = None
    sensitivity: Assessment | None = None
    cost: Cost | None = None


@dataclass(frozen=True, eq=False)
class Standings:
    """The norms of one recipe, by group and then by error; order within a group means nothing.

    family_size: of the tests against the reference
    bars: by number of seeds, the smallest ratio of errors that would be called
    """

    recipe: WorkloadRecipe
    reference: str
    places: tuple[Standing, ...]
    family_size: int
    bars: Mapping[int, float]

    def of(self, norm: str) -> Standing | None:
        return next((place for place in self.places if place.norm == norm), None)


def rank(table: Table, recipe: str) -> Standings | None:
    """The standings of a recipe at the full batch; None if its reference has no complete grid."""
    known = table.recipes[recipe]
    grids = {
        norm: table.rates_of(recipe, norm, _size(table, recipe, norm, known.batch_size))
        for norm in table.norms_of(recipe)
    }
    if not grids.get(known.reference):
        return None
    tuned = {norm: tune(cells) for norm, cells in grids.items() if cells}
    ranked = {norm: value for norm, value in tuned.items() if not value.diverges}
    reference = tuned[known.reference]
    ratios = {norm: ratio(ranked[norm], reference) for norm in ranked if norm != known.reference}
    # Every declared norm counts, even without a complete grid. Each is compared with the reference.
    # The choice of the best adds a one-sided test per further norm, and two of these count as one.
    num_norms = len(grids.keys() | set(known.norms))
    family = max(1, num_norms - 1 + math.ceil((num_norms - 2) / 2))
    groups = _groups(ranked, ratios, known.reference, family)

    def place(norm: str) -> Standing:
        cost = table.cost_of(known.workload, norm)
        if norm not in tuned:
            return Standing(norm, "incomplete", cost=cost)
        if norm not in ranked:
            return Standing(norm, "diverges", tuned[norm], cost=cost)
        falls = _sensitivity(table, recipe, norm)
        return Standing(norm, groups[norm], tuned[norm], ratios.get(norm), falls, cost)

    order: list[Group] = [*GROUPS, "diverges", "incomplete"]
    places = sorted(
        map(place, grids),
        key=lambda one: (order.index(one.group), _level(one.ratio), one.norm),
    )
    return Standings(known, known.reference, tuple(places), family, _bars(ratios, family))


def _groups(
    ranked: Mapping[str, Tuned], ratios: Mapping[str, Assessment], reference: str, family: int
) -> dict[str, Group]:
    """The group of each norm.

    Selection of the best as in normexp.reporting.ranking: a norm is left out if another one is
    better by a verdict of the same family. `open` is a norm that cannot be told from any other,
    where others can: its error depends on which seeds choose the rate, or a seed ended at chance
    level. It may be the best, too.
    """
    errors = {norm: _level(ratios.get(norm)) for norm in ranked}

    @cache
    def is_better(norm: str, other: str) -> bool:
        return verdict_on(ratio(ranked[norm], ranked[other]), family)[0] == "above"

    def group_of(norm: str) -> Group:
        rivals = [other for other in ranked if errors[other] < errors[norm]]
        if not any(is_better(other, norm) for other in rivals):
            return "best"
        if norm == reference:
            return "level"
        verdict, _ = verdict_on(ratios[norm], family)
        return {"above": "better", "below": "worse"}.get(verdict, "level")  # type: ignore[return-value]

    groups: dict[str, Group] = {norm: group_of(norm) for norm in ranked}
    if {*groups.values()} > {"best"}:  # some norms are told apart, so the others should be too
        for norm in ranked:
            behind = [other for other in ranked if errors[other] > errors[norm]]
            is_open = groups[norm] == "best" and norm != reference
            if is_open and not any(is_better(norm, other) for other in behind):
                groups[norm] = "open"
    return groups


def _size(table: Table, recipe: str, norm: str, size: int) -> int | None:
    """The size as the table has it: None where it is the whole batch or where nothing mixes."""
    return size if (recipe, norm, size) in table.groups else None


def _level(assessment: Assessment | None) -> float:
    """Minus the logarithm of the ratio; 0 for the reference itself."""
    return 0.0 if assessment is None else -(assessment.gap.estimate or 0.0)


def _sensitivity(table: Table, recipe: str, norm: str) -> Assessment | None:
    small = table.groups.get((recipe, norm, 2))
    full = table.rates_of(recipe, norm)
    if not small or not full or not table.rates_of(recipe, norm, 2):
        return None
    return compare(tune(full), tune(table.rates_of(recipe, norm, 2)))


def _bars(ratios: Mapping[str, Assessment], family: int) -> dict[int, float]:
    """The smallest ratio that 8, 16, 32 seeds call, with the median spread of the norms."""
    spreads = [spread for one in ratios.values() if (spread := spread_of(one.gap)) is not None]
    if not spreads:
        return {}
    sd, of_samples = np.median(spreads, axis=0).tolist()
    return {n: math.exp(smallest_difference(n, sd, family, of_samples)) for n in (8, 16, 32)}


def overall(standings: Sequence[Standings], norm: str) -> Interval | None:
    """The geometric mean of a norm's ratios over workloads; None if it is not ranked in all."""
    places = [one.of(norm) for one in standings]
    ratios = [place.ratio for place in places if place is not None and place.ratio is not None]
    if not ratios or len(ratios) < len(standings):
        return None
    return as_ratio(over_workloads(ratios).gap)


def rank_all(table: Table) -> list[Standings]:
    """The standings of every workload at its long budget that has a reference."""
    ranked = (rank(table, workload) for workload in WORKLOADS if workload in table.recipes)
    return [one for one in ranked if one is not None]
