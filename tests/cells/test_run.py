"""A stack: cut from what a command asks, resumed bit for bit, committed at once, or split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from marks import slow_but

from normexp.cli import parse_command
from normexp.errors import Halted
from normexp.training.batching import replicas
from normexp.training.cells import cell as cell_module
from normexp.training.cells import run as run_module
from normexp.training.cells import stack as stack_module
from normexp.training.cells.cell import Prepared, prepare_cell
from normexp.training.cells.module import form_of
from normexp.training.cells.run import train_stack
from normexp.training.cells.stack import Stack, cut_stacks, remove, remove_failed, settle
from normexp.training.config.command import compose_cells
from normexp.training.config.spec import CellSpec
from normexp.training.records.journal import CommandEntry, Refusal, read_entries
from normexp.training.records.layout import (
    CHECKPOINT_FILE,
    STACKS,
    WEIGHTS_FILE,
    seed_dir,
)
from normexp.training.records.locks import file_lock
from normexp.training.records.result import Result, Status, read_result
from normexp.training.records.stack_state import Attempts, lock_of, read_attempts, write_attempts
from normexp.training.records.study import read_cell
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl

QUICK = ["steps=6", "log_every=2", "trainer=cpu", "norm_batch_size=2", "batch_size=8"]


def specs_of(runs_dir: Path, *words: str, replicas: int = 2) -> list[CellSpec]:
    own = [f"replicas={replicas}", f"runs_dir={runs_dir}", "study=s"]
    return compose_cells(parse_command(["-m", *QUICK, *words, *own]))


def command(specs: list[CellSpec], name: str = "1") -> CommandEntry:
    asked = {spec.id: spec.request for spec in specs}
    return CommandEntry(name, ["normexp-train"], "code", asked)


def walk(specs: list[CellSpec], name: str = "1", stop_at: int | None = None) -> None:
    """Trains cells as a worker does, until nothing is left."""
    control, prepared = TrainingControl(), Prepared()
    while left := [p for s in cut_stacks(specs) for p in s.parts() if p.left(refused_ids(s, name))]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "StepReports", stopper(control.stop, stop_at))
            assert train_stack(left[0], command(specs, name), control, prepared)


def refused_ids(stack: Stack, name: str) -> set[str]:
    entries = read_entries(stack.study_dir)
    return {e.cell for e in entries if isinstance(e, Refusal) and e.command == name}


def stopper(stop: StopRequest, stop_at: int | None) -> Callable[..., Any]:
    from pytorch_lightning import Callback

    class Stop(Callback):
        def on_train_batch_end(self, _trainer: Any, pl_module: Any, *_: Any) -> None:
            if stop_at is not None and pl_module.step >= stop_at:
                stop.requested = True

    return lambda *_: Stop()


def kill_twice(stack: Stack) -> None:
    """Leaves what two processes do that were killed after the last checkpoint."""
    attempts = read_attempts(stack.folder)
    attempts.checkpointed_at = (stack.folder / CHECKPOINT_FILE).stat().st_mtime_ns
    attempts.count = 2
    write_attempts(stack.folder, attempts)


def files_of(runs_dir: Path) -> dict[str, Any]:
    """The numbers of each run, in all their digits."""
    found: dict[str, Any] = {}
    for path in sorted(runs_dir.glob("s/*/seed-*/result.json")):
        result = read_result(path)
        weights = torch.load(path.parent / "weights.pt", weights_only=True)
        rows = (path.parent / "metrics.csv").read_text()
        found[str(path.relative_to(runs_dir))] = (
            result.status,
            result.metrics,
            rows,
            {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        )
    return found


def results_of(runs_dir: Path) -> list[Result]:
    return [read_result(path) for path in sorted(runs_dir.glob("s/*/seed-*/result.json"))]


def test_a_stack_that_goes_leaves_the_folder_in_which_others_make_theirs(tmp_path: Path):
    folder = tmp_path / STACKS / "x"
    folder.mkdir(parents=True)
    remove(folder)
    assert [*(tmp_path / STACKS).iterdir()] == []


def test_stacks_are_a_function_of_what_a_command_asks(tmp_path: Path):
    specs = specs_of(tmp_path, "norm=batch,group", "lr=0.1,0.3", replicas=3)
    first, second = cut_stacks(specs)
    assert [(s.settings.lr, seed) for s, seed in first.runs] == [
        (r, k) for r in (0.1, 0.3) for k in range(3)
    ]
    assert {s.choices["norm"] for s, _ in second.runs} == {"group"}
    assert cut_stacks(specs)[0].folder == first.folder != second.folder
    many = specs_of(tmp_path, "lr=0.1,0.3", replicas=9)
    assert len(cut_stacks(many)) == 2 and len(cut_stacks(many, on_gpu=True)) == 1


def test_runs_that_are_not_stacked_are_cut_where_each_can_have_a_core(tmp_path: Path):
    specs = specs_of(tmp_path, "lr=0.1,0.3", "stack=false")
    cut = [(spec.settings.lr, seed) for stack in cut_stacks(specs) for spec, seed in stack.runs]
    assert cut == [(0.1, 0), (0.3, 0), (0.1, 1), (0.3, 1)]  # seed by seed
    assert [len(stack.runs) for stack in cut_stacks(specs)] == [1, 1, 1, 1]
    assert [len(stack.runs) for stack in cut_stacks(specs, on_gpu=True)] == [2, 2]


def test_what_would_train_in_turn_is_cut_before_its_first_step_and_prepared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prepared: list[str] = []

    def prepare(spec: CellSpec, shared: Prepared) -> Any:
        prepared.append(spec.id)
        return prepare_cell(spec, shared)

    for replicas_ in (1, 3):  # seed 0 by itself, then with others
        walk(specs_of(tmp_path / str(replicas_), "stack=false", replicas=replicas_))
    monkeypatch.setattr("normexp.training.cells.module.SMALL_FORWARD", 0)
    monkeypatch.setattr(cell_module, "prepare_cell", prepare)
    walk(specs_of(tmp_path / "cut", replicas=3))
    assert len(prepared) == 1
    assert all(one.measured.timing["stack_size"] == 1 for one in results_of(tmp_path / "cut"))
    assert all(one.measured.apart is None for one in results_of(tmp_path / "cut"))
    files = files_of(tmp_path / "cut")
    assert files == files_of(tmp_path / "3")
    assert files.items() > files_of(tmp_path / "1").items()
    assert not [*(tmp_path / "cut" / "s" / STACKS).glob("*")]


@pytest.mark.parametrize("stack", slow_but(["auto"], ["auto", "false"]))
def test_an_interrupted_stack_resumes_to_the_same_bits(tmp_path: Path, stack: str):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["lr=0.1,0.3", f"stack={stack}"]
    walk(specs_of(whole, *words))
    with pytest.raises(Interrupted):
        walk(specs_of(cut, *words), stop_at=3)
    (folder,) = (cut / "s" / STACKS).iterdir()
    assert (folder / CHECKPOINT_FILE).is_file() and read_attempts(folder).count == 0
    walk(specs_of(cut, *words), name="2")
    assert files_of(cut) == files_of(whole)
    assert not [*(cut / "s" / STACKS).glob("*")] and not list(cut.rglob(".lock*"))


def test_a_large_network_shares_the_cores_with_the_runs_asked_and_keeps_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replicas, "LARGE_FORWARD", 0)
    small = "model.width=4"
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        monkeypatch.setattr(run_module, "usable_cores", lambda: 4)
        with pytest.raises(Interrupted):
            walk(specs_of(tmp_path, small), stop_at=1)
        monkeypatch.setattr(run_module, "usable_cores", lambda: 2)
        walk(specs_of(tmp_path, small))
    finally:
        torch.set_num_threads(before)
    assert [result.measured.environment["threads"] for result in results_of(tmp_path)] == [2, 2]


def test_a_run_that_ended_elsewhere_starts_the_others_again(tmp_path: Path):
    with pytest.raises(Interrupted):
        walk(specs_of(tmp_path, replicas=3), stop_at=3)
    walk(specs_of(tmp_path, replicas=1))  # another command: a stack of its own
    walk(specs_of(tmp_path, replicas=3))
    assert [result.seed for result in results_of(tmp_path)] == [0, 1, 2]
    assert not [*(tmp_path / "s" / STACKS).glob("*")]


def test_a_commit_that_was_killed_is_finished_by_whoever_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (spec,) = specs_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(stack_module, "write_result", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            walk([spec])
    assert results_of(tmp_path) == []
    settle(tmp_path / "s", [(spec.id, 7)])
    assert results_of(tmp_path) == []  # its lock is not held
    monkeypatch.setattr(cell_module, "prepare_cell", lambda *_: pytest.fail("trained again"))
    assert train_stack(*cut_stacks([spec]), command([spec]), TrainingControl(), Prepared())
    assert [result.seed for result in results_of(tmp_path)] == [0, 1]
    assert not [*(tmp_path / "s" / STACKS).glob("*")]


def test_a_run_whose_last_update_broke_it_has_diverged_and_keeps_no_weights(tmp_path: Path):
    words = ["steps=1", "lr=1e38", "replicas=1", "trainer=cpu", f"runs_dir={tmp_path}", "study=s"]
    (spec,) = compose_cells(parse_command(words))
    walk([spec])
    (result,) = results_of(tmp_path)
    assert (result.status, result.measured.diverged_at_step) == ("diverged", 1)
    assert not (seed_dir(spec.directory, 0) / WEIGHTS_FILE).exists()


def test_runs_that_others_train_are_left_to_them(tmp_path: Path):
    specs = specs_of(tmp_path, "lr=0.1,0.3")
    (stack,) = cut_stacks(specs)
    first, (spec, seed) = stack.runs[0], stack.runs[-1]
    spec.directory.mkdir(parents=True)
    with file_lock(lock_of(spec.directory, seed)):
        assert not train_stack(stack, command(specs), TrainingControl(), Prepared())
        assert not first[0].directory.exists()
        assert train_stack(Stack(stack.runs[-2:-1]), command(specs), TrainingControl(), Prepared())
    assert [(one.cell_id, one.seed) for one in results_of(tmp_path)] == [(spec.id, seed - 1)]


def test_rates_that_a_schedule_does_not_follow_train_apart(tmp_path: Path):
    cell = prepare_cell(specs_of(tmp_path, "lr=0.1,0.3")[0])
    schedule = replace(cell.recipe.schedule, follows_lr=False)
    other = replace(cell, recipe=replace(cell.recipe, schedule=schedule))
    assert form_of(cell, num_runs=4, num_rates=2) == form_of(other, num_runs=4) == "stacked"
    assert form_of(other, num_runs=4, num_rates=2) == "apart"


def test_a_stack_that_another_worker_has_cut_meanwhile_is_not_tried_again(tmp_path: Path):
    specs = specs_of(tmp_path)
    (stack,) = cut_stacks(specs)
    write_attempts(stack.folder, Attempts([(spec.id, k) for spec, k in stack.runs], is_apart=True))
    assert train_stack(stack, command(specs), TrainingControl(), Prepared())
    assert results_of(tmp_path) == [] and read_attempts(stack.folder).count == 0


def test_a_stack_that_raises_is_trained_run_by_run_and_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trains = run_module._fit

    def raises(runs: Any, *others: Any) -> Any:
        if len(runs) > 1 or runs[0] == (specs[1], 1):
            raise RuntimeError("not in a stack" if len(runs) > 1 else "exploded")
        return trains(runs, *others)

    monkeypatch.setattr(run_module, "_fit", raises)
    specs = specs_of(tmp_path, "lr=0.1,0.3")
    walk(specs)
    ends = {(result.settings["lr"], result.seed): result for result in results_of(tmp_path)}
    failed = ends.pop((0.3, 1))
    assert failed.status is Status.FAILED and "RuntimeError: exploded" in str(failed.error)
    assert "exploded" in (specs[1].directory / "seed-1" / "run.log").read_text()
    assert len(ends) == 3 and {end.status for end in ends.values()} == {Status.FINISHED}
    assert all("not in a stack" in str(end.measured.apart) for end in ends.values())
    walk(specs)  # the same command does not try again
    assert len(results_of(tmp_path)) == 4
    folder = tmp_path / "s"
    left_behind = lock_of(specs[0].directory, 0)  # by a process that was killed as its run ended
    left_behind.touch()
    remove_failed([read_cell(folder, one.id, one.request, []) for one in specs])  # a new one does
    assert len(results_of(tmp_path)) == 3 and not left_behind.exists()


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_stack_that_died_twice_is_trained_run_by_run_and_a_run_has_failed(
    tmp_path: Path, replicas: int
):
    specs = specs_of(tmp_path, replicas=replicas)
    (stack,) = cut_stacks(specs)
    with pytest.raises(Interrupted):
        walk(specs, stop_at=3)
    kill_twice(stack)
    walk(specs)
    results = results_of(tmp_path)
    assert len(results) == replicas
    for result in results:
        assert (result.status is Status.FAILED) == (replicas == 1)
        assert "died twice" in str(result.measured.apart or result.error)


def test_a_refusal_is_a_line_with_the_id_of_its_command(tmp_path: Path):
    (spec,) = specs_of(tmp_path, "norm=group", "norm.num_groups=3")
    walk([spec], name="7")
    (entry,) = read_entries(tmp_path / "s")
    assert isinstance(entry, Refusal) and (entry.cell, entry.command) == (spec.id, "7")
    assert not spec.directory.exists() and not [*(tmp_path / "s" / STACKS).glob("*")]


def test_a_full_disk_halts_and_counts_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "_fit", full)
    with pytest.raises(Halted, match="the disk is full"):
        walk(specs_of(tmp_path))
    assert results_of(tmp_path) == []
