"""What a command prints at its end."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from normexp.config.outcome import Outcome

from normexp.config.spec import CellSpec
from normexp.records.result import Result, Status
from normexp.reporting.metric import is_at_chance
from normexp.reporting.summary import (
    commands_to_look,
    next_commands,
    notes_on,
    print_closing_table,
)

RECORD = {"norm": "batch", "model": "vit", "data": "digits"}
RECORD |= {"lr": 0.1, "chance_accuracy": 0.1, "batch_size": 32, "devices": 1}
RECORD |= {"micro_batch_size": None}
REFUSAL = "norm_batch_size=5 does not divide batch_size=32; try norm_batch_size=4"


def run(seed: int, accuracy: float | None) -> Result:
    known: dict[str, Any] = {} if accuracy is None else {"test/accuracy": accuracy}
    status = "diverged" if accuracy is None else "finished"
    step = 7 if accuracy is None else None
    return Result("cell", seed, status, RECORD, known, {}, diverged_at_step=step)


def outcome(cell_id: str, *accuracies: float | None, folder: Path | None = None) -> Outcome:
    results = [run(seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    directory = (folder or Path("runs/try")) / cell_id
    return Outcome(Status.FINISHED, "batch on digits", cell_id, directory, RECORD, results)


def closing_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None = None
) -> str:
    monkeypatch.setenv("COLUMNS", str(width or 200))
    if width is not None:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("TERM", "dumb")  # no colours
    titles = [f"norm=batch lr={lr}" for lr in ("0.1", "1.0", "10.0")]
    titles += ["norm=none norm_batch_size=2", "norm=none norm_batch_size=8", "norm_batch_size=5"]
    outcomes = [outcome("a", 0.5, 0.7), outcome("b", 0.5, None), outcome("c", None, None)]
    outcomes += [outcome("d", 0.5), outcome("d", 0.5), Outcome(Status.REFUSED, "", error=REFUSAL)]
    print_closing_table([CellSpec(None, {}, title) for title in titles], outcomes)
    return capsys.readouterr().out


def test_rows_tell_cells_apart_by_what_was_swept_and_when_runs_diverged(capsys, monkeypatch):
    rows = closing_table(capsys, monkeypatch).splitlines()
    assert rows[0].split() == ["status", "cell", "test/accuracy", "n", "where"]
    cells = [row.split()[1:3] for row in rows[1:4]]
    assert cells == [["norm=batch", "lr=0.1"], ["norm=batch", "lr=1.0"], ["norm=batch", "lr=10.0"]]
    assert rows[4].split() == ["finished", "norm=none", "0.5000", "1", "d"]  # of two sizes
    assert "0.5000; 1 of 2 diverged, at step 7" in rows[2]
    assert rows[3].split()[0] == "diverged" and "2 of 2 diverged, at step 7" in rows[3]


@pytest.mark.parametrize(
    ("accuracy", "chance", "num_samples", "is_lost"),
    [(0.13, 0.1, 359, True), (0.14, 0.1, 359, False), (0.9, 0.5, 6, False), (0.54, 0.5, 6, True)],
)
def test_chance_is_told_by_the_test_samples(accuracy, chance, num_samples, is_lost):
    assert is_at_chance(accuracy, chance, num_samples) == is_lost


@pytest.mark.parametrize(
    ("accuracies", "chance", "notes"),
    [
        ((0.5, 0.4), 0.1, []),
        ((0.1, 0.08), 0.1, ["2 of 2 seeds at chance .10 %.: no better than always naming"]),
        ((0.5, 0.08), 0.1, ["1 of 2 seeds at chance .10 %.: .* lower its learning rate"]),
        ((1.0,), 1.0, ["the test split has one class"]),
        ((None, None), 0.1, ["every run diverged; try a smaller lr than 0.1, such as lr=0.01"]),
        ((None, 0.7), 0.1, []),
    ],
)
def test_results_that_mean_nothing_are_noted_where_they_are_printed(accuracies, chance, notes):
    one = outcome("a", *accuracies)
    one.description = RECORD | {"chance_accuracy": chance}
    found = notes_on(one)
    assert len(found) == len(notes)
    assert all(re.search(note, text) for note, text in zip(notes, found, strict=True))


def test_at_80_columns_no_line_is_wider_and_no_word_is_cut(capsys, monkeypatch):
    out = closing_table(capsys, monkeypatch, width=80)
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out and "where" not in out
    for word in ["norm=batch", "lr=10.0", "(sd", "norm_batch_size=5", *REFUSAL.split()]:
        assert word in out


def test_commands_name_the_study_and_quote_folders():
    one = outcome("a", 0.5, folder=Path("my runs/try"))
    one.status = Status.FAILED
    log, status, report = commands_to_look([one])
    assert log == "less 'my runs/try/a'/stacks/*/run.log"
    assert status == "python -m normexp.status study=try 'runs_dir=my runs'"
    assert report == "python -m normexp.report study=try 'runs_dir=my runs'"


TRAIN = "python -m normexp.train -m"


@pytest.mark.parametrize(
    ("norm", "metric", "typed", "norms", "sizes", "kept"),
    [
        (
            *("batch", "test/accuracy", "-m --config-dir 'my conf' norm=batch act=gelu study=try"),
            *("batch,layer,instance,group", "batch,group"),
            "--config-dir 'my conf' act=gelu study=try",
        ),
        (  # a norm whose knobs a list cannot take
            *("custom", "test/accuracy", "norm=custom norm._target_=a.B norm.p=3 lr=1"),
            *("batch,layer,instance,group", "batch,group", "lr=1"),
        ),
        *(
            (
                *("custom", "test/accuracy", f"{norm} lr=1"),
                *("a.B,batch,layer,instance,group", "batch,group", "lr=1"),
            )
            for norm in ("norm=custom norm._target_=a.B", "norm=a.B")
        ),
        (  # norms that do not read the future
            *("batch", "test/bits_per_byte", "lr=1"),
            *("batch,layer,causal_instance,causal_group", "batch,causal_group", "lr=1"),
        ),
    ],
)
def test_next_commands_keep_what_was_typed_but_for_the_norm(
    norm: str, metric: str, typed: str, norms: str, sizes: str, kept: str
):
    one = outcome("a")
    one.description = RECORD | {"norm": norm}
    one.results = [Result("a", 0, "finished", RECORD, {metric: 0.5}, {})]
    told = next_commands(one, ["normexp-train", *shlex.split(typed)])
    assert told[0] == f"{TRAIN} norm={norms} {kept}"
    assert norm == "custom" or told[1] == f"{TRAIN} norm={sizes} norm_batch_size=2,8,32 {kept}"


@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        ({"batch_size": 30}, "2,6,30"),
        ({"micro_batch_size": 8}, "2,4,8"),
        ({"devices": 2}, "2,8,16"),
        ({"batch_size": 7}, None),
        ({"batch_size": 1}, None),
    ],
)
def test_next_sizes_are_those_that_the_training_can_be_split_into(sizes, values):
    one = outcome("a", 0.5)
    one.description = RECORD | sizes
    typed = ["normexp-train", "norm_batch_size=1", "epochs=1"]
    told = [line for line in next_commands(one, typed) if "norm=batch,group norm_batch" in line]
    line = f"{TRAIN} norm=batch,group norm_batch_size={values} epochs=1"
    assert told == ([] if values is None else [line])


def test_a_smaller_rate_is_advised_once_and_not_beside_one_that_trains(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rates = {"norm=batch lr=1e+30": 1e30, "norm=batch lr=10.0": 10.0, "norm=group lr=1.0": 1.0}
    outcomes = [outcome(str(lr), None) for lr in rates.values()]
    for one, lr in zip(outcomes, rates.values(), strict=True):
        one.description = RECORD | {"lr": lr}
    cells = [CellSpec(None, {}, title) for title in [*rates, "norm=group lr=0.1"]]
    print_closing_table(cells, [*outcomes, outcome("trained", 0.5)])
    advice = [line for line in capsys.readouterr().out.splitlines() if "try lr" in line]
    assert advice == ["norm=batch: every run diverged, from lr=10 up; try lr=0.1"]


def test_brackets_in_titles_and_errors_are_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    error = "ValueError: no such file [/data/x.bin]; [enforce fail at x]"
    cells = [CellSpec(None, {}, "evaluate_with=[running]"), CellSpec(None, {}, "lr=1")]
    print_closing_table(cells, [Outcome(Status.FAILED, "", error=error), outcome("a", 0.5)])
    out = capsys.readouterr().out
    assert error in out and "evaluate_with=[running]" in out


def test_a_cell_that_one_grid_point_trained_was_not_skipped_by_another(capsys):
    """A norm that does not mix samples, at two norm batch sizes, is one cell."""
    recorded = [outcome("same", 0.9), outcome("same", 0.9)]
    recorded[0].status, recorded[1].status = Status.SKIPPED, Status.FINISHED
    for one in recorded:
        one.description = {**one.description, "mixes_samples": False}
    cells = [CellSpec(None, {}, f"norm=own norm_batch_size={size}") for size in (2, 8)]
    print_closing_table(cells, recorded)
    _, row, *rest = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "finished" and "does not mix" in row
    assert "1 finished (of 2 points of the grid, some are one cell)" in rest
