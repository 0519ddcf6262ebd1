"""The user's own callbacks: which ones fit, when they act, and what ends a training early."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
from pytorch_lightning import callbacks as shipped
from training_cases import assert_same_state, build_module, stopped_and_resumed, train

from normexp.errors import UserError
from normexp.training.fit import act_on_batches, check_callback, describe_monitor, why_stopped
from normexp.training.module import TrainingModule

METRICS = ["val/loss", "val/accuracy"]


class Sees(pl.Callback):
    """Stores the metrics that Lightning holds after each validation."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        self.found.append({k: v.item() for k, v in trainer.callback_metrics.items()})


class Steps(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        pass


class Gradients(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


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
        (Gradients(), "on_after_backward is never called"),
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
    assert act_on_batches([*quiet, Steps()])
    assert act_on_batches([shipped.LambdaCallback(on_train_batch_start=print)])
    early = shipped.EarlyStopping("val/loss")
    assert describe_monitor([Sees(), early]) == "EarlyStopping acts on val/loss"
