"""Trainings on a GPU: as on the CPU, in chunks, in bfloat16, resumed, compiled, side by side."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from gpu_cases import NEEDS_GPU, build, in_each_form, no_waiting, on_each_device
from pytorch_lightning.plugins.precision import MixedPrecision
from torch._dynamo.utils import counters
from training_cases import (
    StopAt,
    assert_same_state,
    build_module,
    image_data,
    resnet20,
    rows_of,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.norms import kernel
from normexp.records.result import read_result
from normexp.train import main
from normexp.training import devices
from normexp.training.module import TrainingModule
from normexp.training.stopping import Interrupted

BOTH = {"seeds": (0, 1), "stacked": True}
TEXT = {"model": partial(text_encoder, dropout=0.2), "data": text_data(), "lr": 0.01}
CHOICES = {
    "plain": {},
    "ghost": {"sizes": Sizes(8, 4, 2)},
    "resnet20": {"model": resnet20, "lr": 0.01},
    "masks_and_dropout": TEXT,
    "clipping": {"max_grad_norm": 0.5},
    "rates": {"lr_scales": (1.0, 0.25)},
}


class Watcher(pl.Callback):
    """A callback of a user."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del pl_module
        self.losses.append(float(trainer.callback_metrics["val/loss"]))


@in_each_form
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_a_training_ends_as_one_in_turn_on_the_cpu(
    tmp_path: Path, device: str, stacked: bool, choices: dict
):
    trained = []
    for where, is_stacked in (("cpu", False), (device, stacked)):
        module = build_module(**choices, seeds=(0, 1), stacked=is_stacked)
        watcher = Watcher()
        checkpoint = tmp_path / f"{where}-{is_stacked}.ckpt"
        train(module, checkpoint, [watcher], accelerator=where)
        trained.append((module.cpu(), watcher.losses))
    (expected, losses), (found, own_losses) = trained
    for replica in (0, 1):
        assert_same_state(expected, found, 1e-8, replica=replica)
    assert own_losses == pytest.approx(losses, rel=1e-9) and len(losses) > 0
    assert found.metrics.keys() == expected.metrics.keys()
    names = {name for row in rows_of(found) for name in row[3]}
    assert names == {name for row in rows_of(expected) for name in row[3]}


@in_each_form
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_chunks_change_nothing(
    tmp_path: Path, monkeypatch, device: str, precision: str, stacked: bool
):
    # Versions of Lightning differ in whether autocast keeps the rounded weights inside a chunk.
    keeps = torch.autocast(device, torch.bfloat16, cache_enabled=True)
    monkeypatch.setattr(MixedPrecision, "autocast_context_manager", lambda _: keeps)
    one, many = (
        train(
            build_module(seeds=(0, 1), stacked=stacked, max_chunk=size),
            tmp_path / f"{size}.ckpt",
            accelerator=device,
            precision=precision,
        )
        for size in (1, 8)
    )
    for replica in (0, 1):
        assert_same_state(one.cpu(), many.cpu(), 1e-10, replica=replica)


@in_each_form
def test_bfloat16_is_near_float32(tmp_path: Path, device: str, stacked: bool):
    mixed, full = (
        train(
            build_module(seeds=(0, 1), stacked=stacked, sizes=Sizes(8, 4, 2)),
            tmp_path / f"{precision}.ckpt",
            precision=precision,
            accelerator=device,
        )
        for precision in ("bf16-mixed", "32-true")
    )
    rel = 0.1 if device == "cuda" else 0.05
    assert mixed.metrics["val/loss"] == pytest.approx(full.metrics["val/loss"], rel=rel)
    assert mixed.metrics["val/loss"] != full.metrics["val/loss"]
    assert all(parameter.dtype == torch.float32 for parameter in mixed.parameters())


@in_each_form
def test_a_checkpoint_moves_between_devices(tmp_path: Path, device: str, stacked: bool):
    build_one = partial(build_module, seeds=(0, 1), stacked=stacked, max_chunk=1)
    whole = train(build_one(), tmp_path / "whole.ckpt", accelerator=device)
    checkpoint = tmp_path / "moved.ckpt"
    for where, stop_at in ((device, 3), ("cpu", 7)):
        stopper = StopAt(stop_at)
        with pytest.raises(Interrupted):
            train(build_one(), checkpoint, [stopper], stop=stopper.request, accelerator=where)
    moved = train(build_one(), checkpoint, accelerator=device)
    for replica in (0, 1):
        assert_same_state(whole.cpu(), moved.cpu(), 1e-9, replica=replica)


class Interrupt(pl.Callback):
    """Sends this process SIGINT once a number of steps is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        if pl_module.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@on_each_device
def test_resumed_after_sigint_to_the_bit(tmp_path: Path, device: str):
    build_one = partial(build_module, **BOTH, max_chunk=1)
    options = {"precision": "32-true", "accelerator": device}
    whole = train(build_one(), tmp_path / "whole.ckpt", **options)
    with pytest.raises(Interrupted):
        train(build_one(), tmp_path / "cut.ckpt", [Interrupt(4)], **options)
    resumed = train(build_one(), tmp_path / "cut.ckpt", **options)
    for replica in (0, 1):
        assert_same_state(whole.cpu(), resumed.cpu(), 0, replica=replica)


@in_each_form
@pytest.mark.parametrize(
    ("model", "choices"),
    [
        ("convnet", {"max_grad_norm": 1.0}),
        ("small_resnet", {"lr_scales": (1.0, 0.5), "sizes": Sizes(16, 8, 4)}),
        ("text_encoder", {}),
        ("gpt", {}),
    ],
)
def test_no_step_waits_for_the_device(
    tmp_path: Path, monkeypatch, device: str, model: str, stacked: bool, choices: dict
):
    words = ["model.dropout=0.1"] if model in ("text_encoder", "gpt") else []
    module = build(model, "batch", *words, stacked=stacked, **choices)
    take_step, num_watched = TrainingModule._take_step, 0

    def watched(self: TrainingModule, *given) -> None:
        nonlocal num_watched
        if self.step == 0:  # allocates, and chooses kernels
            take_step(self, *given)
            return
        num_watched += 1
        with no_waiting(device):
            take_step(self, *given)

    monkeypatch.setattr(TrainingModule, "_take_step", watched)
    train(module, tmp_path / "a.ckpt", precision="32-true", accelerator=device)
    assert num_watched == module.recipe.num_steps - 1 > 0


@on_each_device
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_steps_equal_eager_ones_whatever_the_chunks(
    tmp_path: Path, monkeypatch, device: str
):
    data = image_data(4 * 20 + 2 * (device == "cuda"))  # a shorter last batch compiles again
    choices = {**BOTH, "data": data, "sizes": Sizes(4), "drop_last": False, "max_chunk": 8}
    # A GPU folds the replicas of a stack into the channels whatever the size of an input.
    monkeypatch.setattr(kernel, "FOLD_FROM_ELEMENTS", 0)
    eager = train(build_module(**choices), tmp_path / "eager.ckpt", accelerator=device)
    if device == "cpu":  # where compiling takes a minute
        compile_ = torch.compile
        monkeypatch.setattr(
            devices.torch, "compile", lambda run, **_: compile_(run, backend="aot_eager")
        )
    monkeypatch.setattr("normexp.training.module.SECONDS_PER_CHUNK", 1e9)
    counters.clear()
    module = build_module(**choices, compile=True)
    train(module, tmp_path / "compiled.ckpt", accelerator=device)
    assert module.step == (42 if device == "cuda" else 40)
    assert 1 <= counters["stats"]["unique_graphs"] <= (2 if device == "cuda" else 1)
    for replica in (0, 1):
        assert_same_state(eager.cpu(), module.cpu(), 1e-8, replica=replica)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=NEEDS_GPU)]
)
def test_two_workers_share_a_device(tmp_path: Path, device: str):
    trainer = "gpu" if device == "cuda" else "cpu"
    words = ["norm=batch,group", "steps=6", "replicas=2", "study=two", f"trainer={trainer}"]
    assert main(["-m", *words, "workers=2", f"runs_dir={tmp_path}"]) == 0
    results = [read_result(path.parent) for path in tmp_path.rglob("result.json")]
    assert len(results) == 4 and all(result.status == "finished" for result in results)
