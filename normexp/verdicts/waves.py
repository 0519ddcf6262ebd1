"""How uncertain a mean over the sequences of a test text is: neighbours are alike, as a topic goes on.

A wave is a weighted mean of the sequences, with the weights sqrt(2) cos(pi j (i + 1/2) / N), which
sum to 0. If sequences are independent, or only alike within stretches that are short beside a wave,
it varies as much as the mean over all of them does, so the mean square of the first NUM_WAVES is the
squared standard error, with as many degrees of freedom (Müller 2007, "A theory of robust long-run
variance estimation"; Lazarus, Lewis, Stock and Watson 2018, "HAR inference: recommendations for
practice").

A few long topics, or a drift from the start to the end, make the slowest waves larger than the
others, and the mean still larger, by how much cannot be seen in one text. Then there is no interval.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NUM_WAVES = 6  # that tell the error
SLOWEST = 2  # waves that show a drift: of a whole text, and of its halves
FASTEST = 16  # waves beside which they do
DRIFT = 1.2  # at most so many times their mean square


def waves_of(table: Array) -> Array:
    """The first waves (n, FASTEST), the slowest first, of sequences in their order, (n, N)."""
    num_sequences = table.shape[1]
    places = (np.arange(num_sequences) + 0.5) / num_sequences
    angles = np.pi * np.outer(places, np.arange(1, FASTEST + 1))
    return table @ np.cos(angles) * (np.sqrt(2) / num_sequences)


def why_unknown(waves: Array, num_sequences: int) -> str:
    """Why the waves of a difference, (FASTEST,), allow no interval; empty if they do."""
    if num_sequences <= FASTEST:
        return f"{num_sequences} test sequences are too few: raise data.test_fraction"
    squares = waves**2
    if squares[:SLOWEST].mean() <= DRIFT * squares[SLOWEST:].mean():
        return ""
    stretch = num_sequences // (1 + int(squares[:SLOWEST].argmax()))
    return (
        f"drifts along the test text, over {stretch} of {num_sequences} sequences: "
        "raise data.test_fraction"
    )


def over_sequences(waves: Array) -> tuple[float, float]:
    """The squared standard error of a mean over sequences, and its degrees of freedom."""
    return float((waves[:NUM_WAVES] ** 2).mean()), NUM_WAVES


def residuals_of(waves: Array) -> tuple[float, float]:
    """The same of the mean over n seeds too, by what differs between seeds. waves: (n, FASTEST)"""
    slow = waves[:, :NUM_WAVES]
    df = (len(slow) - 1) * NUM_WAVES
    return float(((slow - slow.mean(axis=0)) ** 2).sum() / (df * len(slow))), df
