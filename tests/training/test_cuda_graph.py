"""Recorded steps end as steps that run as they are, on a tape that freezes what a graph freezes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from tape import Tape
from torch import nn
from torch.optim import lr_scheduler
from training_cases import (
    assert_same_state,
    build_module,
    image_data,
    resnet20,
    rows_of,
    stopped_and_resumed,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.replicas import Replicas
from normexp.batching.sizes import Sizes
from normexp.training import cuda_graph
from normexp.training.cuda_graph import RecordedStep
from normexp.training.module import TrainingModule
from normexp.training.recipe import own_schedule

TEXT = {"model": partial(text_encoder, dropout=0.2), "data": text_data(40), "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ghost": {"sizes": Sizes(8, None, 2)},
    "accumulated": {"sizes": Sizes(8, 4, 2)},
    "rates": {"lr_scales": (1.0, 0.25)},
    "clipped": {"max_grad_norm": 0.5},
    "dropout": TEXT | {"max_grad_norm": 0.5},
    "short last batch": {"data": image_data(44), "drop_last": False},
    "resnet20": {"model": resnet20, "lr": 0.01},
    "adamw": {"optimizer": partial(torch.optim.AdamW, fused=True), "lr": 0.01},
}


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "CudaGraph", Tape)


def recorded(**choices: Any) -> TrainingModule:
    return build_module(**{"seeds": (0, 1), "cuda_graph": True} | choices)


def recorded_step(module: TrainingModule) -> RecordedStep:
    assert module._optimizer_step is not None and module._optimizer_step.recorded is not None
    return module._optimizer_step.recorded


def as_they_are(module: TrainingModule, monkeypatch: pytest.MonkeyPatch) -> TrainingModule:
    """The module without a recording, but with rates as rounded as those of a recording."""
    monkeypatch.setattr(cuda_graph, "WARM_UP", 10**9)
    return module


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize(
    "precision", ["64-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in_turn"])
@pytest.mark.parametrize("choices", CASES.values(), ids=CASES.keys())
def test_a_recorded_training_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch, choices: dict, stacked: bool, precision: str
):
    run = partial(train, precision=precision)
    found = run(recorded(**choices, stacked=stacked), tmp_path / "recorded.ckpt")
    step = recorded_step(found)
    assert step.why_not is None and step.num_replayed >= found.step - 5
    plain = run(recorded(**choices, stacked=stacked, cuda_graph=False), tmp_path / "plain.ckpt")
    with monkeypatch.context() as patch:
        module = as_they_are(recorded(**choices, stacked=stacked), patch)
        expected = run(module, tmp_path / "as_it_is.ckpt")
    assert recorded_step(expected).num_replayed == 0
    for replica in (0, 1):
        assert_same_state(expected, found, 0, replica=replica)
        assert_same_state(plain, found, 1e-6, replica=replica)  # its rates are float64
    assert rows_of(expected) == rows_of(found)


@pytest.mark.usefixtures("tape")
def test_a_resumed_recorded_training_ends_as_one_that_was_not_stopped(tmp_path: Path):
    whole = train(recorded(), tmp_path / "whole.ckpt")
    resumed = stopped_and_resumed(recorded, 4, tmp_path / "stopped.ckpt", "64-true")
    assert recorded_step(resumed).num_replayed > 0
    for replica in (0, 1):
        assert_same_state(whole, resumed, 0, replica=replica)


# What must be copied into a recording, and what becomes of it if it is not ------------------------


def forget_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = cuda_graph._Recording.replay
    monkeypatch.setattr(
        cuda_graph._Recording, "replay", lambda self, _, keys: replay(self, self.batch, keys)
    )


def forget_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = cuda_graph._Recording.replay
    monkeypatch.setattr(
        cuda_graph._Recording, "replay", lambda self, batch, _: replay(self, batch, None)
    )


def forget_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = cuda_graph._Recording.replay

    def with_first_rates(self: cuda_graph._Recording, *given: Any) -> torch.Tensor:
        monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, _: tensor)
        return replay(self, *given)

    monkeypatch.setattr(cuda_graph._Recording, "replay", with_first_rates)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("forget", [forget_batch, forget_keys, forget_rates])
def test_a_recording_that_forgets_to_copy_ends_otherwise(
    tmp_path: Path, monkeypatch, forget: Callable[[pytest.MonkeyPatch], None]
):
    expected = train(recorded(**TEXT), tmp_path / "a.ckpt")
    forget(monkeypatch)
    found = train(recorded(**TEXT), tmp_path / "b.ckpt")
    assert recorded_step(found).num_replayed > 0
    with pytest.raises(AssertionError):
        assert_same_state(expected, found, 0)


# What cannot be recorded runs as it is ------------------------------------------------------------


class CountingNorm(nn.BatchNorm2d):
    """Of this file, so that only the comparison of a replay can tell what it does."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.count = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(input) * (1 + 0.1 * self.count)


class ReplacingNorm(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        self.running_mean = self.running_mean.clone()
        return out


class ReadingNorm(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_available() or self.training:
            raise_in_recording()
        return super().forward(input)


def raise_in_recording() -> None:
    """As `.item()` does inside a CUDA graph."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if isinstance(mode, Tape):
        raise RuntimeError("operation not permitted when stream is capturing")


class FreezesTheFirstLayer(pl.Callback):
    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        next(pl_module.replicas.parameters()).requires_grad_(False)


CYCLE = own_schedule(
    partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=11),
    lr_scheduler.OneCycleLR,
    10,
    None,
    "OneCycleLR",
)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"make_norm": CountingNorm}, "CountingNorm is neither of torch nor of normexp"),
        ({"max_chunk": 1}, "chunk=1, or a callback acts on batches"),
        ({"compile": True}, "compile=true"),
    ],
)
def test_why_steps_are_not_recorded_is_said_before_the_first(
    tmp_path: Path, caplog, monkeypatch, choices: dict, why: str
):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    caplog.set_level(logging.INFO)
    module = train(recorded(**choices), tmp_path / "a.ckpt")
    assert module._optimizer_step is not None and module._optimizer_step.recorded is None
    assert cuda_graph.NOT_RECORDED % why in caplog.messages
    assert module.has_ended


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"make_norm": CountingNorm}, "a replay does not end as the step itself"),
        ({"make_norm": ReplacingNorm}, "a step replaces tensors"),
        ({"make_norm": ReadingNorm}, "operation not permitted"),
        ({"schedule": CYCLE}, "something besides the learning rate changes"),
    ],
)
def test_a_step_that_cannot_be_recorded_never_ends_a_run(
    tmp_path: Path, monkeypatch, choices: dict, why: str
):
    monkeypatch.setattr("normexp.training.module.why_not_recorded", lambda *_: None)
    found = train(recorded(**choices), tmp_path / "a.ckpt")
    assert why in (recorded_step(found).why_not or "")
    with monkeypatch.context() as patch:
        expected = train(as_they_are(recorded(**choices), patch), tmp_path / "b.ckpt")
    if choices.get("make_norm") is not CountingNorm:  # which counts the recording as well
        assert_same_state(expected, found, 0)


@pytest.mark.usefixtures("tape")
def test_what_a_callback_freezes_is_recorded_anew(tmp_path: Path, monkeypatch):
    found = train(recorded(), tmp_path / "a.ckpt", [FreezesTheFirstLayer()])
    with monkeypatch.context() as patch:
        module = as_they_are(recorded(), patch)
        expected = train(module, tmp_path / "b.ckpt", [FreezesTheFirstLayer()])
    assert recorded_step(found).num_replayed > 2
    for replica in (0, 1):
        assert_same_state(expected, found, 0, replica=replica)


def test_on_a_cpu_a_line_says_that_there_is_nothing_to_record(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    train(recorded(), tmp_path / "a.ckpt")
    assert cuda_graph.NOT_RECORDED % "they run on a CPU" in caplog.messages


def hooked(replicas: Replicas) -> Replicas:
    next(replicas.modules()).register_forward_hook(lambda *_: None)
    return replicas


@pytest.mark.usefixtures("tape")
def test_hooks_and_draws_of_foreign_code_are_not_recorded():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    replicas = build_module().replicas
    assert cuda_graph.why_not_recorded(replicas, optimizer, 4) is None
    replicas.has_foreign_draws = True
    assert "global generator" in (cuda_graph.why_not_recorded(replicas, optimizer, 4) or "")
    replicas = hooked(build_module().replicas)
    assert "has hooks" in (cuda_graph.why_not_recorded(replicas, optimizer, 4) or "")
