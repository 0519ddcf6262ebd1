"""Any key that was swept is compared: what differs is the arm, what is equal the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_study import cell_of, report_of_cells

from normexp.verdicts.report import Report, to_json

RNG = np.random.default_rng(31)


def draw(mean: float = 0.9) -> list[float]:
    return (mean + 0.002 * RNG.normal(size=6)).tolist()


def pairs(report: Report) -> list[tuple[str, str, str]]:
    """What is compared, in the order of the report."""
    return [(one.slice.arm_key, one.arm, one.against) for one in report.comparisons]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("act", {"act": "gelu"}),
        ("placement", {"placement": "none"}),  # whatever the value is called
        ("model.width", {"model.width": 64}),
        ("optim.momentum", {"optim": {"momentum": 0.5}}),
    ],
)
def test_a_swept_key_has_a_verdict_against_the_value_as_shipped(key: str, words: dict[str, Any]):
    defaults = {"optim.momentum": 0.9, "model.width": 16}
    swept = cell_of("batch", draw(0.95), defaults=defaults, **words)
    report = report_of_cells(swept, cell_of("batch", draw(0.9), defaults=defaults))
    (one,) = report.comparisons
    assert one.slice.arm_key == key and (one.verdict, one.family_size) == ("better", 1)
    assert "norm=batch" in one.slice.scope
    assert f"{one.arm} is " in report.headline(one.slice)


def test_records_of_an_older_version_need_not_name_a_default():
    """They share a table with those that do, so norms are compared at each value."""
    named = {"data.order": "shuffled"}
    cells = [cell_of("batch", draw()), cell_of("layer", draw(), defaults=named)]
    for norm in ("batch", "layer"):
        cells.append(cell_of(norm, draw(), defaults=named, **{"data.order": "sorted"}))
    assert pairs(report_of_cells(*cells)) == [
        ("norm", "layer", "batch"),
        ("norm", "layer", "batch"),
        ("data.order", "order=sorted", "order=shuffled"),
        ("data.order", "order=sorted", "order=shuffled"),
    ]


def test_values_are_compared_within_each_norm_and_norms_within_each_value():
    cells = [
        cell_of(norm, draw(), act=act) for norm in ("batch", "layer") for act in ("relu", "gelu")
    ]
    report = report_of_cells(*cells)
    assert pairs(report) == [
        ("norm", "layer", "batch"),
        ("norm", "layer", "batch"),
        ("act", "act=gelu", "act=relu"),
        ("act", "act=gelu", "act=relu"),
    ]
    headings = [slice_.title for slice_ in report.slices]
    assert headings == [
        *("resnet on cifar10, act=gelu", "resnet on cifar10, act=relu"),
        *("resnet on cifar10, norm=batch", "resnet on cifar10, norm=layer"),
    ]
    assert {one.family_size for one in report.comparisons} == {4}  # one model, data set and budget
    content = to_json(report)
    assert [one["compared"] for one in content["comparisons"]] == ["norm", "norm", "act", "act"]


def test_the_first_value_that_was_asked_for_is_the_reference_where_none_is_as_shipped():
    cells = [cell_of("batch", draw(), optim={"momentum": value}) for value in (0.5, 0.99, 0.1)]
    asked = {("synthetic", cell[0].directory.parent.name): [range(6)] for cell in cells}
    report = report_of_cells(*cells, asked=asked)
    assert {one.against for one in report.comparisons} == {"momentum=0.5"}
    assert report.comparisons[0].family_size == 3


def test_a_slot_that_is_typed_as_the_norm_sets_it_is_as_shipped():
    """`placement=pre` where the norm's YAML says pre; the first that was asked for is another."""
    cells = [cell_of("batch", draw(), placement=value) for value in ("post", "pre")]
    asked = {("synthetic", cell[0].directory.parent.name): [range(6)] for cell in cells}
    (one,) = report_of_cells(*cells, asked=asked).comparisons
    assert (one.arm, one.against) == ("placement=post", "placement=pre")


def test_a_swept_optimizer_has_its_own_settings():
    """Its settings may differ with it, and those that were swept are part of its name."""
    sgd = [cell_of("batch", draw(), optim={"momentum": value}) for value in (0.5, 0.99)]
    adam = cell_of("batch", draw(), optim={"choice": "adam", "eps": 1e-4})
    report = report_of_cells(*sgd, adam)
    (slice_,) = report.slices
    assert slice_.arm_key == "optim"
    assert slice_.arms == [
        *("optim=adam eps=0.0001", "optim=sgd momentum=0.5", "optim=sgd momentum=0.99")
    ]
    assert all(one.is_comparable for one in report.comparisons)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"act": "gelu", "optim": {"momentum": 0.5}},
         "act and optim.momentum differ at once; train act=relu optim.momentum=0.5, too"),
        ({"data": "digits"}, "data=cifar10 and data=digits have tables of their own"),
        ({"epochs": 12}, "epochs=3 and epochs=12 have tables of their own; train another norm"),
        ({"batch_size": 32, "norm_batch_size": 2},
         "batch_size and norm_batch_size differ at once; train batch_size=128 norm_batch_size=2"),
        (None, "one norm, one size; train another norm in this study"),
    ],
)  # fmt: skip
def test_where_nothing_can_be_compared_a_line_says_what_stands_in_the_way(
    others: dict[str, Any] | None, words: str
):
    cells = [cell_of("batch", draw(), defaults={"optim.momentum": 0.9})]
    if others is not None:
        cells.append(cell_of("batch", draw(), **others))
    report = report_of_cells(*cells)
    assert not report.comparisons
    assert f"nothing to compare: {words}" in " ".join(map(report.headline, report.slices))


def test_arms_are_compared_at_every_size_in_one_family():
    sizes = [
        cell_of("batch", draw(mean), norm_batch_size=size)
        for size, mean in ((2, 0.8), (8, 0.9), (32, 0.95))
    ]
    report = report_of_cells(*sizes, cell_of("layer", draw(0.9)), cell_of("rms", draw(0.9)))
    of_layer = [(one.sizes[0], one.verdict) for one in report.comparisons if one.arm == "layer"]
    assert of_layer == [(2, "better"), (8, "tie"), (32, "worse")]
    # batch at 2 against 32, two norms at three sizes, and the best of each size
    assert {one.family_size for one in report.comparisons} == {1 + 6 + 3}
    means, _, ranking = report.tables_of(report.slices[0])
    marked = {size: ["●" in text for text in means.frame[size]] for size in ("2", "8", "32")}
    assert marked["2"] == [False, True, True] and marked["32"] == [True, False, False]
    assert [*dict.fromkeys(ranking.frame["norm batch size"])] == ["2", "8", "32"]


@pytest.mark.parametrize(("size", "heading"), [(8, "batch size 8"), (4, "norm batch size 4")])
def test_every_cell_stands_in_a_slice(size: int, heading: str):
    """Batch size 32 at two norm batch sizes, and 8 at one."""
    cells = [
        cell_of(norm, draw(), batch_size=batch, norm_batch_size=of_norm, mixes_samples=True)
        for norm in ("batch", "ghost")
        for batch, of_norm in ((32, 2), (32, 8), (8, size))
    ]
    report = report_of_cells(*cells)
    assert {*report.cells} == {cell for slice_ in report.slices for cell in slice_.cells}
    first, last = report.slices
    assert first.sizes == [2, 8] and last.heading.endswith(heading)
    assert [one.sizes for one in report.comparisons_of(last)] == [(size, size)]


def test_of_equal_trainings_the_one_with_the_most_runs_stands_for_all():
    """An arm that was found to mix no samples was asked for at two norm batch sizes."""
    cells = [cell_of("batch", draw(), norm_batch_size=size) for size in (2, 8)]
    twins = [
        cell_of("own", draw()[:n], norm_batch_size=8, mixes_samples=False, tag=tag)
        for n, tag in ((6, "a"), (2, "b"))
    ]
    twins = [[replace(run, config=twins[0][0].config, typed={}) for run in cell] for cell in twins]
    (slice_,) = report_of_cells(*cells, *twins).slices
    assert len(slice_.lines["own"][2].seeds) == 6


def test_arms_that_mix_no_samples_are_compared_once():
    cells = [cell_of("batch", draw(), norm_batch_size=size) for size in (2, 32)]
    cells += [cell_of("layer", draw()), cell_of("rms", draw())]
    report = report_of_cells(*cells, reference="layer")
    count = sum((one.arm, one.against) == ("rms", "layer") for one in report.comparisons)
    assert count == 1 and [len(ranking.places) for ranking in report.rankings] == [3, 3]


def test_only_a_slot_is_as_shipped_by_what_the_norm_sets():
    """A norm that has no `clip` sets none, so `clip=null` is not as shipped."""
    cells = [cell_of("batch", draw(), clip=value) for value in (None, 0.5)]
    cells.append(cell_of("batch", draw(), defaults={"clip": 1.0}))
    asked = {("synthetic", cell[0].directory.parent.name): [range(6)] for cell in cells}
    report = report_of_cells(*cells, asked=asked)
    assert {one.against for one in report.comparisons} == {"clip=1"}


def test_null_is_a_value_where_something_else_ships():
    shipped = cell_of("batch", draw(0.9), defaults={"clip": 1.0})
    report = report_of_cells(cell_of("batch", draw(0.95), clip=None), shipped)
    (one,) = report.comparisons
    assert (one.slice.arm_key, one.verdict) == ("clip", "better")
