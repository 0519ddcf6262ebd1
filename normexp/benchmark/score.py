"""Where each norm stands: tuned errors, their ratios to the reference's, groups, sensitivity.

The rate of every norm is chosen by cross-fitting from the complete grid (normexp.stats.crossfit),
so that the luck of tuning is inside every interval. A diverged run counts as chance level: always
predicting the most frequent class, or 8 bits per byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from normexp.benchmark.contrast import Assessment, Margin, difference, verdict_on
from normexp.benchmark.family import smallest_difference, spread_of
from normexp.benchmark.protocol import WORKLOADS, WorkloadRecipe
from normexp.benchmark.ratio import ONE, error_ratio, over_workloads
from normexp.benchmark.table import Cost, Table, TableCell
from normexp.stats.crossfit import CrossFit, cross_fit
from normexp.stats.interval import Interval, crossed_mean, mean

RULE = {"margins": {"accuracy": {"most": 1.0, "share": 0.25}, "bits_per_byte": {"most": 0.02}}}
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
    ratios = {
        norm: None if norm == known.reference else ratio(ranked[norm], reference) for norm in ranked
    }
    # Every declared norm counts, even without a complete grid.
    family = _family_size(len(grids.keys() | set(known.norms)))
    groups = _groups(ratios, lambda norm, other: ratio(ranked[norm], ranked[other]), family)

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


def _family_size(num_norms: int) -> int:
    """Each norm is compared with the reference.

    The choice of the best adds a one-sided test per further norm, and two of these count as one.
    """
    return max(1, num_norms - 1 + math.ceil((num_norms - 2) / 2))


def _groups(
    ratios: Mapping[str, Assessment | None],
    compared: Callable[[str, str], Assessment],
    family: int,
) -> dict[str, Group]:
    """The group of each norm, from its ratio to the reference; None: it is the reference.

    Selection of the best as in normexp.reporting.ranking: a norm is left out if another one is
    better by a verdict of the same family. `open` is a norm that cannot be told from any other,
    where others can: its error depends on which seeds choose the rate, or a seed ended at chance
    level. It may be the best, too.
    """
    errors = {norm: _level(ratio) for norm, ratio in ratios.items()}

    @cache
    def is_better(norm: str, other: str) -> bool:
        return verdict_on(compared(norm, other), family)[0] == "above"

    def group_of(norm: str) -> Group:
        rivals = [other for other in errors if errors[other] < errors[norm]]
        if not any(is_better(other, norm) for other in rivals):
            return "best"
        against = ratios[norm]
        verdict = "" if against is None else verdict_on(against, family)[0]
        return {"above": "better", "below": "worse"}.get(verdict, "level")  # type: ignore[return-value]

    groups: dict[str, Group] = {norm: group_of(norm) for norm in errors}
    if {*groups.values()} > {"best"}:  # some norms are told apart, so the others should be too
        for norm in errors:
            behind = [other for other in errors if errors[other] > errors[norm]]
            is_open = groups[norm] == "best" and ratios[norm] is not None
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


def _bars(ratios: Mapping[str, Assessment | None], family: int) -> dict[int, float]:
    """The smallest ratio that 8, 16, 32 seeds call, with the median spread of the norms."""
    known = [one.gap for one in ratios.values() if one is not None]
    spreads = [spread for gap in known if (spread := spread_of(gap)) is not None]
    if not spreads:
        return {}
    sd, of_samples = np.median(spreads, axis=0).tolist()
    return {n: math.exp(smallest_difference(n, sd, family, of_samples)) for n in (8, 16, 32)}


# --- Over all workloads --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Overall:
    """The norms that are ranked in every workload at its long budget.

    standings: of the workloads
    places: with the geometric mean of their ratios to the references
    """

    standings: tuple[Standings, ...]
    places: tuple[Standing, ...]

    def of(self, norm: str) -> Standing | None:
        return next((place for place in self.places if place.norm == norm), None)

    @property
    def references(self) -> str:
        """`batch's and layer's`."""
        return " and ".join(dict.fromkeys(f"{one.reference}'s" for one in self.standings))


def rank_overall(standings: Sequence[Standings]) -> Overall:
    """Over the workloads of these standings at the long budget.

    Budgets of one workload are no independent evidence, so the long one alone counts.
    """
    longs = tuple(one for one in standings if one.recipe.name == one.recipe.workload)
    norms = dict.fromkeys(place.norm for one in longs for place in one.places)
    tuned = {norm: known for norm in norms if (known := _tuned_everywhere(longs, norm))}
    references = [place.tuned for one in longs if (place := one.of(one.reference)) and place.tuned]

    @cache
    def compared(norm: str, other: str | None = None) -> Assessment:
        others = references if other is None else tuned[other]
        pairs = zip(tuned[norm], others, strict=True)
        return over_workloads([ONE if a is b else ratio(a, b) for a, b in pairs])

    ratios = {norm: compared(norm) for norm in tuned}
    groups = _groups(ratios, compared, _family_size(len(norms) + 1))
    places = [Standing(norm, groups[norm], ratio=ratios[norm]) for norm in tuned]
    places.sort(key=lambda one: (GROUPS.index(one.group), _level(one.ratio), one.norm))
    return Overall(longs, tuple(places))


def _tuned_everywhere(standings: Sequence[Standings], norm: str) -> list[Tuned]:
    """Of each workload; empty if the norm is not ranked in all."""
    places = [place for one in standings if (place := one.of(norm)) and place.group in GROUPS]
    return [place.tuned for place in places if place.tuned] if len(places) == len(standings) else []


def rank_all(table: Table) -> list[Standings]:
    """The standings of every workload at its long budget that has a reference."""
    ranked = (rank(table, workload) for workload in WORKLOADS if workload in table.recipes)
    return [one for one in ranked if one is not None]
