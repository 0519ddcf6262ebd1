"""Runs grouped into cells: labels, settings, seeds."""

from __future__ import annotations

from synthetic_study import make_runs, study_of

from normexp.reporting.cells import build_cells
from normexp.reporting.metric import describe_metric

ACCURACY = describe_metric("test/accuracy")


def test_values_are_of_finished_seeds_alone_and_others_are_counted():
    runs = make_runs("batch", {0: 0.9, 1: None, 2: 0.8, 3: 0.7}, failed=[3])
    runs += make_runs("group", dict.fromkeys(range(6), 0.9))
    batch = build_cells([study_of(runs)])[0]
    assert batch.values(ACCURACY) == {0: 90.0, 2: 80.0}
    assert (batch.seeds("diverged"), batch.seeds("failed"), batch.missing) == ([1], [3], [4, 5])


def test_sizes_are_effective():
    runs = make_runs("batch", {0: 0.9}, micro_batch_size=16)
    cell = build_cells([study_of(runs)])[0]
    assert (cell.micro_batch_size, cell.norm_batch_size, cell.protocol) == (16, 16, "accumulated")


def test_norms_of_one_name_are_labelled_by_the_knobs_in_which_they_differ():
    runs = [
        *make_runs("group", {0: 0.9}, knobs={"num_groups": 4, "affine": True}),
        *make_runs("group", {0: 0.9}, knobs={"num_groups": 16, "affine": True}),
        *make_runs("layer", {0: 0.9}),
    ]
    labels = [cell.norm for cell in build_cells([study_of(runs)])]
    assert labels == ["layer", "group num_groups=4", "group num_groups=16"]


def test_a_momentum_that_follows_from_the_size_is_no_knob():
    runs = [
        run
        for size in (2, 8)
        for run in make_runs("batch", {0: 0.9}, norm_batch_size=size, knobs={"momentum": size / 80})
    ]
    assert {cell.norm for cell in build_cells([study_of(runs)])} == {"batch"}


def test_a_custom_norm_is_called_by_its_class():
    runs = make_runs("custom", {0: 0.9}, knobs={"_target_": "my_pkg.MyNorm"})
    assert build_cells([study_of(runs)])[0].norm == "MyNorm"


def test_a_budget_that_follows_from_the_size_does_not_part_cells():
    by_size = [
        run
        for size in (32, 128)
        for run in make_runs("batch", {0: 0.9}, batch_size=size, num_steps=12800 // size)
    ]
    assert len({cell.settings for cell in build_cells([study_of(by_size)])}) == 1
    at_one_size = [
        run for steps in (100, 200) for run in make_runs("batch", {0: 0.9}, num_steps=steps)
    ]
    assert len({cell.settings for cell in build_cells([study_of(at_one_size)])}) == 2


def test_ghost_and_accumulated_cells_of_one_size_are_told_apart():
    runs = make_runs("batch", {0: 0.9}, norm_batch_size=8)
    runs += make_runs("batch", {0: 0.9}, micro_batch_size=8)
    labels = {cell.norm for cell in build_cells([study_of(runs)])}
    assert labels == {"batch ghost", "batch accumulated"}


def test_a_leaking_norm_is_stamped():
    runs = make_runs("instance", {0: 0.9}, invalid="leaks the future at block0.norm1")
    assert build_cells([study_of(runs)])[0].norm == "instance INVALID"


def test_two_studies_share_settings_where_only_the_study_tells_them_apart():
    studies = [
        study_of(make_runs("batch", {0: 0.9}, study=name, epochs=epochs), name)
        for name, epochs in (("a", 3), ("b", 4))
    ]
    cells = build_cells(studies)
    assert [cell.norm for cell in cells] == ["batch · a", "batch · b"]
    assert cells[0].settings == cells[1].settings
