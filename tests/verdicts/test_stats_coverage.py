"""How often nominal 95 % intervals cover the truth, simulated at the n that users have."""

from __future__ import annotations

import numpy as np
import pytest

from normexp.verdicts.interval import crossed_mean, mean, welch_mean


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

    def draw(n: int, count: int) -> list[np.ndarray]:
        """Correctness of two norms, the second with lower accuracy, per image."""
        hard, more = rng.normal(2.5, 2, count), rng.normal(0.25, 0.5, count)
        tables = []
        for ease in (hard, hard - more):
            seeds, noise = rng.normal(0, 0.05, (n, 1)), rng.logistic(size=(n, count))
            tables.append((ease + seeds + noise > 0) * 100.0)
        return tables

    means = [[table.mean() for table in draw(1, 1_000_000)] for _ in range(4)]
    truth = float(np.mean([first - second for first, second in means]))
    pairs = [draw(num_seeds, 300) for _ in range(1000)]
    both = covered([crossed_mean(*pair) for pair in pairs], truth)
    of_seeds = [[table.mean(axis=1) for table in pair] for pair in pairs]
    alone = covered([welch_mean(*samples, step=1 / 3) for samples in of_seeds], truth)
    print(f"n={num_seeds}: over seeds and samples {both:.3f}, over seeds {alone:.3f}")
    assert both >= 0.93 and (num_seeds < 8 or alone < 0.94)
