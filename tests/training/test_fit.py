"""Devices, signal handlers, and speed-ups that do not change results."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from training_cases import CPU, StopAt, assert_same_state, build_module, image_data, train

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.training import module
from normexp.training.fit import gpu_arithmetic, trainer_options
from normexp.training.stopping import StopRequest


class NotesHandlers(pl.Callback):
    """Records the SIGTERM handler within each stage."""

    def __init__(self) -> None:
        self.handlers: set[object] = set()

    def note(self, *_: object) -> None:
        self.handlers.add(signal.getsignal(signal.SIGTERM))

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = note


class StopsEarly(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        trainer.should_stop = pl_module.step >= 7


def test_training_that_a_callback_ends_early_is_no_result(tmp_path: Path):
    with pytest.raises(UserError, match="after 7 of 10 steps"):
        train(build_module(max_chunk=1), tmp_path / "a.ckpt", [StopsEarly()])


def test_stop_at_the_end_of_training_comes_too_late(tmp_path: Path):
    stopper, checkpoint = StopAt(10), tmp_path / "last.ckpt"
    trained = train(build_module(), checkpoint, [stopper], stop=stopper.request)
    assert trained.step == 10
    assert "test/loss" in trained.metrics
    assert not checkpoint.exists()  # a run resumed there would skip the test


def test_our_request_answers_signals_in_every_stage(tmp_path: Path, monkeypatch):
    notes, stop, before = NotesHandlers(), StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop.listening():
        ours = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(DDPStrategy, "barrier", lambda *_: None)
        waiting = trainer_options(replace(CPU, per_node=2, strategy="ddp"), stop)["strategy"]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning replaces it
        waiting.barrier()  # for other processes
        assert signal.getsignal(signal.SIGTERM) == ours
    train(build_module(), tmp_path / "a.ckpt", [notes], stop=stop)
    assert notes.handlers == {ours}
    assert signal.getsignal(signal.SIGTERM) == before


def test_out_of_memory_says_what_to_change(tmp_path: Path, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(module.TrainingModule, "_take_step", fail)
    with pytest.raises(MemoryError, match="try fewer replicas, stack=false or a smaller micro_"):
        train(build_module(), tmp_path / "a.ckpt")


def test_arithmetic_is_set_for_a_gpu_inside_the_block_and_left_alone_on_a_cpu(monkeypatch):
    cudnn = torch.backends.cudnn

    def settings() -> tuple[str, bool, bool]:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic

    before = settings()
    with gpu_arithmetic(replace(CPU, matmul_precision="medium")):
        assert settings() == before
    for precision, tf32 in (("high", True), ("highest", False)):
        with gpu_arithmetic(replace(CPU, accelerator="gpu", matmul_precision=precision)):
            assert settings() == (precision, tf32, True)
        assert settings() == before
    for has_cuda, taken in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        assert replace(CPU, accelerator="auto").type == taken  # never "mps"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_step_is_compiled_once_and_trains_the_same_whatever_the_chunks(
    tmp_path: Path, monkeypatch
):
    """Of one replica; of a stack, see test_gpu_trainings.py."""
    graphs, compile_ = [], torch.compile

    def backend(graph, inputs):
        del inputs
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda run, **_: compile_(run, backend=backend))
    monkeypatch.setattr(module, "SECONDS_PER_CHUNK", 1e9)
    choices = {"data": image_data(22), "sizes": Sizes(4), "drop_last": False, "max_chunk": 4}
    trained = train(build_module(**choices, compile=True), tmp_path / "a.ckpt")
    assert trained.step == 12
    assert 1 <= len(graphs) <= 2  # one for the shorter last batch of an epoch
    assert_same_state(trained, train(build_module(**choices), tmp_path / "b.ckpt"), 1e-9)
