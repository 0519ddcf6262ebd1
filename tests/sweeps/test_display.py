"""What a command shows while it trains, of states as the files of a study give them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from normexp.training.records.journal import Request
from normexp.training.records.result import Measured, Result, Status
from normexp.training.records.stack_state import StackState
from normexp.training.records.study import CellState
from normexp.training.studies.terminal import commands_to_look, without_shared_words
from normexp.training.sweeps import display as display_module
from normexp.training.sweeps.display import Display
from normexp.training.sweeps.machine import console_for_progress


def cell(name: str, *, ended: int = 0, status: Status = Status.FINISHED, **stack) -> CellState:
    """A cell of three runs, of which some have ended; with `step` and `total` one trains."""
    state = CellState(name, Request([f"norm={name}", "batch_size=32", "epochs=3"], []))
    for seed in range(3):
        state.states[seed] = status if seed < ended else Status.NOT_STARTED
    metrics = {"test/accuracy": 0.97, "test/loss": 0.1}
    error = "boom" if status is Status.FAILED else None
    state.results = [
        Result(name, seed, status, {}, {}, Measured(metrics=metrics), error)
        for seed in range(ended)
    ]
    if stack:
        state.stacks = [StackState(Path(name), [(name, 0), (name, 1)], "process 1", **stack)]
    return state


def screen(monkeypatch: pytest.MonkeyPatch, *, width: int, is_terminal: bool = True) -> io.StringIO:
    """What displays write, to a terminal of this width or to a file."""
    out = io.StringIO()
    options = {"width": width, "force_terminal": is_terminal, "color_system": None}
    monkeypatch.setattr(
        display_module, "console_for_progress", lambda: Console(file=out, **options)
    )
    return out


def new_lines(out: io.StringIO) -> list[str]:
    """What was written since the last call, line by line."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    out.seek(0)
    out.truncate()
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_training_is_shown_in_full_on_one_line_or_two(monkeypatch, width: int):
    out = screen(monkeypatch, width=width)
    state = cell("a_norm_with_quite_a_long_name_of_its_own", step=12, total=4800)
    state.stacks[0] = StackState(
        Path("s"),
        state.stacks[0].members,
        "p",
        1200,
        4800,
        {"train/loss": 0.1234, "val/accuracy": 0.9},
    )
    with Display([state]) as display:
        display.update([state])
        head, *lines = new_lines(out)
    assert head.startswith("0/3 runs") and head.endswith("elapsed")  # nothing is guessed yet
    assert lines[0].startswith("norm=a_norm_with_quite_a_long_name_of_its_own")
    assert lines[-1].endswith("step 1200/4800  loss 0.123  val 0.9")
    assert [len(line) <= width for line in lines] == [True] * (2 if width == 80 else 1)


def test_a_command_shows_its_bar_before_anything_trains(monkeypatch):
    out = screen(monkeypatch, width=80)
    with Display([cell("batch"), cell("group")]) as display:
        display.update([cell("batch"), cell("group")])
        head, line = new_lines(out)
    assert head.startswith("0/6 runs") and line == "starting"


def test_time_left_is_guessed_from_a_twentieth_of_the_work_on(monkeypatch):
    clock, out = [0.0], screen(monkeypatch, width=120)
    monkeypatch.setattr(display_module.time, "monotonic", lambda: clock[0])
    with Display([cell("batch")]) as display:
        for step, seconds, left in ((0, 0, None), (40, 4, None), (100, 10, "90 s left")):
            clock[0] = seconds
            display.update([cell("batch", step=step, total=1000)])
            row = new_lines(out)[1]
            assert row.endswith(left or f"step {step}/1000"), row


def test_counts_of_ended_cells_never_repeat_or_shrink(monkeypatch):
    out = screen(monkeypatch, width=200, is_terminal=False)
    before = [cell("batch"), cell("group", ended=3), cell("layer"), cell("rms")]
    with Display(before) as display:
        failed = cell("layer", ended=3, status=Status.FAILED)
        refused = cell("rms")
        refused.refused = "too few channels"
        display.update([cell("batch", ended=3), before[1], failed, before[3]])
        display.update([cell("batch", ended=3), before[1], failed, refused])
    assert new_lines(out) == [
        "[6/12 runs] finished norm=batch  test/accuracy 0.9700 (sd 0.0000)",
        "[9/12 runs] failed   norm=layer  test/accuracy 0.9700 (sd 0.0000)",
        "[12/12 runs] refused  norm=rms",
    ]


def test_without_a_terminal_what_trains_is_printed_once_a_minute(monkeypatch):
    clock, out = [0.0], screen(monkeypatch, width=200, is_terminal=False)
    monkeypatch.setattr(display_module.time, "monotonic", lambda: clock[0])
    with Display([cell("batch"), cell("group")]) as display:
        for seconds in (0, 30, 61, 90, 125):
            clock[0] = seconds
            display.update([cell("batch", step=seconds, total=200), cell("group")])
    assert new_lines(out) == [
        "0/6 runs, 61 s elapsed, 9 min left",
        "  norm=batch  step 61/200  2 min left",
        "0/6 runs, 2 min elapsed, 8 min left",
        "  norm=batch  step 125/200  75 s left",
    ]


def test_titles_leave_out_what_all_share_but_the_norm():
    titles = ["norm=batch batch_size=32 lr=1", "norm=batch batch_size=32 lr=2"]
    assert without_shared_words(titles) == (
        ["batch_size=32"],
        ["norm=batch lr=1", "norm=batch lr=2"],
    )
    assert without_shared_words(titles[:1]) == ([], titles[:1])
    assert without_shared_words([]) == ([], [])


def test_only_a_terminal_is_drawn_on(monkeypatch: pytest.MonkeyPatch):
    """A notebook and some logs ask for colours, and cannot go back a line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not console_for_progress().is_terminal


def test_a_study_that_is_not_there_is_not_named(tmp_path: Path):
    state = cell("batch", status=Status.NOT_STARTED)
    state.directory = tmp_path / "gone" / "batch"
    assert commands_to_look([state]) == []
    (tmp_path / "gone").mkdir()
    status, report = commands_to_look([state])
    assert "normexp.status study=gone" in status and "normexp.report study=gone" in report
