"""Verdicts in words: they follow from the intervals, and err as often as they say."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from synthetic_study import make_runs, make_study, study_of

from normexp.reporting.cells import build_cells
from normexp.reporting.comparisons import compare_norms
from normexp.reporting.runs import Run
from normexp.reporting.slices import Slice, build_slices
from normexp.reporting.verdict import Loss, describe_losses

SIMULATIONS = 300


def slice_of(runs: list[Run], **options: float) -> Slice:
    settings = {"metric": None, "tolerance": None, **options}
    return build_slices(build_cells([study_of(runs)]), **settings)[0]


def batch_runs(values: Mapping[int, Mapping[int, float | None]]) -> list[Run]:
    return [
        run
        for size, accuracies in values.items()
        for run in make_runs("batch", accuracies, norm_batch_size=size)
    ]


def loss_of(runs: list[Run], norm: str = "batch") -> Loss:
    return next(one for one in describe_losses(slice_of(runs)) if one.norm == norm)


def test_a_loss_is_stated_with_its_interval_sizes_and_n():
    runs = batch_runs({2: {0: 0.881, 1: 0.879, 2: 0.88}, 128: {0: 0.90, 1: 0.90, 2: 0.90}})
    loss = loss_of(runs)
    # mean 2, sd 0.1, t(2) = 4.303: half width 0.248
    assert loss.kind == "loses"
    assert loss.text.startswith(
        "batch loses 2.0 [1.8, 2.2] points from norm batch size 128 to 2 (n = 3 seeds)."
    )
    assert loss.text.endswith("A loss of more than 1 point is shown at norm batch size 2.")


def test_sizes_are_named_where_a_loss_is_shown_and_where_it_is_not_ruled_out():
    level = {0: 0.90, 1: 0.90, 2: 0.90}
    runs = batch_runs(
        {
            2: {0: 0.851, 1: 0.849, 2: 0.85},  # 5.0 [4.8, 5.2]
            8: {0: 0.90, 1: 0.87, 2: 0.88},  # 1.7 [-2.1, 5.5]: a mean above 1 point, n = 3
            32: {0: 0.899, 1: 0.898, 2: 0.8985},  # 0.15 [0.03, 0.27]
            128: level,
        }
    )
    text = loss_of(runs).text
    assert text.endswith("is shown at norm batch size 2 and not ruled out at 8.")


def test_seeds_that_diverged_at_the_largest_size_are_named_too():
    runs = batch_runs({2: {0: 0.88, 1: 0.881}, 128: {0: 0.9, 1: None}})
    assert "(n = 1 seed; at 128: 1 of 2 diverged)" in loss_of(runs).text


def test_two_seeds_that_differ_alike_are_no_verdict():
    runs = make_runs("batch", {0: 0.90, 1: 0.91}, norm_batch_size=2)
    runs += make_runs("group", {0: 0.92, 1: 0.93}, norm_batch_size=2)
    (one,) = compare_norms(slice_of(runs))
    assert (one.kind, one.judgement) == ("no interval", None)


def test_diverged_and_missing_seeds_are_named_beside_the_number():
    runs = batch_runs({2: {0: 0.88, 1: 0.881, 2: None}, 128: dict.fromkeys(range(4), 0.9)})
    assert "(n = 2 seeds; 1 of 4 diverged, 1 of 4 missing)" in loss_of(runs).text


def test_one_seed_has_no_interval_and_no_verdict():
    loss = loss_of(batch_runs({2: {0: 0.88}, 128: {0: 0.9}}))
    assert loss.kind == "no interval"
    assert "[" not in loss.text and "no interval, no verdict" in loss.text


def test_a_norm_of_which_all_diverged_has_no_number():
    loss = loss_of(batch_runs({2: {0: None, 1: None}, 128: {0: 0.9, 1: 0.91}}))
    assert loss.kind == "no data" and "2 of 2 diverged" in loss.text


def test_independence_is_by_measurement_and_has_no_interval():
    runs = make_study(np.random.default_rng(0))
    loss = loss_of(runs, "group")
    assert (loss.kind, loss.sensitivity) == ("independent", None)
    assert "does not depend on the norm batch size (measured" in loss.text and "[" not in loss.text


def test_lower_is_better_turns_the_sign():
    def runs(size: int, bits: float) -> list[Run]:
        return [
            run
            for seed in range(3)
            for run in make_runs(
                "batch",
                {seed: 0.5},
                norm_batch_size=size,
                metrics={"test/bits_per_byte": bits + 0.001 * seed * (size == 2)},
            )
        ]

    loss = loss_of(runs(2, 1.8) + runs(128, 1.5))
    assert loss.kind == "loses" and "bits per byte" in loss.text


def test_an_invalid_norm_is_in_no_comparison():
    runs = make_study(np.random.default_rng(0))
    runs += make_runs("instance", dict.fromkeys(range(8), 0.99), norm_batch_size=2, invalid="leaks")
    part = slice_of(runs)
    assert {one.norm for one in compare_norms(part)} == {"layer", "group"}
    assert [one.kind for one in describe_losses(part) if "INVALID" in one.norm] == ["invalid"]


def test_comparisons_are_with_batch_at_the_smallest_size_and_paired_by_seed():
    part = slice_of(make_study(np.random.default_rng(1)))
    found = {one.norm: one for one in compare_norms(part)}
    group = found["group"]
    assert (group.reference, group.size, group.kind) == ("batch", 2, "better")
    assert group.difference.n == 8 and "n = 8 pairs" in group.text
    # 8 wins of 8, Clopper and Pearson: 0.025 ** (1 / 8)
    assert "; better with probability 1.00 [0.63, 1.00] (n = 8 pairs)" in group.text
    assert group.judgement is not None
    assert group.judgement.adjusted_p_value >= group.judgement.p_value


def test_holms_correction_can_take_a_verdict_back():
    base = np.array([0.900, 0.901, 0.899, 0.902, 0.898])
    ahead = np.array([0.004, 0.012, 0.007, 0.015, 0.002])  # p = 0.03
    runs = make_runs("batch", dict(enumerate(base)), norm_batch_size=2)
    runs += make_runs("group", dict(enumerate(base + ahead)), norm_batch_size=2)
    (alone,) = compare_norms(slice_of(runs, tolerance=0.0))
    assert alone.kind == "better"
    for norm in ("layer", "instance", "rms"):
        runs += make_runs(norm, dict(enumerate(base[::-1])), norm_batch_size=2)
    family = {one.norm: one for one in compare_norms(slice_of(runs, tolerance=0.0))}
    assert family["group"].difference == alone.difference
    assert family["group"].kind == "unclear"
    assert "cannot be told apart after Holm's correction" in family["group"].text
    assert "; group better with probability 1.00" in family["group"].text


def test_planted_ties_are_called_ties_and_rarely_anything_else():
    rng = np.random.default_rng(2)
    tied, false_alarms = 0, 0
    for _ in range(SIMULATIONS):
        runs = make_study(rng, drop=0.0, sizes=(2, 128), level=("layer", "group", "rms"))
        kinds = [one.kind for one in compare_norms(slice_of(runs))]
        false_alarms += any(kind in ("better", "worse") for kind in kinds)
        tied += kinds.count("tie")
    # The family errs in at most 5 %; three standard deviations of 300 simulations are 3.8 %.
    assert false_alarms / SIMULATIONS <= 0.05 + 0.038
    assert tied / (3 * SIMULATIONS) >= 0.9


def test_a_norm_without_any_drop_is_said_to_lose_in_at_most_a_fortieth():
    rng = np.random.default_rng(3)
    kinds = []
    for _ in range(SIMULATIONS):
        runs = make_study(rng, drop=0.0, sizes=(2, 128), level=())
        kinds.append(describe_losses(slice_of(runs))[0].kind)
    # 2.5 % on each side; three standard deviations are 2.7 %.
    assert kinds.count("loses") / SIMULATIONS <= 0.025 + 0.027
    assert kinds.count("gains") / SIMULATIONS <= 0.025 + 0.027


def test_a_planted_drop_is_found_whatever_the_number_of_seeds():
    rng = np.random.default_rng(4)
    for num_seeds in (3, 5, 8):
        part = slice_of(make_study(rng, drop=0.05, num_seeds=num_seeds, noise=0.002))
        loss = describe_losses(part)[0]
        assert loss.kind == "loses" and loss.sensitivity is not None
        drop = loss.sensitivity.drop
        assert drop.low is not None and drop.high is not None
        assert drop.low - 1 < 5 < drop.high + 1
        assert {one.kind for one in compare_norms(part)} == {"better"}


def test_runs_without_the_metric_are_named_and_not_taken_for_unfinished():
    runs = make_runs("batch", {0: 0.8, 1: 0.9}, norm_batch_size=2)
    runs += make_runs("group", {0: 0.8, 1: 0.9}, metrics={"val/loss": 1.0})
    (one,) = compare_norms(slice_of(runs))
    assert one.kind == "no data"
    assert "(n = 0 pairs; 2 of 2 without test/accuracy)" in one.text
