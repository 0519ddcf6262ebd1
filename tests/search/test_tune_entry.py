"""normexp.tune as a user runs it: seeds, the table, a stop, a failure, kills."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Literal

import pytest

from normexp.config.spec import CellSpec, Outcome
from normexp.records.history import CellEntry, append_cells
from normexp.records.result import Result, read_result
from normexp.search import select as tuning
from normexp.sweeps.sweep import Session
from normexp.tune import main

LR = "lr=tag(log,interval(1e-3,1))"


class Trainer:
    """In place of the runner: accuracy from the learning rate and the seed, all at once."""

    def __init__(self, accuracy: Callable[[float, int], float | None]) -> None:
        self.accuracy = accuracy
        self.batches: list[list[CellSpec]] = []
        self.stop_after: int | None = None

    def __call__(
        self, cells: Sequence[CellSpec], words: Sequence[str], *, session: Session
    ) -> list[Outcome]:
        assert session is not None
        assert words[0] == "normexp-tune"
        self.batches.append(list(cells))
        if self.stop_after is not None and len(self.batches) > self.stop_after:
            raise KeyboardInterrupt
        return [self.train(cell) for cell in cells]

    def train(self, cell: CellSpec) -> Outcome:
        assert cell.cfg is not None
        results = [self.result(cell.cfg.lr, seed) for seed in cell.seeds]
        return Outcome("finished", cell.title, "a cell", Path("none"), results=results)

    def result(self, lr: float, seed: int) -> Result:
        value = self.accuracy(lr, seed)
        if value is None:
            return Result("a cell", seed, "diverged", {}, {}, {}, diverged_at_step=3)
        metrics = {"val/accuracy": value, "test/accuracy": value - 0.1}
        return Result("a cell", seed, "finished", {}, metrics, {})

    @property
    def cells(self) -> list[CellSpec]:
        return [cell for batch in self.batches for cell in batch]

    def rates(self, study: str) -> list[float]:
        return [c.cfg.lr for c in self.cells if c.cfg is not None and c.cfg.study == study]


def peak(lr: float, seed: int) -> float:
    return 0.9 - (math.log10(lr) + 1) ** 2 / 9 + 0.002 * (seed % 1000)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    replaced = Trainer(peak)
    monkeypatch.setattr(tuning, "train_cells", replaced)
    return replaced


def tune(tmp_path: Path, *words: str) -> int:
    return main([*words, "replicas=2", "tune.seeds=2", "study=s", f"runs_dir={tmp_path}"])


def test_best_mean_on_validation_is_reported_with_fresh_seeds(
    tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
):
    assert tune(tmp_path, "lr=choice(0.01,0.1,1.0)") == 0
    assert [len(batch) for batch in trainer.batches] == [3, 1]  # all points at once, then the best
    assert trainer.rates("s-search") == [0.01, 0.1, 1.0] and trainer.rates("s") == [0.1]
    assert [cell.seeds for cell in trainer.cells] == [[1000, 1001]] * 3 + [[0, 1]]
    out = capsys.readouterr().out
    assert "90.1" in out and "80.1 [78.8, 81.4]" in out  # 80.1 -+ t(1) * 0.1
    assert f"python -m normexp.train replicas=2 study=s runs_dir={tmp_path} lr=0.1" in out
    assert "edge" not in out


def test_diverged_seed_counts_as_the_worst_value_and_is_no_failure(
    tmp_path: Path, trainer: Trainer
):
    trainer.accuracy = lambda lr, seed: None if (lr, seed) == (0.2, 1001) else 5 * lr
    assert tune(tmp_path, "lr=choice(0.05,0.12,0.2)") == 0
    assert trainer.rates("s") == [0.12]  # 0.2 has the mean (1 + 0) / 2
    trainer.accuracy = lambda *_: None
    assert tune(tmp_path / "all", "lr=choice(0.1,0.2)") == 1
    assert trainer.rates("s") == [0.12]  # no trial has a value: nothing is reported


@pytest.mark.slow
def test_interrupted_line_goes_on_and_ends_as_an_undisturbed_one(tmp_path: Path, trainer: Trainer):
    words = [LR, "tune.trials=6"]
    assert tune(tmp_path / "whole", *words) == 0
    whole = trainer.rates("s-search")
    assert len(set(whole)) == 6
    trainer.batches, trainer.stop_after = [], 3
    assert tune(tmp_path / "cut", *words) == 130
    trainer.batches, trainer.stop_after = [], None
    assert tune(tmp_path / "cut", *words) == 0
    assert trainer.rates("s-search") == whole[3:]
    trainer.batches = []
    assert tune(tmp_path / "cut", *words) == 0
    assert trainer.rates("s-search") == []  # nothing is added


@pytest.mark.slow
def test_sizes_that_come_to_one_cell_share_a_search(tmp_path: Path, trainer: Trainer):
    words = ["lr=choice(0.1,0.2)", "norm=batch,group", "norm_batch_size=4,8", "steps=2"]
    assert tune(tmp_path, *words) == 0
    titles = [cell.title for cell in trainer.batches[1]]
    assert titles == [
        "norm=batch norm_batch_size=4 lr=0.1",
        "norm=batch norm_batch_size=8 lr=0.1",
        "norm=group norm_batch_size=4 lr=0.1",
    ]


def test_stop_while_fresh_seeds_train_is_told_as_one(
    tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
):
    train = trainer.train
    trainer.train = lambda cell: (
        Outcome("stopped", cell.title) if cell.seeds[0] == 0 else train(cell)
    )
    assert tune(tmp_path, "lr=choice(0.1,0.2)") == 130
    told = capsys.readouterr()
    assert "stopped" in told.err and told.out == ""


def test_failure_under_fail_fast_ends_the_search_as_it_ends_a_sweep(
    tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
):
    words = ["lr=choice(0.01,0.1,1.0)", "fail_fast=true"]
    train = trainer.train
    statuses: dict[str, Literal["failed", "stopped"]] = {"0.1": "failed", "1.0": "stopped"}
    trainer.train = lambda cell: (
        Outcome(statuses[str(cell.cfg.lr)], cell.title, error="it broke")
        if cell.cfg is not None and str(cell.cfg.lr) in statuses
        else train(cell)
    )
    assert tune(tmp_path, *words) == 1
    assert trainer.rates("s") == []
    told = capsys.readouterr()
    assert "lr=0.1  failed: it broke" in told.err and "fail_fast" in told.err
    assert "2, 1 failed" in told.out
    trainer.train = train
    assert tune(tmp_path, *words) == 0  # the one that was stopped goes on, the other is tried again
    assert trainer.rates("s-search") == [0.01, 0.1, 1.0, 1.0, 0.1] and trainer.rates("s") == [0.1]


def test_fresh_seeds_of_an_earlier_best_are_told_apart(
    tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
):
    rates = iter([0.2, 0.9, 0.3])
    values: dict[float, float] = {}
    trainer.accuracy = lambda lr, _: (
        values[lr] if lr in values else values.setdefault(lr, next(rates))
    )
    assert tune(tmp_path, LR, "tune.trials=1") == 0
    (first,) = trainer.rates("s")
    cell = trainer.cells[-1]
    (tmp_path / "s").mkdir()
    append_cells(tmp_path / "s", [CellEntry(cell.digest, cell.title, cell.seeds, "a cell")])
    assert "also has" not in capsys.readouterr().out
    assert tune(tmp_path, LR, "tune.trials=3") == 0
    out = capsys.readouterr().out
    assert f"study=s also has the fresh seeds of lr={first:g}" in out
    assert len(trainer.rates("s")) == 2 and out.count("also has") == 1


def test_dry_run_writes_nothing(
    tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
):
    assert tune(tmp_path, LR, "dry_run=true") == 0
    assert trainer.batches == [] and list(tmp_path.iterdir()) == []
    assert "20 trials of lr=tag(log,interval(0.001,1))" in capsys.readouterr().out


@pytest.mark.slow
def test_search_killed_at_any_moment_finishes_as_an_undisturbed_one(tmp_path: Path):
    """No mocks: every run of search and report has the same metrics, and none is trained twice."""

    def command(name: str) -> list[str]:
        space = ["tune.trials=4", "tune.seeds=2", "epochs=1", "replicas=2", "workers=0"]
        return [sys.executable, "-m", "normexp.tune", LR, *space, f"runs_dir={tmp_path / name}"]

    def results() -> list[Path]:
        # Not Path.glob, which raises where a folder goes away while it looks.
        return [Path(file) for file in glob(f"{tmp_path}/cut/*/*/*/result.json")]

    def metrics(name: str) -> dict[str, dict[str, float]]:
        paths = sorted((tmp_path / name).rglob("result.json"))
        return {str(p.relative_to(tmp_path / name)): read_result(p).metrics for p in paths}

    subprocess.run(command("whole"), check=True, capture_output=True)
    ended: dict[Path, int] = {}
    for number in (0, 2, 6, 8):
        process = subprocess.Popen(
            command("cut"), stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while len(results()) <= number:
            if process.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        time.sleep(0.1 * number)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in results():
            assert ended.setdefault(path, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
    subprocess.run(command("cut"), check=True, capture_output=True)
    assert metrics("cut") == metrics("whole")
    assert all(path.stat().st_mtime_ns == before for path, before in ended.items())
    journal = (tmp_path / "cut" / "default-search" / "optuna.journal").read_text()
    assert all(json.loads(line) for line in journal.splitlines())
