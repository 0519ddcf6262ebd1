"""Devices, and who answers signals while Lightning runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from training_cases import build_module, train

from normexp.errors import UserError
from normexp.training.devices import placed
from normexp.training.stopping import StopRequest


@pytest.mark.parametrize(("has_cuda", "taken"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_cuda_or_the_cpu_and_nothing_else(monkeypatch, has_cuda: bool, taken: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert placed({"accelerator": "auto", "devices": 1})["accelerator"] == taken
    assert placed({"accelerator": "gpu", "devices": 1})["accelerator"] == "cuda"


class NotesHandlers(pl.Callback):
    """Notes who answers SIGTERM inside each stage."""

    def __init__(self) -> None:
        self.handlers: dict[str, object] = {}

    def on_train_batch_start(self, *_: object) -> None:
        self.handlers["train"] = signal.getsignal(signal.SIGTERM)

    def on_validation_batch_start(self, *_: object) -> None:
        self.handlers["validate"] = signal.getsignal(signal.SIGTERM)

    def on_test_batch_start(self, *_: object) -> None:
        self.handlers["test"] = signal.getsignal(signal.SIGTERM)


class StopsEarly(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        trainer.should_stop = pl_module.step >= 7


def test_training_that_a_callback_or_an_option_ends_early_is_no_result(tmp_path: Path):
    with pytest.raises(UserError, match="after 7 of 10 steps"):
        train(build_module(max_chunk=1), tmp_path / "a.ckpt", [StopsEarly()])
    with pytest.raises(UserError, match="of 10 steps"):
        train(build_module(max_chunk=1), tmp_path / "b.ckpt", limit_train_batches=2)


def test_our_request_answers_signals_in_every_stage(tmp_path: Path):
    notes, stop, before = NotesHandlers(), StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop.listening():
        ours = signal.getsignal(signal.SIGTERM)
    train(build_module(), tmp_path / "a.ckpt", [notes], stop=stop)
    assert notes.handlers == dict.fromkeys(("train", "validate", "test"), ours)
    assert signal.getsignal(signal.SIGTERM) == before


def test_waiting_processes_keep_our_signal_handlers(monkeypatch):
    met = []
    monkeypatch.setattr(DDPStrategy, "barrier", lambda _, name: met.append(name))
    stop = StopRequest()
    strategy = placed({"accelerator": "cpu", "devices": 2, "strategy": "ddp"}, stop)["strategy"]
    with stop.listening():
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning replaces it
        strategy.barrier("run-stage")
        assert signal.getsignal(signal.SIGTERM) == ours
    assert met == ["run-stage"]
