"""How often reports say something false, and how often they find what is there.

Each test simulates whole reports, judges them by normexp.stats.contrast, and prints its rate with
its standard error. Accuracies are points; a margin is a quarter of the reference's error, up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pytest
from scipy.special import expit

from normexp.stats.contrast import (
    Assessment,
    Margin,
    change,
    difference,
    state_of_seeds,
    verdict_on,
)
from normexp.stats.crossfit import cross_fit
from normexp.stats.family import p_value
from normexp.stats.interval import crossed_mean, mean
from normexp.stats.ratio import error_ratio

pytestmark = pytest.mark.slow
Array = np.ndarray
MARGIN = Margin(cap=1.0, share=0.25)
MOST = 0.06  # of reports with a false verdict


class Truth(NamedTuple):
    gap: float
    margin: float


Report = list[tuple[Assessment, Truth]]


def is_false(verdict: str, truth: Truth) -> bool:
    return {
        "above": truth.gap <= 0,
        "below": truth.gap >= 0,
        "within": abs(truth.gap) >= truth.margin,
        "open": False,
    }[verdict]


def has_false_verdict(report: Report) -> bool:
    return any(is_false(verdict_on(one, len(report))[0], truth) for one, truth in report)


def rate(name: str, events: Iterable[bool]) -> float:
    """The share of true events; prints it with its binomial standard error."""
    happened = np.array(list(events))
    share = float(happened.mean())
    error = np.sqrt(share * (1 - share) / len(happened))
    print(f"{name}: {100 * share:.2f} % (standard error {100 * error:.2f}, n = {len(happened)})")
    return share


def report_of(cells: Array, truths: Array, step: float | None) -> Report:
    """Seven contrasts of four norms at two sizes: along the sizes, and with the first at size 0.

    cells: outcomes (4, 2, n) or (4, 2, n, N); truths: expected outcomes (4, 2)
    """
    ends = [((norm, 0), (norm, 1)) for norm in range(4)]
    ends += [((norm, 0), (0, 0)) for norm in (1, 2, 3)]
    return [
        (
            difference(cells[a], cells[b], MARGIN, step=step),
            Truth(truths[a] - truths[b], min(1.0, (100 - truths[b]) / 4)),
        )
        for a, b in ends
    ]


# Test samples: networks agree on which images are hard, and each norm has its own hard images


def correct(
    rng: np.random.Generator,
    cells: tuple[int, ...],
    n: int,
    num_samples: int,
    *,
    ease: Array | float = 2.5,
    agreement: float = 2.0,
    taste: float = 0.7,
    luck: float = 0.05,
) -> Array:
    """100 or 0 for each seed and test sample, (*cells, n, num_samples).

    ease: mean log odds of a correct answer, by cell
    agreement, taste: sd over samples of the log odds that all cells share, and of each cell's own
    luck: sd over seeds
    """
    shared = agreement * rng.normal(size=num_samples)
    own = taste * rng.normal(size=(*cells, 1, num_samples))
    seeds = luck * rng.normal(size=(*cells, n, 1))
    ease = np.broadcast_to(ease, cells)[..., None, None]
    return 100.0 * (rng.random((*cells, n, num_samples)) < expit(ease + shared + own + seeds))


def accuracy(ease: float, agreement: float = 2.0, taste: float = 0.7, luck: float = 0.05) -> float:
    """The expected outcome of `correct`."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(99)
    sd = np.sqrt(agreement**2 + taste**2 + luck**2)
    return float(100 * weights @ expit(ease + sd * nodes) / weights.sum())


def ease_of(level: float, **spreads: float) -> float:
    """The ease at which `accuracy` is `level`, by bisection."""
    low, high = -20.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accuracy(middle, **spreads) < level else (low, middle)
    return low


@pytest.mark.parametrize(
    ("level", "n", "num_samples"),
    [
        (96.0, 8, 359),
        (96.0, 3, 359),
        (96.0, 8, 2500),
        (90.0, 5, 359),
        (99.5, 8, 359),
        (99.7, 8, 2500),
    ],
)
def test_equal_norms_on_new_images(level, n, num_samples):
    """Also the ceiling, where most runs are equal."""
    rng = np.random.default_rng(0)
    ease = ease_of(level)
    truths = np.full((4, 2), accuracy(ease))
    reports = (
        report_of(correct(rng, (4, 2), n, num_samples, ease=ease), truths, 100 / num_samples)
        for _ in range(400 if num_samples > 1000 else 1000)
    )
    found = rate(f"level {level}, n={n}, N={num_samples}", map(has_false_verdict, reports))
    assert found <= MOST


@pytest.mark.parametrize(("level", "num_samples"), [(96.0, 359), (99.5, 2500), (90.0, 2500)])
def test_norms_that_differ_by_the_margin(level, num_samples):
    """`within` and one direction are false: the worst truth of a family."""
    rng = np.random.default_rng(1)
    worse = level - min(1.0, (100 - level) / 4)
    truths = np.full((4, 2), level)
    truths[1:, 0], truths[0, 1] = worse, worse
    ease = np.where(truths == level, ease_of(level), ease_of(worse))
    reports = (
        report_of(correct(rng, (4, 2), 8, num_samples, ease=ease), truths, 100 / num_samples)
        for _ in range(400)
    )
    assert (
        rate(f"at the margin of {level}, N={num_samples}", map(has_false_verdict, reports)) <= MOST
    )


@pytest.mark.parametrize("expected", [1.0, 2.0, 4.0])
def test_rare_images_that_one_norm_never_gets_right(expected):
    """So many are expected among 500: often none is there, and the norms look the same."""
    rng = np.random.default_rng(2)
    num_samples, level = 500, 96.0
    ease, gap = ease_of(level), 100 * expected / 500

    def reports(count: int):
        for _ in range(count):
            cells = correct(rng, (4, 2), 8, num_samples, ease=ease, taste=0.0)
            truths = np.full((4, 2), accuracy(ease, taste=0.0))
            cells[1:, 0] *= rng.random((3, 1, num_samples)) > expected / num_samples
            truths[1:, 0] *= 1 - gap / 100
            yield report_of(cells, truths, 100 / num_samples)

    assert rate(f"{expected:g} rare images", map(has_false_verdict, reports(600))) <= MOST


@pytest.mark.parametrize("expected", [1.0, 2.0, 3.7])
def test_coverage_where_the_samples_that_differ_are_not_seen_yet(expected):
    """So many of 359 images are expected that only one norm gets right; none is seen in exp(-x)."""
    rng, covered = np.random.default_rng(12), []
    for _ in range(2000):
        table = np.repeat(-100.0 * (rng.random((1, 359)) < expected / 359), 8, axis=0)
        interval = crossed_mean(table, step=100 / 359)
        covered.append(interval.low <= -100 * expected / 359 <= interval.high)
    assert rate(f"covered, {expected:g} expected", covered) >= 0.95


@pytest.mark.parametrize(("num_samples", "least"), [(2500, 0.8), (359, 0.2)])
def test_two_points_are_found(num_samples, least):
    """Differences over seeds have a standard deviation of 0.65, n = 8, in a family of seven."""
    rng = np.random.default_rng(3)
    low, high = ease_of(94.0), ease_of(96.0)
    ease = np.full((4, 2), high)
    ease[0, 0] = ease[1, 0] = low
    truths = np.vectorize(accuracy)(ease)

    def reports(count: int):
        for _ in range(count):
            cells = correct(rng, (4, 2), 8, num_samples, ease=ease, luck=0.0)
            yield with_spread(cells, rng, 0.65), truths

    found, errors, spreads = [], [], []
    for cells, expected in reports(300):
        report = report_of(cells, expected, 100 / num_samples)
        verdicts = [verdict_on(one, len(report))[0] for one, _ in report]
        found += [verdicts[0] == "below", verdicts[1] == "below"]
        errors.append(has_false_verdict(report))
        spreads.append((cells[1, 0] - cells[1, 1]).mean(axis=-1).std(ddof=1))
    print(f"sd of differences {np.mean(spreads):.2f}")
    assert rate(f"false, N={num_samples}", errors) <= MOST
    assert rate(f"found, N={num_samples}", found) >= least


def with_spread(cells: Array, rng: np.random.Generator, sd: float) -> Array:
    """Flips random answers of each seed so that differences of seed means have at least that sd."""
    num_samples = cells.shape[-1]
    noise = 2 * (cells.mean(axis=-2) * (100 - cells.mean(axis=-2))).mean() / num_samples
    more = np.sqrt(max(sd**2 - noise, 0.0) / 2)  # of one cell's mean
    shifts = more * rng.normal(size=(*cells.shape[:-1], 1))
    # A shift up mends wrong answers, a shift down breaks right ones: in expectation by the shift
    level = cells.mean(axis=-1, keepdims=True)
    mends = (cells == 0) & (rng.random(cells.shape) < np.maximum(shifts, 0) / (100.01 - level))
    breaks = (cells == 100) & (rng.random(cells.shape) < np.maximum(-shifts, 0) / level)
    return cells + 100.0 * mends - 100.0 * breaks


def test_permuted_images():
    """Images swapped at random between two cells that differ: nothing is left to find."""
    rng = np.random.default_rng(4)
    pools = [
        correct(rng, (2,), 8, 359, ease=np.array([ease_of(96), ease_of(93)])) for _ in range(20)
    ]

    def reports(count: int):
        for _ in range(count):
            a, b = pools[rng.integers(20)]
            swaps = rng.random((7, 1, 359)) < 0.5
            pairs = [(np.where(s, a, b), np.where(s, b, a)) for s in swaps]
            yield [(difference(x, y, MARGIN, step=100 / 359), Truth(0.0, 1.0)) for x, y in pairs]

    assert rate("permuted images", map(has_false_verdict, reports(600))) <= MOST


# Seeds alone


def seed_noise(kind: str) -> Callable[[np.random.Generator, tuple[int, ...]], Array]:
    """Draws of mean 0 and about sd 0.5."""
    return {
        "normal": lambda rng, shape: 0.5 * rng.normal(size=shape),
        "t(3)": lambda rng, shape: 0.5 * rng.standard_t(3, size=shape) / np.sqrt(3),
        "uniform": lambda rng, shape: rng.uniform(-0.9, 0.9, size=shape),
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "t(3)", "uniform"])
@pytest.mark.parametrize("n", [3, 5, 8])
def test_equal_norms_on_the_same_images(kind, n):
    rng, truths = np.random.default_rng(5), np.full((4, 2), 96.0)
    draw = seed_noise(kind)
    reports = (report_of(96 + draw(rng, (4, 2, n)), truths, None) for _ in range(1500))
    assert rate(f"{kind}, n={n}", map(has_false_verdict, reports)) <= MOST


def test_two_data_sets_and_two_budgets():
    """2 x 2 x 7 differences and their 2 x 7 changes between budgets are one family of 42."""
    rng, truths = np.random.default_rng(6), np.full((4, 2), 96.0)
    ends = [((norm, 0), (norm, 1)) for norm in range(4)]
    ends += [((norm, 0), (0, 0)) for norm in (1, 2, 3)]

    def reports(count: int):
        for _ in range(count):
            report: Report = []
            for _ in range(2):
                short, long = 96 + 0.5 * rng.normal(size=(2, 4, 2, 8))
                report += report_of(short, truths, None) + report_of(long, truths, None)
                pairs = [((short[a], short[b]), (long[a], long[b])) for a, b in ends]
                report += [(change(*pair, MARGIN), Truth(0.0, 1.0)) for pair in pairs]
            yield report

    assert rate("two data sets and budgets", map(has_false_verdict, reports(500))) <= MOST


@pytest.mark.parametrize("moves", [0.0, 1.0, 3.0])
def test_changes_between_budgets(moves):
    """A drop of 1 point at one budget, and of 1 + moves at the other; sd .65 of differences."""
    rng, margin = np.random.default_rng(7), Margin(cap=1.0)
    words = []
    for _ in range(2000):
        a, b, c, d = 0.46 * rng.normal(size=(4, 8))
        one = change((a - 1, b), (c - 1 - moves, d), margin)
        words.append(verdict_on(one, 3)[0])
    false = rate(f"false, change {moves}", [is_false(w, Truth(-moves, 1.0)) for w in words])
    rate(f"undecided, change {moves}", [word == "open" for word in words])
    assert false <= MOST / 3 and (moves < 3 or words.count("below") >= 0.9 * len(words))


# Tuned rates

PROFILES = {
    "flat": np.array([95.0, 96.0, 96.0, 96.0, 95.0]),
    "peaked": np.array([90.0, 95.0, 96.0, 94.5, 80.0]),
    "two peaks": np.array([96.0, 94.0, 92.0, 94.0, 96.0]),
    "noisy rate": np.array([95.0, 95.5, 96.0, 96.3, 90.0]),
}
SPREADS = {"noisy rate": np.array([0.3, 0.3, 0.5, 2.0, 4.0])}


def grid(rng: np.random.Generator, profile: str, n: int, count: int) -> tuple[Array, Array]:
    """Validation and test outcomes (count, 5 rates, n), which share the luck of their network."""
    sd = SPREADS.get(profile, np.full(5, 0.5))[:, None]
    network = sd * rng.normal(size=(count, 5, n))
    noise = 0.4 * rng.normal(size=(2, count, 5, n))
    val, test = PROFILES[profile][:, None] + network + noise
    return val, test


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("n", [4, 8, 16])
def test_tune_then_train(profile, n):
    """Coverage of the mean, and false verdicts between identical tuned norms, in a family of 3."""
    rng = np.random.default_rng(8)
    scores, _ = grid(rng, profile, n // 2, 100_000)
    truth = PROFILES[profile][scores.mean(axis=2).argmax(axis=1)].mean()
    covered, false = [], []
    for _ in range(400 if n > 8 else 1000):
        norms = [
            cross_fit(*grid_of_one).values
            for grid_of_one in zip(*grid(rng, profile, n, 4), strict=True)
        ]
        interval = mean(norms[0])
        covered.append(interval.low <= truth <= interval.high)
        pairs = [(difference(x, norms[0], MARGIN), Truth(0.0, 1.0)) for x in norms[1:]]
        false.append(has_false_verdict(pairs))
    assert rate(f"false, {profile}, n={n}", false) <= MOST
    assert rate(f"covered, {profile}, n={n}", covered) >= 0.93


def test_tuned_norms_on_new_images():
    """Four identical norms, five rates, eight seeds; validation and test images apart."""
    rng, num_samples = np.random.default_rng(11), 359
    ease = np.broadcast_to([ease_of(x) for x in (95, 96, 96, 95.5, 93)], (4, 5))

    def reports(count: int):
        for _ in range(count):
            cells = correct(rng, (4, 5), 8, 2 * num_samples, ease=ease, taste=0.4, luck=0.2)
            scores, outcomes = cells[..., :num_samples].mean(axis=-1), cells[..., num_samples:]
            norms = [cross_fit(*one).values for one in zip(scores, outcomes, strict=True)]
            yield [
                (difference(norm, norms[0], MARGIN, step=100 / num_samples), Truth(0.0, 1.0))
                for norm in norms[1:]
            ]

    assert rate("tuned, new images", map(has_false_verdict, reports(600))) <= MOST


@pytest.mark.parametrize("profile", ["peaked", "noisy rate"])
def test_a_benchmark_of_thirty_norms(profile):
    """Five rates, eight seeds shared by all norms, 500 validation and 2,500 test images.

    All norms are equal: coverage of the ratios of errors to the first norm, false verdicts against
    it in a family of 29, and pairs told apart in a family of 435.
    """
    rng, num_norms, num_samples = np.random.default_rng(13), 30, 2500
    luck = np.array([0.08, 0.08, 0.1, 0.4, 0.6] if profile == "noisy rate" else [0.1] * 5)
    levels = (94, 94.5, 95, 95.2, 85) if profile == "noisy rate" else (91, 94.5, 95, 93.5, 80)
    ease = [ease_of(x, taste=0.4, luck=sd) for x, sd in zip(levels, luck, strict=True)]
    rows, columns = np.triu_indices(num_norms, 1)
    covered, against_first, pairs = [], [], []
    for _ in range(60):
        shared = 2.0 * rng.normal(size=num_samples + 500)
        own = 0.4 * rng.normal(size=(num_norms, 5, 1, num_samples + 500))
        seeds = [rng.normal(size=(count, 5, 8)) for count in (1, num_norms)]
        of_seeds = luck[:, None] * (np.sqrt(0.3) * seeds[0] + np.sqrt(0.7) * seeds[1])
        odds = np.array(ease)[:, None, None] + shared + own + of_seeds[..., None]
        right = 100.0 * (rng.random(odds.shape) < expit(odds))
        scores, outcomes = right[..., num_samples:].mean(axis=-1), right[..., :num_samples]
        norms = [cross_fit(*one).values for one in zip(scores, outcomes, strict=True)]
        ratios = [error_ratio(norm, norms[0], margin=np.log(1.1)) for norm in norms[1:]]
        covered += [one.gap.low <= 0 <= one.gap.high for one in ratios]
        against_first.append(any(verdict_on(one, 29)[0] in ("above", "below") for one in ratios))
        gaps = [error_ratio(norms[a], norms[b]).gap for a, b in zip(rows, columns, strict=True)]
        pairs.append(min(map(p_value, gaps)) * len(gaps) <= 0.05)
    assert rate(f"covered ratios, {profile}", covered) >= 0.93
    assert rate(f"false against the first, {profile}", against_first) <= MOST
    assert rate(f"false pairs, {profile}", pairs) <= MOST


# Looks, skew


def test_one_look_at_the_declared_seeds():
    """A report read again after every seed from 3 to 16; 8 were declared."""
    rng, truths = np.random.default_rng(9), np.full((4, 2), 96.0)

    def is_ever_false(cells: Array, *, every: bool) -> bool:
        looks = (n for n in range(3, 17) if every or state_of_seeds(n, 8) == "complete")
        return any(has_false_verdict(report_of(cells[..., :n], truths, None)) for n in looks)

    studies = 96 + 0.5 * rng.normal(size=(400, 4, 2, 16))
    every = rate("every look judged", (is_ever_false(study, every=True) for study in studies))
    once = rate("one look judged", (is_ever_false(study, every=False) for study in studies))
    assert once <= MOST < every


@pytest.mark.parametrize("n", [8, 16, 32])
def test_error_under_skew_is_known(n):
    """No method can know at n = 8 what happens to one seed in ten; prints what README states."""
    rng = np.random.default_rng(10)
    count, margin = 2000, Margin(cap=1.0)

    def losing(shape: tuple[int, ...]) -> Array:
        return 0.5 * rng.normal(size=shape) - 10 * (rng.random(shape) < 0.1)

    words = {"equal": [], "one point": [], "exponential": []}
    for _ in range(count):
        skewed, steady = losing((n,)), 0.5 * rng.normal(size=n)
        words["equal"].append(verdict_on(difference(skewed, steady - 1, margin), 1))
        words["one point"].append(verdict_on(difference(skewed, steady, margin), 1))
        tight = 0.05 * rng.normal(size=n)
        words["exponential"].append(
            verdict_on(difference(1 - rng.exponential(size=n), tight, margin), 1)
        )
    equal, one_point = Truth(0.0, 1.0), Truth(-1.0, 1.0)
    false = {
        name: rate(f"false, {name}, n={n}", [is_false(word, truth) for word, _ in words[name]])
        for name, truth in (("equal", equal), ("one point", one_point), ("exponential", equal))
    }
    rate(f"withheld, equal, n={n}", [withheld for _, withheld in words["equal"]])
    # With probability 0.9^n none of the seeds shows that some lose ten points.
    assert false["equal"] <= 0.9**n + 0.08 and false["exponential"] <= 0.12
