"""One cell in this process: what is recorded is not trained again, and nothing is left behind."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from normexp.cli import read_options
from normexp.records.committed import commit_results
from normexp.records.paths import CHECKPOINT_FILE, ENDED_FILE, LOG_FILE
from normexp.records.result import read_result, shared_dir
from normexp.train import main

QUICK = ["norm=group", "steps=2", "replicas=1"]


def train(tmp_path: Path, *words: str) -> Path:
    assert main([*QUICK, *words, f"runs_dir={tmp_path}"]) == 0
    (cell,) = tmp_path.glob("default/group-*")
    return cell


@pytest.mark.parametrize("shared", [False, True])
def test_checkpoint_of_an_ended_stack_goes_with_the_next_command(tmp_path: Path, shared: bool):
    """As a process leaves it that is killed between the last result.json and its own tidying."""
    cell = train(tmp_path)
    before = (cell / "seed-0/result.json").stat().st_ino
    stack = shared_dir(cell.parent, [(cell.name, 0)]) if shared else cell / "stacks" / "0-0"
    stack.mkdir(parents=True, exist_ok=True)
    commit_results(stack, [read_result(cell / "seed-0")])
    for name in (CHECKPOINT_FILE, LOG_FILE):
        (stack / name).touch()
    assert main([*QUICK, f"runs_dir={tmp_path}", "dry_run=true"]) == 0
    assert (stack / ENDED_FILE).exists()  # a dry run writes nothing
    train(tmp_path)
    assert [path.name for path in stack.iterdir()] == [LOG_FILE]
    assert (cell / "seed-0/result.json").stat().st_ino == before


def test_command_that_adds_an_evaluation_holds_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my runs"
    cell = train(folder)
    train(folder, "evaluate_with=[running,precise]", "precise_samples=64")
    _, _, line = capsys.readouterr().err.partition("python -m normexp.evaluate ")
    options = read_options("evaluate", shlex.split(line.splitlines()[0]))
    assert Path(options["run"]) == cell
    assert options["evaluate_with"] == ["running", "precise"]
    assert options["precise_samples"] == 64


def test_evaluation_without_weights_is_not_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(tmp_path, "save_weights=false")
    train(tmp_path, "evaluate_with=[running,precise]")
    told = capsys.readouterr().err
    assert "without weights to measure them from" in told
    assert "normexp.evaluate" not in told
