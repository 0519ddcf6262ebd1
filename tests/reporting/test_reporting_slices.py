"""Slices: which size varies, which cells are on their lines, which learning rate is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_study import slices_of, write_cell


def test_an_independent_norm_is_one_cell_at_every_norm_batch_size(tmp_path: Path):
    for size in (2, 8, 128):
        write_cell(tmp_path, "batch", {0: 0.8}, norm_batch_size=size)
    group = write_cell(tmp_path, "group", {0: 0.9}, norm_batch_size=2)
    (part,) = slices_of(tmp_path)
    assert (part.axis, part.sizes, part.fixed) == ("norm_batch_size", [2, 8, 128], "batch size 128")
    points = dict(part.lines())["group"]
    assert points["size"].tolist() == [2, 8, 128] and points["independent"].all()
    assert set(points["cell"]) == {str(group)}


def test_along_the_batch_size_every_norm_has_cells_of_its_own(tmp_path: Path):
    for size in (8, 32):
        for norm in ("batch", "group"):
            write_cell(tmp_path, norm, {0: 0.8}, batch_size=size)
    (part,) = slices_of(tmp_path)
    assert (part.axis, part.sizes) == ("batch_size", [8, 32])
    assert part.points["cell"].nunique() == 4 and not part.points["independent"].any()


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
