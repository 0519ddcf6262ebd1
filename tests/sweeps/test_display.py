"""What a sweep prints: titles, a line per cell, a live view, the time left."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass

import pytest
from rich.console import Console

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.spec import Outcome, spoken, tell_apart, title_of
from normexp.records.state import shared_words
from normexp.sweeps import display as module
from normexp.sweeps.display import Display


@dataclass
class AtWork:
    task: tuple[int, ...]
    steps: tuple[int, int]
    since: float
    is_ready: bool = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_counts_the_cells_and_says_why(capsys: pytest.CaptureFixture[str]):
    with Display(["norm=a", "norm=b", "norm=c"]) as display:
        display.ended("norm=a", Outcome("finished", "a", seconds=12.0))
        display.ended("norm=b", Outcome("failed", "b", error="killed by signal 9"))
        display.ended("norm=c lr=x", Outcome("refused", "c", error="lr=x: must be a number"))
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] finished norm=a in 12 s, 24 s left",
        "[2/3] failed   norm=b: killed by signal 9, 12 s left",
        "[3/3] refused  norm=c lr=x: must be a number",
    ]


def test_a_note_of_the_package_is_told_once(capsys: pytest.CaptureFixture[str]):
    with Display(["norm=a", "norm=b"]):
        for _ in range(2):
            logging.getLogger("normexp.somewhere").info("drop_last leaves out %d", 14)
    assert capsys.readouterr().err == "drop_last leaves out 14\n"


def test_a_workers_progress_bar_is_one_line(capsys: pytest.CaptureFixture[str]):
    with Display(["norm=a"]) as display:
        display.print("a [b]:\r\n 0%|  |\r50%|# |\r100%|##|\nend")
    assert capsys.readouterr().err == "a [b]:\n100%|##|\nend\n"


def test_time_left_follows_the_steps_of_what_runs(clock: list[float]):
    display = Display(["a", "b", "c", "d"], num_places=2)
    assert display.time_left(3) == ""  # nothing was measured yet
    display.seconds = [100.0]
    clock[0] = 30.0
    half, fresh = AtWork((1,), (50, 100), since=0.0), AtWork((2,), (0, 0), since=10.0)
    # 30 s for the other half, 100 - 20 s for the fresh one, 100 s for the one that waits
    assert display.time_left(1, [half, fresh]) == spoken((30 + 80 + 100) / 2)
    fresh.is_ready = False
    assert display.time_left(1, [half, fresh]) == ""
    fresh.is_ready, display.is_stopping = True, True
    assert display.time_left(1, [half, fresh]) == ""


def test_time_left_does_not_count_failures():
    display = Display(["a", "b", "c"])
    display.ended("a", Outcome("failed", "a", seconds=0.1))
    assert display.time_left(2) == ""


def test_live_view_has_a_row_per_worker():
    display = Display(["norm=a", "norm=b", "norm=c"], num_places=2)
    file = io.StringIO()
    display.console = Console(file=file, force_terminal=True, width=80)
    with display:
        display.ended("norm=a", Outcome("skipped", "a"))
        display.update([AtWork((1, 2), (5, 40), 0.0), AtWork((2,), (0, 0), 0.0)], num_waiting=0)
    shown = file.getvalue()
    assert "1/3 cells, 1 skipped, 2 running" in shown
    assert "norm=b and 1 more  step 5/40" in shown
    assert "norm=c  starting" in shown


def test_without_a_terminal_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
):
    display = Display(["norm=a"])
    for seconds in (1.0, 61.0, 70.0):
        clock[0] = seconds
        display.update([AtWork((0,), (5, 40), 0.0)], num_waiting=0)
    assert capsys.readouterr().err == "0/1 cells, 1 running, 61 s elapsed: norm=a  step 5/40\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.44, "0.4 s"), (12.2, "12 s"), (170, "3 min"), (7500, "2 h 05 min")]
)
def test_durations_are_spoken(seconds: float, words: str):
    assert spoken(seconds) == words


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
