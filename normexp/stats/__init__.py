"""Statistics of a study: pure functions on arrays over seeds, each returning an Interval."""

from normexp.stats.interval import (
    Interval,
    Judgement,
    holm,
    iqm,
    judge_family,
    largest_family,
    mean,
    median,
    paired_difference,
    paired_improvement,
    probability_of_improvement,
    sign_flip_p_value,
    stratified_difference,
)
from normexp.stats.sensitivity import (
    Sensitivity,
    Threshold,
    area_over_log2_size,
    batch_size_sensitivity,
    losses_by_size,
    size_threshold,
    slope_per_halving,
)

__all__ = [
    "Interval",
    "Judgement",
    "Sensitivity",
    "Threshold",
    "area_over_log2_size",
    "batch_size_sensitivity",
    "holm",
    "iqm",
    "judge_family",
    "largest_family",
    "losses_by_size",
    "mean",
    "median",
    "paired_difference",
    "paired_improvement",
    "probability_of_improvement",
    "sign_flip_p_value",
    "size_threshold",
    "slope_per_halving",
    "stratified_difference",
]
