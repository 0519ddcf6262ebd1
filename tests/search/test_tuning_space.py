"""Hydra's sweep grammar as a search space."""

from __future__ import annotations

import math

import pytest

from normexp.config.compose import parse_overrides
from normexp.config.grid import is_searched
from normexp.errors import UserError
from normexp.search.points import Choice, Range, Space, read_space


def space_of(*texts: str) -> Space:
    return read_space(parse_overrides(texts))


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("lr=tag(log,interval(1e-3,1))", Range("lr", 1e-3, 1.0, log=True, whole=False)),
        ("optim.momentum=interval(0,0.99)", Range("optim.momentum", 0.0, 0.99, False, False)),
        ("epochs=int(interval(2,9))", Range("epochs", 2, 9, log=False, whole=True)),
        ("norm.num_groups=choice(2,4,8)", Choice("norm.num_groups", ("2", "4", "8"))),
        ("epochs=range(1,9,3)", Choice("epochs", ("1", "4", "7"))),
        ("lr=range(0.1,0.5,0.2)", Choice("lr", ("0.1", "0.3"))),
        ("optim=choice(sgd,adamw)", Choice("optim", ("sgd", "adamw"))),
        ("+optim.betas=choice([1,2],[1,3])", Choice("+optim.betas", ("[1,2]", "[1,3]"))),
    ],
)  # fmt: skip
def test_each_kind_of_dimension_is_read(text: str, dimension: Choice | Range):
    assert space_of(text).dimensions == (dimension,)


def test_comma_list_is_a_grid_and_no_dimension():
    texts = ["norm=batch,group", "lr=0.1", "norm=glob(*)", "lr=choice(0.1,1)", "lr=interval(0.1,1)"]
    assert [is_searched(o) for o in parse_overrides(texts)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("lr=interval(1,0.1)", "low must be below high; try interval(0.1,1)"),
        ("lr=interval(1,1)", "low must be below high"),
        ("lr=tag(log,interval(0,1))", "a log scale begins above 0"),
        ("lr=tag(square,interval(0.1,1))", "tag square is unknown"),
        ("lr=tag(log,range(1,9))", "only an interval has a log scale"),
        ("lr=choice(0.1)", "1 value to search in"),
        ("lr=range(3,3)", "0 value to search in"),
    ],
)
def test_space_without_values_is_refused(text: str, part: str):
    with pytest.raises(UserError) as caught:
        space_of(text)
    assert str(caught.value).startswith(text) and part in str(caught.value)


def test_points_of_choices_are_their_product_and_an_interval_has_none():
    space = space_of("optim=choice(sgd,adamw)", "epochs=range(1,3)")
    points = [("sgd", "1"), ("sgd", "2"), ("adamw", "1"), ("adamw", "2")]
    assert [tuple(point.values()) for point in space.points()] == points
    assert space.num_points() == 4
    assert space_of("epochs=range(1,3)", "lr=interval(0.1,1)").num_points() is None


def test_probes_show_every_choice_and_both_ends():
    space = space_of("optim=choice(sgd,adamw)", "lr=interval(0.1,1)")
    assert [tuple(point.values()) for point in space.probes()] == [
        ("sgd", "0.1"),
        ("adamw", "0.1"),
        ("sgd", "1.0"),
    ]


def test_values_have_four_digits_and_stay_between_the_ends():
    dimension = Range("lr", 0.0123456, 0.987654, log=True, whole=False)
    assert dimension.text_of(0.1234567) == "0.1235"
    assert dimension.text_of(0.0123456) == "0.01235"
    assert dimension.text_of(0.987654) == "0.987654"
    assert Range("epochs", 1, 9, log=False, whole=True).text_of(3) == "3"


def test_edge_is_a_twentieth_of_the_interval_on_its_own_scale():
    log = Range("lr", 1e-4, 1.0, log=True, whole=False)
    for fraction, is_edge in ((0.04, True), (0.06, False), (0.94, False), (0.96, True)):
        assert log.is_at_edge(repr(math.exp(math.log(1e-4) * (1 - fraction)))) is is_edge
    assert not Range("lr", 0.0, 1.0, log=False, whole=False).is_at_edge("0.06")
    choice = Choice("lr", ("0.3", "0.1", "1.0"))
    assert [choice.is_at_edge(text) for text in choice.texts] == [False, True, True]
    assert not Choice("optim", ("sgd", "adamw", "rmsprop")).is_at_edge("sgd")
    assert not Choice("lr", ("0.1", "1.0")).is_at_edge("0.1")  # two choices are all edge
