"""Recorded steps end as eager ones, on a tape that freezes what a CUDA graph freezes."""

from __future__ import annotations

import logging
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
    ReadingNorm,
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
from normexp.config.sizes import Sizes
from normexp.norms.batch import BatchNorm
from normexp.training import cuda_graph
from normexp.training.cuda_graph import RecordedStep
from normexp.training.module import TrainingModule
from normexp.training.muon import MuonAdamW
from normexp.training.schedule import named_schedule, own_schedule

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
TEXT = {"model": partial(text_encoder, dropout=0.2), "data": text_data(40), "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ghost": {"sizes": Sizes(8, None, 2)},
    "accumulated": {"sizes": Sizes(8, 4, 2)},
    "rates": {"lr_scales": (1.0, 0.25)},
    "clipped": {"max_grad_norm": 0.5},
    "dropout": TEXT | {"max_grad_norm": 0.5},
    "short last batch": {"data": image_data(44), "drop_last": False},
    "short third batch": {
        "data": image_data(20),
        "drop_last": False,
        "schedule": named_schedule("cosine", 0.1, 12),
    },
    "resnet20": {"model": resnet20, "lr": 0.01},
    "adamw": {"optimizer": partial(torch.optim.AdamW, fused=True), "lr": 0.01},
}


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "CudaGraph", Tape)


def recorded(**choices: Any) -> TrainingModule:
    return build_module(**{"seeds": (0, 1), "cuda_graph": True} | choices)


def recorded_step(module: TrainingModule) -> RecordedStep:
    assert module.recorded_step is not None
    return module.recorded_step


def eager(module: TrainingModule, monkeypatch: pytest.MonkeyPatch) -> TrainingModule:
    """The module without a recording, but with the rates that a recording reads."""
    monkeypatch.setattr(cuda_graph, "WARM_UP", 10**9)
    return module


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize(
    "precision", ["64-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in_turn"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "resnet20")) for n in CASES]
)
def test_a_recorded_training_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch, name: str, stacked: bool, precision: str
):
    run, choices = partial(train, precision=precision), CASES[name]
    found = run(recorded(**choices, stacked=stacked), tmp_path / "recorded.ckpt")
    step = recorded_step(found)
    assert step.why_not is None and step.num_replayed >= found.step // 3
    plain = run(recorded(**choices, stacked=stacked, cuda_graph=False), tmp_path / "plain.ckpt")
    with monkeypatch.context() as patch:
        module = eager(recorded(**choices, stacked=stacked), patch)
        expected = run(module, tmp_path / "eager.ckpt")
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
def test_a_recording_that_forgets_to_copy_ends_otherwise(tmp_path: Path, monkeypatch):
    choices = TEXT | {"seeds": (0,)}
    expected = train(recorded(**choices), tmp_path / "a.ckpt")
    for forget in (forget_batch, forget_keys, forget_rates):
        with monkeypatch.context() as patch:
            forget(patch)
            found = train(recorded(**choices), tmp_path / "b.ckpt")
        assert recorded_step(found).num_replayed > 0
        with pytest.raises(AssertionError):
            assert_same_state(expected, found, 0)


# What cannot be recorded runs eagerly -------------------------------------------------------------


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


class InterruptedNorm(nn.BatchNorm2d):
    """As if Ctrl-C was pressed while a graph is recorded, in whose place torch raises its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        if isinstance(mode, Tape):
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        return super().forward(input)


class FreezesTheFirstLayer(pl.Callback):
    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        next(pl_module.replicas.parameters()).requires_grad_(False)


class ChangesTheMomentum(pl.Callback):
    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        for module in pl_module.replicas.modules():
            if isinstance(module, BatchNorm):
                module.momentum = 0.5


class AddsAHook(pl.Callback):
    def __init__(self) -> None:
        self.num_calls = 0

    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        for module in pl_module.replicas.modules():
            if isinstance(module, BatchNorm):
                module.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_calls += 1


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
        (
            {"optimizer": partial(torch.optim.SGD, momentum=0.9)},
            "SGD is neither fused nor capturable",
        ),
        pytest.param(
            {"optimizer": MuonAdamW}, "MuonAdamW is neither fused nor capturable", marks=NEEDS_MUON
        ),
    ],
)
def test_why_steps_are_not_recorded_is_said_before_the_first(
    tmp_path: Path, caplog, monkeypatch, choices: dict, why: str
):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    caplog.set_level(logging.INFO)
    module = train(recorded(**choices), tmp_path / "a.ckpt")
    assert module.recorded_step is None
    assert cuda_graph.NOT_RECORDED % why in caplog.messages
    assert module.has_ended


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"make_norm": CountingNorm}, "changes attributes of modules"),
        ({"make_norm": ReplacingNorm}, "a step replaces tensors"),
        ({"make_norm": ReadingNorm}, "RuntimeError: operation not permitted"),
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
        expected = train(eager(recorded(**choices), patch), tmp_path / "b.ckpt")
    assert_same_state(expected, found, 0)


@pytest.mark.usefixtures("tape")
def test_ctrl_c_while_a_step_is_recorded_is_ctrl_c(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("normexp.training.module.why_not_recorded", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        train(recorded(make_norm=InterruptedNorm), tmp_path / "a.ckpt")


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("change", [FreezesTheFirstLayer, ChangesTheMomentum])
def test_what_a_callback_changes_is_recorded_anew(
    tmp_path: Path, monkeypatch, change: type[pl.Callback]
):
    found = train(recorded(), tmp_path / "a.ckpt", [change()])
    with monkeypatch.context() as patch:
        expected = train(eager(recorded(), patch), tmp_path / "b.ckpt", [change()])
    assert recorded_step(found).num_replayed > 2
    for replica in (0, 1):
        assert_same_state(expected, found, 0, replica=replica)


@pytest.mark.usefixtures("tape")
def test_a_hook_that_a_callback_adds_is_called_in_every_step(tmp_path: Path):
    hook = AddsAHook()
    module = train(recorded(seeds=(0,)), tmp_path / "a.ckpt", [hook])
    sites = sum(isinstance(one, BatchNorm) for one in module.replicas.modules())
    assert "has hooks" in (recorded_step(module).why_not or "")
    assert hook.num_calls >= sites * 5  # of the second epoch


def test_on_a_cpu_a_line_says_that_there_is_nothing_to_record(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    train(recorded(), tmp_path / "a.ckpt")
    assert cuda_graph.NOT_RECORDED % "they run on a CPU" in caplog.messages


def hooked(replicas: Replicas) -> Replicas:
    next(replicas.modules()).register_forward_hook(lambda *_: None)
    return replicas


@pytest.mark.usefixtures("tape")
def test_hooks_and_draws_of_foreign_code_are_not_recorded():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True)
    replicas = build_module().replicas
    assert cuda_graph.why_not_recorded(replicas, optimizer) is None
    replicas.has_foreign_draws = True
    assert "global generator" in (cuda_graph.why_not_recorded(replicas, optimizer) or "")
    replicas = hooked(build_module().replicas)
    assert "has hooks" in (cuda_graph.why_not_recorded(replicas, optimizer) or "")
