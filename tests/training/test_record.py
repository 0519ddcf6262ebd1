"""The numbers of a training: metrics.csv, the loggers of each run, rows of losses."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from pytorch_lightning.loggers import Logger

from normexp.records.result import read_metrics
from normexp.training.module import LossHistory, Recorder


class KeepingLogger(Logger):
    name, version = "keeping", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_each_run_gets_its_own_finite_values_in_its_file_and_its_logger(tmp_path: Path):
    files, loggers = [tmp_path / "a.csv", None], [KeepingLogger(), KeepingLogger()]
    recorder = Recorder(files, [[logger] for logger in loggers])
    recorder.record((6, 1, 48), {"val/loss": [1.0, 3.0]})
    recorder.record((7, 1, 56), {"val/loss": [math.inf, 4.0], "val/accuracy": [math.nan] * 2})
    recorder.write()
    assert read_metrics(tmp_path / "a.csv") == [(6, 1, 48, "val/loss", 1.0)]
    assert [(step, row["val/loss"]) for step, row in loggers[1].rows] == [(6, 3), (7, 4)]
    assert loggers[0].rows == [(6, {"val/loss": 1.0, "epoch": 1, "samples_seen": 48})]


def test_rows_of_the_loss_do_not_depend_on_when_they_are_read():
    losses = [torch.tensor([float(step), -float(step)]) for step in range(1, 9)]
    losses[6][1] = torch.inf
    for interval in (1, 2, 8):
        history, rows = LossHistory(2, every=3), []
        for step, loss in enumerate(losses, start=1):
            history.add(loss)
            if step % interval == 0:
                rows += list(history.read(step))
        assert rows == [(3, [2.0, -2.0]), (6, [5.0, -5.0])]
        assert history.diverged_at == [None, 7]
