"""Labels of cells, the tables they share, and what makes two of them unlike."""

from __future__ import annotations

import pytest
from synthetic_study import cell_of, report_of_cells

FLAT = [0.8, 0.81, 0.83]


def test_labels_name_the_knobs_in_which_cells_of_a_norm_differ():
    cells = [cell_of("group", FLAT, knobs={"num_groups": n}) for n in (4, 8)]
    cells += [cell_of("batch", FLAT, knobs={"eps": 1e-5})]
    (part,) = report_of_cells(*cells).slices
    assert part.norms == ["batch", "group num_groups=4", "group num_groups=8"]


def test_a_momentum_that_follows_from_the_size_is_no_knob():
    cells = [
        cell_of("batch", FLAT, norm_batch_size=size, knobs={"momentum": m})
        for size, m in ((2, 0.01), (8, 0.1))
    ]
    assert report_of_cells(*cells).slices[0].norms == ["batch"]


def test_accumulated_and_ghost_sub_batches_of_one_size_are_two_lines():
    cells = [
        cell_of("batch", FLAT, norm_batch_size=8, micro_batch_size=micro) for micro in (8, None)
    ]
    assert report_of_cells(*cells).slices[0].norms == [
        "batch micro_batch_size=8",
        "batch micro_batch_size=null",
    ]


def test_studies_stand_in_labels():
    cells = [cell_of("batch", FLAT, study=study) for study in ("before", "after")]
    assert report_of_cells(*cells).slices[0].norms == ["batch · after", "batch · before"]


def test_models_data_sets_and_budgets_have_tables_of_their_own():
    """Also those of two studies: another model and data set are no other budget."""
    cells = [cell_of("batch", FLAT, epochs=epochs) for epochs in (3, 12)]
    report = report_of_cells(*cells)
    assert [part.title for part in report.slices] == [
        f"resnet on cifar10, epochs={epochs}" for epochs in (3, 12)
    ]
    cells = [
        cell_of("batch", FLAT, study="a", data="digits", epochs=3),
        cell_of("batch", FLAT, study="b", model="vit", epochs=12),
    ]
    titles = [part.title for part in report_of_cells(*cells).slices]
    assert titles == ["vit on cifar10", "resnet on digits"]


def test_a_budget_does_not_separate_cells_where_it_follows_from_the_size():
    cells = [cell_of("batch", FLAT, batch_size=size, num_steps=1280 // size) for size in (32, 128)]
    (part,) = report_of_cells(*cells).slices
    assert (part.axis, part.sizes) == ("batch_size", [32, 128])
    (one,) = report_of_cells(*cells).comparisons
    assert one.is_comparable


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"epochs": 12}, "not compared: epochs 12 and 3"),
        ({"lr": 0.3}, "not compared: lr 0.3 and 0.1"),
        ({"act": "tlu", "recipe_act": "tlu"}, "not compared: "),
    ],
)
def test_another_recipe_is_named(config: dict, words: str):
    report = report_of_cells(cell_of("batch", FLAT), cell_of("group", FLAT, **config))
    (one,) = report.comparisons
    assert one.why.startswith(words)


def test_a_norm_may_bring_the_slots_of_its_yaml():
    own = {"act": "tlu", "norm_slots": {"act": "tlu"}}
    report = report_of_cells(cell_of("batch", FLAT), cell_of("frn", FLAT, **own))
    assert report.comparisons[0].is_comparable


def test_a_norm_that_does_not_mix_samples_stands_at_every_norm_batch_size():
    cells = [cell_of("batch", FLAT, norm_batch_size=size) for size in (2, 8)]
    (part,) = report_of_cells(*cells, cell_of("group", FLAT)).slices
    assert part.independent == {"group"} and part.lines["group"].keys() == {2, 8}
    assert part.lines["group"][2] is part.lines["group"][8]


def test_both_sizes_may_vary():
    cells = [
        cell_of("batch", FLAT, batch_size=batch, norm_batch_size=norm)
        for batch, norm in ((8, 8), (8, 2), (32, 32), (32, 2))
    ]
    report = report_of_cells(*cells)
    assert [(part.axis, part.fixed) for part in report.slices] == [
        ("norm_batch_size", "batch size 8"),
        ("norm_batch_size", "batch size 32"),
        ("batch_size", "norm batch size = batch size"),
    ]
    assert len({part.slug for part in report.slices}) == 3


def test_the_learning_rate_is_chosen_on_validation_and_never_on_test():
    cells = [
        cell_of("batch", [0.5] * 2, lr=lr, metrics={"test/accuracy": test, "val/accuracy": val})
        for lr, test, val in ((0.1, 0.9, 0.7), (0.3, 0.8, 0.75))
    ]
    (part,) = report_of_cells(*cells).slices
    assert part.lines["batch"][128].best.lr == 0.3
