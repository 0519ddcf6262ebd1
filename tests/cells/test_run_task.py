"""Tasks of one cell and of several rates: trained as if alone, skipped, busy, failed, tidied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normexp.cells import assembly
from normexp.cells import run as run_module
from normexp.cells.run import Busy, run_task
from normexp.cells.stack import Stack
from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.spec import CellSpec
from normexp.records.files import file_lock, is_held
from normexp.records.history import AttemptEntry, append_entries, read_history
from normexp.records.metrics import read_metrics
from normexp.records.paths import LOCK_FILE, LOG_FILE, MEMBERS_FILE, seed_dir
from normexp.records.result import Result, Status, read_result, write_result
from normexp.records.stacks import StackRecord, begin_stack, list_stacks
from normexp.train import main
from normexp.training.stopping import Interrupted, TrainingControl

RATES = ["lr=0.05,0.5"]
QUICK = ["steps=6", "log_every=2", "save_weights=false"]


def train(
    tmp_path: Path, *words: str, study: str = "s", replicas: int = 2, norm_batch_size: int = 2
) -> int:
    own = [f"norm_batch_size={norm_batch_size}", f"replicas={replicas}", "workers=0"]
    return main(["-m", *QUICK, *words, *own, f"runs_dir={tmp_path}", f"study={study}"])


def results_of(tmp_path: Path, study: str = "s") -> dict[tuple[float, int], Result]:
    found = [read_result(path) for path in tmp_path.glob(f"{study}/*/seed-*/result.json")]
    return {(result.config["lr"], result.seed): result for result in found}


def specs_of(tmp_path: Path, replicas: int = 2) -> list[CellSpec]:
    own = ["norm_batch_size=2", f"replicas={replicas}", f"runs_dir={tmp_path}", "study=s"]
    return compose_cells(parse_command(["-m", *QUICK, *RATES, *own]))


def claim(specs: list[CellSpec], stop: bool = False) -> list[StackRecord]:
    """Trains cells as a worker does; returns the stacks that began."""
    begun, control = list[StackRecord](), TrainingControl()
    control.stop.requested = stop
    assert run_task(specs, begun.append, control) == {}
    return begun


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


def fail_stacks(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Stack], bool]) -> None:
    trains = run_module.train_on_devices

    def train_or_fail(stack: Stack, *arguments: Any) -> None:
        if fails(stack):
            raise RuntimeError("no more")
        trains(stack, *arguments)

    monkeypatch.setattr(run_module, "train_on_devices", train_or_fail)


WHY = "RuntimeError: no more (test_run_task.py, line "


def test_rate_that_fails_takes_no_other_run_with_it(tmp_path: Path, monkeypatch, capsys):
    fail_stacks(monkeypatch, lambda stack: any(cell.recipe.lr == 0.5 for cell, _ in stack.runs))
    assert train(tmp_path, *RATES) == 1
    assert WHY in capsys.readouterr().err
    results = results_of(tmp_path)
    assert {key: run.status for key, run in results.items()} == {
        **{(0.05, seed): "finished" for seed in (0, 1)},
        **{(0.5, seed): "failed" for seed in (0, 1)},
    }
    stack, *alone = read_history(tmp_path / "s").attempts
    assert stack.error.startswith(WHY) and not stack.died and len(alone) == 2
    assert {run.apart for run in results.values()} == {stack.error}
    assert not list(tmp_path.rglob(MEMBERS_FILE))
    monkeypatch.undo()
    assert train(tmp_path, *RATES) == 0  # the failed runs are tried again, one by one
    told = {(run.status, run.apart) for run in results_of(tmp_path).values()}
    assert told == {("finished", stack.error)}


@pytest.mark.parametrize(("deaths", "apart"), [([0, 0], "killed"), ([1, 0], None)])
def test_stack_goes_on_until_its_process_has_died_twice_at_one_checkpoint(
    tmp_path: Path, deaths: list[int], apart: str | None
):
    (spec, _) = specs_of(tmp_path)
    study, members = spec.directory.parent, [(spec.id, 0), (spec.id, 1)]
    stack = begin_stack(study, members, {spec.id: 0.05})
    for at in deaths:
        append_entries(study, [AttemptEntry(stack.id, "killed", died=True, checkpointed_at=at)])
    claim([spec])
    results = results_of(tmp_path).values()
    assert {(run.apart, run.timing["stack_size"]) for run in results} == {
        (apart, 1 if apart else 2)
    }


def test_begun_stack_keeps_its_members_whoever_claims_them(tmp_path: Path):
    """Also if the new command asks for fewer or more seeds and rates."""
    specs = specs_of(tmp_path)
    with pytest.raises(Interrupted):
        claim(specs, stop=True)
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1
    (later,) = [spec for spec in specs_of(tmp_path, replicas=3) if spec.lr > 0.1]
    assert [len(stack.members) for stack in claim([later])] == [4, 1]
    results = results_of(tmp_path)
    assert results.keys() == {(lr, seed) for lr in (0.05, 0.5) for seed in (0, 1)} | {(0.5, 2)}
    assert {run.apart for run in results.values()} == {None}
    assert claim(specs) == []


@pytest.mark.slow
def test_cells_train_one_after_another_where_stacking_does_not_pay(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(assembly, "stacking_pays", lambda *_: False)
    assert train(tmp_path, *RATES) == 0
    assert {run.timing["stack_size"] for run in results_of(tmp_path).values()} == {2}
    assert not (tmp_path / "s" / "stacks").exists()


def test_busy_stack_holds_nothing_while_another_process_trains_one_cell(tmp_path: Path):
    specs = specs_of(tmp_path)
    first, second = (spec.directory for spec in specs)
    second.mkdir(parents=True)
    with file_lock(second / LOCK_FILE):
        with pytest.raises(Busy):
            claim(specs)
        assert not first.exists()
    (stack,) = claim(specs)
    assert stack.members == [(spec.id, seed) for spec in specs for seed in (0, 1)]
    assert not is_held(first / LOCK_FILE) and not (first / LOCK_FILE).exists()


def test_failed_runs_are_tried_again_one_by_one(tmp_path: Path):
    specs = specs_of(tmp_path)
    run_dir = seed_dir(specs[0].directory, 0)
    run_dir.mkdir(parents=True)
    failed = Result(specs[0].id, 0, Status.FAILED, {}, {}, {}, error="no more")
    write_result(run_dir, failed)
    claim(specs)
    sizes = [run.timing["stack_size"] for run in results_of(tmp_path).values()]
    assert sorted(sizes) == [1, 3, 3, 3]


def train_one(tmp_path: Path, *words: str) -> Path:
    line = ["norm=group", "steps=2", "replicas=1", *words, f"runs_dir={tmp_path}"]
    assert main(line) == 0
    (cell,) = tmp_path.glob("default/group-*")
    return cell


@pytest.mark.slow
def test_what_a_process_leaves_that_is_killed_at_its_end_is_removed_by_the_next_command(
    tmp_path: Path,
):
    cell = train_one(tmp_path)
    before = (cell / "seed-0/result.json").stat().st_ino
    stack = begin_stack(cell.parent, [(cell.name, 0)], {cell.name: 0.1})
    stack.checkpoint.touch()
    (cell / LOCK_FILE).touch()
    train_one(tmp_path, "dry_run=true")
    assert stack.checkpoint.exists()  # a dry run writes nothing
    train_one(tmp_path)
    assert [path.name for path in stack.directory.iterdir()] == [LOG_FILE]
    assert not (cell / LOCK_FILE).exists()
    (cell / LOCK_FILE).touch()
    train_one(tmp_path)
    assert not (cell / LOCK_FILE).exists()
    assert (cell / "seed-0/result.json").stat().st_ino == before


@pytest.mark.slow
def test_run_of_a_stack_that_has_its_result_keeps_it(tmp_path: Path):
    """The state after a kill between the first and the last result.json of a stack."""
    specs = specs_of(tmp_path)
    claim(specs)
    whole = results_of(tmp_path)
    ids = list(dict.fromkeys(run.cell_id for run in whole.values()))
    study = tmp_path / "s"
    members = [(cell_id, seed) for cell_id in ids for seed in (0, 1)]
    begin_stack(study, members, dict(zip(ids, (0.05, 0.5), strict=True)))
    kept = {path: path.stat().st_ino for path in study.glob("*/seed-0/*")}
    for cell_id in ids:
        (study / cell_id / "seed-1" / "result.json").unlink()
    claim(specs)
    assert {path: path.stat().st_ino for path in study.glob("*/seed-0/*")} == kept
    assert {key: run.metrics for key, run in results_of(tmp_path).items()} == {
        key: run.metrics for key, run in whole.items()
    }
    assert not list_stacks(study, ids)
