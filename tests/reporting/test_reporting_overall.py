"""The answer over several data sets: stratified, and said only where it is one."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel
from synthetic_study import make_runs, study_of

from normexp.reporting.cells import build_cells
from normexp.reporting.comparisons import complement
from normexp.reporting.numbers import p_value_of
from normexp.reporting.overall import Overall, describe_overall
from normexp.reporting.runs import Run
from normexp.reporting.slices import build_slices
from normexp.stats import Interval, stratified_difference

SMALL = {"digits": (0.80, 0.81, 0.79, 0.80), "cifar10": (0.60, 0.62, 0.61, 0.60)}


def overall_of(runs: list[Run]) -> list[Overall]:
    cells = build_cells([study_of(runs)])
    return describe_overall(build_slices(cells, metric=None, tolerance=None))


def study(ahead: dict[str, float], **options: str) -> list[Run]:
    """batch loses 10 points on each data set; group is ahead of it at size 2 by `ahead`."""
    runs = []
    for data, gap in ahead.items():
        values = np.array(SMALL[data])
        settings = {"data": data, **options}
        for size, extra in ((2, 0.0), (128, 0.1)):
            runs += make_runs(
                "batch", dict(enumerate(values + extra)), norm_batch_size=size, **settings
            )
        spread = np.array([0.001, -0.001, 0.002, -0.002])
        runs += make_runs("group", dict(enumerate(values + gap + spread)), **settings)
    return runs


def test_difference_is_the_mean_over_data_sets_with_one_weight_each():
    (found,) = overall_of(study({"digits": 0.02, "cifar10": 0.06}))
    (one,) = found.comparisons
    assert one.difference.estimate == pytest.approx(4.0) and one.difference.n == 8
    assert one.kind == "better"
    assert one.text.startswith("At norm batch size 2, group is better than batch by 4.0 [")
    assert one.text.endswith("points (digits +2.0, cifar10 +6.0; n = 8 pairs).")
    assert found.heading == "Over 2 data sets (digits, cifar10), batch size 128"
    assert [loss.text[:53] for loss in found.losses] == [
        "batch loses 10.0 [10.0, 10.0] points on average from "
    ]


def test_p_value_agrees_with_the_stratified_interval():
    rng = np.random.default_rng(0)
    strata = [(rng.normal(0.5, 1, n), rng.normal(0, 1, n)) for n in (5, 8)]
    only = strata[0]
    assert p_value_of(stratified_difference([only])) == pytest.approx(ttest_rel(*only).pvalue)
    p = p_value_of(stratified_difference(strata))
    touching = stratified_difference(strata, level=1 - p)
    assert touching.low is not None and touching.high is not None
    assert min(abs(touching.low), abs(touching.high)) == pytest.approx(0, abs=1e-9)


def test_data_sets_that_disagree_are_seen_to():
    (found,) = overall_of(study({"digits": 0.04, "cifar10": -0.04}))
    assert found.comparisons[0].difference.estimate == pytest.approx(0, abs=1e-9)
    assert "digits +4.0, cifar10 -4.0" in found.comparisons[0].text


def test_one_data_set_has_no_overall_answer():
    assert overall_of(study({"digits": 0.02})) == []


def test_data_sets_of_several_models_are_averaged_within_a_model():
    runs = study({"digits": 0.02, "cifar10": 0.06})
    runs += study({"digits": 0.0, "cifar10": 0.0}, model="vit")
    found = overall_of(runs)
    assert [one.comparisons[0].difference.estimate for one in found] == pytest.approx([4, 0])


def test_a_data_set_with_one_pair_gives_no_interval():
    runs = [
        run
        for run in study({"digits": 0.02, "cifar10": 0.06})
        if run.result.config["data"] == "digits" or run.result.seed == 0
    ]
    (found,) = overall_of(runs)
    assert found.comparisons[0].kind == "no interval"
    assert "too few seeds" in found.comparisons[0].text
    assert "3 missing" in found.comparisons[0].text.replace("of 4 ", "")


def test_complement_of_a_probability_turns_its_interval():
    turned = complement(Interval(0.9, 0.6, 0.98, 0.95, 8, "Clopper-Pearson"))
    assert (turned.estimate, turned.low, turned.high) == pytest.approx((0.1, 0.02, 0.4))
