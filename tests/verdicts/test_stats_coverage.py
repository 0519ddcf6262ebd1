"""How often nominal 95 % intervals cover the truth, simulated at the n that users have."""

from __future__ import annotations

import numpy as np
import pytest

from normexp.verdicts.interval import crossed_mean, mean


def covered(intervals, truth: float) -> float:
    return float(np.mean([i.low <= truth <= i.high for i in intervals]))


# Accuracies: counts of a test set, near 100 % and with ties


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [300, 10_000])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_coverage_of_a_mean_accuracy(num_samples, spread):
    """Prints the table; 2,000 studies have a binomial error of .005 at .95.

    spread: standard deviation between seeds as a share of the error rate (of 10 % at 50 %)
    """
    rng = np.random.default_rng(0)
    for accuracy in (0.5, 0.9, 0.99, 0.995):
        deviation = spread * min(1 - accuracy, 0.1)
        true = np.full((2000, 16), accuracy)
        if deviation:
            concentration = accuracy * (1 - accuracy) / deviation**2 - 1
            shape = accuracy * concentration, (1 - accuracy) * concentration
            true = rng.beta(*shape, size=true.shape)
        values = 100 * rng.binomial(num_samples, true) / num_samples
        for n in (2, 3, 5, 8, 16):
            own = values[:, :n]
            found = [mean(row, step=100 / num_samples, bounds=(0, 100)) for row in own]
            rate = covered(found, 100 * accuracy)
            width = np.median([i.high - i.low for i in found])
            print(
                f"N={num_samples} sd={deviation:.4f} {accuracy:.1%} n={n}: {rate:.3f} "
                f"(width {width:.2f})"
            )
            assert all(i.low >= 0 and i.high <= 100 for i in found)
            assert rate >= 0.935


# Seeds and test samples: networks agree on which images are hard


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [3, 5, 8])
def test_coverage_over_seeds_and_test_samples(num_seeds):
    """New seeds and samples; the interval over seeds alone covers less as seeds grow."""
    rng = np.random.default_rng(0)

    def gaps(n: int, count: int) -> np.ndarray:
        """Correctness of one norm minus that of another with lower accuracy, per image."""
        hard, more = rng.normal(2.5, 2, count), rng.normal(0.25, 0.5, count)
        seeds = rng.normal(0, 0.05, (2, n, 1))
        noise = rng.logistic(size=(2, n, count))
        return ((hard + seeds[0] + noise[0] > 0) * 100.0) - (
            hard - more + seeds[1] + noise[1] > 0
        ) * 100

    truth = np.mean([gaps(1, 1_000_000).mean() for _ in range(4)])
    tables = [gaps(num_seeds, 300) for _ in range(1000)]
    both = covered([crossed_mean(table) for table in tables], truth)
    alone = covered([mean(table.mean(axis=1), step=1 / 3) for table in tables], truth)
    print(f"n={num_seeds}: over seeds and samples {both:.3f}, over seeds {alone:.3f}")
    assert both >= 0.93 and (num_seeds < 8 or alone < 0.94)
