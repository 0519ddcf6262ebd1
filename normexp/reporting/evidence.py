"""What stands in brackets behind a sentence: seeds, test samples, rates, the end of training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normexp.errors import UserError
from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE, seed_dir
from normexp.records.samples import read_samples
from normexp.reporting.contrast import Contrast
from normexp.reporting.frame import Row
from normexp.reporting.metric import Metric, format_signed
from normexp.stats.interval import Interval, crossed_mean

ROUNDED = 1e-4  # a mean over float32 samples may differ from the metric by this share
STILL_FALLING = 0.01  # share of the first training loss, from one fifth of the steps to the next


def count_words(point: Row, metric: Metric, n: int, noun: str) -> str:
    """`n = 5 seeds; 2 of 8 diverged, 1 of 8 missing`."""
    lost = lost_words(point, metric)
    noun = noun[:-1] if n == 1 else noun
    return f"n = {n} {noun}" + (f"; {lost}" if lost else "")


def lost_words(point: Row, metric: Metric) -> str:
    """`2 of 8 diverged, 1 of 8 missing`; and runs that a callback ended before their last step."""
    lost = {word: point[word] for word in ("diverged", "failed", "missing")}
    lost["ended early"] = point["early"]
    lost[f"without {metric.name}"] = point["finished"] - point["recorded"]
    parts = [f"{count} of {point['expected']} {word}" for word, count in lost.items() if count]
    return ", ".join(parts)


def seed_words(one: Contrast) -> str:
    """`ahead with 7 of 8 seeds`, where a tie counts one half; and equality that is no chance."""
    a, b = one.pairs
    if len(a) > 1 and (a == b).all() and not one.has_diverged:
        return "equal under every seed: is the norm used?"
    chance = one.improvement
    if one.is_along_sizes or chance.estimate is None:
        return ""
    ties = " (a tie counts half)" if (a == b).any() else ""
    return f"ahead with {chance.estimate * chance.n:g} of {chance.n} seeds{ties}"


def gap_over_samples(one: Contrast) -> Interval | None:
    """The gap over seeds and test samples; None unless every run of the gap has its samples.

    Samples are used where their mean is the metric, as it is for an accuracy.
    """
    if one.has_diverged:  # a diverged run has no samples
        return None
    metric, values = one.part.metric, one.part.values
    cells = [one.first["cell"], one.second["cell"]]
    paired = values[cells].dropna()
    found = [
        [_samples_of(cell, seed, value, metric) for seed, value in paired[cell].items()]
        for cell in dict.fromkeys(cells)
    ]
    sizes = {len(samples) for own in found for samples in own}
    if len(paired) < 2 or len(sizes) > 1 or 0 in sizes:
        return None
    gaps = np.array(found[0]) - np.array(found[1])
    gap = crossed_mean(gaps, limit=metric.limit)
    return gap if metric.higher_is_better else -gap


def _samples_of(cell: str, seed: object, value: float, metric: Metric) -> np.ndarray:
    """The metric of each test sample, scaled; empty if their mean is not the recorded value."""
    kind = metric.name.partition("@")[2] or "running"
    samples = np.empty(0)
    with suppress(UserError):  # a torn file does not fail the report
        recorded = read_samples(seed_dir(Path(cell), int(str(seed))))
        samples = metric.scale * recorded.get(kind, samples)
    is_metric = len(samples) and abs(samples.mean() - value) <= ROUNDED * abs(value)
    return samples if is_metric else np.empty(0)


def optimism_words(one: Contrast) -> str:
    """`learning rates chosen on these seeds: optimism 0.14 points at 2, 0.20 points at 128`."""
    found, metric = [], one.part.metric
    for name, row in zip(one.names, (one.first, one.second), strict=True):
        if (one.part.searched["cell"] == row["cell"]).any():
            optimism = one.part.optimism(row["cell"])
            amount = (
                "unknown"
                if optimism is None
                else f"{format_signed(optimism, metric.digits + 1)} {metric.unit}".rstrip()
            )
            found.append(f"{amount} {name}")
    return f"learning rates chosen on these seeds: optimism {', '.join(found)}" if found else ""


def rate_words(one: Contrast) -> str:
    """`learning rate 0.1 of group, 0.05 of batch`, where the two differ."""
    rates = [row["lr"] for row in (one.first, one.second)]
    if rates[0] == rates[1]:
        return ""
    said = [f"{rate:g} {name}" for rate, name in zip(rates, one.names, strict=True)]
    return f"learning rate {', '.join(said)}"


def training_words(one: Contrast) -> str:
    """`train loss at 2: 0.67 (still falling), at 128: 0.05 (converged)`."""
    runs, found = one.part.runs, []
    for name, row in zip(one.names, (one.first, one.second), strict=True):
        is_own = (runs["cell"] == row["cell"]) & (runs["status"] == "finished")
        end = training_end(runs["directory"][is_own])
        found += [f"{name}: {end.words}"] if end is not None else []
    return f"train loss {', '.join(found)}" if found else "train loss not recorded"


@dataclass(frozen=True)
class TrainingEnd:
    """The training loss of a cell over the last fifth of its steps, as mean over runs.

    fall: mean over the fifth before less this mean, as a share of the first loss; None if a fifth
        has no recorded loss
    """

    loss: float
    fall: float | None

    @property
    def words(self) -> str:
        """`0.67 (still falling)`."""
        if self.fall is None:
            return f"{self.loss:.2g} (slope unknown)"
        end = "still falling" if self.fall > STILL_FALLING else "converged"
        return f"{self.loss:.2g} ({'rising' if self.fall < -STILL_FALLING else end})"


def training_end(directories: Iterable[str]) -> TrainingEnd | None:
    """The end of the training loss over runs; None if no run has recorded one."""
    losses, falls = [], []
    for directory in directories:
        rows = []
        with suppress(UserError):  # a torn file does not fail the report
            rows = read_metrics(Path(directory) / METRICS_FILE)
        curve = [
            (row.step, row.value)
            for row in rows
            if row.name == "train/loss" and math.isfinite(row.value)
        ]
        if not curve:
            continue
        steps, values = np.array(curve).T
        fifth = np.ceil(5 * steps / steps[-1])
        last, before = values[fifth == 5], values[fifth == 4]
        losses.append(last.mean())
        if len(before):
            falls.append((before.mean() - last.mean()) / values[0])
    if not losses:
        return None
    return TrainingEnd(float(np.mean(losses)), float(np.mean(falls)) if falls else None)
