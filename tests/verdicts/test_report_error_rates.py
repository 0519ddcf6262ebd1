"""How often a report says something false of equal norms: three designs, drawn anew for each study.

Each test prints its rate. More studies: STUDIES=1000 python -m pytest -s of this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy.special import expit
from synthetic_study import cell_of, report_of_cells

from normexp.verdicts.report import Report
from normexp.verdicts.rows import Row

NORMS, SIZES, RATES, n = ("batch", "one", "two", "three"), (2, 32), (0.01, 0.03, 0.1, 0.3, 1.0), 8
STUDIES = int(os.environ.get("STUDIES", "60"))
FALSE = {"better", "worse"}
Draw = Callable[[np.random.Generator], Iterator[list[Row]]]


def is_false(report: Report) -> bool:
    return any(one.verdict in FALSE for one in report.comparisons)


def cells(draw: Callable[[], list[float]]) -> Iterator[list[Row]]:
    for norm in NORMS:
        for size in SIZES:
            yield cell_of(norm, draw(), norm_batch_size=size, mixes_samples=True)


def heavy_tails(rng: np.random.Generator) -> Iterator[list[Row]]:
    """t(3), at a ceiling."""
    return cells(lambda: np.clip(0.995 + 0.004 * rng.standard_t(3, n), 0.5, 1).tolist())


def images(rng: np.random.Generator) -> Iterator[list[Row]]:
    """Each cell has its own hard images, as a norm has."""
    shared = rng.normal(0, 2, 300)
    for norm in NORMS:
        for size in SIZES:
            odds = 2 + shared + rng.normal(0, 0.7, 300)
            rights = rng.random((n, 300)) < expit(odds + rng.normal(0, 0.05, (n, 1)))
            means = dict(enumerate(rights.mean(axis=1).tolist()))
            place = {"norm_batch_size": size, "mixes_samples": True}
            yield cell_of(norm, means, samples=dict(enumerate(rights)), **place)


def tuned(rng: np.random.Generator) -> Iterator[list[Row]]:
    """Five learning rates; runs share the luck of validation and test."""
    for norm in NORMS:
        for size in SIZES:
            for lr, level in zip(RATES, (0.90, 0.95, 0.955, 0.945, 0.80), strict=True):
                luck = rng.normal(0, 0.008, n)
                for seed in range(n):
                    val, test = level + luck[seed] + rng.normal(0, 0.006, 2)
                    metrics = {"val/accuracy": val, "test/accuracy": test}
                    place = {"norm_batch_size": size, "mixes_samples": True, "lr": lr}
                    yield cell_of(norm, {seed: test}, metrics=metrics, **place)


@pytest.mark.slow
@pytest.mark.parametrize("design", [heavy_tails, images, tuned])
def test_equal_norms_have_few_false_verdicts(design: Draw):
    found = [
        is_false(report_of_cells(*design(np.random.default_rng(study)))) for study in range(STUDIES)
    ]
    error = np.sqrt(0.05 * 0.95 / STUDIES)
    print(f"{design.__name__}: {100 * np.mean(found):.1f} % of {STUDIES} studies, {sum(found)}")
    assert np.mean(found) <= 0.05 + 3 * error
