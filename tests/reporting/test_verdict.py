"""Sentences: their words follow from the intervals, and err as often as they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_study import slices_of, write_cell, write_study

from normexp.reporting.slices import Slice
from normexp.reporting.verdict import (
    Answer,
    Comparison,
    Loss,
    answer_over_data,
    answer_slice,
    compare_norms,
    complement,
    describe_losses,
)
from normexp.stats import Interval

SIMULATIONS = 300
ACCURACIES = {"digits": (0.80, 0.81, 0.79, 0.80), "cifar10": (0.60, 0.62, 0.61, 0.60)}


def write_batch(root: Path, values: Mapping[int, Mapping[int, float | None]]) -> None:
    for size, accuracies in values.items():
        write_cell(root, "batch", accuracies, norm_batch_size=size)


def loss_of(root: Path, norm: str = "batch") -> Loss:
    return next(one for one in describe_losses(slices_of(root)[0]) if one.norm == norm)


def comparisons_of(root: Path, tolerance: float | None = None) -> dict[str, Comparison]:
    (part,) = slices_of(root, tolerance=tolerance)
    return {one.norm: one for one in compare_norms(part)}


# Losses


def test_a_loss_is_stated_with_its_interval_sizes_and_n(tmp_path: Path):
    write_batch(tmp_path, {2: {0: 0.881, 1: 0.879, 2: 0.88}, 128: {0: 0.90, 1: 0.90, 2: 0.90}})
    loss = loss_of(tmp_path)
    # mean 2, sd 0.1, t(2) = 4.303: half width 0.248
    assert loss.kind == "loses"
    assert "batch loses 2.0 [1.8, 2.2] points from norm batch size 128 to 2 (n = 3" in loss.text
    assert loss.text.endswith("more than 1 point is shown at norm batch size 2.")


def test_sizes_are_named_where_a_loss_is_shown_and_where_it_is_not_ruled_out(tmp_path: Path):
    write_batch(
        tmp_path,
        {
            2: {0: 0.851, 1: 0.849, 2: 0.85},  # 5.0 [4.8, 5.2]
            8: {0: 0.90, 1: 0.87, 2: 0.88},  # 1.7 [-2.1, 5.5]: a mean above 1 point, n = 3
            32: {0: 0.899, 1: 0.898, 2: 0.8985},  # 0.15 [0.03, 0.27]
            128: {0: 0.90, 1: 0.90, 2: 0.90},
        },
    )
    assert loss_of(tmp_path).text.endswith("norm batch size 2 and not ruled out at 8.")


@pytest.mark.parametrize(
    ("smallest", "largest", "kind", "words"),
    [
        ({0: 0.88}, {0: 0.9}, "no interval", "loses 2.0 points"),
        ({0: 0.9}, {0: 0.88}, "no interval", "gains 2.0 points"),
        ({0: None, 1: None}, {0: 0.9, 1: 0.91}, "no data", "n = 0 seeds; 2 of 2 diverged"),
        ({0: 0.88, 1: 0.881}, {0: 0.9, 1: None}, "no interval", "n = 1 seed; at 128: 1 of 2 div"),
        (
            {0: 0.88, 1: 0.881, 2: None},
            dict.fromkeys(range(4), 0.9),
            "loses",
            "(n = 2 seeds; 1 of 4 diverged, 1 of 4 missing)",
        ),
        ({0: 0.92, 1: 0.921}, {0: 0.9, 1: 0.9}, "gains", "gains 2.1 [1.4, 2.7] points"),
        ({0: 0.9, 1: 0.901, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, "holds", "within 1 point"),
        ({0: 0.8, 1: 0.95, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, "unclear", "no clear loss"),
    ],
)
def test_kinds_of_losses(tmp_path: Path, smallest: dict, largest: dict, kind: str, words: str):
    write_batch(tmp_path, {2: smallest, 128: largest})
    loss = loss_of(tmp_path)
    assert loss.kind == kind and words in loss.text
    assert ("[" in loss.text) is (kind not in ("no interval", "no data"))


def test_independence_is_by_measurement_and_has_no_interval(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(0))
    loss = loss_of(tmp_path, "group")
    assert (loss.kind, loss.sensitivity) == ("independent", None)
    assert "(measured" in loss.text and "n = 8 seeds" in loss.text and "[" not in loss.text


def test_lower_is_better_turns_the_sign(tmp_path: Path):
    for size, bits in ((2, 1.8), (128, 1.5)):
        runs = range(3)
        for seed in runs:
            metrics = {"test/bits_per_byte": bits + 0.001 * seed * (size == 2)}
            write_cell(tmp_path, "batch", {seed: 0.5}, norm_batch_size=size, metrics=metrics)
    loss = loss_of(tmp_path)
    assert loss.kind == "loses" and "bits per byte" in loss.text


# Comparisons


def test_comparisons_are_with_batch_at_the_smallest_size_and_paired_by_seed(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(1))
    group = comparisons_of(tmp_path)["group"]
    assert (group.reference, group.size, group.kind) == ("batch", 2, "better")
    assert group.difference.n == 8 and "n = 8 pairs" in group.text
    # 8 wins of 8, Clopper and Pearson: 0.025 ** (1 / 8)
    assert "better with probability 1.00 [0.63, 1.00]" in group.text
    assert group.p is not None and group.adjusted_p is not None
    assert group.adjusted_p >= group.p


def test_an_invalid_norm_is_in_no_comparison(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(0))
    values = dict.fromkeys(range(8), 0.99)
    write_cell(tmp_path, "instance", values, norm_batch_size=2, result={"invalid": "leaks"})
    assert set(comparisons_of(tmp_path)) == {"layer", "group"}
    assert loss_of(tmp_path, "instance INVALID").kind == "invalid"


def test_holms_correction_can_take_a_verdict_back(tmp_path: Path):
    base = np.array([0.900, 0.901, 0.899, 0.902, 0.898])
    ahead = np.array([0.004, 0.012, 0.007, 0.015, 0.002])  # p = 0.03
    write_cell(tmp_path, "batch", dict(enumerate(base)), norm_batch_size=2)
    write_cell(tmp_path, "group", dict(enumerate(base + ahead)), norm_batch_size=2)
    alone = comparisons_of(tmp_path, tolerance=0.0)["group"]
    assert alone.kind == "better"
    for norm in ("layer", "instance", "rms"):
        write_cell(tmp_path, norm, dict(enumerate(base[::-1])), norm_batch_size=2)
    group = comparisons_of(tmp_path, tolerance=0.0)["group"]
    assert (group.difference, group.kind) == (alone.difference, "unclear")
    assert "Holm" in group.text and "group better with probability 1.00" in group.text


@pytest.mark.parametrize(
    ("batch", "group", "kind", "words"),
    [
        (
            {0: 0.90, 1: 0.91},
            {0: 0.92, 1: 0.93},
            "no interval",
            "differs from batch by +2.0 points",
        ),
        ({0: 0.8, 1: None}, {0: None, 1: 0.9}, "no data", "n = 0 pairs; 1 of 2 diverged; batch: 1"),
        ({0: 0.9, 1: 0.902, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, "tie", "within 1 point"),
        ({0: 0.9, 1: 0.902, 2: 0.9}, {0: 0.8, 1: 0.80, 2: 0.801}, "worse", "by 10.0 [9."),
        ({0: 0.9, 1: 0.902, 2: 0.9}, {0: 0.8, 1: 0.97, 2: 0.901}, "unclear", "group better with"),
    ],
)
def test_kinds_of_comparisons(tmp_path: Path, batch: dict, group: dict, kind: str, words: str):
    write_cell(tmp_path, "batch", batch, norm_batch_size=2)
    write_cell(tmp_path, "group", group, norm_batch_size=2)
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == kind and words in one.text
    assert (one.adjusted_p is None) is (kind in ("no interval", "no data"))


def test_runs_without_the_metric_are_named_and_not_taken_for_unfinished(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9}, norm_batch_size=2)
    write_cell(tmp_path, "group", {0: 0.8, 1: 0.9}, metrics={"val/loss": 1.0})
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == "no data" and "2 of 2 without test/accuracy" in one.text


# Over several data sets


def write_data_sets(root: Path, ahead: Mapping[str, float], **options: str) -> None:
    """batch loses 10 points on each data set; group is ahead of it at size 2 by `ahead`."""
    for data, gap in ahead.items():
        values = np.array(ACCURACIES[data])
        for size, extra in ((2, 0.0), (128, 0.1)):
            accuracies = dict(enumerate(values + extra))
            write_cell(root, "batch", accuracies, norm_batch_size=size, data=data, **options)
        spread = np.array([0.001, -0.001, 0.002, -0.002])
        write_cell(root, "group", dict(enumerate(values + gap + spread)), data=data, **options)


def overall_of(root: Path) -> list[Answer]:
    return answer_over_data(slices_of(root))


def test_difference_is_the_mean_over_data_sets_with_one_weight_each(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.02, "cifar10": 0.06})
    (found,) = overall_of(tmp_path)
    (one,) = found.comparisons
    assert one.difference.estimate == pytest.approx(4.0) and one.difference.n == 8
    assert one.kind == "better" and "cifar10 +6.0, digits +2.0; n = 8 pairs" in one.text
    assert "cifar10, digits" in found.heading and "batch size 128" in found.heading
    (loss,) = found.losses
    assert (loss.norm, loss.kind) == ("batch", "loses") and "10.0 [10.0, 10.0] points" in loss.text


def test_data_sets_that_disagree_are_seen_to(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.04, "cifar10": -0.04})
    (found,) = overall_of(tmp_path)
    assert found.comparisons[0].difference.estimate == pytest.approx(0, abs=1e-9)
    assert "cifar10 -4.0, digits +4.0" in found.comparisons[0].text


def test_one_data_set_has_no_answer_over_data_and_models_are_kept_apart(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.02})
    assert overall_of(tmp_path) == []
    write_data_sets(tmp_path, {"cifar10": 0.06})
    write_data_sets(tmp_path, {"digits": 0.0, "cifar10": 0.0}, model="vit")
    gaps = [one.comparisons[0].difference.estimate for one in overall_of(tmp_path)]
    assert gaps == pytest.approx([4, 0])


def test_a_data_set_with_one_pair_gives_no_interval(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.02, "cifar10": 0.06})
    for seed in (1, 2, 3):
        for path in (tmp_path / "synthetic").glob(f"*cifar10*/seed-{seed}/result.json"):
            path.unlink()
    (found,) = overall_of(tmp_path)
    assert found.comparisons[0].kind == "no interval"
    assert "group on cifar10: 3 of 4 missing" in found.comparisons[0].text


def test_complement_of_a_probability_turns_its_interval():
    turned = complement(Interval(0.9, 0.6, 0.98, 0.95, 8))
    assert (turned.estimate, turned.low, turned.high) == pytest.approx((0.1, 0.02, 0.4))


# How often the sentences err


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> Slice:
    """batch at sizes 2 and 128 and three norms that do not mix samples, all alike."""
    root = tmp_path_factory.mktemp("level")
    sizes, norms = (2, 128), ("layer", "group", "rms")
    write_study(root, np.random.default_rng(0), drop=0.0, sizes=sizes, level=norms)
    return slices_of(root)[0]


def redrawn(part: Slice, rng: np.random.Generator, *, num_seeds: int = 8) -> Slice:
    """The slice with new values, all of mean 90: seeds share an effect of twice the noise."""
    effect = rng.normal(0, 0.8, (num_seeds, 1))
    values = 90 + effect + rng.normal(0, 0.4, (num_seeds, len(part.values.columns)))
    return replace(part, values=pd.DataFrame(values, columns=part.values.columns))


def test_planted_ties_are_called_ties_and_rarely_anything_else(level: Slice):
    rng = np.random.default_rng(2)
    kinds = [[one.kind for one in compare_norms(redrawn(level, rng))] for _ in range(SIMULATIONS)]
    false_alarms = np.mean([bool({"better", "worse"} & set(family)) for family in kinds])
    # The family errs in at most 5 %; three standard deviations of 300 simulations are 3.8 %.
    assert false_alarms <= 0.05 + 0.038
    assert np.mean([kind == "tie" for family in kinds for kind in family]) >= 0.9


def test_a_norm_without_any_drop_is_said_to_lose_in_at_most_a_fortieth(level: Slice):
    rng = np.random.default_rng(3)
    kinds = [describe_losses(redrawn(level, rng))[0].kind for _ in range(SIMULATIONS)]
    # 2.5 % on each side; three standard deviations are 2.7 %.
    assert kinds.count("loses") / SIMULATIONS <= 0.025 + 0.027
    assert kinds.count("gains") / SIMULATIONS <= 0.025 + 0.027
    assert kinds.count("holds") / SIMULATIONS >= 0.9


@pytest.mark.parametrize("num_seeds", [3, 5, 8])
def test_a_planted_drop_is_found_whatever_the_number_of_seeds(tmp_path: Path, num_seeds: int):
    write_study(tmp_path, np.random.default_rng(4), drop=0.1, num_seeds=num_seeds)
    answer = answer_slice(slices_of(tmp_path)[0])
    loss = answer.losses[0]
    assert loss.kind == "loses" and loss.sensitivity is not None
    drop = loss.sensitivity.drop
    assert drop.low is not None and drop.high is not None
    assert drop.low - 1 < 10 < drop.high + 1
    assert {one.kind for one in answer.comparisons} == {"better"}
