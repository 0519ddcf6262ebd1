"""Cells: their labels, settings and counts; and slices: sizes, lines and chosen rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from normexp.records.history import CommandEntry, append_entries
from synthetic_study import cells_of, report_of, slices_of, write_cell, write_sizes

from normexp.reporting.metric import describe_metric
from normexp.reporting.model import differences
from normexp.reporting.tables import cell_table, run_table, show

OTHER = {"placement": "post", "qk_norm": True, "residual_scale": 0.0}  # than the defaults


def labels_of(root: Path) -> list[str]:
    return [cell.norm for cell in cells_of(root)]


# Cells


def test_values_are_of_finished_seeds_alone_and_others_are_counted(tmp_path: Path):
    path = write_cell(tmp_path, "batch", {0: 0.9, 2: 0.8, 3: 0.7}, failed=[3])
    last_seen = {"metrics": {"test/accuracy": 0.1}}  # of a run that diverged, so no result of it
    write_cell(tmp_path, "batch", {1: None}, result=last_seen)
    asked = {path.name: [("", list(range(6)))]}
    append_entries(path.parent, [CommandEntry("c", ["normexp-train"], "one", 3, asked)])
    batch = cells_of(tmp_path)[0]  # equal recipes are one cell
    assert batch.directory == path and batch.values(describe_metric("test/accuracy")) == {
        0: pytest.approx(90),
        2: pytest.approx(80),
    }
    counts = (batch.expected, batch.finished, batch.diverged, batch.failed, batch.missing)
    assert counts == (6, 2, 1, 1, 2)
    assert batch.error == "CUDA out of memory"


def test_a_run_that_a_callback_has_ended_is_named_in_the_tables(tmp_path: Path):
    early = {"steps": 40, "stopped": "EarlyStopping: val/loss did not improve"}
    write_cell(tmp_path, "group", {0: 0.8, 1: 0.9}, result=early)
    cells = cells_of(tmp_path)
    assert cell_table(cells, None, None).rows[0]["note"] == "2 of 2 ended early"
    runs = run_table(cells).rows
    assert {(run["steps"], run["stopped"]) for run in runs} == {(40, early["stopped"])}


def test_sizes_are_effective_and_both_ways_to_one_are_told_apart(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=8)
    write_cell(tmp_path, "batch", {0: 0.9}, micro_batch_size=8)
    cells = cells_of(tmp_path)
    found = {(cell.norm, cell.micro_batch_size, cell.norm_batch_size) for cell in cells}
    assert found == {("batch ghost", 128, 8), ("batch accumulated", 8, 8)}


def test_norms_of_one_name_are_labelled_by_the_knobs_in_which_they_differ(tmp_path: Path):
    for groups in (16, 1):  # 1 is no flag
        write_cell(tmp_path, "group", {0: 0.9}, knobs={"num_groups": groups, "affine": True})
    write_cell(tmp_path, "layer", {0: 0.9}, result={"invalid": "leaks the future"})
    labels = ["layer INVALID", "group num_groups=1", "group num_groups=16"]
    assert labels_of(tmp_path) == labels


@pytest.mark.parametrize(
    ("key", "default"), [("placement", "pre"), ("qk_norm", "false"), ("residual_scale", "null")]
)
def test_norms_that_differ_in_a_slot_are_named_as_it_is_typed(tmp_path: Path, key, default):
    """The record of a cell lacks a slot that has its default."""
    write_cell(tmp_path, "rms", {0: 0.8})
    write_cell(tmp_path, "rms", {0: 0.9}, identity={key: OTHER[key]})
    assert set(labels_of(tmp_path)) == {
        f"rms {key}={default}",
        f"rms {key}={str(OTHER[key]).lower()}",
    }


def test_a_value_that_is_not_recorded_is_named_by_its_default(tmp_path: Path):
    for own in ({}, {"val_every_epochs": 4}):
        write_cell(tmp_path, "batch", {0: 0.9}, identity={"callback": "early_stopping", **own})
    assert {cell.setting for cell in cells_of(tmp_path)} == {
        "val_every_epochs=1",
        "val_every_epochs=4",
    }


def test_a_momentum_that_follows_from_the_size_is_no_knob(tmp_path: Path):
    for size in (2, 8):
        write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=size, knobs={"momentum": size / 80})
    assert set(labels_of(tmp_path)) == {"batch"}


def test_cells_are_compared_across_a_move_of_a_class_of_normexp(tmp_path: Path):
    for norm, module in (("batch", "digits"), ("layer", "images")):
        identity = {"data": {"_target_": f"normexp.data.{module}.load_digits"}}
        write_cell(tmp_path, norm, {0: 0.9}, identity=identity)
    assert len({cell.title for cell in cells_of(tmp_path)}) == 1


def test_parts_of_the_user_are_called_by_their_class_or_name(tmp_path: Path):
    identity = {
        "model": {"_target_": "my_pkg.MyNet", "width": 8},
        "data": {"_target_": "my_pkg.load_cats"},
        "optim": {"_target_": "my_pkg.Lion"},
        "norm": {"_target_": "my_pkg.MyNorm"},
    }
    for kind in ("custom", "mine"):  # `mine`: a YAML file of the user's
        parts = dict.fromkeys(("model", "data", "optim"), kind)
        write_cell(tmp_path, kind, {0: 0.9}, identity=identity, **parts)
    named = {**identity, "model": {"name": "resnet50"}}
    write_cell(tmp_path, "batch", {0: 0.9}, model="torchvision", identity=named)
    assert {cell.norm: cell.title for cell in cells_of(tmp_path)} == {
        "MyNorm": "MyNet on load_cats, optim=Lion",
        "mine": "mine on mine, optim=mine",
        "batch": "resnet50 on cifar10, optim=sgd",
    }


@pytest.mark.parametrize(
    ("changes", "identity", "words"),
    [
        ({"precision": "bf16-mixed"}, {}, "precision=bf16-mixed"),
        ({"max_grad_norm": 1.0}, {}, "max_grad_norm=1.0"),
        ({"num_steps": 7}, {}, "num_steps=7"),
        ({}, {"model": {"width": 8}}, "model.width=8"),
        ({}, {"model": {"source_digest": "b7"}}, "model.source_digest=b7"),
        ({}, {"data": {"digest": "b7"}}, "data.digest=b7"),
        ({}, {"optim": {"nesterov": True}}, "optim.nesterov=true"),
        ({}, {"optim": {"momentum": 0.5}}, "optim.momentum=0.5"),
        ({}, {"norm": {"source_digest": "b7"}}, "layer source_digest=b7"),
        ({}, {"norm": {"affine": False}}, "layer affine=false"),
    ],
)
def test_cells_that_differ_in_anything_show_it_in_titles_and_tables(
    tmp_path: Path, changes, identity, words: str
):
    before = {"precision": "32-true", "max_grad_norm": None, "num_steps": 9}
    parts = {"model": {}, "data": {}, "optim": {}, "norm": {}}
    write_cell(tmp_path, "layer", {0: 0.9}, identity=parts, **before)
    write_cell(tmp_path, "layer", {0: 0.9}, identity=parts | identity, **before | changes)
    cells = cells_of(tmp_path)
    assert sum(words in f"{cell.norm}, {cell.title}" for cell in cells) == 1
    for table in (cell_table(cells, None, None), run_table(cells)):
        texts = table.frame[table.columns].drop(columns="directory").map(show)
        assert not texts.duplicated().any()


def test_a_budget_separates_cells_unless_it_follows_from_the_size(tmp_path: Path):
    for size in (32, 128):
        options = {"batch_size": size, "num_steps": 12800 // size}
        write_cell(tmp_path, "batch", {0: 0.9}, study="by_size", **options)
    for steps in (100, 200):
        write_cell(tmp_path, "batch", {0: 0.9}, study="at_one_size", num_steps=steps)
    first, second = cells_of(tmp_path, "by_size")
    assert first.settings == second.settings
    titles = ["resnet on cifar10, num_steps=100", "resnet on cifar10, num_steps=200"]
    assert [cell.title for cell in cells_of(tmp_path, "at_one_size")] == titles


def test_two_studies_share_settings_where_only_the_study_tells_them_apart(tmp_path: Path):
    for name, epochs in (("a", 3), ("b", 4)):
        write_cell(tmp_path, "batch", {0: 0.9}, study=name, epochs=epochs)
    first, second = cells_of(tmp_path, "a", "b")
    assert [first.norm, second.norm] == ["batch · a", "batch · b"]
    assert first.base == second.base == "batch" and first.settings == second.settings


def test_sizes_without_effect_do_not_make_two_cells(tmp_path: Path):
    write_cell(tmp_path, "group", {0: 0.9}, norm_batch_size=2)
    write_cell(tmp_path, "group", {1: 0.8}, norm_batch_size=8, micro_batch_size=128)
    (cell,) = cells_of(tmp_path)
    assert [run.seed for run in cell.runs] == [0, 1]


def test_cells_differ_in_the_values_of_their_recipes(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.9}, knobs={"affine": True, "dims": [1, 2]}, epochs=3)
    write_cell(tmp_path, "layer", {0: 0.9}, knobs={"affine": 1, "dims": [1, 2]}, epochs=3.0)
    (part,) = slices_of(tmp_path)
    found = differences(*part.values)
    assert found["norm.affine"] == (True, 1) and found["norm"] == ("batch", "layer")
    assert {"norm.dims", "epochs", "lr"} <= part.shared.keys() - found.keys()
    assert part.differences.keys() == found.keys() and part.shared["lr"] == 0.1


# Slices


def test_an_independent_norm_is_one_cell_at_every_norm_batch_size(tmp_path: Path):
    write_sizes(tmp_path, dict.fromkeys((2, 8, 128), {0: 0.8}))
    group = write_cell(tmp_path, "group", {0: 0.9}, norm_batch_size=2)
    (part,) = slices_of(tmp_path)
    assert (part.axis, part.sizes, part.fixed) == ("norm_batch_size", [2, 8, 128], "batch size 128")
    points = [(size, cell.directory) for size, cell in part.lines["group"].items()]
    assert points == [(size, group) for size in (2, 8, 128)] and part.independent == {"group"}


def test_a_norm_that_mixes_samples_at_some_sizes_is_independent_at_none(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.8}, norm_batch_size=1, mixes_samples=False)
    write_sizes(tmp_path, dict.fromkeys((2, 8), {0: 0.9}))
    report = report_of(tmp_path)
    (part,), (comparison,) = report.slices, report.comparisons
    assert list(part.lines["batch"]) == part.sizes == [1, 2, 8] and not part.independent
    assert comparison.is_primary


def test_models_and_data_sets_have_slices_of_their_own(tmp_path: Path):
    for data in ("cifar10", "digits"):
        write_sizes(tmp_path, dict.fromkeys((2, 128), {0: 0.8}), data=data)
    text = {"test/bits_per_byte": 1.5, "val/bits_per_byte": 1.6}
    write_cell(tmp_path, "layer", {0: 0.5}, data="manual", metrics=text)
    parts = slices_of(tmp_path)
    names = [(part.title.partition(" on ")[2], part.metric.name) for part in parts]
    image = "test/accuracy"
    assert names == [("cifar10", image), ("digits", image), ("manual", "test/bits_per_byte")]
    assert len({part.slug for part in parts}) == 3 and parts[2].sizes == [128]


def test_both_sizes_may_vary(tmp_path: Path):
    for size in (8, 32):
        write_sizes(tmp_path, dict.fromkeys((2, 8), {0: 0.8}), batch_size=size)
    found = [(part.axis, part.fixed) for part in slices_of(tmp_path)]
    assert found == [("norm_batch_size", "batch size 8"), ("norm_batch_size", "batch size 32")]


def test_the_learning_rate_is_chosen_on_validation_and_never_on_test(tmp_path: Path):
    for lr, val, test, second in ((0.1, 0.9, 0.1, 0.5), (0.01, 0.8, 0.99, 0.5), (1.0, 1, 1, None)):
        metrics = {"val/accuracy": val, "test/accuracy": test}
        write_cell(tmp_path, "batch", {0: 0.5, 1: second}, metrics=metrics, lr=lr)
    (part,) = slices_of(tmp_path)
    assert [cell.lr for _, cell in part.points] == [0.1]  # at the best rate a seed diverged
    assert [cell.lr for cell in part.rates["batch", 128]] == [0.01, 0.1, 1.0]


def test_optimism_is_that_of_the_rates_that_were_candidates(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.90, 1: 0.80, 2: 0.80}, lr=0.1)
    chosen = write_cell(tmp_path, "batch", {0: 0.80, 1: 0.90, 2: 0.90}, lr=0.3)
    write_cell(tmp_path, "batch", {0: 0.99, 1: 0.99, 2: None}, lr=1.0)  # is no candidate
    group = write_cell(tmp_path, "group", {0: 0.9, 1: 0.9, 2: 0.9})
    (part,) = slices_of(tmp_path)
    by_folder = {cell.directory: cell for cell in part.values}
    # without seed 0 the others choose .3 (80 for it), without 1 or 2 the rates are equal: the first
    assert part.optimism(by_folder[chosen]) == pytest.approx(
        100 * (2.6 / 3 - (0.8 + 0.8 + 0.8) / 3)
    )
    assert part.optimism(by_folder[group]) is None
