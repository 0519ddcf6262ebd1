"""Sentences: which are verdicts, their details, and how often they are false."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_study import (
    answers_of,
    report_of,
    slices_of,
    write_cell,
    write_sizes,
    write_study,
)

from normexp.records.metrics import MetricsWriter
from normexp.records.samples import write_samples
from normexp.reporting.model import Slice
from normexp.reporting.publish import draw
from normexp.reporting.report import Report
from normexp.reporting.sentences import Answer, Claim
from normexp.reporting.tables import comparison_table
from normexp.reporting.verdict import DECIDED, compare
from normexp.stats.interval import paired_difference

ACCURACIES = {"digits": (0.80, 0.81, 0.79, 0.804), "cifar10": (0.60, 0.62, 0.61, 0.605)}
VERBS = re.compile(r"\b(better|worse|loses|gains|holds|tied)\b")


def drawn(rng: np.random.Generator, level: float, sd: float = 0.001, n: int = 6) -> dict:
    return dict(enumerate(rng.normal(level, sd, n)))


def answer_of(root: Path, *names: str, tolerance: float | None = None) -> Answer:
    (answer,) = answers_of(root, *names, tolerance=tolerance)
    return answer


def loss_of(root: Path, norm: str = "batch") -> Claim:
    return next(one for one in answer_of(root).losses if one.norm == norm)


def comparisons_of(root: Path, tolerance: float | None = None) -> dict[str, Claim]:
    return {one.norm: one for one in answer_of(root, tolerance=tolerance).comparisons}


# A norm along the sizes


@pytest.mark.parametrize(
    ("smallest", "largest", "kind", "words"),
    [
        ({0: 0.88}, {0: 0.9}, "no interval", "size 2 minus 128: -2.0 points"),
        ({0: 0.88, 1: 0.881}, {0: 0.9}, "no interval", "n = 1 seed"),
        ({0: None, 1: None}, {2: 0.9, 3: 0.91}, "no data", "2 of 2 diverged"),
        ({0: 0.92, 1: 0.9212}, {0: 0.9, 1: 0.901}, "gains", "gains 2.0 [1.9, 2.1] points"),
        ({0: 0.9, 1: 0.901, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, "holds", "within 1 point"),
        ({0: 0.8, 1: 0.95, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, "open", "; undecided"),
        (  # differences 1.9, 2.2, 2.2; sd .173, no value repeats, t(2) = 4.303: half width 0.43
            {0: 0.881, 1: 0.879, 2: 0.880},
            {0: 0.9, 1: 0.901, 2: 0.902},
            "loses",
            "batch loses 2.1 [1.7, 2.5] points from norm batch size 128 to 2, at epochs=3 and "
            "lr=0.1 (n = 3 seeds; on these test samples",
        ),
    ],
)
def test_kinds_along_the_sizes(tmp_path: Path, smallest, largest, kind, words):
    write_sizes(tmp_path, {2: smallest, 128: largest})
    loss = loss_of(tmp_path)
    assert loss.kind == kind and words in loss.text
    assert bool(VERBS.search(loss.text)) is (kind in DECIDED)


def test_two_seeds_with_equal_counts_in_every_cell_hold_nothing(tmp_path: Path):
    write_sizes(tmp_path, dict.fromkeys((2, 8, 128), {0: 0.975, 1: 0.972}))
    write_cell(tmp_path, "group", {0: 0.975, 1: 0.972})
    for claim in (loss_of(tmp_path), comparisons_of(tmp_path)["group"]):
        assert claim.kind == "open" and not VERBS.search(claim.text)
        assert claim.comparison.gap.low < -1 and claim.comparison.gap.high > 1
        assert "equal under every seed" in claim.text


def test_two_norms_have_the_cost_of_a_step_beside_the_verdict(tmp_path: Path):
    costs = {"batch": (8.0, 0.0042), "group": (12.0, 0.005)}
    for norm, (step_ms, kept) in costs.items():
        timing = {"step_ms": step_ms, "stack_size": 4, "backward_mb_per_sample": kept}
        write_cell(tmp_path, norm, {0: 0.5, 1: 0.6}, result={"timing": timing})
    claims = [claim.claim for answer in answers_of(tmp_path) for claim in answer.sentences]
    assert [claim for claim in claims if "backward" in claim] == [
        "A step of one seed takes 2 ms with batch and 3 ms with group; a forward keeps 4.2 kB and "
        "5 kB per sample for its backward"
    ]


def test_independence_is_by_measurement_and_one_sentence_for_all_norms(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(0))
    loss = loss_of(tmp_path, "layer, group")
    assert (loss.kind, loss.comparison) == ("independent", None)
    assert loss.text.startswith("layer and group do not depend on the norm batch size (measured")
    assert loss.text.count("n = 8 seeds") == 1 and "[" not in loss.text
    write_cell(tmp_path, "instance", {0: 0.8, 1: None}, norm_batch_size=2)
    text = loss_of(tmp_path, "layer, group, instance").text
    assert "layer and group: n = 8 seeds; instance: n = 1 seed; 1 of 2 diverged" in text


def test_lower_is_better_turns_the_sign(tmp_path: Path):
    for size, bits in ((2, 1.8), (128, 1.5)):
        for seed in range(3):
            metrics = {"test/bits_per_byte": bits + 0.001 * seed * (size == 2)}
            write_cell(tmp_path, "batch", {seed: 0.5}, norm_batch_size=size, metrics=metrics)
    loss = loss_of(tmp_path)
    assert loss.kind == "loses" and "worsens by 0.301 [" in loss.text  # loses bits: ambiguous
    assert "bits per byte from norm batch size 128 to 2" in loss.text


def test_difference_without_a_verdict_is_first_minus_second_if_lower_is_better_too(tmp_path: Path):
    for size, bits in ((2, 1.8), (128, 1.5)):
        metrics = {"test/bits_per_byte": bits}
        write_cell(tmp_path, "batch", {0: 0.5}, norm_batch_size=size, metrics=metrics)
    write_cell(tmp_path, "group", {0: 0.5}, metrics={"test/bits_per_byte": 1.7})
    assert "norm batch size 2 minus 128: 0.300 bits per byte" in loss_of(tmp_path).text
    assert "group minus batch: -0.100 bits per byte" in comparisons_of(tmp_path)["group"].text


def test_only_norms_that_mix_samples_have_a_verb_along_the_batch_size(tmp_path: Path):
    rng = np.random.default_rng(0)
    for norm in ("batch", "group"):
        ends = {8: drawn(rng, 0.8), 32: drawn(rng, 0.9)}
        write_sizes(tmp_path, ends, norm, axis="batch_size")
    kinds = {one.norm: one for one in answer_of(tmp_path).losses}
    assert kinds["batch"].kind == "loses"
    assert kinds["group"].kind == "interval" and kinds["group"].comparison.p is None
    assert "group, batch size 8 minus 32: -10.1 [" in kinds["group"].text


# Diverged runs


def diverged(*lost: int) -> dict[int, float | None]:
    values = {seed: 0.88 + 0.0011 * seed for seed in range(6)}
    return {seed: None if seed in lost else value for seed, value in values.items()}


def test_diverged_runs_count_as_the_worst_run_and_do_not_drop_out(tmp_path: Path):
    write_sizes(tmp_path, {2: diverged(4, 5), 128: {k: 0.9 + 0.0013 * k for k in range(6)}})
    loss = loss_of(tmp_path)
    assert (
        loss.comparison.gap.n == 6 and "2 of 6 diverged" in loss.text and "worst run" in loss.text
    )
    clean = [2.0 + 0.02 * k for k in range(4)] + [100 * (0.9 + 0.0013 * k) - 88.0 for k in (4, 5)]
    assert loss.comparison.gap.estimate == pytest.approx(-np.mean(clean))
    assert loss.kind == "loses" and "batch loses at least 2.2 [" in loss.text
    assert loss.comparison.part.sensitivity("batch").num_seeds == 6


@pytest.mark.parametrize("size", [2, 128])
def test_diverged_runs_neither_hold_nor_gain(tmp_path: Path, size: int):
    """The worst run may be close to the others; the diverged one is not."""
    level = {k: 0.9 + 0.0001 * k for k in range(6)}
    ends = {2: dict(level), 128: dict(level)}
    ends[size] = {seed: None if seed < 2 else value for seed, value in level.items()}
    write_sizes(tmp_path / "one", ends)
    loss, bound = loss_of(tmp_path / "one"), "most" if size == 2 else "least"
    assert loss.kind == "open" and f"the difference is at {bound} this" in loss.text
    write_sizes(tmp_path / "both", {2: ends[size], 128: ends[size]})
    loss = loss_of(tmp_path / "both")
    assert loss.kind == "open" and "the difference may be greater or smaller" in loss.text


def test_a_norm_ahead_on_the_seeds_that_it_survived_is_not_better(tmp_path: Path):
    write_cell(tmp_path, "batch", {k: 0.80 + 0.0013 * k for k in range(8)}, norm_batch_size=2)
    values = {k: 0.90 + 0.0011 * k for k in range(8)} | {7: None}
    write_cell(tmp_path, "group", values, norm_batch_size=2)
    assert comparisons_of(tmp_path)["group"].kind == "open"


# Comparisons with the reference


def test_comparisons_are_with_batch_at_the_smallest_size_and_paired_by_seed(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(1))
    group = comparisons_of(tmp_path)["group"]
    assert (group.reference, group.kind) == ("batch", "better")
    assert group.text.startswith("At norm batch size 2, group is better than batch")
    assert group.comparison.gap.n == 8 and "n = 8 pairs" in group.text
    assert "ahead with 8 of 8 seeds" in group.text
    assert group.comparison.improvement.low == pytest.approx(
        0.025 ** (1 / 8)
    )  # Clopper and Pearson


@pytest.mark.parametrize(
    ("norms", "reference"),
    [
        (["group", "evonorm", "layer"], "layer"),
        (["frn", "evonorm", "batch_renorm"], "batch_renorm"),
    ],
)
def test_without_batch_norm_the_reference_is_the_first_in_the_order_of_figures(
    tmp_path: Path, norms: list[str], reference: str
):
    for place, norm in enumerate(norms):
        write_cell(tmp_path, norm, {k: 0.9 - 0.01 * place + 0.001 * k**2 for k in range(4)})
    found = comparisons_of(tmp_path)
    assert found.keys() == {*norms} - {reference}
    assert {one.reference for one in found.values()} == {reference}


def test_an_invalid_norm_is_in_no_comparison(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(0))
    values = dict.fromkeys(range(8), 0.99)
    write_cell(tmp_path, "instance", values, norm_batch_size=2, result={"invalid": "leaks"})
    assert set(comparisons_of(tmp_path)) == {"layer", "group"}
    assert loss_of(tmp_path, "instance INVALID").kind == "invalid"


def test_a_larger_family_takes_a_verdict_back(tmp_path: Path):
    base = np.array([0.900, 0.9012, 0.8991, 0.9023, 0.8985])
    ahead = np.array([0.0041, 0.0122, 0.0073, 0.0154, 0.0025])  # p = 0.03
    write_cell(tmp_path, "batch", dict(enumerate(base)), norm_batch_size=2)
    write_cell(tmp_path, "group", dict(enumerate(base + ahead)), norm_batch_size=2)
    alone = comparisons_of(tmp_path, tolerance=0.0)["group"]
    assert alone.kind == "better"
    write_cell(tmp_path, "layer", dict(enumerate(base[::-1] + 1e-5)), norm_batch_size=2)
    group = comparisons_of(tmp_path, tolerance=0.0)["group"]
    assert (group.comparison.gap, group.kind) == (alone.comparison.gap, "open")
    # Two comparisons with batch, and the better of group and layer.
    assert group.comparison.p == pytest.approx(3 * alone.comparison.p)
    assert not VERBS.search(group.text)
    rows = comparison_table([answer_of(tmp_path, tolerance=0.0)]).rows
    assert [row["p in the family"] for row in rows if row["norm"] == "group"] == [
        f"{group.comparison.p:.2g}"
    ]


def test_the_family_is_the_whole_report(tmp_path: Path):
    for data in ("digits", "cifar10"):
        write_sizes(tmp_path, dict.fromkeys((2, 128), {0: 0.9, 1: 0.905, 2: 0.9102}), data=data)
        write_cell(tmp_path, "group", {0: 0.9, 1: 0.9049, 2: 0.9101}, data=data)
    report = report_of(tmp_path)
    assert len(report.sections) == 2
    assert "this report tests is 4:" in report.note  # a drop and a comparison on each data set


@pytest.mark.parametrize(
    ("batch", "group", "kind", "words"),
    [
        ({0: 0.90}, {0: 0.92}, "no interval", "group minus batch: 2.0 points; too few seeds"),
        ({0: 0.8, 1: None}, {2: 0.9}, "no data", "n = 0 pairs; batch at 2: 1 of 2 diverged"),
        ({0: 0.9, 1: 0.902, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, "tie", "within 1 point"),
        ({0: 0.9, 1: 0.902, 2: 0.9}, {0: 0.8, 1: 0.80, 2: 0.801}, "worse", "by 10.0 [9."),
        ({0: 0.9, 1: 0.902, 2: 0.9}, {0: 0.8, 1: 0.97, 2: 0.901}, "open", "; undecided"),
    ],
)
def test_kinds_of_comparisons(tmp_path: Path, batch: dict, group: dict, kind: str, words: str):
    write_cell(tmp_path, "batch", batch, norm_batch_size=2)
    write_cell(tmp_path, "group", group, norm_batch_size=2)
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == kind and words in one.text
    assert (one.comparison.p is None) is (kind in ("no interval", "no data"))
    assert bool(VERBS.search(one.text)) is (kind in DECIDED)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"metrics": {"val/loss": 1.0}}, "no data", "2 of 2 without test/accuracy"),
        (
            {"result": {"steps": 40, "stopped": "EarlyStopping: val/loss"}},
            "open",
            "2 of 2 ended early",
        ),
    ],
)
def test_runs_without_the_metric_or_ended_by_a_callback_are_counted_once(
    tmp_path: Path, options: dict, kind: str, words: str
):
    write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9}, norm_batch_size=2)
    write_cell(tmp_path, "group", {0: 0.8, 1: 0.9}, **options)
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == kind and one.text.count(words) == 1 and "missing" not in one.text


# Scope: test samples, learning rates, convergence and budget


def write_with_samples(root: Path, rng: np.random.Generator, *, recorded: float = 0.0) -> None:
    """batch at two sizes on 60 samples of which some are hard for every seed."""
    hard = rng.normal(2.5, 2, 60)
    for size, level in ((2, -2.0), (128, 0.0)):
        right = {k: hard + level + rng.logistic(size=60) > 0 for k in range(6)}
        accuracies = {seed: float(own.mean()) + recorded for seed, own in right.items()}
        cell = write_cell(root, "batch", accuracies, norm_batch_size=size)
        for seed, own in right.items():
            write_samples(cell / f"seed-{seed}", {"running": own})


def test_a_verdict_is_for_new_test_samples_where_they_are_recorded(tmp_path: Path):
    write_with_samples(tmp_path, np.random.default_rng(0))
    loss = loss_of(tmp_path)
    gap, (first, second) = loss.comparison.gap, loss.comparison.pairs
    over_seeds = paired_difference(first, second)
    assert loss.comparison.num_samples == 60 and "on these test samples" not in loss.text
    assert gap.estimate == pytest.approx(over_seeds.estimate)
    assert gap.low < over_seeds.low and gap.high > over_seeds.high


def test_samples_of_some_runs_alone_or_of_another_metric_are_not_used(tmp_path: Path):
    write_with_samples(tmp_path / "other", np.random.default_rng(0), recorded=0.01)
    write_with_samples(tmp_path / "some", np.random.default_rng(0))
    next((tmp_path / "some" / "synthetic").glob("*/seed-3/samples.npz")).unlink()
    for name in ("other", "some"):
        loss = loss_of(tmp_path / name)
        assert loss.comparison.num_samples == 0 and "on these test samples" in loss.text
        assert (loss.kind == "doubtful") is (name == "other")


def test_one_rate_each_is_said_and_two_rates_are_not_compared(tmp_path: Path):
    accuracies = {0: 0.90, 1: 0.91, 2: 0.92}
    write_cell(tmp_path, "batch", accuracies, lr=0.05)
    write_cell(tmp_path, "group", accuracies, lr=0.1)
    write_cell(tmp_path, "layer", accuracies, lr=0.05)
    found = comparisons_of(tmp_path)
    assert "not compared, their recipes differ: lr=0.1 and 0.05 (" in found["group"].text
    assert found["layer"].kind == "open" and "learning rate" not in found["layer"].text


def test_a_learning_rate_chosen_on_the_same_seeds_is_said_with_its_optimism(tmp_path: Path):
    rng = np.random.default_rng(0)
    for lr in (0.01, 0.03, 0.1, 0.3):
        write_cell(tmp_path, "batch", drawn(rng, 0.9, 0.01, 8), lr=lr)
    write_cell(tmp_path, "group", drawn(rng, 0.9, 0.01, 8))
    text = comparisons_of(tmp_path)["group"].text
    amount = re.search(r"chosen on these seeds: optimism ([+-][\d.]+) points of batch", text)
    assert 0 < float(amount[1]) < 2 and "of group" not in text.split("optimism")[1]


def write_curves(cell: Path, losses: list[float], num_seeds: int = 3) -> None:
    for seed in range(num_seeds):
        with MetricsWriter(cell / f"seed-{seed}" / "metrics.csv") as writer:
            for i, loss in enumerate(losses, start=1):
                writer.add(10 * i, i, 100 * i, {"train/loss": loss})


FALLING = [2.3, 2.0, 1.6, 1.3, 1.0, 0.9, 0.8, 0.76, 0.70, 0.64]
LEVEL = [2.3, 0.9, 0.3, 0.1, 0.06, 0.055, 0.053, 0.051, 0.05, 0.05]


@pytest.mark.parametrize(
    ("smallest", "largest", "words"),
    [
        (FALLING, LEVEL, "train loss at 2: 0.67 (not known to have converged), at 128: 0.05 ("),
        ([], [], "train loss not recorded"),
    ],
)
def test_a_flat_end_is_not_known_to_have_converged(tmp_path: Path, smallest, largest, words):
    ends = {2: {0: 0.85, 1: 0.8511, 2: 0.8544}, 128: {0: 0.9, 1: 0.9011, 2: 0.9088}}
    for cell, losses in zip(write_sizes(tmp_path, ends), (smallest, largest), strict=True):
        write_curves(cell, losses)
    text = loss_of(tmp_path).text
    assert words in text and "(converged)" not in text


@pytest.mark.parametrize(
    ("epochs", "last", "drop", "is_converged"),
    [(6, 0.02, 0, True), (5, 0.02, 0, False), (6, -0.06, 0, False), (6, 0.02, 0.03, False)],
)
def test_converged_is_what_a_budget_twice_as_long_hardly_moves(
    tmp_path: Path, epochs: int, last: float, drop: float, is_converged: bool
):
    """last: change of the train loss, drop: of the accuracy at every size."""
    ends = {2: {0: 0.85, 1: 0.8511, 2: 0.8544}, 128: {0: 0.9, 1: 0.9011, 2: 0.9088}}
    for cell in write_sizes(tmp_path, ends):
        write_curves(cell, FALLING)
    ends = {size: {k: x - drop for k, x in values.items()} for size, values in ends.items()}
    for cell in write_sizes(tmp_path, ends, epochs=epochs):
        write_curves(cell, [*FALLING[:-2], *(x + last for x in FALLING[-2:])])
    text = next(one.losses[0].text for one in answers_of(tmp_path) if "epochs=3" in one.heading)
    end = "converged" if is_converged else "not known to have converged"
    assert f"at 2: 0.67 ({end}), at 128: 0.67 ({end})" in text


def write_budgets(root: Path, drops: Mapping[int, float], *, studies: bool = False) -> None:
    """batch loses drops[epochs] from size 128 to 2."""
    rng = np.random.default_rng(0)
    for epochs, drop in drops.items():
        study = f"e{epochs}" if studies else "synthetic"
        ends = {2: drawn(rng, 0.9 - drop), 128: drawn(rng, 0.9)}
        write_sizes(root, ends, epochs=float(epochs), study=study)


@pytest.mark.parametrize("studies", [False, True])
def test_another_budget_and_the_change_to_it_are_said(tmp_path: Path, studies: bool):
    write_budgets(tmp_path / "turns", {12: 0.02, 48: -0.02}, studies=studies)
    write_budgets(tmp_path / "stays", {12: 0.02, 48: 0.03}, studies=studies)
    names = ("e12", "e48") if studies else ()
    turned, kept = (report_of(tmp_path / name, *names) for name in ("turns", "stays"))
    for text in (one.text for answer in answers_in(turned) for one in answer.losses):
        assert re.search(r"at epochs=(12|48) and lr=0.1 \(", text)
        assert re.search(
            r"loses 2\.0 .* 1\.9 \[1.8, 2.0\] points the other way\."
            r"|gains 1\.9 .* 2\.0 \[1.9, 2.1\] points the other way\.",
            text,
        )
        assert "From epochs=12 to epochs=48 the difference changes by 3.9 [" in text
    for text in (one.text for answer in answers_in(kept) for one in answer.losses):
        assert "the other way" not in text and "the difference changes by -1.1 [" in text
    headlines = [report.sections[0].headline for report in (turned, kept)]
    turns, stays = (one.claim.replace(" · e12", "") for one in headlines if one)
    start = (
        r"batch loses 2.0 \[.*\] points from norm batch size 128 to 2, at epochs=12 and lr=0.1. "
    )
    change = r" From epochs=12 to epochs=48 the difference changes by .*"
    other = r"At epochs=48: 1.9 \[1.8, 2.0\] points the other way\."
    assert re.fullmatch(start + other + change, turns)
    assert re.fullmatch(start + r"At epochs=48: 3.1 \[3.0, 3.2\] points\." + change, stays)


def test_the_headline_is_the_same_at_every_budget(tmp_path: Path):
    write_budgets(tmp_path, {12: 0.02, 48: 0.0})
    rng = np.random.default_rng(1)
    for epochs in (12.0, 48.0):
        write_cell(tmp_path, "group", drawn(rng, 0.93), epochs=epochs)
    (section,) = report_of(tmp_path).sections
    assert [answer.parts[0].budget for answer in section.answers] == ["epochs=12", "epochs=48"]
    assert "epochs" not in section.heading and section.headline is not None
    write_cell(tmp_path, "layer", drawn(rng, 0.96), epochs=12.0)  # better, at one budget alone
    assert report_of(tmp_path).sections[0].headline.norms == ["group"]
    words = (
        r"At norm batch size 2, group is better than batch by .* points, at epochs=12 and lr=0.1"
    )
    words += r"\. At epochs=48: .* points\. .* changes by .*"
    assert re.fullmatch(words, section.headline.claim)


def test_an_undecided_headline_says_so_at_each_budget(tmp_path: Path):
    for epochs in (12, 48):
        ends = {2: {0: 0.8, 1: 0.95, 2: 0.9}, 128: {0: 0.9, 1: 0.9, 2: 0.901}}
        write_sizes(tmp_path, ends, epochs=epochs)
    (section,) = report_of(tmp_path).sections
    words = r"batch, .*: (.* points); undecided, .* decide, at epochs=12 and lr=0.1\. "
    words += r"At epochs=48: \1\. From epochs=12 to epochs=48 the difference does not change .*"
    assert section.headline is not None and re.fullmatch(words, section.headline.claim)


def test_equal_drops_do_not_change_and_noise_is_undecided(tmp_path: Path):
    write_budgets(tmp_path / "equal", {12: 0.02, 48: 0.02})
    change = loss_at(tmp_path / "equal", "epochs=12").comparison.change
    assert change.kind == "does not change" and change.family_size == 3
    rng = np.random.default_rng(3)
    for epochs in (12.0, 48.0):
        ends = {2: drawn(rng, 0.88, 0.02), 128: drawn(rng, 0.9, 0.02)}
        write_sizes(tmp_path / "noise", ends, epochs=epochs)
    loss = loss_at(tmp_path / "noise", "epochs=12")
    assert loss.comparison.change.kind == "open"
    assert "it is undecided whether the difference changes: " in loss.elsewhere
    assert "the other way" not in loss.elsewhere


def loss_at(root: Path, budget: str) -> Claim:
    return next(one.losses[0] for one in answers_of(root) if budget in one.heading)


@pytest.mark.parametrize(
    ("of_batch", "of_group", "words"),
    [
        ({"epochs": 12}, {"epochs": 3}, "epochs=3 and 12"),
        ({}, {"act": "gelu"}, "act=gelu and relu"),
        ({}, {"conv": "weight_standardized"}, "conv=weight_standardized and plain"),
    ],
)
def test_cells_that_differ_in_more_than_the_norm_are_not_compared(
    tmp_path: Path, of_batch: dict, of_group: dict, words: str
):
    write_cell(tmp_path, "batch", {k: 0.9 + 0.001 * k**2 for k in range(5)}, **of_batch)
    write_cell(tmp_path, "group", {k: 0.5 + 0.001 * k for k in range(5)}, **of_group)
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == "unlike" and not one.comparison.verdict and "points" not in one.claim
    assert one.text.startswith(f"group and batch are not compared, their recipes differ: {words}")
    (ranking,) = report_of(tmp_path).rankings
    assert not ranking.ranked


def test_a_slot_that_the_yaml_of_the_norm_sets_is_part_of_the_norm(tmp_path: Path):
    write_cell(tmp_path, "batch", {k: 0.9 + 0.001 * k**2 for k in range(5)})
    values: dict = {k: 0.5 + 0.001 * k for k in range(5)}
    write_cell(tmp_path, "group_ws", values, conv="weight_standardized")
    assert comparisons_of(tmp_path)["group_ws"].kind == "unlike"  # the command line set it
    slots = {"conv": "weight_standardized"}
    write_cell(tmp_path, "mine", values, **slots, norm_slots=slots)
    assert comparisons_of(tmp_path)["mine"].kind == "worse"


def test_a_verdict_that_outlying_seeds_decide_is_undecided(tmp_path: Path):
    level = [0.9, 0.9013, 0.8991, 0.9005, 0.8984, 0.9021, 0.9009, 0.8996]
    ahead = [-0.0021, 0.0033, 0.0014, -0.0037, 0.0026, -0.0018, 0.0029, 0.0005]
    group = [a + b for a, b in zip(level, ahead, strict=True)]
    write_cell(tmp_path, "batch", dict(enumerate([*level[:7], 0.7])))
    write_cell(tmp_path, "group", dict(enumerate(group)))
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == "apart" and "; undecided: 1 of 8 seeds lies apart, and" in one.text
    (row,) = [row for row in draw(report_of(tmp_path)).cells.rows if row["norm"] == "batch"]
    assert row["worst seed"] == "70.0" and row["seeds apart"] == 1


def test_close_to_100_percent_the_margin_is_a_share_of_the_error(tmp_path: Path):
    values = {k: 0.991 + 0.0001 * k**2 for k in range(6)}
    write_cell(tmp_path, "batch", values)
    write_cell(tmp_path, "group", {k: x - 0.006 + 1e-5 * k for k, x in values.items()})
    one = comparisons_of(tmp_path)["group"]
    assert one.kind == "worse" and one.comparison.margin == pytest.approx(0.2, abs=0.03)
    write_cell(tmp_path, "layer", {k: x - 1e-4 * (-1) ** k for k, x in values.items()})
    layer = comparisons_of(tmp_path)["layer"]
    assert layer.kind == "tie" and "within a quarter of batch's error (0.2 points)" in layer.text
    given = comparisons_of(tmp_path, tolerance=2.0)["layer"]
    assert given.comparison.margin == 2.0 and "tolerance=2 given to the report" in given.text


def answers_in(report: Report) -> list[Answer]:
    return [answer for section in report.sections for answer in section.answers]


def test_budgets_in_samples_are_followed_along_the_batch_size(tmp_path: Path):
    """drop_last then makes epochs and steps differ between sizes."""
    rng = np.random.default_rng(0)
    for samples, drop in ((16000, 0.02), (64000, -0.02)):
        for size, level in ((8, 0.9 - drop), (128, 0.9)):
            steps = samples // size
            length = {"num_steps": steps, "epochs": steps / (1294 // size)}
            write_cell(tmp_path, "batch", drawn(rng, level), batch_size=size, **length)
    answers = answers_of(tmp_path)
    short, long = (answer.parts[0] for answer in answers)
    assert (short.sizes, short.axis) == ([8, 128], "batch_size")
    assert "samples=16000," in short.heading and "steps" not in short.heading
    assert "samples=64000," in long.heading
    text = answers[0].losses[0].text
    assert "batch loses 2" in text and "at samples=16000 and lr=0.1" in text
    assert "At samples=64000: 1.9" in text and "points the other way" in text


# Over several data sets


def write_data_sets(root: Path, ratio: Mapping[str, float], **options: Any) -> None:
    """At size 2 batch makes twice its errors at 128; group makes `ratio` times batch's at 2."""
    spread = np.array([0.001, -0.0011, 0.002, -0.0022])
    for data, own in ratio.items():
        values = np.array(ACCURACIES[data])
        for size, factor in ((2, 1.0), (128, 0.5)):
            accuracies = dict(enumerate(1 - factor * (1 - values) + spread * (size > 2)))
            write_cell(root, "batch", accuracies, norm_batch_size=size, data=data, **options)
        group = dict(enumerate(1 - own * (1 - values) + spread))
        write_cell(root, "group", group, data=data, **options)


def overall_of(root: Path) -> Sequence[Answer]:
    return report_of(root).over_data


def test_data_sets_are_put_together_by_ratios_of_errors_without_a_verb(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.5, "cifar10": 0.8})
    (found,) = overall_of(tmp_path)
    (one,), (loss,) = found.comparisons, found.losses
    centre, low, high = re.search(r"([\d.]+) \[([\d.]+), ([\d.]+)\] times", one.text).groups()
    assert float(centre) == pytest.approx(np.sqrt(0.5 * 0.8), abs=0.01)
    assert float(low) < np.sqrt(0.4) < float(high)
    assert "cifar10 0.80, digits 0.50; n = 8 pairs" in one.text
    assert "cifar10, digits" in found.heading and "batch size 128" in found.heading
    assert re.search(
        r"batch at norm batch size 2: 2\.0\d? \[.*\] times its errors at 128", loss.text
    )
    assert {one.kind, loss.kind} == {"interval"}
    assert not VERBS.search(one.text + loss.text)


def test_a_data_set_without_errors_leaves_no_ratio_and_diverged_runs_are_named(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.5})
    for norm, size in (("batch", 2), ("batch", 128), ("group", None)):
        values: dict[int, float | None] = dict.fromkeys(range(4), 1.0)
        values |= {0: None} if norm == "group" else {}
        write_cell(tmp_path, norm, values, norm_batch_size=size, data="cifar10")
    (found,) = overall_of(tmp_path)
    assert "batch at norm batch size 2: no ratio to its errors at 128 (" in found.losses[0].text
    assert "cifar10 without a ratio, digits 2.0" in found.losses[0].text
    assert "group on cifar10: 1 of 4 diverged" in found.comparisons[0].text
    assert "diverged runs count as the worst run" in found.comparisons[0].text


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        (("batch", "group"), " is 2: each norm that mixes samples, from its largest to its "
         "smallest size, and each norm against batch at the smallest size. "),
        (("batch",), " is 1: each norm that mixes samples, from its largest to its smallest size."),
        (("layer", "group"), " is 1: each norm against layer at the smallest size. "),
    ],
)  # fmt: skip
def test_the_note_names_the_differences_that_are_judged(tmp_path: Path, norms, words: str):
    rng = np.random.default_rng(0)
    for norm in norms:
        for size in (2, 128) if norm == "batch" else (None,):
            write_cell(tmp_path, norm, drawn(rng, 0.9), norm_batch_size=size)
    assert words in report_of(tmp_path).note


def test_one_data_set_has_no_answer_over_data_and_models_are_kept_apart(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.5})
    assert overall_of(tmp_path) == []
    write_data_sets(tmp_path, {"cifar10": 0.5})
    write_data_sets(tmp_path, {"digits": 1.0, "cifar10": 1.0}, model="vit")
    texts = [one.comparisons[0].text for one in overall_of(tmp_path)]
    assert "group: 0.500 [" in texts[0] and "group: 1.0" in texts[1]


def test_data_sets_of_other_budgets_are_kept_apart(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.5}, epochs=3)
    write_data_sets(tmp_path, {"cifar10": 0.5}, epochs=12)
    assert overall_of(tmp_path) == []
    write_data_sets(tmp_path, {"cifar10": 0.5}, epochs=3)
    (found,) = overall_of(tmp_path)
    assert "resnet, epochs=3, batch size 128" in found.heading


def test_a_data_set_with_one_pair_gives_no_interval(tmp_path: Path):
    write_data_sets(tmp_path, {"digits": 0.5, "cifar10": 0.5})
    for seed in (1, 2, 3):
        for path in (tmp_path / "synthetic").glob(f"*cifar10*/seed-{seed}/result.json"):
            path.unlink()
    (found,) = overall_of(tmp_path)
    assert "group: 0.50 times the errors" in found.comparisons[0].text
    assert "group on cifar10: 3 of 4 missing" in found.comparisons[0].text


# How often the sentences err


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Slice:
    """Four norms that mix samples at six sizes: 7 members of the family."""
    return mixing_norms(tmp_path_factory.mktemp("report"), 4, (2, 4, 8, 16, 32, 128))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Slice:
    """Ten norms that mix samples at two sizes: 19 members."""
    return mixing_norms(tmp_path_factory.mktemp("zoo"), 10, (2, 128))


def mixing_norms(root: Path, count: int, sizes: tuple[int, ...]) -> Slice:
    values = dict(enumerate(np.linspace(0.89, 0.91, 8)))
    for norm in ("batch", *(f"norm{i}" for i in range(1, count))):
        write_sizes(root, dict.fromkeys(sizes, values), norm, mixes_samples=True)
    (part,) = slices_of(root)
    return part


def redrawn(
    part: Slice, rng: np.random.Generator, n: int, *, drop: float = 0.0, shared: float = 0.0
) -> Slice:
    """The slice with new values: 90, less `drop` at the smallest size, of sd .65 in every cell.

    shared: standard deviation of an effect of the seed that all cells have
    """
    smallest = {line[min(line)] for line in part.lines.values()}
    effects = rng.normal(0, shared, n)
    values = {
        cell: dict(enumerate(90 - drop * (cell in smallest) + rng.normal(0, 0.65, n) + effects))
        for cell in part.values
    }
    return replace(part, values=values)


def kinds_of(part: Slice) -> list[tuple[bool, str]]:
    """Whether each comparison is along the sizes, and its kind: what `answer_slices` writes out."""
    return [(one.is_along_sizes, one.kind) for one in compare([part])]


def false_alarms(part: Slice, n: int, count: int) -> float:
    """Share of studies without any difference in which a sentence claims one."""
    rng = np.random.default_rng(n)
    wrong = {"loses", "gains", "better", "worse"}
    studies = (redrawn(part, rng, n, shared=2.0 * (i % 2)) for i in range(count))
    return float(np.mean([any(kind in wrong for _, kind in kinds_of(own)) for own in studies]))


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("study", ["report", "zoo"])
def test_a_null_report_has_a_false_sentence_in_at_most_a_twentieth(study: str, n: int, request):
    """2,000 studies, half with a shared effect of the seed; binomial error .005 at .05."""
    rate = false_alarms(request.getfixturevalue(study), n, 2000)
    print(f"{study}, n={n}: {rate:.4f}")
    assert rate <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize("study", ["report", "zoo"])
def test_a_drop_of_exactly_the_tolerance_is_not_said_to_hold(study: str, request):
    part, rng = request.getfixturevalue(study), np.random.default_rng(1)
    studies = [kinds_of(redrawn(part, rng, 8, drop=1.0)) for _ in range(1000)]
    assert np.mean([(True, "holds") in own or (True, "gains") in own for own in studies]) <= 0.06


@pytest.mark.parametrize("study", ["report", "zoo"])
def test_a_drop_of_two_points_is_called_with_eight_seeds(study: str, request):
    """Per norm: 100 studies of 4 norms, or 40 of 10; binomial error .02."""
    part, rng = request.getfixturevalue(study), np.random.default_rng(2)
    studies = [redrawn(part, rng, 8, drop=2.0) for _ in range(100 if study == "report" else 40)]
    called = [kind == "loses" for own in studies for along, kind in kinds_of(own) if along]
    print(f"{study}: {np.mean(called):.3f}")
    assert np.mean(called) >= 0.8
