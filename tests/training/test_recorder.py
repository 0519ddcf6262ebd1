"""Chunks of optimizer steps, the losses recorded in them, and the loggers that get numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pytorch_lightning.loggers import Logger

from normexp.records.metrics import read_metrics
from normexp.training import chunks
from normexp.training.chunks import ChunkLoader, LossHistory
from normexp.training.loggers import is_logged_out
from normexp.training.recorder import Position, Recorder


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
    recorder.record(Position(6, 1, 48), {"val/loss": [1.0, 3.0]})
    recorder.record(
        Position(7, 1, 56), {"val/loss": [math.inf, 4.0], "val/accuracy": [math.nan] * 2}
    )
    recorder.track(Position(7, 1, 56), {"train/lr": [0.1, 0.2]})
    recorder.write()
    assert read_metrics(tmp_path / "a.csv") == [(6, 1, 48, "val/loss", 1.0)]
    assert [(step, row.get("val/loss")) for step, row in loggers[1].rows] == [
        (6, 3),
        (7, 4),
        (7, None),
    ]
    assert loggers[0].rows[-1] == (7, {"train/lr": 0.1, "epoch": 1, "samples_seen": 56})
    again = Recorder(files)
    again.load_state_dict(recorder.state_dict())
    assert again.rows == recorder.rows


def test_wandb_is_offline_without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_logged_out()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert not is_logged_out()


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch):
    """The chunks of a loader, by a clock on which each step takes as long as is said."""
    now = [0.0]
    monkeypatch.setattr(chunks.time, "perf_counter", lambda: now[0])

    def take(loader: ChunkLoader, seconds_per_step: float = 0.0) -> list[tuple[int, int]]:
        found = []
        for chunk in loader:
            now[0] += seconds_per_step * (chunk.stop - chunk.start)
            found.append((chunk.start, chunk.stop))
        return found

    return take


def test_chunks_grow_until_one_takes_the_target_time_and_end_with_the_epoch(chunks_of):
    loader = ChunkLoader(lambda: 31, steps_per_epoch=31, total_steps=100, max_steps=8)
    assert chunks_of(loader) == [(31, 32), (32, 34), (34, 38), (38, 46), (46, 54), (54, 62)]
    slow = ChunkLoader(lambda: 0, steps_per_epoch=8, total_steps=8, max_steps=16)
    seconds = slow.target_seconds / 2.5
    assert chunks_of(slow, seconds) == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]


def test_chunks_begin_at_the_current_step_and_end_with_the_last(chunks_of):
    loader = ChunkLoader(lambda: 13, steps_per_epoch=10, total_steps=17, max_steps=8)
    assert chunks_of(loader) == [(13, 14), (14, 16), (16, 17)]


def test_rows_do_not_depend_on_when_they_are_taken_or_saved():
    losses = [torch.tensor([float(step), -float(step)]) for step in range(1, 9)]
    losses[6][1] = torch.inf
    found = []
    for interval in (1, 2, 8):
        history, rows = LossHistory(2, every=3), []
        for step, loss in enumerate(losses, start=1):
            history.add(loss)
            if step % interval == 0:
                rows += list(history.read())
                state, history = history.state_dict(), LossHistory(2, every=3)
                history.load_state_dict(state)
        found.append((rows, history.num_steps, history.diverged_at))
    rows = [(3, [2.0, -2.0]), (6, [5.0, -5.0])]
    assert found == [(rows, 8, [None, 7])] * 3
