"""Seeds whose values lie apart from the others.

A t interval of eight seeds cannot know that one seed in ten loses ten points. So the seeds that lie
apart are counted beside a mean, and a verdict must be the same without them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normexp.stats.interval import ROUNDING, as_sample

MAD_PER_SD = 0.6745  # of the normal distribution


def lies_apart(values: ArrayLike, *, step: float = 0.0) -> NDArray[np.bool_]:
    """True for each of values (n,) that is farther than c(n) sd from the median.

    sd is the median absolute deviation / 0.6745 (Hampel 1974), at least one step, and c(n) = 3.75 +
    165 / n^2. Under normal noise at most 5 % of samples have any such value, for every n from 3 to
    64 (tests/stats/test_outliers.py). Fewer than half of the values can lie apart, and none of two.

    step: smallest difference that values could have; see normexp.stats.interval
    """
    sample = as_sample(values)
    n = len(sample)
    if n < 3:
        return np.zeros(n, dtype=np.bool_)
    centre = np.median(sample)
    distances = np.abs(sample - centre)
    sd = max(float(np.median(distances)) / MAD_PER_SD, step, ROUNDING * abs(centre))
    return distances > (3.75 + 165 / n**2) * sd
