"""Several comparisons at once: Holm's correction over a small family declared beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from normexp.stats.interval import Array, as_sample


@dataclass(frozen=True)
class Judgement:
    """One comparison of a family: its p, the p after Holm's correction, and rejected or not."""

    p_value: float
    adjusted_p_value: float
    rejected: bool


def holm(p_values: ArrayLike) -> Array:
    """Adjusted p of each of (k,) p values: max over j <= i of min(1, (k - j) p_(j)), j from 0.

    Rejecting where the adjusted p is at most alpha keeps the probability of any false rejection in
    the family at alpha, whatever the dependence (Holm 1979, "A simple sequentially rejective
    multiple test procedure").
    """
    sample = as_sample(p_values)
    if ((sample < 0) | (sample > 1)).any():
        raise ValueError("a p value lies outside 0..1")
    order = np.argsort(sample, kind="stable")
    factors = np.arange(len(sample), 0, -1)
    adjusted = np.empty_like(sample)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * sample[order]), 1.0)
    return adjusted


def judge_family(p_values: Mapping[str, float], *, alpha: float = 0.05) -> dict[str, Judgement]:
    """Which comparisons of the family are rejected when any false one may occur with alpha.

    p_values: every declared comparison by name, also those that turned out dull: leaving some out
    afterwards breaks the promise.
    """
    adjusted = holm(list(p_values.values()))
    return {
        name: Judgement(p, float(q), bool(q <= alpha))
        for (name, p), q in zip(p_values.items(), adjusted, strict=True)
    }


def largest_family(num_pairs: int, *, alpha: float = 0.05) -> int:
    """How many comparisons leave Holm able to reject with the least sign-flip p, 2 / 2^num_pairs.

    8 pairs: 6 comparisons; 5 pairs: none.
    """
    return int(alpha * 2 ** (num_pairs - 1))
