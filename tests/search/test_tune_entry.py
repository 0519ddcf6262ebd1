"""normexp.tune as a user runs it: seeds, the table, a stop, a failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

from normexp.training.config.spec import CellSpec
from normexp.training.records.journal import CommandEntry, read_entries
from normexp.training.records.result import Measured, Result, Status
from normexp.training.records.study import CellState
from normexp.training.search import select
from normexp.tune import main


def lost(cell: CellSpec, how: str) -> CellState:
    """The state of a cell that failed, was refused, or was stopped."""
    state = CellState(cell.id, cell.request, cell.directory)
    state.refused = "it broke" if how == "refused" else ""
    failed = Result(cell.id, 0, Status.FAILED, {}, {}, Measured(), error="it broke")
    state.results = [failed] if how == "failed" else []
    state.states = dict.fromkeys(
        cell.seeds, Status.FAILED if how == "failed" else Status.NOT_STARTED
    )
    return state


class Trainer:
    """In place of the sweep: accuracy from the learning rate and the seed."""

    def __init__(self, accuracy: Callable[[float, int], float | None]) -> None:
        self.accuracy = accuracy
        self.sweeps: list[list[CellSpec]] = []
        self.statuses: dict[float, Literal["failed", "stopped", "refused"]] = {}

    def __call__(
        self, cells: Sequence[CellSpec], words: Sequence[str], **_: object
    ) -> list[CellState]:
        assert words[0] == "normexp-tune"
        self.sweeps.append(list(cells))
        return [self.train(cell) for cell in cells]

    def train(self, cell: CellSpec) -> CellState:
        assert cell.study_dir is not None
        cell.study_dir.mkdir(parents=True, exist_ok=True)
        if cell.settings.lr in self.statuses:
            return lost(cell, self.statuses[cell.settings.lr])
        results = [self.result(cell.settings.lr, seed) for seed in cell.seeds]
        state = CellState(cell.id, cell.request, cell.directory, results=results)
        state.states = {result.seed: Status(result.status) for result in results}
        return state

    def result(self, lr: float, seed: int) -> Result:
        value = self.accuracy(lr, seed)
        if value is None:
            broken = {"val/accuracy": 0.99, "val/loss": 0.01}  # must not count
            measured = Measured(broken, diverged_at_step=3)
            return Result("a cell", seed, "diverged", {}, {}, measured)
        metrics = {"val/accuracy": value, "val/loss": value, "test/accuracy": value - 0.1}
        return Result("a cell", seed, "finished", {}, {}, Measured(metrics))

    def rates(self, study: str) -> list[float]:
        cells = [cell for sweep in self.sweeps for cell in sweep]
        return [c.settings.lr for c in cells if c.config["study"] == study]


def peak(lr: float, seed: int) -> float:
    return 0.9 - (math.log10(lr) + 1) ** 2 / 9 + 0.002 * (seed % 1000)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    replaced = Trainer(peak)
    monkeypatch.setattr(select, "train_cells", replaced)
    return replaced


def tune(tmp_path: Path, *words: str) -> int:
    return main([*words, "replicas=2", "tune.seeds=2", "study=s", f"runs_dir={tmp_path}"])


def test_best_mean_on_validation_is_reported_with_fresh_seeds(
    tmp_path: Path,
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", "200")
    assert tune(tmp_path, "lr=choice(0.01,0.1,1.0)") == 0
    assert [len(sweep) for sweep in trainer.sweeps] == [3, 1]  # all points at once, then the best
    assert trainer.rates("s-search") == [0.01, 0.1, 1.0] and trainer.rates("s") == [0.1]
    seeds = [cell.seeds for sweep in trainer.sweeps for cell in sweep]
    assert seeds == [[1000, 1001]] * 3 + [[0, 1]]
    out = capsys.readouterr().out
    assert "90.1 val accuracy (%)" in out and "0.8010" in out  # of the search, and of fresh seeds


def test_dry_run_counts_the_fresh_seeds(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["norm=batch,none", "norm_batch_size=8,16", "lr=choice(0.1,0.3)", "steps=2"]
    assert tune(tmp_path, *words, "dry_run=true") == 0
    out = capsys.readouterr().out
    assert "18 runs of 9 cells to do" in out and out.count("norm=none lr=best") == 1


def test_dry_run_plans_the_best_point_of_an_ended_search(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    line = ["lr=choice(0.3,0.1)", "steps=2", "workers=0", "trainer=cpu"]
    assert tune(tmp_path, *line) == 0
    capsys.readouterr()
    assert tune(tmp_path, *line, "dry_run=true") == 0
    out = capsys.readouterr().out
    assert "0 runs of 0 cells to do" in out and "best" not in out


def test_smaller_loss_is_better_and_the_first_of_equals_is_chosen(tmp_path: Path, trainer: Trainer):
    trainer.accuracy = lambda lr, _: None if lr == 0.4 else max(lr, 0.2)
    assert tune(tmp_path, "lr=choice(0.3,0.2,0.1,0.4)", "tune.metric=val/loss") == 0
    assert trainer.rates("s") == [0.2]


def test_diverged_seed_counts_as_the_worst_value_and_is_no_failure(
    tmp_path: Path, trainer: Trainer
):
    trainer.accuracy = lambda lr, seed: None if (lr, seed) == (0.2, 1001) else 5 * lr
    assert tune(tmp_path, "lr=choice(0.05,0.12,0.2)") == 0
    assert trainer.rates("s") == [0.12]  # 0.2 has the mean (1 + 0) / 2
    trainer.accuracy = lambda *_: None
    assert tune(tmp_path / "all", "lr=choice(0.1,0.2)") == 1
    assert trainer.rates("s") == [0.12]  # no point has a value: nothing is reported


def test_metric_that_no_run_has_is_refused_with_those_there_are(
    tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
):
    assert tune(tmp_path, "lr=choice(0.1,0.2)", "tune.metric=val/bits_per_byte") == 2
    assert "tune.metric=val/bits_per_byte" in capsys.readouterr().err
    assert trainer.rates("s") == []


def test_sizes_that_come_to_one_cell_are_trained_once(tmp_path: Path, trainer: Trainer, capsys):
    words = ["lr=choice(0.1,0.2)", "norm=batch,group", "norm_batch_size=4,8"]
    assert tune(tmp_path, *words) == 0
    assert [len(sweep) for sweep in trainer.sweeps] == [6, 3]
    assert "3 finished" in capsys.readouterr().out


def test_a_search_says_which_keys_it_searched_and_shows_no_test_accuracy(tmp_path: Path, capsys):
    words = ["lr=choice(0.1,0.2)", "steps=2", "workers=0", "norm=none", "model.width=4"]
    assert tune(tmp_path, *words) == 0
    for study in ("s", "s-search"):
        (entry,) = read_entries(tmp_path / study)
        assert isinstance(entry, CommandEntry) and entry.searched == ["lr"]
    lines = capsys.readouterr().err
    assert "lr=0.1  val/accuracy" in lines and "test/accuracy" not in lines


def test_stop_while_fresh_seeds_train_is_told_as_one(tmp_path: Path, trainer: Trainer, capsys):
    train = trainer.train
    trainer.train = lambda cell: lost(cell, "stopped") if cell.seeds[0] == 0 else train(cell)
    assert tune(tmp_path, "lr=choice(0.1,0.2)") == 130
    told = capsys.readouterr()
    assert "stopped" in told.err and told.out == ""


def test_failed_point_is_not_chosen_and_fails_the_command(tmp_path: Path, trainer: Trainer, capsys):
    trainer.statuses = {0.1: "failed"}
    assert tune(tmp_path, "lr=choice(0.01,0.1,1.0)") == 1
    assert trainer.rates("s") == [0.01]
    assert "2 of 3" in capsys.readouterr().out
    trainer.statuses = {0.1: "failed", 0.2: "failed"}
    assert tune(tmp_path, "lr=choice(0.1,0.2)") == 1
    assert "search: it broke" in capsys.readouterr().out
    trainer.statuses = {0.1: "refused", 0.2: "refused"}
    assert tune(tmp_path, "lr=choice(0.1,0.2)") == 2
    assert "it broke" in capsys.readouterr().err


def test_failure_under_fail_fast_trains_no_fresh_seeds(tmp_path: Path, trainer: Trainer, capsys):
    trainer.statuses = {0.1: "failed", 1.0: "stopped"}
    assert tune(tmp_path, "lr=choice(0.01,0.1,1.0)", "fail_fast=true") == 1
    assert trainer.rates("s") == []
    assert "fail_fast" in capsys.readouterr().err
