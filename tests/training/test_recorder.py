from __future__ import annotations

import math
from pathlib import Path

import pytest
from pytorch_lightning.loggers import Logger
from training_cases import MemorySink

from normexp.training.recorder import Position, Recorder, finite_mean, resolve_mode


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
