from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pytorch_lightning.loggers import Logger
from training_cases import MemorySink

from normexp.training.recorder import Position, Recorder, WandbRun, finite_mean, resolve_mode


class MeanLogger(Logger):
    name, version = "mean", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_each_run_gets_its_own_finite_values_and_loggers_the_mean():
    sinks, logger = [MemorySink(), MemorySink()], MeanLogger()
    recorder = Recorder([[sink] for sink in sinks], [logger])
    recorder.record(Position(6, 1, 48), {"val/loss": [1.0, 3.0]})
    missing = {"val/loss": [math.nan, 3.0], "val/accuracy": [math.nan] * 2}
    recorder.record(Position(7, 1, 56), missing)
    assert sinks[0].rows == [(6, 1, 48, {"val/loss": 1.0}), (7, 1, 56, {})]
    assert sinks[1].rows == [(6, 1, 48, {"val/loss": 3.0}), (7, 1, 56, {"val/loss": 3.0})]
    assert logger.rows == [(6, {"val/loss": 2.0}), (7, {"val/loss": 3.0})]


def test_mean_is_over_finite_values():
    assert finite_mean([1.0, math.inf, 3.0]) == 2.0
    assert finite_mean([math.nan]) is None


def test_wandb_is_offline_without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_mode("auto") == "online"
    assert resolve_mode("disabled") == "disabled"


def read_offline_run(folder: Path) -> list[dict]:
    """The records of an offline W&B run, by W&B's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    answer = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ
    )
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_two_wandb_runs_of_one_process_stay_apart(tmp_path: Path):
    runs = [
        WandbRun(
            project="normexp",
            entity=None,
            mode="offline",
            directory=tmp_path,
            group="group-convnet-digits-b32",
            seed=seed,
            id_file=tmp_path / f"id-{seed}",
            tags=["group"],
            config={"norm": "group", "seed": seed},
        )
        for seed in (0, 1)
    ]
    for step in (1, 2):
        for seed, run in enumerate(runs):
            run.add(step, 0, 8 * step, {"train/loss": 10.0 * seed + step})
    for run in runs:
        run.finish(failed=False)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    text = [json.dumps(read_offline_run(folder)) for folder in folders]
    for seed in (0, 1):
        (mine,) = [t for t in text if f"group-convnet-digits-b32/seed-{seed}" in t]
        assert f'"train/loss": {10 * seed + 2}' in mine
