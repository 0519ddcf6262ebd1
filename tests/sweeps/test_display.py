"""What a sweep prints: titles, a line per cell, a live view, the time left."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.outcome import Outcome
from normexp.config.spec import format_duration, split_shared_words, title_of
from normexp.records.logs import messages_about
from normexp.records.result import Status
from normexp.records.state import shared_words
from normexp.sweeps import display as module
from normexp.sweeps.display import Display
from normexp.sweeps.worker import WorkerState


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def seat(*positions: int, steps: tuple[int, int] = (0, 0), since: float = 0.0) -> WorkerState:
    seat = WorkerState()
    seat.take(positions)
    seat.is_ready, seat.steps, seat.since = True, steps, since
    return seat


def test_lines_count_the_cells_and_say_why_and_notes_are_told_once(capsys):
    with Display(["norm=a", "norm=b", "norm=c"]) as display:
        display.total = 15
        display.ended("norm=a", Outcome(Status.FINISHED, "a", seconds=12.0), 5, 2)
        for _ in range(2):
            logging.getLogger("normexp.somewhere").info("drop_last leaves out %d", 14)
        for cell in ("norm=b", "norm=c"):
            with messages_about(cell):
                logging.getLogger("normexp.somewhere").warning("few values")
        display.ended("norm=b", Outcome(Status.FAILED, "b", error="killed by signal 9"), 5, 1)
        display.print("a [b]:\r\n 0%|  |\r50%|# |\r100%|##|\nend")  # a worker's progress bar
    assert capsys.readouterr().err.splitlines() == [
        "[5/15 runs] finished norm=a in 12 s, 24 s left",
        "drop_last leaves out 14",
        "norm=b: few values",
        "[10/15 runs] failed   norm=b: killed by signal 9, 12 s left",
        "a [b]:",
        "100%|##|",
        "end",
    ]


def test_time_left_follows_the_steps_of_what_runs(clock: list[float]):
    display = Display(["a", "b", "c", "d"], num_slots=2)
    display.ended("a", Outcome(Status.FAILED, "a", seconds=0.1), 1, 3)
    assert display.time_left(3) == ""  # no training was measured yet
    display.seconds = [100.0]
    clock[0] = 30.0
    half, fresh = seat(1, steps=(50, 100)), seat(2, since=10.0)
    # 30 s for the other half, 100 - 20 s for the fresh one, 100 s for the one that waits
    assert display.time_left(1, [half, fresh]) == format_duration((30 + 80 + 100) / 2)
    fresh.is_ready = False
    assert display.time_left(1, [half, fresh]) == ""
    fresh.is_ready, display.is_stopping = True, True
    assert display.time_left(1, [half, fresh]) == ""


def test_live_view_has_a_row_per_worker():
    display = Display(["norm=a", "norm=b", "norm=c"], num_slots=2)
    file = io.StringIO()
    display.console = Console(file=file, force_terminal=True, width=80)
    with display:
        display.total = 9
        display.ended("norm=a", Outcome(Status.SKIPPED, "a"), 3, 2)
        display.update([seat(1, 2, steps=(5, 40)), seat(2)], num_waiting=0)
    for shown in (
        "3/9 runs, 1 skipped, 2 running",
        "norm=b and 1 more  step 5/40",
        "norm=c  starting",
    ):
        assert shown in file.getvalue()


def test_without_a_terminal_a_line_now_and_then(clock: list[float], capsys):
    display = Display(["norm=a"])
    for seconds in (1.0, 61.0, 70.0):
        clock[0] = seconds
        display.update([seat(0, steps=(5, 40))], num_waiting=0)
    assert capsys.readouterr().err == "0/1 runs, 1 running, 61 s elapsed: norm=a  step 5/40\n"


def test_durations_are_spoken():
    assert list(map(format_duration, (0.44, 12.2, 170, 7500))) == [
        "0.4 s",
        "12 s",
        "3 min",
        "2 h 05 min",
    ]


@pytest.mark.parametrize(
    ("typed", "titles"),
    [
        ("norm=group study=s runs_dir=/r replicas=2", ["norm=group batch_size=32"]),
        (
            "norm=group norm.num_groups=2 +norm.x=1",
            ["norm=group batch_size=32 norm.num_groups=2 +norm.x=1"],
        ),
        (
            "trainer=cpu trainer.precision=64-true norm_batch_size=2",
            ["norm=batch batch_size=32 norm_batch_size=2 trainer.precision=64-true"],
        ),
        (  # as if each were alone
            "-m norm=group,none norm.num_groups=2 study=s",
            ["norm=group batch_size=32 norm.num_groups=2", "norm=none norm.num_groups=2"],
        ),
    ],
)
def test_title_is_the_norm_the_sizes_and_what_was_typed_of_the_training(typed, titles):
    assert list(map(title_of, compose_cells(parse_command(typed.split())))) == titles


def test_words_that_titles_share():
    shared, own = split_shared_words(["norm=a lr=1 act=x", "norm=a lr=2 act=x", "norm=a act=x"])
    assert (shared, own) == ("act=x", ["norm=a lr=1", "norm=a lr=2", "norm=a"])
    assert split_shared_words(["norm=a lr=1"]) == ("", ["norm=a lr=1"])
    assert split_shared_words([]) == ("", [])
    sizes = ["norm=none norm_batch_size=2 lr=1", "norm=none norm_batch_size=8 lr=1"]
    assert shared_words(sizes) == "norm=none lr=1"  # one cell


def test_a_training_that_takes_longer_than_others_has_no_time_left_of_0(clock: list[float]):
    display = Display(["a", "b"])
    display.ended("a", Outcome(Status.FINISHED, "a", seconds=10.0), 1, 1)
    clock[0] = 30.0
    assert display.time_left(0, [seat(1)]) == ""
    assert display.time_left(0, [seat(1, since=25.0)]) == format_duration(5.0)
