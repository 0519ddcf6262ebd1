"""What `normexp.status` says of a study, read from its files, without torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import normexp
from normexp.cli import read_options
from normexp.config.compose import compose_config
from normexp.records.files import file_lock, write_json
from normexp.records.history import CommandEntry, EndEntry, append_entries
from normexp.records.metrics import MetricsWriter
from normexp.records.paths import LOCK_FILE, RESULT_FILE, seed_dir
from normexp.records.result import Result, Status, write_result
from normexp.records.stacks import begin_stack, list_stacks
from normexp.records.state import CellState, read_status
from normexp.status import main

WORDS = ["normexp-train", "-m", "norm=batch,group,bad", "study=s"]


def command(
    words: list[str], cells: dict[str, list[int]], max_attempts: int = 3, **titles: str
) -> CommandEntry:
    """A command for some seeds of cells, whose titles are `norm=<first letters of the id>`."""
    asked = {
        cell: [(titles.get(cell, f"norm={cell.partition('-')[0]}"), seeds)]
        for cell, seeds in cells.items()
    }
    return CommandEntry(str(len(words)), words, "0" * 16, max_attempts, asked)


def write(study: Path, cell: str, seed: int, state: str, attempts: int = 1) -> None:
    status = Status(state)
    run_dir = seed_dir(study / cell, seed)
    run_dir.mkdir(parents=True)
    error = "RuntimeError: no more" if status == "failed" else None
    step = 7 if status == "diverged" else None
    own = {"error": error, "diverged_at_step": step, "attempts": attempts}
    write_result(run_dir, Result(cell, seed, status, {}, {}, {}, **own))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three runs of `batch` have ended; `group` was interrupted; `layer` was never begun."""
    study, seeds = tmp_path / "s", [0, 1, 2]
    study.mkdir()
    asked = {name: seeds for name in ("batch-1", "group-1", "layer-1", "bad-1")}
    refused = EndEntry("bad-1", "norm=bad", seeds, str(len(WORDS)), "refused", "no such norm")
    done = command(["normexp-train", "done"], {"batch-1": [0, 1]})
    append_entries(study, [command(WORDS, asked), refused, done])
    write(study, "batch-1", 0, "finished")
    write(study, "batch-1", 1, "diverged")
    write(study, "batch-1", 2, "failed")
    begin_stack(study, [("group-1", 0), ("group-1", 1)], {"group-1": 0.1}).checkpoint.touch()
    return study


def cell_of(study: Path, title: str) -> CellState:
    (cell,) = [each for each in read_status(study.parent, "s").cells if each.title == title]
    return cell


def test_every_run_that_was_asked_for_has_a_state(study: Path):
    write(study, "copied", 0, "finished")  # which no command asked for
    shutil.copytree(study / "group-1" / "stacks" / "0-1", study / "group-1" / "stacks" / "0-1.bak")
    states = {cell.title: [*cell.states.values()] for cell in read_status(study.parent, "s").cells}
    assert states == {
        "norm=batch": ["finished", "diverged", "failed"],
        "norm=group": ["interrupted", "interrupted", "not started"],
        "norm=layer": ["not started"] * 3,
        "norm=bad": [],
        "copied": ["finished"],
    }
    assert cell_of(study, "norm=batch").notes == ["RuntimeError: no more"]
    assert cell_of(study, "norm=bad").refused == "refused: no such norm"
    assert not read_status(study.parent, "s").is_complete


def test_a_command_typed_again_asks_for_the_cells_that_it_means_now(study: Path):
    """As after an edit of a norm that one of its cells had begun with, or would have."""
    append_entries(study, [command(WORDS, {"batch-2": [0], "bad-2": [0]})])
    cells = {cell.title: cell for cell in read_status(study.parent, "s").cells}
    assert "norm=batch, before its source changed" not in cells  # the other command asks for it
    assert "norm=layer" not in cells  # which had not begun
    assert not cells["norm=bad"].refused and cells["norm=bad"].id == "bad-2"


def test_running_cell_names_its_process_and_how_far_it_is(study: Path):
    run_dir = seed_dir(study / "group-1", 0)
    run_dir.mkdir()
    with MetricsWriter(run_dir / "metrics.csv") as writer:
        writer.add(40, 1, 1280, {"train/loss": 0.5})
    with file_lock(study / "group-1" / LOCK_FILE), file_lock(study / "batch-1" / LOCK_FILE):
        cell = cell_of(study, "norm=group")
        again = cell_of(study, "norm=batch").states
    assert [*cell.states.values()] == ["running", "interrupted", "not started"]
    assert cell.notes == [f"process {os.getpid()}, step 40 at its last checkpoint"]
    assert again == {0: "finished", 1: "diverged", 2: "running"}  # a failed run is tried again


def test_result_that_cannot_be_read_or_was_copied_is_a_state(study: Path):
    shutil.copy(seed_dir(study / "batch-1", 0) / RESULT_FILE, seed_dir(study / "batch-1", 1))
    (seed_dir(study / "batch-1", 0) / RESULT_FILE).write_text('{"schema": 99}')
    (seed_dir(study / "batch-1", 2) / RESULT_FILE).unlink()
    (seed_dir(study / "batch-1", 2) / RESULT_FILE).mkdir()
    cell = cell_of(study, "norm=batch")
    assert [*cell.states.values()] == ["unreadable", "unreadable", "unreadable"]
    assert "schema=99" in cell.notes[0] and "Is a directory" in cell.notes[2]


def test_only_commands_that_lack_something_are_to_be_typed_again(study: Path):
    more = [command(["normexp-train", "norm=batch"], {"batch-1": [2]})]
    more.append(command(["normexp-tune", "x"], {"batch-1": [0]}))  # asks for more
    append_entries(study, more)
    unfinished = read_status(study.parent, "s").unfinished_commands(with_exhausted=True)
    assert [each.command[-1] for each in unfinished] == ["study=s", "norm=batch", "x"]


# --- The entry -----------------------------------------------------------------------------------


def test_entry_says_what_to_type_and_imports_neither_torch_nor_hydra(study: Path):
    script = (
        "import sys; from normexp.status import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if {'torch', 'hydra', 'numpy'} & set(sys.modules) else code)"
    )
    words = [sys.executable, "-c", script, "study=s", f"runs_dir={study.parent}"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "9 runs of 3 cells: 1 finished, 1 diverged, 1 failed, 2 interrupted, 4 not" in run.stdout
    assert "1 failed run: tried again, up to max_attempts=3 times" in run.stdout
    assert "1 refused cell: not trained unless" in run.stdout
    _, _, again = run.stdout.partition("to finish, type again:\n")
    line = f"  python -m normexp.train -m norm=batch,group,bad study=s runs_dir={study.parent}"
    assert again.split("\n") == [line, ""]


def test_a_long_error_is_printed_once(study: Path, capsys):
    error = "RuntimeError: " + "no more of this " * 9
    ends = [
        EndEntry(f"{cell}-1", f"norm={cell}", [0], "9", "refused", error) for cell in ("a", "b")
    ]
    append_entries(study, ends)
    assert main([f"study={study.name}", f"runs_dir={study.parent}"]) == 0
    out = capsys.readouterr().out
    assert out.count("no more of this") == 9 and out.count("refused [1]") == 2


def told(study: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([f"study={study.name}", f"runs_dir={study.parent}"]) == 0
    return capsys.readouterr().out


def test_what_all_cells_share_is_told_once(tmp_path: Path, capsys):
    titles = {f"b-{size}": f"norm=batch norm_batch_size={size} steps=5" for size in (2, 8)}
    (tmp_path / "s").mkdir()
    append_entries(tmp_path / "s", [command(["x"], dict.fromkeys(titles, [0]), **titles)])
    assert told(tmp_path / "s", capsys).count("steps=5") == 1


def test_complete_study_points_to_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = tmp_path / "it's (2)" / "s"
    write(study, "batch-1", 0, "finished")
    out = told(study, capsys)
    assert "1 run of 1 cell: 1 finished" in out
    (line,) = out.partition("complete; next:\n")[2].splitlines()
    *command, own_study, place = shlex.split(line)
    assert command == ["python", "-m", "normexp.report"] and own_study == "study=s"
    assert read_options("report", [own_study, place])["runs_dir"] == str(study.parent)
    assert compose_config([own_study, place])["runs_dir"] == str(study.parent)


def test_cells_of_a_mistaken_command_are_named_and_can_be_forgotten(
    study: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(study / "group-1")
    for seed in (0, 1, 2):
        (seed_dir(study / "batch-1", seed) / RESULT_FILE).unlink(missing_ok=True)
        shutil.rmtree(seed_dir(study / "batch-1", seed))
        write(study, "batch-1", seed, "finished")
    words = [f"study={study.name}", f"runs_dir={study.parent}"]
    assert main([*words, "forget=batch-1"]) == 2
    assert "remove that folder first" in capsys.readouterr().err
    assert main([*words, "forget=layer-2"]) == 2
    assert "such as layer-1" in capsys.readouterr().err
    assert main([*words, "forget=[layer-1,group-1]"]) == 0
    assert "complete but for 1 refused cell: norm=bad\n" in capsys.readouterr().out
    assert main([*words, "forget=REFUSED"]) == 0
    shown = capsys.readouterr().out
    assert "forgotten: norm=bad" in shown and "3 runs of 1 cell: 3 finished" in shown
    assert "complete; next:" in shown
    assert main([*words, "forget=REFUSED"]) == 2
    assert "no cell of study=" in capsys.readouterr().err
    append_entries(study, [command(["normexp-train", "bad"], {"bad-1": [0]})])  # asks again
    assert cell_of(study, "norm=bad").states == {0: "not started"}


def test_cells_are_forgotten_by_words_of_their_titles(study: Path):
    words = [f"study={study.name}", f"runs_dir={study.parent}"]
    assert main([*words, "forget=norm=group"]) == 2  # it was begun
    assert main([*words, "forget=[norm=layer,norm=bad]"]) == 0
    assert {cell.id for cell in read_status(study.parent, "s").cells} == {"batch-1", "group-1"}


def test_a_command_is_forgotten_by_its_number_with_the_seeds_that_it_added(study: Path, capsys):
    """A mistaken command: a seed too many, and a cell that nobody wanted."""
    words = [f"study={study.name}", f"runs_dir={study.parent}"]
    before = read_status(study.parent, "s").cells
    append_entries(study, [command(["normexp-train"], {"batch-1": [0, 3], "scale-1": [0]})])
    write(study, "batch-1", 3, "finished")
    write(study, "scale-1", 0, "finished")
    with file_lock(study / "scale-1" / LOCK_FILE):
        assert main([*words, "forget=3"]) == 2
        assert "stop that command first" in capsys.readouterr().err
    assert main([*words, "forget=3"]) == 0
    out = capsys.readouterr().out
    assert "forgotten: command 3\n" in out and str(study / "scale-1" / "seed-0") in out
    assert read_status(study.parent, "s").cells == before
    assert main([*words, "forget=3"]) == 2 and main([*words, "forget=9"]) == 2
    assert "the study has 1, 2" in capsys.readouterr().err
    again = CommandEntry("4", ["normexp-train"], "0" * 16, 3, {"scale-1": [("norm=scale", [0])]})
    append_entries(study, [again])
    assert cell_of(study, "norm=scale").states == {0: "finished"}


def test_a_command_typed_again_is_one_command_and_forgotten_as_one(study: Path, capsys):
    again = [replace(command(WORDS, {"batch-1": [0]}), id=f"again-{n}") for n in (1, 2)]
    append_entries(study, again)  # for fewer cells than before, as after an edit
    shown = told(study, capsys)
    assert "  3  " in shown and "(typed 2 times, last at" in shown and "  4  " not in shown
    assert main([f"study={study.name}", f"runs_dir={study.parent}", "forget=3"]) == 0
    commands = read_status(study.parent, "s").history.commands
    assert [one.id for one in commands] == [str(len(WORDS)), "2"]


def test_an_interrupted_run_says_where_it_resumes(study: Path):
    (stack,) = list_stacks(study, ["group-1"])
    write_json(stack.directory / "progress.json", {"step": 268, "total_steps": 2400})
    assert cell_of(study, "norm=group").notes == ["resumes at step 268 of 2400"]
    stack.checkpoint.unlink()
    assert cell_of(study, "norm=group").notes == []


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A study of one cell, whose only run has failed three times."""
    study = tmp_path / "s"
    write(study, "batch-1", 0, "failed", attempts=3)
    return study


TITLE = {"batch-1": "norm=batch evaluate_with=[running]"}


@pytest.mark.parametrize(
    ("typed", "max_attempts", "next_line"),
    [
        (["norm=batch"], 3, "max_attempts"),
        (["norm=batch", "max_attempts=4"], 4, "to finish"),
        (["max_attempts=9", "retry_failed=false"], 1, "max_attempts"),
    ],
)
def test_command_that_would_not_try_again_is_shown_as_one_that_does(
    failing: Path, capsys, typed: list[str], max_attempts: int, next_line: str
):
    line = command(["normexp-train", *typed], {"batch-1": [0]}, max_attempts, **TITLE)
    append_entries(failing, [line])
    result = seed_dir(failing / "batch-1", 0) / RESULT_FILE
    result.write_text(result.read_text().replace("no more", "no more [/data/x]"))
    out = told(failing, capsys)
    *_, first, line, end = out.split("\n")
    assert next_line in first and end == ""
    assert ("max_attempts=4" in line) and "retry_failed" not in line
    assert "no more [/data/x]" in out and "evaluate_with=[running]" in out  # brackets are text


def test_running_study_has_nothing_to_type(failing: Path, capsys):
    append_entries(failing, [command(["normexp-train"], {"batch-1": [0]})])
    with file_lock(failing / "batch-1" / LOCK_FILE):
        assert "running now" in told(failing, capsys)


def test_moved_study_is_told_where_it_lies_now(failing: Path, capsys):
    words = ["normexp-train", "x", "study=s", "runs_dir=/old"]
    more = [command(words, {"batch-1": [1]}), command(["normexp-tune", "y", "study=s"], {})]
    append_entries(failing, more)
    moved = failing.rename(failing.parent / "t-search")
    _, _, again = told(moved, capsys).partition("to finish, type again:\n")
    place = f"runs_dir={moved.parent}"
    assert again.splitlines() == [
        f"  python -m normexp.train x study=t-search {place}",
        f"  python -m normexp.tune y study=t {place}",
    ]


@pytest.mark.slow
def test_five_thousand_results_take_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study, titles = tmp_path / "s", {}
    metrics = {f"{part}/{name}": 0.5 for part in ("val", "test") for name in ("loss", "accuracy")}
    for number in range(1250):
        config = {"norm": "batch", "batch_size": 32, "lr": 0.1 + number, "num_steps": 600}
        cell_id = f"batch-convnet-digits-b32-lr{config['lr']}"
        for seed in range(4):
            run_dir = seed_dir(study / cell_id, seed)
            run_dir.mkdir(parents=True)
            write_result(run_dir, Result(cell_id, seed, Status.FINISHED, config, metrics, {}))
        (study / cell_id / "stacks" / "0-3").mkdir(parents=True)
        titles[cell_id] = f"norm=batch lr={number}"
    append_entries(study, [command(WORDS, dict.fromkeys(titles, [0, 1, 2, 3]), **titles)])
    began = time.process_time()  # on one core 4 seconds and 3
    assert "5000 runs of 1250 cells: 5000 finished" in told(study, capsys)
    listed = time.process_time()
    assert len(normexp.load_study("s", tmp_path)) == 5000
    assert max(listed - began, time.process_time() - listed) < 30
