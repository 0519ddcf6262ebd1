"""What `normexp.status` says of a study, read from its files, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from normexp.config.help import conf_dir
from normexp.records.files import file_lock
from normexp.records.history import CellEntry, CommandEntry, append_entries
from normexp.records.metrics import MetricsWriter
from normexp.records.paths import LOCK_FILE, seed_dir
from normexp.records.result import Result, Status, write_result
from normexp.records.stacks import begin_stack
from normexp.records.state import MAX_ATTEMPTS, CellState, read_status
from normexp.status import main

WORDS = ["normexp-train", "-m", "norm=batch,group,bad", "study=s"]


def command(words: list[str], cells: dict[str, list[int]]) -> CommandEntry:
    return CommandEntry(words, "0" * 16, cells)


def write(study: Path, cell: str, seed: int, status: Status, attempts: int = 1) -> None:
    run_dir = seed_dir(study / cell, seed)
    run_dir.mkdir(parents=True)
    error = "RuntimeError: no more" if status == "failed" else None
    step = 7 if status == "diverged" else None
    result = Result(
        cell, seed, status, {}, {}, {}, error=error, diverged_at_step=step, attempts=attempts
    )
    write_result(run_dir, result)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three runs of `batch` have ended; `group` was interrupted; `layer` was never begun."""
    study = tmp_path / "s"
    study.mkdir()
    titles = ["batch", "batch again", "group", "layer", "bad"]
    append_entries(study, [CellEntry(f"d-{title}", f"norm={title}", [0, 1, 2]) for title in titles])
    known = {"batch": "b-1", "batch again": "b-1", "group": "g-1"}
    for title, cell_id in known.items():
        append_entries(study, [CellEntry(f"d-{title}", f"norm={title}", [0, 1, 2], cell_id)])
    append_entries(
        study, [CellEntry("d-bad", "norm=bad", [0, 1, 2], error="refused: no such norm")]
    )
    seeds = [0, 1, 2]
    asked = {f"d-{title}": seeds for title in ("batch", "group", "bad")}
    append_entries(study, [command(WORDS, asked)])
    one = ["normexp-train", "norm=batch"]
    append_entries(study, [command([*one, "replicas=2"], {"d-batch": [0, 1]})])
    write(study, "b-1", 0, "finished")
    write(study, "b-1", 1, "diverged")
    write(study, "b-1", 2, "failed")
    begin_stack(study, [("g-1", 0), ("g-1", 1)], {"g-1": 0.1}).checkpoint.touch()
    return study


def states(cell: CellState) -> Counter[str]:
    return Counter(cell.states.values())


def cell_of(study: Path, title: str) -> CellState:
    (cell,) = [each for each in read_status(study.parent, "s").cells if each.title == title]
    return cell


def test_every_run_that_was_asked_for_has_a_state(study: Path):
    status = read_status(study.parent, "s")
    by_title = {cell.title: cell for cell in status.cells}
    assert by_title.keys() == {"norm=batch", "norm=group", "norm=layer", "norm=bad"}
    assert states(by_title["norm=batch"]) == {"finished": 1, "diverged": 1, "failed": 1}
    assert by_title["norm=batch"].notes == ["RuntimeError: no more"]
    assert states(by_title["norm=group"]) == {"interrupted": 2, "not started": 1}
    assert states(by_title["norm=layer"]) == {"not started": 3}
    assert by_title["norm=bad"].refused == "refused: no such norm"
    assert not by_title["norm=bad"].states
    assert not status.is_complete


def test_cell_of_an_edited_source_keeps_its_title(study: Path):
    append_entries(study, [CellEntry("d-own", "norm=own", [0], cell_id="o-1")])
    write(study, "o-1", 0, "finished")
    append_entries(study, [CellEntry("d-own", "norm=own", [0], cell_id="o-2")])
    titles = {cell.title for cell in read_status(study.parent, "s").cells}
    assert {"norm=own", "norm=own, before its source changed"} <= titles and "o-1" not in titles


def test_running_cell_names_its_process_and_how_far_it_is(study: Path):
    run_dir = seed_dir(study / "g-1", 0)
    run_dir.mkdir()
    with MetricsWriter(run_dir / "metrics.csv") as writer:
        writer.add(40, 1, 1280, {"train/loss": 0.5})
    with file_lock(study / "g-1" / LOCK_FILE):
        cell = cell_of(study, "norm=group")
        assert states(cell) == {"running": 1, "interrupted": 1, "not started": 1}
        assert cell.notes == [f"process {os.getpid()}, step 40 at its last checkpoint"]


def test_result_that_cannot_be_read_or_was_copied_is_a_state(study: Path):
    shutil.copytree(study / "g-1" / "stacks" / "0-1", study / "g-1" / "stacks" / "0-1.bak")
    shutil.copy(seed_dir(study / "b-1", 0) / "result.json", seed_dir(study / "b-1", 1))
    (seed_dir(study / "b-1", 0) / "result.json").write_text('{"schema": 99}')
    cell = cell_of(study, "norm=batch")
    assert states(cell) == {"unreadable": 2, "failed": 1}
    assert "schema=99" in cell.notes[0]
    assert states(cell_of(study, "norm=group")) == {"interrupted": 2, "not started": 1}


def test_cell_that_no_command_asked_for_is_counted_as_well(study: Path):
    write(study, "copied", 0, "finished")
    assert read_status(study.parent, "s").runs["finished"] == 2


def test_entry_says_what_to_type_and_imports_neither_torch_nor_hydra(study: Path):
    script = (
        "import sys; from normexp.status import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if {'torch', 'hydra', 'numpy'} & set(sys.modules) else code)"
    )
    words = ["study=s", f"runs_dir={study.parent}"]
    command = [sys.executable, "-c", script, *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "9 runs of 4 cells: 1 finished, 1 diverged, 1 failed, 2 interrupted, 4 not" in run.stdout
    _, _, again = run.stdout.partition("to finish, type again:\n")
    line = f"  python -m normexp.train -m norm=batch,group,bad study=s runs_dir={study.parent}"
    assert again.split("\n") == [line, ""]


def test_only_commands_that_lack_something_are_to_be_typed_again(study: Path):
    def unfinished() -> list[list[str]]:
        status = read_status(study.parent, "s")
        return [each.command for each in status.unfinished_commands(with_spent=True)]

    assert unfinished() == [WORDS]
    append_entries(study, [command(["normexp-train", "norm=batch"], {"d-batch": [2]})])
    append_entries(study, [command(["normexp-train", "done"], {"d-batch": [0]})])
    append_entries(study, [command(["normexp-tune", "x"], {"d-batch": [0]})])  # asks for more
    assert [words[-1] for words in unfinished()] == ["study=s", "norm=batch", "x"]


def test_what_all_cells_share_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = tmp_path / "s"
    study.mkdir()
    titles = [f"norm=batch norm_batch_size={size} steps=5" for size in (2, 8)]
    append_entries(study, [CellEntry(title, title, [0]) for title in titles])
    append_entries(study, [command(WORDS, {})])
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "norm=batch norm_batch_size=8  1" in out
    assert out.count("steps=5") == 1 and "all with steps=5" in out


def test_complete_study_points_to_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "s", "b-1", 0, "finished")
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    assert "complete; next:\n  python -m normexp.report study=s" in capsys.readouterr().out


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A study of one cell, whose only run has failed three times."""
    study = tmp_path / "s"
    write(study, "b-1", 0, "failed", attempts=3)
    append_entries(study, [CellEntry("d", "norm=batch evaluate_with=[running]", [0], "b-1")])
    return study


def told(study: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([f"study={study.name}", f"runs_dir={study.parent}"]) == 0
    return capsys.readouterr().out


def test_brackets_in_titles_and_errors_are_text(failing: Path, capsys):
    result = seed_dir(failing / "b-1", 0) / "result.json"
    result.write_text(result.read_text().replace("no more", "no more [/data/x]"))
    out = told(failing, capsys)
    assert "no more [/data/x]" in out and "evaluate_with=[running]" in out


@pytest.mark.parametrize(
    ("typed", "next_line"),
    [
        (["norm=batch"], "max_attempts"),
        (["norm=batch", "max_attempts=4"], "to finish"),
        (["max_attempts=9", "retry_failed=false"], "max_attempts"),
    ],
)
def test_command_that_would_not_try_again_is_shown_as_one_that_does(
    failing: Path, capsys, typed: list[str], next_line: str
):
    append_entries(failing, [command(["normexp-train", *typed], {"d": [0]})])
    *_, first, line, end = told(failing, capsys).split("\n")
    assert next_line in first and end == ""
    assert ("max_attempts=4" in line) and "retry_failed" not in line


def test_attempts_that_are_allowed_are_those_of_the_config():
    text = (conf_dir() / "config.yaml").read_text()
    assert f"\nmax_attempts: {MAX_ATTEMPTS} " in text and "\nretry_failed: true " in text


def test_cell_that_is_tried_again_is_running(failing: Path, capsys):
    append_entries(failing, [command(["normexp-train"], {"d": [0]})])
    with file_lock(failing / "b-1" / LOCK_FILE):
        assert read_status(failing.parent, "s").runs == {"running": 1}
        assert "running now" in told(failing, capsys)


def test_moved_study_is_told_where_it_lies_now(failing: Path, capsys):
    words = ["normexp-train", "x", "study=s", "runs_dir=/old"]
    append_entries(failing, [command(words, {"d": [1]})])
    append_entries(failing, [CellEntry("d", "norm=batch", [1], "b-1")])
    moved = failing.rename(failing.parent / "t-search")
    append_entries(moved, [command(["normexp-tune", "y", "study=s"], {})])
    _, _, again = told(moved, capsys).partition("to finish, type again:\n")
    place = f"runs_dir={moved.parent}"
    assert again.splitlines() == [
        f"  python -m normexp.train x study=t-search {place}",
        f"  python -m normexp.tune y study=t {place}",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "study is missing"),
        (["studdy=s"], "did you mean study"),
        (["study=nowhere"], "study=nowhere not found"),
        (["s"], "s"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    assert main([*words, f"runs_dir={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
