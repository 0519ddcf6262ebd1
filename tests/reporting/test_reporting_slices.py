"""Slices: which size varies, which cells are on their lines, which learning rate is chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_study import slices_of, write_cell

from normexp.reporting.cells import build_cells
from normexp.reporting.frame import read_studies
from normexp.reporting.slices import build_slices
from normexp.reporting.verdict import contrasts_of


def test_an_independent_norm_is_one_cell_at_every_norm_batch_size(tmp_path: Path):
    for size in (2, 8, 128):
        write_cell(tmp_path, "batch", {0: 0.8}, norm_batch_size=size)
    group = write_cell(tmp_path, "group", {0: 0.9}, norm_batch_size=2)
    (part,) = slices_of(tmp_path)
    assert (part.axis, part.sizes, part.fixed) == ("norm_batch_size", [2, 8, 128], "batch size 128")
    points = part.lines["group"]
    assert [point["size"] for point in points] == [2, 8, 128]
    assert all(point["independent"] for point in points)
    assert {point["cell"] for point in points} == {str(group)}


def test_a_norm_that_mixes_samples_at_some_sizes_is_independent_at_none(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.8}, norm_batch_size=1, mixes_samples=False)
    for size in (2, 8):
        write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=size)
    (part,) = slices_of(tmp_path)
    assert [point["size"] for point in part.lines["batch"]] == part.sizes == [1, 2, 8]
    assert not part.points["independent"].any()
    (contrast,) = contrasts_of(part)
    assert contrast.is_primary


def test_along_the_batch_size_every_norm_has_cells_of_its_own(tmp_path: Path):
    for size in (8, 32):
        for norm in ("batch", "group"):
            write_cell(tmp_path, norm, {0: 0.8}, batch_size=size)
    (part,) = slices_of(tmp_path)
    assert (part.axis, part.sizes) == ("batch_size", [8, 32])
    assert part.points["cell"].nunique() == 4 and not part.points["independent"].any()


@pytest.mark.parametrize(
    ("key", "changed", "labels"),
    [
        ("placement", "post", {"rms placement=pre", "rms placement=post"}),
        ("qk_norm", True, {"rms qk_norm=false", "rms qk_norm=true"}),
        ("residual_scale", 0.0, {"rms residual_scale=null", "rms residual_scale=0.0"}),
    ],
)
def test_norms_that_differ_in_a_slot_are_named_as_it_is_typed(tmp_path: Path, key, changed, labels):
    """The record of a cell lacks a slot that has its default."""
    write_cell(tmp_path, "rms", {0: 0.8})
    write_cell(tmp_path, "rms", {0: 0.9}, identity={key: changed})
    (part,) = slices_of(tmp_path)
    assert set(part.norms) == labels


def test_knobs_of_numbers_are_not_named_as_flags(tmp_path: Path):
    for groups in (1, 2):
        write_cell(tmp_path, "group", {0: 0.8}, knobs={"num_groups": groups})
    (part,) = slices_of(tmp_path)
    assert set(part.norms) == {"group num_groups=1", "group num_groups=2"}


def test_models_and_data_sets_have_slices_of_their_own(tmp_path: Path):
    for data in ("cifar10", "digits"):
        for size in (2, 128):
            write_cell(tmp_path, "batch", {0: 0.8}, norm_batch_size=size, data=data)
    parts = slices_of(tmp_path)
    assert [part.title for part in parts] == ["resnet on cifar10", "resnet on digits"]
    assert len({part.slug for part in parts}) == 2


def test_both_sizes_may_vary(tmp_path: Path):
    for batch_size in (8, 32):
        for size in (2, 8):
            options = {"batch_size": batch_size, "norm_batch_size": size}
            write_cell(tmp_path, "batch", {0: 0.8}, **options)
    found = [(part.axis, part.fixed) for part in slices_of(tmp_path)]
    assert found == [("norm_batch_size", "batch size 8"), ("norm_batch_size", "batch size 32")]


def test_the_learning_rate_is_chosen_on_validation_and_never_on_test(tmp_path: Path):
    for lr, val, test, second in ((0.1, 0.9, 0.1, 0.5), (0.01, 0.8, 0.99, 0.5), (1.0, 1, 1, None)):
        metrics = {"val/accuracy": val, "test/accuracy": test}
        write_cell(tmp_path, "batch", {0: 0.5, 1: second}, metrics=metrics, lr=lr)
    (part,) = slices_of(tmp_path)
    assert part.points["lr"].tolist() == [0.1]  # at the best rate a seed diverged
    searched = part.searched.set_index("lr")["chosen"].to_dict()
    assert searched == {0.01: False, 0.1: True, 1.0: False}


def test_runs_with_different_metrics_have_each_their_own(tmp_path: Path):
    text = {"test/bits_per_byte": 1.5, "val/bits_per_byte": 1.6}
    write_cell(tmp_path, "layer", {0: 0.5}, data="shakespeare", metrics=text)
    write_cell(tmp_path, "layer", {0: 0.9})
    names = {part.metric.name for part in slices_of(tmp_path)}
    assert names == {"test/accuracy", "test/bits_per_byte"}


@pytest.mark.parametrize("size", [2, 128])
def test_one_size_alone_is_a_slice_too(tmp_path: Path, size: int):
    write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=size)
    (part,) = slices_of(tmp_path)
    assert part.sizes == [size]


@pytest.mark.parametrize(("metric", "worst"), [("test/accuracy", 70.0), ("test/loss", 0.3)])
def test_a_diverged_run_counts_as_the_worst_on_the_lines(tmp_path: Path, metric: str, worst: float):
    cell = write_cell(tmp_path, "batch", {0: 0.8, 1: None}, norm_batch_size=2)
    write_cell(tmp_path, "batch", {0: 0.7, 1: 0.9}, norm_batch_size=8)
    write_cell(tmp_path, "group", {0: 0.1}, metrics={"val/accuracy": 0.1})  # nothing, but no loss
    records = read_studies(tmp_path, ["synthetic"])
    (part,) = build_slices(build_cells(records), records.runs, metric=metric, tolerance=None)
    assert part.outcomes[str(cell)][1] == pytest.approx(worst)
    assert np.isnan(part.values[str(cell)][1])


def test_optimism_is_that_of_the_rates_that_were_candidates(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.90, 1: 0.80, 2: 0.80}, lr=0.1)
    chosen = write_cell(tmp_path, "batch", {0: 0.80, 1: 0.90, 2: 0.90}, lr=0.3)
    write_cell(tmp_path, "batch", {0: 0.99, 1: 0.99, 2: None}, lr=1.0)  # is no candidate
    group = write_cell(tmp_path, "group", {0: 0.9, 1: 0.9, 2: 0.9})
    (part,) = slices_of(tmp_path)
    # without seed 0 the others choose .3 (80 for it), without 1 or 2 the rates are equal: the first
    assert part.optimism(str(chosen)) == pytest.approx(100 * (2.6 / 3 - (0.8 + 0.8 + 0.8) / 3))
    assert part.optimism(str(group)) is None
