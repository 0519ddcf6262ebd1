"""Seeds that lie apart: by hand, and how often normal noise has any."""

from __future__ import annotations

import numpy as np
import pytest

from normexp.stats.outliers import lies_apart


def test_one_seed_of_eight_that_lost_ten_points_lies_apart():
    values = [96.1, 96.4, 95.9, 86.2, 96.0, 96.6, 96.3, 95.8]
    assert lies_apart(values).nonzero()[0].tolist() == [3]


def test_the_limit_by_hand():
    # n = 8: median 3.5, deviations .5 .5 1.5 1.5 2.5 2.5 3.5 and the last; sd = 2 / .6745 = 2.97,
    # limit 3.75 + 165 / 64 = 6.33 sd = 18.8
    values = np.arange(8.0)
    values[7] = 3.5 + 18.7
    assert not lies_apart(values).any()
    values[7] = 3.5 + 18.9
    assert lies_apart(values).nonzero()[0].tolist() == [7]


def test_ties_are_as_wide_as_one_step():
    values = [97.5] * 7 + [97.2]
    assert not lies_apart(values, step=0.3).any()
    assert lies_apart([97.5] * 7 + [90.0], step=0.3).sum() == 1


def test_no_seed_of_two_lies_apart():
    assert not lies_apart([0.0, 90.0]).any() and lies_apart([]).size == 0


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 8, 10, 13, 20, 32])
def test_at_most_five_percent_of_normal_samples_have_any(n):
    samples = np.random.default_rng(n).normal(size=(2000, n))
    share = np.mean([lies_apart(sample).any() for sample in samples])
    print(f"n={n}: {100 * share:.1f} %")
    assert share <= 0.05 + 2 * 0.005
