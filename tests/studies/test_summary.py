"""What a command prints when it has ended: told apart, and readable at 80 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normexp.records.result import Result
from normexp.studies.outcome import Composed, Outcome
from normexp.studies.summary import commands_to_look, next_commands, print_closing_table

RECORD = {"norm": "batch", "model": "vit", "data": "digits"}
REFUSAL = "norm_batch_size=5 does not divide batch_size=32; try norm_batch_size=4"


def run(seed: int, accuracy: float | None) -> Result:
    known: dict[str, Any] = {} if accuracy is None else {"test/accuracy": accuracy}
    status = "diverged" if accuracy is None else "finished"
    step = 7 if accuracy is None else None
    return Result("cell", seed, status, RECORD, known, {}, diverged_at_step=step)


def outcome(cell_id: str, *accuracies: float | None, folder: Path | None = None) -> Outcome:
    results = [run(seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    directory = (folder or Path("runs/try")) / cell_id
    return Outcome("finished", "batch on digits", cell_id, directory, RECORD, results)


def closing_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None = None
) -> str:
    if width is not None:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "dumb")  # no colours
    titles = [f"norm=batch lr={lr}" for lr in ("0.1", "1.0", "10.0")]
    titles += ["norm=none norm_batch_size=2", "norm=none norm_batch_size=8", "norm_batch_size=5"]
    outcomes = [outcome("a", 0.5, 0.7), outcome("b", 0.5, None), outcome("c", None, None)]
    outcomes += [outcome("d", 0.5), outcome("d", 0.5), Outcome("refused", "", error=REFUSAL)]
    print_closing_table([Composed(None, {}, title) for title in titles], outcomes)
    return capsys.readouterr().out


def test_cells_are_told_apart_by_what_was_swept_and_shared_ones_are_one_row(capsys, monkeypatch):
    rows = closing_table(capsys, monkeypatch).splitlines()
    assert rows[0].split() == ["status", "cell", "test/accuracy", "n", "where"]
    cells = [row.split()[1:3] for row in rows[1:4]]
    assert cells == [["norm=batch", "lr=0.1"], ["norm=batch", "lr=1.0"], ["norm=batch", "lr=10.0"]]
    assert rows[4].split() == ["finished", "norm=none", "0.5000", "1", "d"]


def test_divergence_is_told_with_its_steps(capsys, monkeypatch):
    rows = closing_table(capsys, monkeypatch).splitlines()
    assert "0.5000; 1 of 2 diverged, at step 7" in rows[2]
    assert rows[3].split()[0] == "diverged" and "2 of 2 diverged, at step 7" in rows[3]


def test_at_80_columns_no_line_is_wider_and_no_word_is_cut(capsys, monkeypatch):
    out = closing_table(capsys, monkeypatch, width=80)
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out and "where" not in out
    for word in ["norm=batch", "lr=10.0", "(sd", "norm_batch_size=5", *REFUSAL.split()]:
        assert word in out


def test_commands_keep_model_data_and_study_and_quote_folders():
    one = outcome("a", 0.5, folder=Path("my runs/try"))
    for command in next_commands(one)[:2]:
        assert command.endswith("model=vit data=digits study=try runs_dir='my runs'")
    one.status = "failed"
    log, status, report = commands_to_look([one])
    assert log == "less 'my runs/try/a'/stacks/*/run.log"
    assert status == "python -m normexp.status study=try runs_dir='my runs'"
    assert report == "python -m normexp.report study=try runs_dir='my runs'"
