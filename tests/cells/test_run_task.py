"""Tasks of one cell and of several rates: trained as if alone, skipped, busy, failed, tidied."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from normexp.records.committed import commit_results, shared_dir

from normexp.cells import assembly
from normexp.cells import run as run_module
from normexp.cells.cell import prepare_cell
from normexp.cells.run import run_task
from normexp.cli import parse_command, read_options
from normexp.config.grid import compose_cells
from normexp.config.spec import CellSpec, Command
from normexp.records.files import FileLock, is_held
from normexp.records.metrics import read_metrics
from normexp.records.paths import (
    CHECKPOINT_FILE,
    ENDED_FILE,
    LOCK_FILE,
    LOG_FILE,
    seed_dir,
    stack_dir,
)
from normexp.records.result import Result, read_result, write_result
from normexp.train import main

RATES = ["lr=0.05,0.5"]
QUICK = ["norm_batch_size=2", "steps=6", "log_every=2", "replicas=2", "save_weights=false"]


def train(tmp_path: Path, *words: str, study: str = "s") -> int:
    own = ["workers=0", f"runs_dir={tmp_path}", f"study={study}"]
    return main(["-m", *QUICK, *words, *own])


def results_of(tmp_path: Path, study: str = "s") -> dict[tuple[float, int], Result]:
    found = [read_result(path) for path in tmp_path.glob(f"{study}/*/seed-*/result.json")]
    return {(result.config["lr"], result.seed): result for result in found}


def specs_of(tmp_path: Path, *words: str) -> list[CellSpec]:
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


def test_failing_stack_of_rates_is_trained_cell_by_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    train_on_devices = run_module.train_on_devices

    def fail(stack, *arguments: object) -> None:
        if len(stack.parts) > 1:
            raise RuntimeError("no more")
        train_on_devices(stack, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_on_devices", fail)
    assert train(tmp_path, *RATES) == 0
    assert "RuntimeError: no more" in capsys.readouterr().err
    assert {run.timing["stack_size"] for run in results_of(tmp_path).values()} == {2}


def test_refused_cells_are_told_as_if_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, *RATES, "norm_batch_size=5") == 2
    told = capsys.readouterr()
    assert "norm_batch_size=5" in told.err
    assert "trained alone" not in told.err


@pytest.mark.slow
def test_cells_train_one_after_another_where_stacking_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(assembly, "stacks", lambda *_: False)
    assert train(tmp_path, *RATES) == 0
    assert {run.timing["stack_size"] for run in results_of(tmp_path).values()} == {2}
    assert not (tmp_path / "s" / "stacks").exists()


def test_task_is_busy_and_holds_nothing_while_another_process_trains_one_cell(tmp_path: Path):
    specs = specs_of(tmp_path)
    first, second = (prepare_cell(each.cfg, each.choices).directory for each in specs if each.cfg)
    second.mkdir(parents=True)
    lock = FileLock(second / LOCK_FILE)
    assert lock.acquire()
    outcomes = run_task(specs)
    assert [outcome.status for outcome in outcomes] == ["busy", "busy"]
    assert {(each.cell_id, each.holder) for each in outcomes} == {(second.name, lock.holder())}
    assert not is_held(first / LOCK_FILE)
    assert not results_of(tmp_path)
    lock.release()
    begun: list[tuple[int, str, list[int]]] = []
    outcomes = run_task(specs, lambda i, each: begun.append((i, each.cell_id, each.missing)))
    assert [outcome.status for outcome in outcomes] == ["finished", "finished"]
    assert begun == [(0, first.name, [0, 1]), (1, second.name, [0, 1])]
    assert not is_held(first / LOCK_FILE) and not (first / LOCK_FILE).exists()


@pytest.mark.parametrize("has_failed", [True, False])
def test_cell_with_a_failed_or_begun_run_is_trained_alone(tmp_path: Path, has_failed: bool):
    specs = specs_of(tmp_path)
    first, _ = (prepare_cell(each.cfg, each.choices) for each in specs if each.cfg)
    if has_failed:
        run_dir = seed_dir(first.directory, 0)
        run_dir.mkdir(parents=True)
        write_result(run_dir, Result(first.id, 0, "failed", {}, {}, {}, error="no more"))
    else:
        stack = stack_dir(first.directory, 0, 1)
        stack.mkdir(parents=True)
        (stack / CHECKPOINT_FILE).touch()
    assert [outcome.status for outcome in run_task(specs)] == ["alone", "alone"]


def train_one(tmp_path: Path, *words: str) -> Path:
    line = ["norm=group", "steps=2", "replicas=1", *words, f"runs_dir={tmp_path}"]
    assert main(line) == 0
    (cell,) = tmp_path.glob("default/group-*")
    return cell


@pytest.mark.parametrize("is_shared", [False, True])
def test_checkpoint_of_an_ended_stack_is_removed_by_the_next_command(
    tmp_path: Path, is_shared: bool
):
    """As a process leaves it that is killed between the last result.json and cleaning up."""
    cell = train_one(tmp_path)
    before = (cell / "seed-0/result.json").stat().st_ino
    stack = shared_dir(cell.parent, [(cell.name, 0)]) if is_shared else cell / "stacks" / "0-0"
    stack.mkdir(parents=True, exist_ok=True)
    commit_results(stack, [read_result(cell / "seed-0")])
    for name in (CHECKPOINT_FILE, LOG_FILE):
        (stack / name).touch()
    train_one(tmp_path, "dry_run=true")
    assert (stack / ENDED_FILE).exists()  # a dry run writes nothing
    train_one(tmp_path)
    assert [path.name for path in stack.iterdir()] == [LOG_FILE]
    assert (cell / "seed-0/result.json").stat().st_ino == before
    result = read_result(cell / "seed-0")
    commit_results(stack, [result])
    (cell / "seed-0/result.json").unlink()  # killed before the first result.json
    train_one(tmp_path)
    assert read_result(cell / "seed-0") == result


def test_recorded_cell_names_the_command_that_adds_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my runs"
    cell = train_one(folder)
    train_one(folder, "evaluate_with=[running,precise]", "precise_samples=64")
    _, _, line = capsys.readouterr().err.partition("python -m normexp.evaluate ")
    options = read_options("evaluate", shlex.split(line.splitlines()[0]))
    assert Path(options["run"]) == cell
    assert options["evaluate_with"] == ["running", "precise"]
    assert options["precise_samples"] == 64
    (cell / "seed-0/weights.pt").unlink()
    train_one(folder, "evaluate_with=[running,precise]")
    told = capsys.readouterr().err
    assert "without weights" in told and "normexp.evaluate" not in told
