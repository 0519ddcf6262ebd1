"""Cells that differ in their learning rate alone, trained as one stack: as if each were alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.cells import run as run_task
from normexp.cells import stack as assembly
from normexp.cells.cell import prepare_cell
from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.spec import CellSpec, Command
from normexp.records.files import StackLock, is_held
from normexp.records.metrics import read_metrics
from normexp.records.paths import LOCK_FILE
from normexp.records.result import Result, read_result
from normexp.train import main

RATES = ["lr=0.05,0.5"]
QUICK = ["norm_batch_size=2", "steps=6", "log_every=2", "replicas=2", "save_weights=false"]


def train(tmp_path: Path, *words: str, study: str = "s") -> int:
    own = ["workers=0", f"runs_dir={tmp_path}", f"study={study}"]
    return main(["-m", *QUICK, *words, *own])


def results_of(tmp_path: Path, study: str = "s") -> dict[tuple[float, int], Result]:
    found = [read_result(path) for path in tmp_path.glob(f"{study}/*/seed-*/result.json")]
    return {(result.config["lr"], result.seed): result for result in found}


def composed(tmp_path: Path, *words: str) -> list[CellSpec]:
    arguments = parse_command(["-m", *QUICK, *RATES, *words, f"runs_dir={tmp_path}", "study=s"])
    assert isinstance(arguments, Command)
    return compose_cells(arguments)


def test_each_run_of_a_stack_of_rates_is_as_trained_alone(tmp_path: Path):
    words = [*RATES, "trainer=cpu", "trainer.precision=64-true", "optim.warmup=0.5"]
    assert train(tmp_path, *words) == 0
    assert train(tmp_path, *words, "stack=false", study="alone") == 0  # cell by cell, in turn
    together, alone = results_of(tmp_path), results_of(tmp_path, "alone")
    assert together.keys() == alone.keys() == {(lr, seed) for lr in (0.05, 0.5) for seed in (0, 1)}
    for key, result in together.items():
        assert result.timing["stack_size"] == 4
        assert alone[key].timing["stack_size"] == 2
        assert result.cell_id == alone[key].cell_id
        assert result.metrics == pytest.approx(alone[key].metrics, abs=1e-9)
        files = [f"{study}/{result.cell_id}/seed-{key[1]}/metrics.csv" for study in ("s", "alone")]
        rows, rows_alone = (read_metrics(tmp_path / file) for file in files)
        assert [row.step for row in rows] == [row.step for row in rows_alone]
        for row, row_alone in zip(rows, rows_alone, strict=True):
            assert row.value == pytest.approx(row_alone.value, abs=1e-9)


@pytest.mark.slow
def test_more_seeds_and_rates_train_what_is_missing(tmp_path: Path):
    assert train(tmp_path, *RATES) == 0
    before = {path: path.stat().st_ino for path in tmp_path.glob("s/*/seed-*/result.json")}
    assert train(tmp_path, *RATES, "replicas=3") == 0
    assert train(tmp_path, "lr=0.05,0.1,0.5", "replicas=3") == 0
    sizes = {key: result.timing["stack_size"] for key, result in results_of(tmp_path).items()}
    assert sizes == {
        **{(lr, seed): 4 for lr in (0.05, 0.5) for seed in (0, 1)},
        **{(lr, 2): 2 for lr in (0.05, 0.5)},
        **{(0.1, seed): 3 for seed in (0, 1, 2)},  # alone
    }
    assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.slow
def test_failing_stack_is_trained_cell_by_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(run_task, "train_together", fail)
    assert train(tmp_path, *RATES) == 0
    assert "each learning rate is trained alone: RuntimeError: no more" in capsys.readouterr().err
    assert {run.timing["stack_size"] for run in results_of(tmp_path).values()} == {2}


def test_refused_cells_are_told_as_that_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, *RATES, "norm_batch_size=5") == 2
    told = capsys.readouterr()
    assert "norm_batch_size=5 does not divide" in told.err
    assert "trained alone" not in told.err


@pytest.mark.slow
def test_cells_train_one_after_another_where_the_rule_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(assembly, "stacks", lambda *_: False)
    assert train(tmp_path, *RATES) == 0
    assert {run.timing["stack_size"] for run in results_of(tmp_path).values()} == {2}
    assert not (tmp_path / "s" / "stacks").exists()


@pytest.mark.slow
def test_task_of_which_somebody_trains_a_cell_is_busy_and_holds_nothing(tmp_path: Path):
    cells = composed(tmp_path)
    first, second = (prepare_cell(each.cfg, each.choices).directory for each in cells if each.cfg)
    second.mkdir(parents=True)
    lock = StackLock(second / LOCK_FILE)
    assert lock.acquire()
    end = run_task.run_task(cells)
    assert [outcome and outcome.status for outcome in end.outcomes] == [None, "busy"]
    assert not is_held(first / LOCK_FILE)
    assert not results_of(tmp_path)
    lock.release()
    end = run_task.run_task(cells)
    assert [outcome and outcome.status for outcome in end.outcomes] == ["finished", "finished"]
