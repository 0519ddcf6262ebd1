"""What cells are called where those of several commands stand side by side."""

from __future__ import annotations

import pytest

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.sweeps.display import shared_words, tell_apart, title_of


@pytest.mark.parametrize(
    ("typed", "title"),
    [
        ("norm=group study=s runs_dir=/r replicas=2", "norm=group batch_size=32"),
        (
            "norm=batch epochs=3 norm_batch_size=2",
            "norm=batch batch_size=32 norm_batch_size=2 epochs=3",
        ),
        (
            "norm=group norm.num_groups=2 +norm.x=1",
            "norm=group batch_size=32 norm.num_groups=2 +norm.x=1",
        ),
        (
            "trainer=cpu trainer.precision=64-true",
            "norm=batch batch_size=32 trainer.precision=64-true",
        ),
    ],
)
def test_title_is_the_norm_the_sizes_and_what_was_typed_of_the_training(typed: str, title: str):
    (cell,) = compose_cells(parse_command(typed.split()))
    assert title_of(cell) == title


def test_cell_of_a_sweep_is_called_as_if_it_were_alone():
    line = "-m norm=batch,nothing epochs=3 study=s"
    cells = compose_cells(parse_command(line.split()))
    assert [title_of(cell) for cell in cells] == [
        "norm=batch batch_size=32 epochs=3",
        "norm=nothing epochs=3",
    ]


def test_words_that_all_share_are_told_once():
    shared, own = tell_apart(["norm=a lr=1 act=x", "norm=a lr=2 act=x", "norm=a act=x"])
    assert (shared, own) == ("act=x", ["norm=a lr=1", "norm=a lr=2", "norm=a"])
    assert tell_apart(["norm=a lr=1"]) == ("", ["norm=a lr=1"])
    assert tell_apart([]) == ("", [])


def test_cell_that_came_of_several_sizes_is_what_they_share():
    titles = ["norm=none norm_batch_size=2 lr=1", "norm=none norm_batch_size=8 lr=1"]
    assert shared_words(titles) == "norm=none lr=1"
