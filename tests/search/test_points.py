"""Planning a search from a command line: its space, its searches, refusals."""

from __future__ import annotations

import pytest

from normexp.cli import parse_command
from normexp.errors import UserError
from normexp.training.config.choices import parse_overrides
from normexp.training.search.points import Search, plan_searches
from normexp.training.search.space import Dimension, Space, read_space

LR = "lr=interval(1e-3,1)"


def searches_of(*words: str) -> list[Search]:
    return plan_searches(parse_command(list(words)))


def test_grid_is_one_search_for_each_of_its_points():
    searches = searches_of(LR, "norm=batch,group", "epochs=2", "tune.points=5")
    assert [search.title for search in searches] == ["norm=batch", "norm=group"]
    first, second = ([point for point, _ in search.trials] for search in searches)
    assert first == second and len(first) == 5


def test_search_and_report_differ_in_study_and_seeds_alone():
    (plan,) = searches_of(LR, "tune.seeds=2", "replicas=5", "study=mine")
    search, report = (plan.cell({"lr": "0.02"}, is_report=report) for report in (False, True))
    assert (search.config["study"], search.seeds) == ("mine-search", [1000, 1001])
    assert (report.config["study"], report.seeds) == ("mine", [0, 1, 2, 3, 4])
    assert search.id == report.id
    assert search.settings.lr == 0.02


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "nothing to search"),
        (["lr=0.1,0.3"], "nothing to search"),
        ([LR, "tune.metric=test/accuracy"], "nothing is chosen on test"),
        ([LR, "tune.metric=train/loss"], "nothing is chosen on test"),
        ([LR, "tune.first_seed=2"], "overlap: a result must come from fresh seeds"),
        ([LR, "tune.first_seed=3", "replicas=4"], "try tune.first_seed=4"),
        ([LR, "tune.seeds=1"], "tune.seeds=1: must be greater than 1"),
        ([LR, "tune.points=0"], "tune.points=0"),
        ([LR, "tune.metric=val/accuracy@precise"], "evaluate_with=[running,precise]"),
        (
            [LR, "tune.metric=val/accuracy@tiles6"],
            "tune.metric=val/accuracy@tiles6: needs evaluate_at=[tiles6]",
        ),
        (["lr=interval(0,1)"], "lr=interval(0,1): a log scale begins above 0"),
        (["optim.momentum=interval(0.5,1.5)"], "optim.momentum=1."),
        (["seed=choice(1,2)"], "seed=choice(1,2)"),
        ([LR, "study=a,b"], "study=a,b"),
        (["lrr=choice(1,2)"], "lrr: unknown key; did you mean lr"),
        ([LR, "tune.point=3"], "did you mean tune.points"),
        (["norm=group", "norm.num_grups=choice(2,4)"], "did you mean norm.num_groups"),
        (["optim=choice(sgd,adamm)"], "optim=adamm: no such optim"),
        (["lr=interval(1,0.1)"], "lr=interval(1,0.1): low must be below high"),
        (["lr=interval(1,1)"], "lr=interval(1,1): low"),
        (["lr=tag(log,interval(0,1))"], "lr=tag(log,interval(0,1)): a log scale begins above 0"),
        (["lr=tag(square,interval(0.1,1))"], "square"),
        (["lr=tag(log,range(1,9))"], "lr=tag(log,range(1,9))"),
        (["lr=choice(0.1)"], "lr=choice(0.1): 1 values"),
        (["epochs=int(interval(2,9))"], "whole numbers are a range, as in epochs=range(2,10)"),
        (["lr=range(3,3)"], "0 values"),
    ],
)
def test_mistake_is_refused_before_any_work(words: list[str], part: str):
    with pytest.raises(UserError) as caught:
        searches_of(*words)
    assert part in str(caught.value)


def space_of(*texts: str) -> Space:
    return read_space(parse_overrides(texts))


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("lr=tag(log,interval(1e-3,1))", Dimension("lr", (), 1e-3, 1.0, log=True)),
        ("lr=interval(1e-3,1)", Dimension("lr", (), 1e-3, 1.0, log=True)),
        ("optim.momentum=interval(0,0.99)", Dimension("optim.momentum", (), 0.0, 0.99)),
        ("norm.num_groups=choice(2,4,8)", Dimension("norm.num_groups", ("2", "4", "8"))),
        ("epochs=range(1,9,3)", Dimension("epochs", ("1", "4", "7"))),
        ("lr=range(0.1,0.5,0.2)", Dimension("lr", ("0.1", "0.3"))),
        ("optim=choice(sgd,adamw)", Dimension("optim", ("sgd", "adamw"))),
        ("+optim.betas=choice([1,2],[1,3])", Dimension("+optim.betas", ("[1,2]", "[1,3]"))),
    ],
)  # fmt: skip
def test_each_kind_of_dimension_is_read(text: str, dimension: Dimension):
    assert space_of(text).dimensions == (dimension,)


def texts(space: Space, count: int) -> list[tuple[str, ...]]:
    return [tuple(point.values()) for point in space.points(count)]


def test_choices_with_few_combinations_are_all_tried():
    space = space_of("optim=choice(sgd,adamw)", "epochs=range(1,3)")
    grid = [("sgd", "1"), ("sgd", "2"), ("adamw", "1"), ("adamw", "2")]
    assert texts(space, 4) == texts(space, 20) == grid
    assert len(set(texts(space, 3))) == 3


GOLDEN = [("0.01698", "adamw", "8"), ("0.2239", "sgd", "4"), ("0.1371", "adamw", "7")]
MIXED = ("lr=interval(1e-3,1)", "optim=choice(sgd,adamw)", "epochs=range(2,10)")


@pytest.mark.parametrize(
    "space",
    [space_of("lr=interval(1e-3,1)"), space_of(*MIXED), space_of("lr=range(1,40)", MIXED[1])],
    ids=lambda space: " ".join(space.keys),
)
def test_longer_search_keeps_the_points_of_a_shorter_one(space: Space):
    longest = space.points(70)
    assert len({tuple(point.items()) for point in longest}) == 70
    for count in (1, 5, 8, 33):
        assert space.points(count) == longest[:count]


def test_points_are_the_same_in_every_process_and_release():
    """A search goes on after an update only if the sequence stays as it is."""
    assert texts(space_of(*MIXED), 3) == GOLDEN
