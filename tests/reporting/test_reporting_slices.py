"""Slices: which size varies, which cells stand in it, which learning rate is taken."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_study import make_runs, study_of

from normexp.reporting.cells import build_cells
from normexp.reporting.runs import Run
from normexp.reporting.slices import Slice, align, build_slices


def slices_of(runs: list[Run]) -> list[Slice]:
    return build_slices(build_cells([study_of(runs)]), metric=None, tolerance=None)


def test_an_independent_norm_is_one_cell_at_every_norm_batch_size():
    runs = [
        run for size in (2, 8, 128) for run in make_runs("batch", {0: 0.8}, norm_batch_size=size)
    ]
    (part,) = slices_of([*runs, *make_runs("group", {0: 0.9}, norm_batch_size=2)])
    assert (part.axis, part.sizes, part.fixed) == ("norm_batch_size", [2, 8, 128], "batch size 128")
    group = part.lines["group"]
    assert group.cells == {} and group.independent is not None
    assert all(group.at(size) is group.independent for size in part.sizes)


def test_along_the_batch_size_every_norm_has_cells_of_its_own():
    runs = [
        run
        for size in (8, 32)
        for norm in ("batch", "group")
        for run in make_runs(norm, {0: 0.8}, batch_size=size)
    ]
    (part,) = slices_of(runs)
    assert (part.axis, part.sizes) == ("batch_size", [8, 32])
    assert part.lines["group"].independent is None and len(part.lines["group"].cells) == 2


def test_models_and_data_sets_have_slices_of_their_own():
    runs = [
        run
        for data in ("cifar10", "digits")
        for size in (2, 128)
        for run in make_runs("batch", {0: 0.8}, norm_batch_size=size, data=data)
    ]
    parts = slices_of(runs)
    assert [part.title for part in parts] == ["resnet on cifar10", "resnet on digits"]
    assert len({part.slug for part in parts}) == 2


def test_seeds_are_aligned_and_what_is_not_there_is_nan():
    runs = make_runs("batch", {0: 0.8, 1: None, 3: 0.7}, norm_batch_size=2)
    runs += make_runs("batch", {0: 0.9, 1: 0.85}, norm_batch_size=128)
    (part,) = slices_of(runs)
    values, seeds = align(part.lines["batch"], part.sizes, part.metric)
    assert seeds == [0, 1, 3]
    expected = [[80, 90], [np.nan, 85], [70, np.nan]]
    np.testing.assert_allclose(values, expected)


def test_the_learning_rate_is_chosen_on_validation_and_never_on_test():
    def metrics(val: float, test: float) -> dict[str, float]:
        return {"val/accuracy": val, "test/accuracy": test}

    runs = make_runs("batch", {0: 0.5, 1: 0.5}, metrics=metrics(0.9, 0.1), lr=0.1)
    runs += make_runs("batch", {0: 0.5, 1: 0.5}, metrics=metrics(0.8, 0.99), lr=0.01)
    runs += make_runs("batch", {0: 0.5, 1: None}, metrics=metrics(0.95, 0.99), lr=1.0)
    (part,) = slices_of(runs)
    chosen = part.lines["batch"].at(128)
    assert chosen is not None and chosen.lr == 0.1  # the higher one diverged for a seed
    assert {cell.lr for cell in part.searched[chosen.id]} == {0.1, 0.01, 1.0}


def test_runs_with_different_metrics_have_each_their_own():
    text = {"test/bits_per_byte": 1.5, "val/bits_per_byte": 1.6}
    runs = make_runs("layer", {0: 0.5}, data="shakespeare", metrics=text)
    runs += make_runs("layer", {0: 0.9})
    assert {part.metric.name for part in slices_of(runs)} == {"test/accuracy", "test/bits_per_byte"}


@pytest.mark.parametrize("size", [2, 128])
def test_one_size_alone_is_a_slice_too(size: int):
    (part,) = slices_of(make_runs("batch", {0: 0.9}, norm_batch_size=size))
    assert part.sizes == [size]
