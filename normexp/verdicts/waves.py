"""The standard error of a mean over the sequences of a test text, whose neighbours are correlated.

A wave is a weighted sum of the sequences, with weights sqrt(2) / N cos(pi j (i + 1/2) / N), which
sum to 0. If the correlation does not reach far along a wave, the wave has the variance of the mean.
So the mean square of the first NUM_WAVES estimates the squared standard error, with NUM_WAVES
degrees of freedom (Müller 2007, "A theory of robust long-run variance estimation";
Lazarus, Lewis, Stock and Watson 2018, "HAR inference: recommendations for practice").

A few long topics, or a drift from start to end, make the slowest waves larger than the others, and
the error of the mean larger still; one text cannot show by how much. Then there is no interval,
unless seeds differ so much more that the text does not matter. All arms of a table are tested on
one text, so whether it is such a text is asked of all of them together: a single difference may
happen to show few of its topics. Constants were chosen by simulation
(conf/experiment/README.md, "How often a verdict is false").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NUM_WAVES = 6  # used to estimate the error
NUM_SLOWEST = 2  # compared with the others, to see a drift
NUM_TRIED = 16
DRIFT = 1.2  # by this factor, the mean square of the slowest may exceed that of the others
BEYOND = 5.0  # a drift makes the squared error at most so many times that mean square


def waves_of(table: Array) -> Array:
    """The first waves (n, NUM_TRIED), the slowest first, of sequences in their order, (n, N)."""
    num_sequences = table.shape[1]
    places = (np.arange(num_sequences) + 0.5) / num_sequences
    angles = np.pi * np.outer(places, np.arange(1, NUM_TRIED + 1))
    return table @ np.cos(angles) * (np.sqrt(2) / num_sequences)


def drift_of(waves: Sequence[Array | None]) -> float:
    """The factor by which the slowest waves of a difference exceed the others: its mean over pairs.

    waves: of each arm, (NUM_TRIED,); None if it was not tested on a text
    """
    factors = []
    of_texts = [of_arm for of_arm in waves if of_arm is not None]
    for first, second in combinations(of_texts, 2):
        squares = (first - second) ** 2
        if squares.any():
            factors.append(squares[:NUM_SLOWEST].mean() / squares[NUM_SLOWEST:].mean())
    return float(np.mean(factors)) if factors else 0.0


def why_unknown(waves: Array, num_sequences: int, of_seeds: float, drift: float) -> str:
    """Why the waves of a difference, (NUM_TRIED,), do not tell its error; empty if they do.

    of_seeds: the squared standard error over seeds
    drift: `drift_of` all arms
    """
    if num_sequences <= NUM_TRIED:
        return f"{num_sequences} test sequences are too few: raise data.test_fraction"
    slowest = waves[:NUM_SLOWEST] ** 2
    if drift <= DRIFT or BEYOND * slowest.mean() <= of_seeds:
        return ""
    stretch = num_sequences // (1 + int(slowest.argmax()))
    return (
        f"may drift along the test text, over {stretch} of {num_sequences} sequences: "
        "raise data.test_fraction"
    )


def over_sequences(waves: Array) -> tuple[float, float]:
    """The squared standard error of a mean over sequences, and its degrees of freedom."""
    return float((waves[:NUM_WAVES] ** 2).mean()), NUM_WAVES


def residuals_of(waves: Array) -> tuple[float, float]:
    """The part of it that differs between n seeds, for their mean. waves: (n, NUM_TRIED)"""
    slow = waves[:, :NUM_WAVES]
    df = (len(slow) - 1) * NUM_WAVES
    return float(((slow - slow.mean(axis=0)) ** 2).sum() / (df * len(slow))), df
