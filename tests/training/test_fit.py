"""Through Lightning: devices, signals, callbacks, and what ends a training early."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.strategies import DDPStrategy
from training_cases import (
    CPU,
    StopAt,
    assert_same_state,
    build_module,
    stopped_and_resumed,
    train,
)

from normexp.errors import UserError
from normexp.training import module
from normexp.training.fit import (
    act_on_batches,
    check_callback,
    describe_monitor,
    gpu_arithmetic,
    trainer_options,
    why_stopped,
)
from normexp.training.module import TrainingModule
from normexp.training.step import Step
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

    monkeypatch.setattr(Step, "take", fail)
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


# The user's own callbacks -------------------------------------------------------------------------


METRICS = ["val/loss", "val/accuracy"]


class Sees(pl.Callback):
    """Stores the metrics that Lightning holds after each validation."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        self.found.append({k: v.item() for k, v in trainer.callback_metrics.items()})


def test_callback_finds_the_means_of_the_stack_after_each_validation(tmp_path: Path):
    sees = Sees()
    module = train(build_module(seeds=(0, 1), stacked=True), tmp_path / "a.ckpt", [sees])
    assert [set(found) for found in sees.found] == [{"train/loss", "val/loss", "val/accuracy"}] * 2
    mean = sum(module.metrics["val/loss"]) / 2
    assert sees.found[-1]["val/loss"] == pytest.approx(mean, rel=1e-6)  # Lightning's are float32


def test_training_that_early_stopping_ends_is_complete_and_says_why(tmp_path: Path):
    early = shipped.EarlyStopping("val/loss", stopping_threshold=100.0)
    module = train(build_module(), tmp_path / "a.ckpt", [early])
    assert module.step == 5 < module.recipe.num_steps
    assert "test/loss" in module.metrics
    assert "val/loss" in (why_stopped(module.trainer) or "")


def test_state_of_a_callback_is_resumed(tmp_path: Path):
    counts: list[int] = []

    class Watches(shipped.EarlyStopping):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            counts.append(self.wait_count)

    def build() -> TrainingModule:
        return build_module(max_chunk=2)

    def watching() -> list[pl.Callback]:
        return [Watches("val/loss", patience=9, min_delta=100.0)]

    whole = train(build(), tmp_path / "whole.ckpt", watching())
    stop_at = 5  # the end of an epoch
    resumed = stopped_and_resumed(build, stop_at, tmp_path / "a.ckpt", "64-true", watching)
    assert counts == [0, 1, 0, 1]  # the second training neither began again nor missed a check
    assert_same_state(whole, resumed, 0)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (shipped.ModelCheckpoint(), "cannot be used: .*weights.pt"),
        (shipped.GradientAccumulationScheduler({0: 2}), "set micro_batch_size="),
        (shipped.LambdaCallback(on_before_zero_grad=print), "on_before_zero_grad is never called"),
        (shipped.EarlyStopping("val_loss"), "monitor=val_loss .* try val/loss, val/accuracy"),
    ],
)
def test_callback_that_cannot_work_is_refused_with_what_does(callback: object, message: str):
    with pytest.raises(UserError, match=f"^callback._target_=Own.*{message}"):
        check_callback(callback, "callback._target_=Own", METRICS)


def test_callbacks_say_what_they_need():
    quiet = [Sees(), shipped.LambdaCallback(on_train_end=print)]
    for callback in quiet:
        check_callback(callback, "callback", METRICS)
    assert not act_on_batches(quiet) and describe_monitor(quiet) is None
    assert act_on_batches([*quiet, StopsEarly()])
    assert act_on_batches([shipped.LambdaCallback(on_train_batch_start=print)])
    early = shipped.EarlyStopping("val/loss")
    assert describe_monitor([Sees(), early]) == "EarlyStopping acts on val/loss"
