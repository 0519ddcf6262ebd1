"""Through Lightning: devices, signals, callbacks, and what ends a training early."""

from __future__ import annotations

import inspect
import signal
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.func import vmap
from torch.optim import lr_scheduler
from training_cases import (
    SETTINGS,
    SGD,
    StopAt,
    assert_same_state,
    build_module,
    stopped_and_resumed,
    train,
)

from normexp.errors import UserError
from normexp.training.callbacks import act_on_batches, check_callback, describe_monitor, why_stopped
from normexp.training.devices import device_type, gpu_arithmetic
from normexp.training.fit import build_trainer, evaluate
from normexp.training.module import TrainingModule
from normexp.training.schedule import own_schedule
from normexp.training.step import Step
from normexp.training.stopping import Interrupted, StopRequest


class NotesHandlers(pl.Callback):
    """Records the handlers of SIGTERM and SIGUSR1 within each stage."""

    def __init__(self) -> None:
        self.handlers: set[object] = set()

    def note(self, *_: object) -> None:
        self.handlers.add((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)))

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = note


class StopsEarly(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        trainer.should_stop = pl_module.step >= 7


def test_training_that_a_callback_ends_early_is_no_result(tmp_path: Path):
    with pytest.raises(UserError, match="after 7 of 10 steps"):
        train(build_module(max_chunk=1), tmp_path / "a.ckpt", [StopsEarly()])


class SetsRates(pl.Callback):
    """Sets the learning rate in one hook, once `step` steps are done."""

    def __init__(self, hook: str, step: int, rate: float) -> None:
        def set_rates(trainer: pl.Trainer, pl_module: TrainingModule, *_: object) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = rate if pl_module.step >= step else group["lr"]

        setattr(self, hook, set_rates)


@pytest.mark.parametrize(
    ("hook", "step"),
    [("on_train_start", 0), ("on_train_epoch_start", 5), ("on_train_batch_start", 7)],
)
def test_a_rate_that_the_schedule_would_overwrite_is_refused(tmp_path: Path, hook: str, step: int):
    with pytest.raises(UserError, match=f"before step {step + 1}, and the schedule sets it anew"):
        train(build_module(max_chunk=1), tmp_path / "a.ckpt", [SetsRates(hook, step, 0.0)])


def test_a_callback_may_set_the_rate_of_a_schedule_that_follows_validations(tmp_path: Path):
    make = partial(lr_scheduler.ReduceLROnPlateau, patience=9)
    plateau = own_schedule(make, lr_scheduler.ReduceLROnPlateau, 10, None, "plateau")
    module = build_module(schedule=plateau)
    train(module, tmp_path / "a.ckpt", [SetsRates("on_train_start", 0, 0.25)])
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.25


class Ends(pl.Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=["exit", "ctrl-c"])
def test_a_program_that_a_callback_ends_is_not_interrupted(tmp_path: Path, error: BaseException):
    with pytest.raises(type(error)):
        train(build_module(), tmp_path / "a.ckpt", [Ends(error)])


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
        two = SETTINGS.trainer.model_copy(update={"devices": 2})
        waiting = build_trainer(two, tmp_path, stop).strategy
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning replaces it
        waiting.barrier()  # for other processes
        assert signal.getsignal(signal.SIGTERM) == ours
    train(build_module(), tmp_path / "a.ckpt", [notes], stop=stop)
    assert notes.handlers == {(ours, signal.getsignal(signal.SIGUSR1))}
    assert signal.getsignal(signal.SIGTERM) == before


def test_nothing_of_the_surroundings_reaches_a_training_or_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = train(build_module(), tmp_path / "alone/a.ckpt")
    job = {"NTASKS": "6", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "a"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in inspect.signature(pl.Trainer).parameters:
        monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", "1")
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.chdir(tmp_path)
    Path("hpc_ckpt_3.ckpt").write_text("of another program's job")
    notes, handler = NotesHandlers(), signal.getsignal(signal.SIGUSR1)
    in_job = train(build_module(), tmp_path / "job/a.ckpt", [notes])
    assert_same_state(in_job, alone, 0)
    assert in_job.metrics == alone.metrics
    assert {usr1 for _, usr1 in notes.handlers} == {handler}
    evaluate(in_job, tmp_path / "job")
    assert in_job.metrics == alone.metrics


def test_out_of_memory_says_what_to_change(tmp_path: Path, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(Step, "take", fail)
    with pytest.raises(MemoryError, match="fewer replicas or a smaller micro_batch_size"):
        train(build_module(), tmp_path / "a.ckpt")


def arithmetic() -> tuple:
    """What a GPU would compute with: float32, convolutions, and whether attention is fused."""
    kernels, cudnn = torch.backends.cuda, torch.backends.cudnn
    fused = kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled()
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic, *fused


def test_arithmetic_of_a_gpu_is_set_inside_the_block_and_put_back():
    before = arithmetic()
    for precision, tf32 in (("high", True), ("highest", False)):
        with gpu_arithmetic(precision):
            assert arithmetic() == (precision, tf32, True, False, False)
            assert torch.backends.cudnn.enabled
        assert arithmetic() == before


def test_unfused_attention_runs_under_vmap_and_equals_fused():
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True)
    x = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    x.requires_grad_()
    outputs = torch.stack([attend(one, one, one) for one in x])
    (fused,) = torch.autograd.grad(outputs.square().sum(), x)
    with gpu_arithmetic("high"):
        stacked = vmap(lambda one: attend(one, one, one))(x)
        (unfused,) = torch.autograd.grad(stacked.square().sum(), x)
    torch.testing.assert_close(unfused, fused)


@pytest.mark.parametrize(
    "optimizer", [SGD, partial(torch.optim.AdamW, fused=True)], ids=["sgd", "adamw"]
)
def test_a_checkpoint_of_a_network_that_lies_otherwise_resumes_alike(tmp_path: Path, optimizer):
    """As that of a GPU, where a network of images has its channels last."""
    build = partial(build_module, optimizer=optimizer)
    whole = train(build(), tmp_path / "whole.ckpt")
    checkpoint, stopper = tmp_path / "stopped.ckpt", StopAt(4)
    with pytest.raises(Interrupted):
        train(build(), checkpoint, [stopper], stop=stopper.request)
    content = torch.load(checkpoint, weights_only=True)
    moved = 0
    for state in content["optimizer_states"][0]["state"].values():
        for name, value in state.items():
            if value.ndim == 4:
                state[name] = value.contiguous(memory_format=torch.channels_last)
                moved += not state[name].is_contiguous()
    assert moved
    torch.save(content, checkpoint)
    resumed = train(build(), checkpoint)
    assert_same_state(whole, resumed, 0)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_auto_is_a_gpu_or_the_cpu(monkeypatch, has_cuda: bool):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert device_type("auto") == ("cuda" if has_cuda else "cpu")  # never "mps"


# The user's own callbacks -------------------------------------------------------------------------


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
    ],
)
def test_callback_that_cannot_work_is_refused_with_what_does(callback: object, message: str):
    with pytest.raises(UserError, match=f"^callback._target_=Own.*{message}"):
        check_callback(callback, "callback._target_=Own")


def test_callbacks_say_what_they_need():
    quiet = [Sees(), shipped.LambdaCallback(on_train_end=print)]
    for callback in quiet:
        check_callback(callback, "callback")
    assert not act_on_batches(quiet) and not any(map(describe_monitor, quiet))
    assert act_on_batches([*quiet, StopsEarly()])
    assert act_on_batches([shipped.LambdaCallback(on_train_batch_start=print)])
    early = shipped.EarlyStopping("val/loss")
    assert describe_monitor(early) == "EarlyStopping acts on val/loss"
