"""The tuning curve of a search: the expected value of the best of k of its points.

After Dodge et al., "Show Your Work" (arXiv:1909.03004), with draws without replacement, which Tang
et al. (arXiv:2004.13705) show to be unbiased. The best point is chosen on validation and its value
is taken on test, so the choice adds no optimism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import gammaln

from normexp.records.paths import RESULT_FILE, list_seeds, seed_dir
from normexp.records.result import Result, read_result
from normexp.records.study import SearchEntry, read_study
from normexp.reporting.charts import HEIGHT, WIDTH, Figure, encode_style, tooltip
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.style import assign_styles

Array = NDArray[np.float64]
RESAMPLES = 2000
CAPTION = (
    "Expected {metric} of the best of k points, drawn without replacement from the n points that "
    "were tried, against k. The best is chosen by {objective}; its value is the mean over the "
    "seeds of the search, and a diverged run counts as the worst value. Bands: 95 % percentile "
    "bootstrap over the points ({resamples} resamples). They do not cover the noise of the seeds, "
    "and are too narrow where k is near n."
)


def expected_best(scores: Array, values: Array) -> Array:
    """The expected value of the point with the highest score among k points, for k = 1 .. n.

    sum_i C(i - 1, k - 1) / C(n, k) v_i, with the points in ascending order of their scores, is the
    mean over all draws of k of the n points. Points of equal scores share their mean value.

    Args:
        scores: (n,), higher is better.
        values: (n,); infinite for a diverged loss, which makes the result infinite where it counts.
    """
    n = len(scores)
    _, groups = np.unique(scores, return_inverse=True)  # 0 for the lowest score
    shared = np.bincount(groups, values) / np.bincount(groups)
    weights = _weights(n)
    terms = np.multiply(weights, shared[np.sort(groups)], out=np.zeros((n, n)), where=weights > 0)
    return terms.sum(axis=1)


@cache
def _weights(n: int) -> Array:
    """C(i - 1, k - 1) / C(n, k) at row k and column i: P(rank i is the highest of k drawn)."""
    i, k = np.arange(1, n + 1), np.arange(1, n + 1)[:, None]
    above = gammaln(n - k + 1) - gammaln(np.maximum(i - k, 0) + 1) + gammaln(i) - gammaln(n + 1)
    return np.where(i >= k, k * np.exp(above), 0)


def bootstrap_band(scores: Array, values: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Low and high bounds (n,) of `expected_best`: 95 % percentile bootstrap over the points."""
    n = len(scores)
    drawn = rng.integers(n, size=(RESAMPLES, n))
    curves = np.stack([expected_best(scores[index], values[index]) for index in drawn])
    low, high = np.quantile(curves, [0.025, 0.975], axis=0, method="closest_observation")
    return low, high


@dataclass(frozen=True)
class Curve:
    """The points of one search.

    Attributes:
        norm: with its knobs, as in the legend.
        setting: the other words of the command line that its points share.
        scores: (n,), means over seeds on validation; higher is better.
        values: (n,), means over seeds on test.
    """

    norm: str
    setting: str
    objective: Metric
    metric: Metric
    scores: Array
    values: Array

    def rows(self) -> list[dict[str, Any]]:
        """One row for each k with a finite expected value, in the shown unit."""
        center = expected_best(self.scores, self.values)
        low, high = bootstrap_band(self.scores, self.values, np.random.default_rng(0))
        shown = self.metric.scale * np.stack([center, low, high])
        return [
            {"norm": self.norm, "size": "", "k": k, "n": len(self.scores), "mean": mean}
            | {"low": low, "high": high if math.isfinite(high) else None}
            for k, (mean, low, high) in enumerate(shown.T.tolist(), start=1)
            if math.isfinite(mean)
        ]


def read_curves(study_dir: Path) -> list[Curve]:
    """The searches in the history of a study that have two or more points."""
    searches = read_study(study_dir).searches if study_dir.is_dir() else []
    curves = [_read_curve(study_dir, search) for search in searches]
    return [curve for curve in curves if curve is not None and len(curve.scores) > 1]


def _read_curve(study_dir: Path, search: SearchEntry) -> Curve | None:
    cells = [_read_cell(study_dir / cell_id) for cell_id in search.points]
    cells = [results for results in cells if results]
    if not cells:
        return None
    objective = describe_metric(search.metric)
    on_test = search.metric.replace("val/", "test/")
    has_test = any(on_test in result.metrics for results in cells for result in results)
    metric = describe_metric(on_test) if has_test else objective
    sign = 1 if objective.higher_is_better else -1
    scores = np.array([sign * objective.mean_over(results) for results in cells])
    values = np.array([metric.mean_over(results) for results in cells])
    knobs = [word for word in search.words if word.lstrip("+").startswith(("norm=", "norm."))]
    named = [word.lstrip("+").removeprefix("norm=").removeprefix("norm.") for word in knobs]
    norm = " ".join(named) or cells[0][0].config["norm"]
    setting = " ".join(word for word in search.words if word not in knobs)
    return Curve(norm, setting, objective, metric, scores, values)


def _read_cell(cell_dir: Path) -> list[Result]:
    seeds = list_seeds(cell_dir)
    folders = [seed_dir(cell_dir, seed) for seed in seeds]
    return [read_result(folder) for folder in folders if (folder / RESULT_FILE).is_file()]


def draw_tuning(study_dirs: Sequence[Path]) -> list[Figure]:
    """A figure for each setting of the searches in these studies, with a curve for each norm."""
    curves = [curve for study_dir in study_dirs for curve in read_curves(study_dir)]
    settings = dict.fromkeys((curve.setting, curve.objective.name) for curve in curves)
    return [
        _draw([c for c in curves if (c.setting, c.objective.name) == setting], number)
        for number, setting in enumerate(settings, start=1)
    ]


def _draw(curves: Sequence[Curve], number: int) -> Figure:
    metric, objective, setting = curves[0].metric, curves[0].objective, curves[0].setting
    colour, _, dash = encode_style(assign_styles(curve.norm for curve in curves))
    colour = colour.legend(symbolOpacity=1)
    most = max(len(curve.scores) for curve in curves)
    ticks = list(range(1, most + 1, math.ceil(most / 12)))
    x = alt.X("k:Q", title="points tried, k", axis=alt.Axis(values=ticks, format="d"))
    y = alt.Y("mean:Q", title=metric.label, scale=alt.Scale(zero=False))
    tip = tooltip("norm", *(f"{name}:Q" for name in ("k", "n", "mean", "low", "high")))
    band = alt.Chart().mark_area(opacity=0.15)
    band = band.encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour)
    line = alt.Chart().mark_line(point=True).encode(x, y, colour, dash, tooltip=tip)
    chart = alt.layer(band, line).properties(width=WIDTH, height=HEIGHT)
    caption = CAPTION.format(
        metric=metric.label, objective=objective.label, resamples=f"{RESAMPLES:,}"
    )
    table = pd.DataFrame([row for curve in curves for row in curve.rows()])
    subtitle = setting or "the default training"
    return Figure(
        f"tuning_{number}", "Expected best of k points", caption, chart, table, subtitle=subtitle
    )
