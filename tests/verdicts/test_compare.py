"""Which differences a report states, when it gives a verdict on them, and how it ranks norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_study import cell_of, find, report_of_cells

from normexp.errors import UserError
from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.compare import DIFFERENCE, gap_of, judge
from normexp.verdicts.interval import mean
from normexp.verdicts.metric import describe_metric
from normexp.verdicts.report import Report
from normexp.verdicts.rows import Point, SearchRecord, comparable

SEEDS = np.random.default_rng(3).normal(0, 0.002, 8)
NOISE = np.random.default_rng(4).normal(0, 0.001, (4, 8))


def level(mean: float, noise: int = 0) -> list[float]:
    return (mean + SEEDS + NOISE[noise]).tolist()


GROUP = cell_of("group", level(0.95, 1))
PLACE = ("synthetic", GROUP[0].directory.parent.name)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (level(0.93, 1), "better"),
        (level(0.87, 1), "worse"),
        (level(0.9, 1), "tie"),
        ((0.9 + 20 * SEEDS).tolist(), "undecided"),
    ],
)
def test_a_norm_against_the_reference(values: list[float], verdict: str):
    report = report_of_cells(cell_of("batch", level(0.9)), cell_of("group", values))
    one = find(report, "group")
    assert (one.verdict, one.gap.n) == (verdict, 8)
    why = "seeds differ too much: 4.7 pp would be decided"
    assert one.why == (why if verdict == "undecided" else "")
    assert one.gap.estimate == pytest.approx(100 * (np.mean(values) - np.mean(level(0.9))))
    assert one.row["verdict"] == verdict and str(one.row[DIFFERENCE]).startswith(("+", "-"))


def test_the_smallest_size_is_compared_with_the_largest_and_losses_turn_the_sign():
    small, large = (
        cell_of("batch", level(mean, noise), norm_batch_size=size)
        for noise, (mean, size) in enumerate(((0.8, 2), (0.9, 128)))
    )
    report = report_of_cells(small, large)
    assert find(report, "batch at 2", "batch at 128").verdict == "worse"
    report = report_of_cells(small, large, metric="test/loss")
    assert find(report, "batch at 2", "batch at 128").verdict == "worse"  # of a loss, too


def test_a_diverged_run_counts_as_chance_level_whatever_else_was_trained():
    """B2: the difference of two norms does not depend on a third."""
    cells = [cell_of("batch", level(0.9)), cell_of("group", [None, *level(0.92)[1:]])]
    alone = find(report_of_cells(*cells), "group")
    with_third = find(report_of_cells(*cells, cell_of("instance", level(0.6))), "group")
    assert alone.gap == with_third.gap
    assert alone.gap.estimate == pytest.approx(
        100 * (np.mean([0.1, *level(0.92)[1:]]) - np.mean(level(0.9)))
    )
    assert alone.why == "group: 1 diverged" and alone.verdict == "undecided"


def test_a_diverged_seed_counts_as_chance_level_at_every_learning_rate():
    """B1: also where only some of the seeds choose the learning rate at which it diverged."""

    def grid(lost: float | None) -> ArmAtSize:
        near = cell_of("group", level(0.949, 1), lr=0.1)
        best = cell_of("group", [lost, *level(0.95, 2)[1:]], lr=0.3)
        (slice_,) = report_of_cells(near, best).slices
        return slice_.lines["group"][128]

    diverged, finished = grid(None), grid(0.95)
    assert diverged.tuning is not None and 0 < diverged.tuning.shares[1] < finished.tuning.shares[1]
    assert (diverged.mean.estimate or 0.0) < 90 < (finished.mean.estimate or 0.0)
    assert diverged.lost == "1 diverged"


@pytest.mark.parametrize(
    ("cells", "options", "why"),
    [
        ([cell_of("batch", level(0.9)), GROUP[:5]], {"asked": {PLACE: [range(8)]}},
         "5 of 8 seeds of group"),
        ([*(cell_of("batch", level(0.9), lr=lr) for lr in (0.1, 0.3)), GROUP],
         {}, "not compared: lr not searched alike"),
        ([cell_of("batch", [0.9]), GROUP[:1]], {}, "one seed"),
    ],
)  # fmt: skip
def test_a_row_without_a_verdict_says_why(cells: list, options: dict, why: str):
    one = find(report_of_cells(*cells, **options), "group")
    assert (one.verdict, one.why) == (None, why)
    assert (one.gap.low is None) == (why == "one seed" or not one.is_comparable)


BATCH = cell_of("batch", level(0.9), lr=0.3)
RATES = (0.01, 0.1, 0.3, 1.0)


def search_of(
    rates: Sequence[float] = RATES, seeds: tuple[int, ...] = (1000, 1001)
) -> SearchRecord:
    points = {Point((("lr", comparable(rate)),), seeds) for rate in rates}
    return SearchRecord(frozenset({"lr"}), frozenset(points))


@pytest.mark.parametrize(
    ("of_batch", "of_group", "why"),
    [
        (search_of(), search_of(), "at one search's lr"),
        (search_of(), search_of((*RATES, 3.0)), "lr not searched alike"),
        (search_of(), search_of(seeds=(1000, 1002)), "lr not searched alike"),
        (search_of(), None, "not compared: lr 0.1 and 0.3"),
        (search_of(seeds=(7, 8)), search_of(seeds=(7, 8)), "seed 7 was searched, too"),
        (search_of(()), search_of(()), "study synthetic-search is missing"),
    ],
)
def test_fresh_seeds_after_a_search_have_a_verdict_if_it_was_alike_for_both(
    of_batch: SearchRecord, of_group: SearchRecord | None, why: str
):
    found = {("synthetic", BATCH[0].directory.parent.name): of_batch, PLACE: of_group}
    searches = {place: search for place, search in found.items() if search}
    one = find(report_of_cells(BATCH, GROUP, searches=searches), "group")
    is_alike = of_batch == of_group == search_of()
    assert (one.verdict, one.why) == ("better" if is_alike else None, why)
    assert "at the learning rates that one search chose" in one.slice.scope
    report = report_of_cells(BATCH, GROUP, searches=searches)
    headline = report.headline(report.slices[0])
    assert headline.endswith("; at one search's lr.") == is_alike


def test_the_best_rate_of_a_search_at_its_edge_names_the_one_to_add():
    places = [("synthetic", cell[0].directory.parent.name) for cell in (BATCH, GROUP)]
    search = search_of((0.03, 0.1, 0.3))
    report = report_of_cells(BATCH, GROUP, searches=dict.fromkeys(places, search))
    means = report.tables_of(report.slices[0])[0].frame.set_index("norm")
    assert means["lr"].to_dict() == {"batch": "0.3", "group": "0.1"}
    assert means["search"].to_dict() == {"batch": "at the edge: add 0.9", "group": ""}


def test_the_family_is_a_table():
    """Another data set does not change the number of comparisons, another norm does."""

    def size(*norms: str, data: tuple[str, ...] = ("cifar10",)) -> int:
        cells = [cell_of(norm, level(0.9), data=name) for norm in norms for name in data]
        return report_of_cells(*cells).comparisons[0].family_size

    assert size("batch", "group") == size("batch", "group", data=("a", "b")) == 1
    assert size("batch", "group", "layer") == 3  # two, and the choice of the best


def of_text(*leads: np.ndarray, **options: Any) -> Report:
    """Norms of four seeds on a text that becomes harder.

    leads: of all but the first over the first, along the text
    """
    rng = np.random.default_rng(0)
    length = len(leads[0])
    hard = np.linspace(1, 2, length) + rng.normal(0, 0.3, length)
    cells = []
    for norm, own in zip(("batch", "group", "layer"), (0, *leads), strict=False):
        runs = []
        for seed in range(4):
            noise = rng.normal(0, 0.01, length)
            loss = (hard - own + noise).astype(np.float32)
            metrics = {"test/bits_per_byte": 2 * float(loss.mean())}
            runs += cell_of(norm, {seed: 0.5}, metrics=metrics, samples={seed: loss}, data="text",
                            chance_accuracy=None)  # fmt: skip
        cells.append(runs)
    return report_of_cells(*cells, **options)


def test_sequences_of_a_text_count_and_are_scaled_to_bits_per_byte():
    lead = np.random.default_rng(1).normal(0.1, 0.1, 200)
    one = find(of_text(lead), "group")
    assert one.num_samples == 200 and one.verdict == "better"
    assert one.gap.estimate == pytest.approx(2 * lead.mean(), abs=0.01)


def test_a_difference_that_drifts_along_a_text_has_no_verdict():
    """The same leads at the same sequences, in an order in which neighbours are alike or not."""
    lead = np.repeat([0.1, 0.2], 100)
    drifting, mixed = (
        find(of_text(order), "group")
        for order in (lead, np.random.default_rng(2).permutation(lead))
    )
    assert mixed.verdict == "better"
    assert drifting.verdict is None and drifting.gap.low is None
    assert drifting.why.startswith("may drift along the test text, over 200 of 200 sequences")
    also = judge(replace(drifting, why="3 of 4 seeds of group"), family_size=1)
    assert also.why == f"3 of 4 seeds of group; {drifting.why}"
    beside = find(of_text(np.random.default_rng(2).permutation(lead), lead), "group")
    assert beside.verdict is None and beside.why.startswith("may drift along the test text")
    short = find(of_text(lead[::20]), "group")
    assert short.verdict is None and short.why.startswith("10 test sequences are too few")


def test_a_norm_at_chance_drifts_as_the_text_does_and_costs_no_other_its_verdict():
    lead = np.random.default_rng(2).permutation(np.repeat([0.1, 0.2], 100))
    metric = replace(describe_metric("test/bits_per_byte"), chance_level=6.0)
    report = of_text(lead, lead - 2, metric=metric)
    assert find(report, "group").verdict == "better"
    assert find(report, "layer").why.startswith("may drift along the test text")


def test_statistics_of_the_same_runs_are_paired_by_seed():
    """Two evaluations share the luck of a training, which two norms do not."""
    runs = []
    for seed, accuracy in enumerate(level(0.9)):
        metrics = {"val/accuracy": accuracy, "val/accuracy@precise": accuracy + 0.01 + 1e-4 * seed}
        runs += cell_of("batch", {seed: accuracy}, metrics=metrics)
    names = ("val/accuracy@precise", "val/accuracy")
    precise, running = (
        report_of_cells(runs, metric=name).slices[0].lines["batch"][128] for name in names
    )
    gap, _ = gap_of(precise, running, drift=None)
    paired = mean(100 * np.array([0.01 + 1e-4 * seed for seed in range(8)]))
    assert (gap.low, gap.high) == pytest.approx((paired.low, paired.high))


def test_a_diverged_language_model_has_uniform_bits():
    metrics = {"test/bits_per_byte": 1.5}
    cells = [
        cell_of(norm, seeds, metrics=metrics, chance_accuracy=None)
        for norm, seeds in (("batch", [0.9, 0.9]), ("group", [0.9, None]))
    ]
    assert report_of_cells(*cells).slices[0].lines["group"][128].values == {0: 1.5, 1: 8.0}


def test_where_a_chosen_rate_has_no_samples_the_row_says_that_it_is_over_seeds_alone():
    rights = {seed: np.random.default_rng(seed).random(100) < 0.9 for seed in range(8)}
    means = {seed: float(right.mean()) for seed, right in rights.items()}
    batch = cell_of("batch", means, samples=rights)
    one = find(report_of_cells(batch, cell_of("group", level(0.8))), "group")
    assert (one.num_samples, one.why) == (0, "over seeds alone") and one.verdict == "worse"
    assert "also the choice of test samples" in one.slice.scope


def test_a_rate_that_is_never_chosen_needs_no_samples():
    """A study may ship without the samples of rates that nobody would choose."""

    def grid(norm: str, level: float) -> list:
        rights = {s: np.random.default_rng([s, len(norm)]).random(300) < level for s in range(6)}
        means = {seed: float(right.mean()) for seed, right in rights.items()}
        best = cell_of(norm, means, lr=0.3, samples=rights)
        poor = [0.3, 0.31, 0.29, 0.3, 0.32, 0.28]
        return [cell_of(norm, poor, lr=0.01), best, cell_of(norm, poor, lr=3.0)]

    one = find(report_of_cells(*grid("batch", 0.9), *grid("rms", 0.7)), "rms")
    assert (one.num_samples, one.why, one.verdict) == (300, "", "worse")


def test_a_best_rate_at_an_edge_names_the_one_to_add():
    cells = [
        cell_of("batch", level(mean, noise), lr=lr)
        for noise, (lr, mean) in enumerate(((0.01, 0.8), (0.1, 0.85), (1.0, 0.9)))
    ]
    grid = report_of_cells(*cells).slices[0].lines["batch"][128]
    assert (grid.tuned, grid.search_words) == (1.0, "most often of 3; at the edge: add 10")


@pytest.mark.parametrize(
    ("values", "means", "added"),
    [
        ((-3, -2, -1), (0.9, 0.8, 0.7), "add -4"),  # logarithms
        ((-3, -2, -1), (0.7, 0.8, 0.9), "add 0"),
        ((-2, -1, 0), (0.7, 0.8, 0.9), "add 1"),
        ((0, 0.1, 0.2), (0.7, 0.8, 0.9), "add 0.4"),
        ((0, 0.1, 0.2), (0.9, 0.8, 0.7), ""),
        ((-1, 0, 1), (0.7, 0.9, 0.7), ""),
    ],
)
def test_the_edges_of_values_that_are_not_positive(
    values: Sequence[float], means: Sequence[float], added: str
):
    cells = [
        cell_of("batch", level(mean, noise), lr=value)
        for noise, (value, mean) in enumerate(zip(values, means, strict=True))
    ]
    grid = report_of_cells(*cells).slices[0].lines["batch"][128]
    assert grid.why_at_edge.endswith(added) and bool(grid.why_at_edge) == bool(added)


def test_the_upper_edge_is_named_where_0_is_chosen_too():
    """Four seeds are best without, and three with as much as was tried."""
    low = [0.9] * 4 + [0.8] * 3
    high = [0.8] * 4 + [0.96] * 3
    cells = [cell_of("batch", low, lr=0.0), cell_of("batch", [0.5] * 7, lr=0.1)]
    grid = report_of_cells(*cells, cell_of("batch", high, lr=0.2)).slices[0].lines["batch"][128]
    assert grid.tuning is not None
    assert grid.tuning.shares[0] > grid.tuning.shares[-1] > 0.25
    assert grid.beyond == pytest.approx(0.4)


@pytest.mark.parametrize(("rates", "added"), [((0.01, 0.1), "1"), ((0.1, 1.0, 10.0), "1e+02")])
@pytest.mark.parametrize("kind", ["grid", "search"])
def test_at_the_edge_of_a_grid_or_search_there_is_no_verdict(
    kind: str, rates: tuple[float, ...], added: str
):
    """The best learning rate of group is the largest that was tried; so it may be larger."""
    cells, searches = [], {}
    for norm, best in (("batch", rates[0]), ("group", rates[-1])):
        for number, lr in enumerate(rates):
            if kind == "grid" or lr == best:
                cell = cell_of(norm, level(0.9 - 0.1 * (lr != best), number), lr=lr)
                cells.append(cell)
                searches["synthetic", cell[0].directory.parent.name] = search_of(rates)
    report = report_of_cells(*cells, searches=searches if kind == "search" else {})
    one = find(report, "group")
    assert one.verdict is None and one.why == f"best lr of group at the edge: add {added}"
    assert one.gap.low is not None and one.family_size == 1


# Rankings

RNG = np.random.default_rng(5)


def draw(mean: float, spread: float = 0.002) -> list[float]:
    return (mean + spread * RNG.normal(size=8)).tolist()


def test_norms_stand_in_order_of_their_estimate_with_marks_and_verdicts():
    means = {"batch": 0.9, "layer": 0.93, "group": 0.931, "rms": 0.85}
    report = report_of_cells(*(cell_of(norm, draw(mean)) for norm, mean in means.items()))
    (ranking,) = report.rankings
    assert ranking.reference == "batch" and set(ranking.best) == {"layer", "group"}
    estimates = [place.side.mean.estimate for place in ranking.places]
    assert estimates == sorted(estimates, reverse=True)
    verdicts = {pair.arm: pair.verdict for place in ranking.places if (pair := place.comparison)}
    assert verdicts == {"layer": "better", "group": "better", "rms": "worse"}
    # three against the reference; layer, group and rms with each other are one more
    assert ranking.family_size == 4


def test_a_learning_rate_is_chosen_by_the_metric_that_is_named():
    """lr 0.1 has the better accuracy on validation, lr 0.3 the better loss; 1 has neither."""
    cells = []
    for lr, accuracy, loss in ((0.1, 0.9, 0.5), (0.3, 0.8, 0.4), (1.0, 0.7, 0.6)):
        metrics = {"test/accuracy": accuracy, "val/accuracy": accuracy, "val/loss": loss}
        cells.append(cell_of("batch", level(accuracy), lr=lr, metrics=metrics))
    options = {"metric": "test/accuracy"}
    (by_loss,) = report_of_cells(*cells, choose_by="val/loss", **options).slices
    (by_accuracy,) = report_of_cells(*cells, **options).slices
    for slice_, expected in ((by_loss, 80.0), (by_accuracy, 90.0)):
        (batch,) = slice_.arms_at_sizes
        assert batch.mean.estimate == pytest.approx(expected)
    assert "lr tuned over 3 by val/loss" in by_loss.scope
    for wrong, words in (
        ({"choose_by": "test/accuracy"}, "choose by a metric of validation data"),
        ({"choose_by": "val/iou"}, "choose_by=val/iou: no run has it"),
        ({"choose_by": "val/loss", "metric": None}, "set metric=... too"),
    ):
        with pytest.raises(UserError, match=words):
            report_of_cells(*cells, **options | wrong)
    with pytest.raises(UserError, match="no arm has several learning rates"):
        report_of_cells(cells[0], choose_by="val/loss", **options)


def test_equal_norms_all_may_be_the_best_and_one_that_cannot_be_compared_stands_last():
    cells = [cell_of(norm, draw(0.9, 0.01)) for norm in ("batch", "layer", "group")]
    (ranking,) = report_of_cells(*cells, cell_of("rms", draw(0.99), epochs=9)).rankings
    assert sorted(ranking.best) == ["batch", "group", "layer"]
    last = ranking.places[-1]
    assert (last.arm, last.may_be_best) == ("rms", None)
    assert last.comparison and last.comparison.gap.estimate is None
    assert last.comparison.why == "not compared: epochs 9 and 3"


@pytest.mark.parametrize("name", [None, "batch"])
def test_the_reference_is_the_norm_as_shipped_where_a_sweep_has_several_of_it(name: str | None):
    typed = [cell_of("batch", level(0.9), knobs={"mode": mode}) for mode in ("one", "two")]
    shipped = cell_of("batch", level(0.9), defaults={"norm.mode": "three"})
    report = report_of_cells(*typed, shipped, cell_of("layer", level(0.8)), reference=name)
    assert {c.against for c in report.comparisons} == {"batch"}
    assert report_of_cells(*typed).comparisons[0].against == "batch mode=one"


def test_a_reference_that_is_named_counts_at_the_sizes_that_it_has():
    cells = [
        cell_of(norm, level(0.9), norm_batch_size=size, mixes_samples=True)
        for norm in ("batch", "own")
        for size in (2, 8)
    ]
    cells.append(cell_of("ghost", level(0.95, 1), norm_batch_size=8, mixes_samples=True))
    report = report_of_cells(*cells, reference="ghost")
    between = [c for c in report.comparisons if not c.is_along_sizes]
    assert {(c.arm, c.against, c.sizes) for c in between} == {
        ("batch", "ghost", (8, 8)),
        ("own", "ghost", (8, 8)),
    }


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("batch", "not run at norm batch size 8"),
        ("own", "own was not run at norm batch size 8"),
    ],
)
def test_at_the_largest_size_a_norm_of_another_size_is_not_compared(reference: str, why: str):
    cells = [cell_of("batch", level(0.9), norm_batch_size=size) for size in (2, 8)]
    cells.append(cell_of("own", level(0.95, 1), norm_batch_size=2, mixes_samples=True))
    report = report_of_cells(*cells, at_largest=True, reference=reference)
    (one,) = [c for c in report.comparisons if not c.is_along_sizes]
    assert (one.verdict, one.why, one.family_size) == (None, why, 1)
