"""How often a report says something false of equal arms, drawn anew for each study.

False are a difference, and an arm that is not marked as one that may be the best. Each test prints
its rate. More studies: STUDIES=300 python -m pytest -s -m slow of this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from synthetic_study import cell_of, report_of_cells

from normexp.verdicts.report import Report
from normexp.verdicts.rows import Row

NORMS, SIZES, RATES, n = ("batch", "one", "two", "three"), (2, 32), (0.01, 0.03, 0.1, 0.3, 1.0), 8
LENGTH = 725  # sequences of a text
STUDIES = int(os.environ.get("STUDIES", "60"))
FALSE = {"better", "worse"}
Draw = Callable[[np.random.Generator], Iterator[list[Row]]]


def is_false(report: Report) -> bool:
    places = [place for ranking in report.rankings for place in ranking.places]
    is_left_out = any(place.may_be_best is False for place in places)
    return is_left_out or any(one.verdict in FALSE for one in report.comparisons)


def cells(
    draw: Callable[[], list[float]], sizes: Sequence[int] = SIZES, norms: Sequence[str] = NORMS
) -> Iterator[list[Row]]:
    for norm in norms:
        for size in sizes:
            yield cell_of(norm, draw(), norm_batch_size=size, mixes_samples=True)


def normal(rng: np.random.Generator, count: int, deviation: float = 0.01) -> list[float]:
    return rng.normal(0.8, deviation, count).tolist()


def heavy_tails(rng: np.random.Generator) -> Iterator[list[Row]]:
    """t(3), at a ceiling."""
    return cells(lambda: np.clip(0.995 + 0.004 * rng.standard_t(3, n), 0.5, 1).tolist())


def one_size(rng: np.random.Generator) -> Iterator[list[Row]]:
    return cells(lambda: normal(rng, 4), sizes=[32])


def two_norms(rng: np.random.Generator) -> Iterator[list[Row]]:
    return cells(lambda: normal(rng, 3), sizes=[32], norms=NORMS[:2])


def every_size(rng: np.random.Generator) -> Iterator[list[Row]]:
    return cells(lambda: normal(rng, 4), sizes=(2, 8, 32))


def noisy_reference(rng: np.random.Generator) -> Iterator[list[Row]]:
    for norm in NORMS:
        yield cell_of(norm, normal(rng, 4, 0.04 if norm == "batch" else 0.01))


def tight_reference(rng: np.random.Generator) -> Iterator[list[Row]]:
    for norm in NORMS:
        yield cell_of(norm, normal(rng, 4, 0.0025 if norm == "batch" else 0.01))


def a_tenth_diverges(rng: np.random.Generator) -> Iterator[list[Row]]:
    for norm in NORMS:
        lost = rng.random(n) < 0.1
        values = [None if gone else value for gone, value in zip(lost, normal(rng, n), strict=True)]
        yield cell_of(norm, values)


def any_key(rng: np.random.Generator) -> Iterator[list[Row]]:
    """Two norms, each with three activations."""
    for norm in NORMS[:2]:
        for act in ("relu", "gelu", "silu"):
            yield cell_of(norm, normal(rng, 4), act=act)


def ladder(rng: np.random.Generator) -> Iterator[list[Row]]:
    """Two norms at four widths."""
    for norm in NORMS[:2]:
        for width in (8, 16, 32, 64):
            yield cell_of(norm, normal(rng, 4), **{"model.width": width})


def images(rng: np.random.Generator) -> Iterator[list[Row]]:
    """Each cell has its own hard images, as a norm has."""
    return with_images(rng, n)


def images_of_4_seeds(rng: np.random.Generator) -> Iterator[list[Row]]:
    return with_images(rng, 4)


def with_images(rng: np.random.Generator, count: int) -> Iterator[list[Row]]:
    shared = rng.normal(0, 2, 300)
    for norm in NORMS:
        for size in SIZES:
            odds = 2 + shared + rng.normal(0, 0.7, 300)
            rights = rng.random((count, 300)) < expit(odds + rng.normal(0, 0.05, (count, 1)))
            means = dict(enumerate(rights.mean(axis=1).tolist()))
            place = {"norm_batch_size": size, "mixes_samples": True}
            yield cell_of(norm, means, samples=dict(enumerate(rights)), **place)


def run_of(rng: np.random.Generator, norm: str, seed: int, level: float, **place: Any) -> list[Row]:
    """A run whose luck validation and test share."""
    luck = rng.normal(0, 0.008)
    val, test = level + luck + rng.normal(0, 0.006, 2)
    return cell_of(
        norm, {seed: test}, metrics={"val/accuracy": val, "test/accuracy": test}, **place
    )


def tuned(rng: np.random.Generator) -> Iterator[list[Row]]:
    """Five learning rates."""
    for norm in NORMS:
        for size in SIZES:
            for lr, level in zip(RATES, (0.90, 0.95, 0.955, 0.945, 0.80), strict=True):
                for seed in range(n):
                    place = {"norm_batch_size": size, "mixes_samples": True, "lr": lr}
                    yield run_of(rng, norm, seed, level, **place)


def outside(rng: np.random.Generator, rates: Sequence[float]) -> Iterator[list[Row]]:
    """All norms are equal at their best, which of one of them lies outside of the grid."""
    for norm in NORMS:
        best = 10 * rates[-1] if norm == "one" else rates[len(rates) // 2]
        for lr in rates:
            for seed in range(n):
                yield run_of(rng, norm, seed, 0.9 - 0.02 * np.log10(lr / best) ** 2, lr=lr)


def outside_of_2(rng: np.random.Generator) -> Iterator[list[Row]]:
    return outside(rng, (0.1, 1.0))


def outside_of_3(rng: np.random.Generator) -> Iterator[list[Row]]:
    return outside(rng, (0.01, 0.1, 1.0))


def texts(name: str, along: Callable[..., Any], *args: int, norms: int = 2) -> Draw:
    """Texts of 725 sequences. along: how much better each norm is along them, (norms, 725)"""

    def draw(rng: np.random.Generator) -> Iterator[list[Row]]:
        for norm, own in zip(NORMS, along(rng, norms, *args), strict=False):
            hard = 1.5 + 0.05 * own + rng.normal(0, 0.05, LENGTH)
            for seed in range(4):
                loss = hard + rng.normal(0, 0.002) + rng.normal(0, 0.05, LENGTH)
                metrics = {"test/bits_per_byte": float(loss.mean())}
                samples = {seed: loss.astype(np.float32)}
                yield cell_of(norm, {seed: 0.5}, metrics=metrics, samples=samples, data="text",
                              chance_accuracy=None)  # fmt: skip

    draw.__name__ = name
    return draw


def independent(rng: np.random.Generator, norms: int) -> np.ndarray:
    return rng.normal(size=(norms, LENGTH))


def topics(rng: np.random.Generator, norms: int, length: int) -> np.ndarray:
    """Topics of one length; each norm is good at topics of its own."""
    return of_topics(rng, norms, (np.arange(LENGTH) + rng.integers(length)) // length)


def random_topics(rng: np.random.Generator, norms: int, count: int) -> np.ndarray:
    starts = np.sort(rng.integers(0, LENGTH, count - 1))
    return of_topics(rng, norms, np.searchsorted(starts, np.arange(LENGTH), side="right"))


def of_topics(rng: np.random.Generator, norms: int, topic: np.ndarray) -> np.ndarray:
    return rng.normal(size=(norms, topic.max() + 1))[:, topic]


def drift(rng: np.random.Generator, norms: int) -> np.ndarray:
    """A random walk."""
    return rng.normal(size=(norms, LENGTH)).cumsum(axis=1) / LENGTH**0.5


def sparse(rng: np.random.Generator, norms: int) -> np.ndarray:
    """A few sequences carry the difference."""
    return rng.laplace(0, 5, (norms, LENGTH)) * (rng.random((norms, LENGTH)) < 0.02)


DESIGNS: list[Draw] = [
    *(heavy_tails, one_size, two_norms, every_size, noisy_reference, tight_reference, any_key),
    a_tenth_diverges,
    *(ladder, images, images_of_4_seeds, tuned, outside_of_2, outside_of_3),
    texts("text_independent", independent),
    texts("text_sparse", sparse),
    texts("text_drift", drift),
    *(texts(f"text_topics_of_{length}", topics, length) for length in (9, 36, 145)),
    *(texts(f"text_{count}_topics", random_topics, count) for count in (3, 5, 10, 36)),
    texts("text_4_norms", topics, 36, norms=4),
    texts("text_4_norms_3_topics", random_topics, 3, norms=4),
    texts("text_4_norms_drift", drift, norms=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_equal_arms_have_few_false_verdicts(design: Draw):
    found = [
        is_false(report_of_cells(*design(np.random.default_rng(study)))) for study in range(STUDIES)
    ]
    error = np.sqrt(0.05 * 0.95 / STUDIES)
    print(f"{design.__name__}: {100 * np.mean(found):.1f} % of {STUDIES} studies, {sum(found)}")
    assert np.mean(found) <= 0.05 + 3 * error
