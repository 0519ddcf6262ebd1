"""Two processes that share every step train what one does with the same sizes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException
from training_cases import (
    NOT_SAVED,
    batch_norm,
    build_module,
    image_data,
    resnet20,
    rows_of,
    state_of,
    text_data,
    text_encoder,
    train,
)
from wild_norms import StrangerNorm

from normexp.norms.batch import SyncBatchNorm
from normexp.training import fit
from normexp.training.config.sizes import Sizes
from normexp.training.module import TrainingModule


def sync_norm(num_features: int) -> nn.Module:
    return SyncBatchNorm(num_features, eps=1e-5, momentum=0.1)


ADAMW = partial(torch.optim.AdamW, betas=(0.9, 0.999))

# Sizes as two devices are asked for; `alone` gives those of one process that trains the same.
CASES: dict[str, dict[str, Any]] = {
    "batch_stacked": {"sizes": Sizes(8), "seeds": (0, 1), "stacked": True},
    "accumulated_ghost": {"sizes": Sizes(16, 8, 2), "model": resnet20},
    "stranger": {"sizes": Sizes(8, 4), "make_norm": StrangerNorm},
    # The first process has 4 of the last 6 strings; real tokens differ in number everywhere.
    "sync_masked": {
        "sizes": Sizes(8),
        "model": text_encoder,
        "data": text_data(22),
        "drop_last": False,
        "make_norm": sync_norm,
        "synchronized": True,
    },
    "sync_ragged": {
        "sizes": Sizes(8, 4),
        "data": image_data(47),
        "drop_last": False,
        "make_norm": sync_norm,
        "synchronized": True,
    },
    "adamw_clipped": {
        "sizes": Sizes(8),
        "seeds": (0, 1),
        "optimizer": ADAMW,
        "lr": 1e-3,
        "max_grad_norm": 0.5,
    },
    # 46 samples leave a last batch of 6: in parts of 4 the second device has 2 and then 0 of them.
    "ragged": {"sizes": Sizes(8, 4), "data": image_data(46), "drop_last": False},
    "idle": {"sizes": Sizes(8), "data": image_data(42), "drop_last": False},
    "masked_with_dropout": {
        "sizes": Sizes(8),
        "model": partial(text_encoder, dropout=0.3),
        "data": text_data(22),
        "drop_last": False,
    },
}


def build(name: str) -> TrainingModule:
    case = {"lr": 0.01, "make_norm": batch_norm} | CASES[name]
    sizes = case.pop("sizes").shared_by(2, synchronized=case.pop("synchronized", False))
    return build_module(sizes=sizes, **case)


def outcome_of(module: TrainingModule) -> dict[str, Any]:
    """State, rows and final metrics of every replica."""
    every = range(module.replicas.num_replicas)
    states = [{n: v.detach() for n, v in state_of(module, index).items()} for index in every]
    rows = [rows_of(module, index) for index in every]
    return {"states": states, "rows": rows, "metrics": module.metrics}


def in_two_processes(function: Callable[[Fabric], None]) -> None:
    """Calls a function of a module in two processes at once."""
    environment = LightningEnvironment()
    Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn", plugins=[environment]).launch(
        function
    )


def train_all(fabric: Fabric, *, folder: Path) -> None:
    """Leaves the outcome of each case in FOLDER/<case>.<rank>.pt."""
    for name in CASES:
        module = train(build(name), folder / f"{name}.ckpt", strategy="ddp", devices=2)
        torch.save(outcome_of(module), folder / f"{name}.{fabric.global_rank}.pt")


class KillSecond(pl.Callback):
    """Kills the process of rank 1 within a step."""

    def on_train_batch_start(self, trainer, pl_module, *args):  # noqa: ARG002
        if trainer.global_rank == 1 and pl_module.step >= 6:
            os.kill(os.getpid(), signal.SIGKILL)


def lose_second(fabric: Fabric, *, checkpoint: Path) -> None:
    """Saves often; rank 1 dies."""
    del fabric
    fit.SECONDS_BETWEEN_SAVES = 0
    train(build("batch_stacked"), checkpoint, [KillSecond()], strategy="ddp", devices=2)


def resume(fabric: Fabric, *, checkpoint: Path) -> None:
    module = train(build("batch_stacked"), checkpoint, strategy="ddp", devices=2)
    torch.save(outcome_of(module), checkpoint.with_suffix(f".{fabric.global_rank}.pt"))


def assert_same_outcome(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    for own, theirs in zip(expected["states"], found["states"], strict=True):
        for name in (name for name in own if not name.endswith(NOT_SAVED)):
            torch.testing.assert_close(theirs[name], own[name], rtol=0, atol=atol, msg=name)
    for name, column in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(column, abs=atol)


@pytest.fixture(scope="module")
def shared_trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the outcome of every case in each of two processes."""
    folder = tmp_path_factory.mktemp("two")
    in_two_processes(partial(train_all, folder=folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(case: str, shared_trainings: Path, tmp_path: Path):
    alone = outcome_of(train(build(case), tmp_path / "alone.ckpt"))
    first, second = (
        torch.load(shared_trainings / f"{case}.{index}.pt", weights_only=True) for index in (0, 1)
    )
    # AdamW divides by the root of a mean of squares, which magnifies rounding from step to step.
    atol = 1e-9 if case == "adamw_clipped" else 1e-12
    assert_same_outcome(first, alone, atol)
    assert_same_outcome(second, first, 0)
    for own, theirs in zip(alone["rows"], first["rows"], strict=True):
        assert [row[:3] for row in own] == [row[:3] for row in theirs]
        for own_row, their_row in zip(own, theirs, strict=True):
            assert own_row[3] == pytest.approx(their_row[3], abs=atol)


@pytest.mark.slow
def test_killed_process_leaves_a_checkpoint_that_both_resume(tmp_path: Path):
    alone = outcome_of(train(build("batch_stacked"), tmp_path / "alone.ckpt"))
    checkpoint = tmp_path / "last.ckpt"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        in_two_processes(partial(lose_second, checkpoint=checkpoint))
    assert 0 < torch.load(checkpoint, weights_only=True)["normexp"]["step"] < 10
    in_two_processes(partial(resume, checkpoint=checkpoint))
    found = torch.load(checkpoint.with_suffix(".0.pt"), weights_only=True)
    assert_same_outcome(found, alone, 1e-12)
