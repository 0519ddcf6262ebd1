"""Labels of cells, the tables they share, and what makes two of them unlike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_study import cell_of, report_of_cells

from normexp.training.studies.rows import join_paths
from normexp.verdicts.compare import DIFFERENCE
from normexp.verdicts.report import report_on
from normexp.verdicts.rows import PlannedCell, Row, Rows

FLAT = [0.8, 0.81, 0.83]


GROUPS = [cell_of("group", FLAT, knobs={"num_groups": n}) for n in (4, 8)]


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        (
            [*GROUPS, cell_of("batch", FLAT, knobs={"eps": 1e-5})],
            ["batch eps=1e-05", "group num_groups=4", "group num_groups=8"],
        ),
        (  # accumulated and ghost sub-batches
            [cell_of("batch", FLAT, norm_batch_size=8, micro_batch_size=m) for m in (8, None)],
            ["micro_batch_size=8", "micro_batch_size=128"],
        ),
        (
            [cell_of("batch", FLAT, study=study) for study in ("before", "after")],
            ["batch · after", "batch · before"],
        ),
        (  # what is off is not named
            [cell_of("batch", FLAT, knobs={"at": at}) for at in ({"head": "rms"}, None)],
            ["batch", "batch at.head=rms"],
        ),
    ],
)
def test_labels_say_what_a_cell_is(cells: list, labels: list[str]):
    assert report_of_cells(*cells).slices[0].arms == labels


def test_the_name_of_an_arm_does_not_depend_on_what_else_was_trained():
    cells = [cell_of("Cand", FLAT, knobs={"k": 1}), cell_of("batch", FLAT)]
    before, after = (report_of_cells(*some) for some in (cells, [*cells, cell_of("Cand", FLAT)]))
    assert before.slices[0].arms == ["batch", "Cand k=1"]
    assert after.slices[0].arms == ["batch", "Cand", "Cand k=1"]


def test_code_is_named_where_a_later_cell_has_the_same_name_and_other_code():
    """A norm of the user whose file was changed between two commands."""
    cells = [
        cell_of("Own", FLAT, knobs={"_target_": "own.Own", "source_digest": digest})
        for digest in ("b", "a")
    ]
    asked = {("synthetic", cell[0].directory.parent.name): [range(3)] for cell in cells}
    labels = [report_of_cells(*some, asked=asked).slices[0].arms for some in (cells[:1], cells)]
    assert labels == [["Own"], ["Own", "Own source_digest=a"]]


def test_a_reference_may_be_one_of_several_settings_of_a_norm():
    report = report_of_cells(*GROUPS, reference="group num_groups=4")
    assert [(c.arm, c.against) for c in report.comparisons] == [
        ("group num_groups=8", "group num_groups=4")
    ]


def test_models_data_sets_budgets_and_sizes_have_tables_of_their_own():
    def tables(*cells: list) -> list[tuple]:
        slices = report_of_cells(*cells).slices
        assert len({slice_.slug for slice_ in slices}) == len(slices)
        return [(slice_.heading, slice_.axis, slice_.sizes) for slice_ in slices]

    fixed = "batch size 128"
    assert tables(*(cell_of("batch", FLAT, epochs=epochs) for epochs in (3, 12))) == [
        (f"resnet on cifar10, epochs={epochs}, {fixed}", "norm_batch_size", [128])
        for epochs in (3, 12)
    ]
    assert tables(  # another model and data set are no other budget
        cell_of("batch", FLAT, study="a", data="digits", epochs=3),
        cell_of("batch", FLAT, study="b", model="vit", epochs=12),
    ) == [
        (f"vit on cifar10, {fixed}", "norm_batch_size", [128]),
        (f"resnet on digits, {fixed}", "norm_batch_size", [128]),
    ]
    full = "norm batch size = batch size"
    steps = [cell_of("batch", FLAT, batch_size=size, steps=1280 // size) for size in (32, 128)]
    assert tables(*steps) == [(f"resnet on cifar10, {full}", "batch_size", [32, 128])]
    (one,) = report_of_cells(*steps).comparisons
    assert one.is_comparable  # a budget that follows from the size
    both = ((8, 8), (8, 2), (32, 32), (32, 2))
    assert tables(
        *(cell_of("batch", FLAT, batch_size=size, norm_batch_size=norm) for size, norm in both)
    ) == [
        ("resnet on cifar10, batch size 8", "norm_batch_size", [2, 8]),
        ("resnet on cifar10, batch size 32", "norm_batch_size", [2, 32]),
        (f"resnet on cifar10, {full}", "batch_size", [8, 32]),
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"epochs": 12}, "not compared: epochs 12 and 3"),
        ({"lr": 0.3}, "not compared: lr 0.3 and 0.1"),
        ({"act": "tlu"}, "not compared: act tlu and relu"),
        ({"knobs": {"act": "tlu"}}, "seeds differ too much: 5.6 pp would be decided"),  # its YAML's
        ({"optim": {"weight_decay": 0}}, "not compared: optim.weight_decay 0 and null"),
    ],
)
def test_a_row_names_the_keys_in_which_recipes_differ(config: dict, words: str):
    report = report_of_cells(cell_of("batch", FLAT), cell_of("group", [0.8, 0.85, 0.81], **config))
    (one,) = report.comparisons
    is_compared = not words.startswith("not compared")
    assert one.why == words and one.is_comparable == is_compared
    assert (one.verdict is None) == (not is_compared)
    assert (str(one.row[DIFFERENCE]) == "-") == (not is_compared)


def test_a_norm_that_does_not_mix_samples_stands_at_every_norm_batch_size():
    cells = [cell_of("batch", FLAT, norm_batch_size=size) for size in (2, 8)]
    (slice_,) = report_of_cells(*cells, cell_of("group", FLAT)).slices
    assert slice_.independent == {"group"} and slice_.lines["group"].keys() == {2, 8}
    assert slice_.lines["group"][2] is slice_.lines["group"][8]


def test_the_learning_rate_is_chosen_on_validation_and_never_on_test():
    cells = [
        cell_of("batch", [0.5] * 2, lr=lr, metrics={"test/accuracy": test, "val/accuracy": val})
        for lr, test, val in ((0.1, 0.9, 0.7), (0.3, 0.8, 0.75))
    ]
    (slice_,) = report_of_cells(*cells).slices
    assert slice_.lines["batch"][128].best.tuned == 0.3


def test_a_cell_that_failed_before_it_was_prepared_stands_with_the_others():
    lost = cell_of("batch", [0.5] * 2, lr=0.3, failed=[0, 1])
    cells = [cell_of("batch", FLAT, lr=0.1), cell_of("group", FLAT)]
    cells += [cell_of(norm, FLAT, epochs=12) for norm in ("batch", "group")]
    for cell in cells:  # what follows from the data is not known of the lost one
        for run in cell:
            run.config["steps"] = 100 * run.config["epochs"]
    cells.append(lost)
    slices = report_of_cells(*cells).slices
    assert [slice_.title for slice_ in slices] == [
        *("resnet on cifar10, epochs=3", "resnet on cifar10, epochs=12"),
    ]
    assert [cell.tuned for cell in slices[0].cells if cell.arm == "batch"] == [0.1, 0.3]


def test_a_knob_that_differs_between_studies_is_in_the_labels():
    cells = [
        cell_of("batch", FLAT, study=study, knobs={"momentum": momentum})
        for study, momentum in (("a", 0.1), ("b", 0.3))
    ]
    assert report_of_cells(*cells).slices[0].arms == [
        "batch momentum=0.1 · a",
        "batch momentum=0.3 · b",
    ]


def test_data_are_compared_where_both_digests_are_known():
    def why(digest: str) -> str:
        digests = {"digests": {"data": digest}} if digest else {}
        batch = cell_of("batch", FLAT, digests={"data": "a"})
        group = cell_of("group", [0.8, 0.85, 0.81], **digests)
        return report_of_cells(batch, group).comparisons[0].why

    assert why("a") == why("") == "seeds differ too much: 5.6 pp would be decided"  # or none
    assert why("b") == "not compared: digests.data b and a"


def test_a_knob_may_be_a_list_of_groups():
    cells = [cell_of("batch", FLAT, knobs={"blocks": [{"width": w}]}) for w in (1, 2)]
    assert len(report_of_cells(*cells).slices[0].arms) == 2


def test_a_slot_that_is_typed_equals_the_same_slot_in_a_norms_yaml():
    own = cell_of("frn", [0.8, 0.85, 0.81], knobs={"act": "tlu"})
    (one,) = report_of_cells(cell_of("batch", FLAT, act="tlu"), own).comparisons
    assert one.is_comparable


def with_samples(cell: list, count: int) -> list:
    """The runs of a cell that was asked for by a number of samples."""
    for run in cell:
        run.config["samples"] = run.typed["samples"] = count
    return cell


@pytest.mark.parametrize(("samples", "is_comparable"), [((700, 700), True), ((700, 1400), False)])
def test_a_budget_of_samples_is_compared_as_it_was_asked_for(samples: tuple, is_comparable: bool):
    """Epochs and steps follow, with a rest that depends on the batch size."""
    cells = [
        with_samples(
            cell_of("batch", FLAT, batch_size=size, epochs=steps * size / 333, steps=steps), count
        )
        for size, steps, count in ((3, 233, samples[0]), (32, 21, samples[1]))
    ]
    (one,) = report_of_cells(*cells).comparisons
    assert one.is_comparable == is_comparable and "samples=700" in one.slice.scope


def test_floats_in_reasons_have_six_digits():
    cells = [cell_of("batch", FLAT, lr=2 / 3), cell_of("rms", FLAT)]
    assert report_of_cells(*cells).comparisons[0].why == "not compared: lr 0.1 and 0.666667"


def test_what_follows_from_equal_words_may_differ():
    """A momentum by `norm.half_life`, a learning rate by `lr_rule`."""
    cells = [cell_of("batch", FLAT, batch_size=size, knobs={"half_life": 900}) for size in (6, 48)]
    for cell, momentum, lr in zip(cells, (0.004, 0.036), (0.05, 0.14), strict=True):
        for run in cell:
            run.config.update({"norm.momentum": momentum, "lr": lr})
            run.typed["lr"] = 0.2
    (one,) = report_of_cells(*cells).comparisons
    assert one.is_comparable
    for run in cells[0]:
        run.config["base_batch_size"] = run.typed["base_batch_size"] = 12
    for run in cells[1]:
        run.defaults["base_batch_size"] = 32
    (one,) = report_of_cells(*cells).comparisons
    assert one.why == "not compared: base_batch_size 12 and 32"


@pytest.mark.parametrize("kind", ["bits_per_byte", "loss", "gain"])
def test_no_interval_of_a_positive_metric_reaches_below_0(kind: str):
    name = f"test/{kind}"
    values = [0.1 + seed / 100 for seed in range(7)] + [7.5]
    runs = [cell_of("batch", {k: 0.5}, metrics={name: v})[0] for k, v in enumerate(values)]
    low = report_of_cells(runs, metric=name).slices[0].lines["batch"][128].mean.low
    assert low is not None and (low < 0 if kind == "gain" else low == 0)


def test_a_norm_batch_size_that_all_share_is_said():
    cells = [cell_of(norm, FLAT, norm_batch_size=8) for norm in ("batch", "layer")]
    assert "batch size 128, norm batch size 8" in report_of_cells(*cells).slices[0].scope
    assert "norm batch size" not in report_of_cells(cell_of("batch", FLAT)).slices[0].scope


def on_folder(norm: str, root: str, contents: str, seeds: Sequence[int]) -> list[Row]:
    accuracies = {seed: 0.8 + 0.01 * seed for seed in seeds}
    runs = []
    for run in cell_of(norm, accuracies, data="image_folder", digests={"data": contents}):
        config, typed = (one | {"data.root": root} for one in (run.config, run.typed))
        cell_id = f"{norm}-{root}-{contents}"
        runs.append(replace(run, config=config, typed=typed, cell_id=cell_id))
    return runs


def test_paths_of_the_same_contents_are_one_data_set():
    (layer,) = on_folder("layer", "./img", "a", [0])
    runs = [
        *on_folder("batch", "img", "a", (0, 1)),
        *on_folder("batch", "./img", "a", (1, 2)),
        *on_folder("group", "/home/me/img", "a", (0, 1, 2)),
        *on_folder("group", "img", "b", (0, 1, 2)),
    ]
    planned = PlannedCell("synthetic", "l", Path(), [0], layer.config)
    rows = join_paths(Rows(runs, planned=[planned]))
    report = report_on(rows, Path("runs"), ["synthetic"])
    first, second = report.slices
    assert {cell.arm: len(cell.runs) for cell in first.cells} == {
        "batch": 3,
        "group": 3,
        "layer": 0,
    }
    assert [cell.arm for cell in second.cells] == ["group"]
