"""Which cause carries what a norm loses at its smallest norm batch size.

A trained network is evaluated with running averages (r), with precise statistics (p), and with
these after a sample's own moments got their weight in training (s); see
`normexp.training.evaluation`. From the largest size (L) to the smallest (S) the metric falls by

    r_L - r_S = (s_L - s_S)                  training noise: what the weights have lost
              + (s - p)_S - (s - p)_L        own share: each sample shaped its own statistics
              + (p - r)_S - (p - r)_L        running averages: they miss the population

for each seed. These are the terms of `normexp.diagnose` between two sizes. A cause carries the fall
if it is more than half of it: the mean over seeds of (term - fall / 2) is positive by a t interval,
at an error rate of 5 % for the three causes of one sentence together, apart from the error rate of
the verdicts. It is said only of a fall that is a verdict of the report.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from normexp.config.rules import format_count
from normexp.errors import UserError
from normexp.records.files import read_json
from normexp.records.paths import EVALUATION_FILE
from normexp.reporting.metric import describe_metric, format_interval
from normexp.reporting.model import AXIS_WORDS, CellRow
from normexp.reporting.verdict import ALONG_SIZES, Comparison
from normexp.stats.interval import LEVEL, Array, Interval, mean

CAUSES = ("training noise", "own share", "running averages")
MEANING = {
    "training noise": "noisy statistics in training left worse weights, however evaluated",
    "own share": "in training a sample shapes its own statistics, in evaluation it does not",
    "running averages": "they are off the statistics of the training samples",
}
REMEDIES = {
    "training noise": "another learning rate (search it), a norm that does not mix samples, as "
    "norm=group, or a larger norm_batch_size",
    "own share": "norm=eval_norm, which gives each sample its share in evaluation too",
    "running averages": "evaluate_with=[precise]",
}
STATISTICS = ("running", "precise", "own_share")


@dataclass(frozen=True)
class Causes:
    """The terms of a fall, in the unit of the metric; positive where the smallest size is worse.

    carriers: the causes that carry it
    is_spread: no cause carries it, by the same test
    """

    fall: Interval
    terms: Mapping[str, Interval]
    carriers: Sequence[str]
    is_spread: bool


def measure_causes(comparison: Comparison) -> Causes | None:
    """The causes of a norm's fall; None where a kind of statistics has no two seeds at a size."""
    metric, part = comparison.part.metric, comparison.part
    names = [metric.name, f"{metric.name}@precise", f"{metric.name}@own_share"]
    tables = [
        [cell.values(describe_metric(name)) for name in names]
        for cell in (comparison.second, comparison.first)  # the largest size first
    ]
    seeds = set[int].intersection(*(set(by_seed) for of_cell in tables for by_seed in of_cell))
    if len(seeds) < 2:
        return None
    sign = 1 if metric.higher_is_better else -1
    large, small = (
        sign * np.array([[by_seed[seed] for seed in sorted(seeds)] for by_seed in of_cell])
        for of_cell in tables
    )  # (3 statistics, n)
    running, precise, own_share = large - small
    terms = dict(zip(CAUSES, (own_share, precise - own_share, running - precise), strict=True))
    level = 1 - (1 - LEVEL) / len(terms)

    def excess(term: Array) -> Interval:
        return mean(term - running / 2, step=part.step, level=level)

    excesses = {name: excess(term) for name, term in terms.items()}
    bounds = {name: (e.low, e.high) for name, e in excesses.items() if e.low is not None}
    return Causes(
        mean(running, step=part.step),
        {name: mean(term, step=part.step) for name, term in terms.items()},
        [name for name, (low, _) in bounds.items() if low is not None and low > 0],
        all(name in bounds and (bounds[name][1] or 0) < 0 for name in terms),
    )


def words_on_causes(comparison: Comparison) -> tuple[str, str] | None:
    """A claim on the causes of a fall along the norm batch size, and its details.

    None where nothing was recorded that could explain it, and there is no loss.
    """
    if not comparison.is_along_sizes or comparison.part.axis != "norm_batch_size":
        return None
    if "@" in comparison.part.metric.name or comparison.unlike:
        return None
    norm, size = comparison.first.norm, comparison.sizes[0]
    where = f"{norm} at {AXIS_WORDS[comparison.part.axis]} {size}"
    causes = measure_causes(comparison)
    is_loss = comparison.verdict == ALONG_SIZES["below"]
    if causes is None:
        return (_not_recorded(comparison, where)) if is_loss else None
    if not is_loss:
        why = comparison.why_no_verdict
        return f"No loss of {where} to explain", "" if comparison.verdict else why or ""
    if comparison.has_diverged:
        return f"What carries the loss of {where} is not known: seeds diverged", ""
    return _carried(comparison, causes, where)


def _carried(comparison: Comparison, causes: Causes, where: str) -> tuple[str, str]:
    metric, estimate = comparison.part.metric, causes.fall.estimate or 0.0
    terms = ", ".join(
        f"{name} {format_interval(term, metric.digits)}" for name, term in causes.terms.items()
    )
    amounts = f"{terms} of {estimate:.{metric.digits}f} {metric.unit}"
    seeds = format_count(causes.fall.n, "seed")
    about = f"n = {seeds}, on these test samples, at an error rate of its own (5 %)"
    rates = {cell.lr for cell in (comparison.first, comparison.second)}
    if any(comparison.tuned) or len(rates) > 1:
        about += "; at the chosen learning rates"
    above = [name for name, term in causes.terms.items() if term.low is not None and term.low > 0]
    remedies = [f"against {name}: {REMEDIES[name]}" for name in causes.carriers or above]
    meanings = [f"{name}: {meaning}" for name, meaning in MEANING.items()]
    details = "; ".join([*meanings, *remedies, about])
    if not causes.carriers:
        if causes.is_spread:
            return f"No single cause carries the loss of {where}: {amounts}", details
        if above:
            take = "takes" if len(above) == 1 else "take"
            parts = f"{' and '.join(above)} {take} part in the loss of {where}"
            return f"{_capital(parts)}; what carries it is undecided: {amounts}", details
        return f"What carries the loss of {where} is undecided: {amounts}", details
    verb, names = "carries" if len(causes.carriers) == 1 else "carry", " and ".join(causes.carriers)
    return f"{_capital(names)} {verb} the loss of {where}: {amounts}", details


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _not_recorded(comparison: Comparison, where: str) -> tuple[str, str] | None:
    """The commands that record it; None if the norm has no such statistics."""
    cells = (comparison.first, comparison.second)
    sees_future = any(cell.config.get("leaks_future_in_training") is True for cell in cells)
    if sees_future or all(map(_was_asked, cells)):
        return None
    kinds = f"evaluate_with=[{','.join(STATISTICS)}]"
    commands = [
        f"python -m normexp.evaluate {shlex.join([f'run={cell.directory}', kinds])}"
        for cell in cells
    ]
    return f"To see what carries the loss of {where}: {'; '.join(commands)}", ""


def _was_asked(cell: CellRow) -> bool:
    with suppress(UserError, OSError):
        files = [run.directory / EVALUATION_FILE for run in cell.runs]
        return all({*STATISTICS[1:]} <= read_json(file).get("asked", {}).keys() for file in files)
    return False
