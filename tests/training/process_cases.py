"""Trainings that two processes share, and the one process that trains the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from training_cases import (
    StrangerNorm,
    batch_norm,
    build_module,
    group_norm,
    image_data,
    resnet20,
    rows_of,
    state_of,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.norms.batch import SyncBatchNorm
from normexp.training import fit
from normexp.training.module import TrainingModule


def sync_norm(num_features: int) -> nn.Module:
    return SyncBatchNorm(num_features, eps=1e-5, momentum=0.1)


ADAMW = partial(torch.optim.AdamW, betas=(0.9, 0.999))

# Sizes as two devices are asked for; `alone` gives those of one process that trains the same.
CASES: dict[str, dict[str, Any]] = {
    "batch": {"sizes": Sizes(8)},
    "batch_stacked": {"sizes": Sizes(8), "seeds": (0, 1), "stacked": True},
    "batch_in_turn": {"sizes": Sizes(8), "seeds": (0, 1)},
    "ghost": {"sizes": Sizes(8, None, 2)},
    "accumulated": {"sizes": Sizes(8, 4)},
    "accumulated_ghost": {"sizes": Sizes(16, 8, 2), "model": resnet20},
    "stranger": {"sizes": Sizes(8, 4), "make_norm": StrangerNorm},
    "sync": {"sizes": Sizes(8, 4), "make_norm": sync_norm, "synchronized": True},
    "group": {"sizes": Sizes(8), "make_norm": group_norm},
    "adamw_clipped": {"sizes": Sizes(8), "optimizer": ADAMW, "lr": 1e-3, "max_grad_norm": 0.5},
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
    replicas = range(module.replicas.num_replicas)
    states: list[dict[str, Tensor]] = [
        {name: value.detach() for name, value in state_of(module, index).items()}
        for index in replicas
    ]
    return {
        "states": states,
        "rows": [rows_of(module, index) for index in replicas],
        "metrics": module.metrics,
    }


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

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, *args):  # noqa: ARG002
        if trainer.global_rank == 1 and pl_module.step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def lose_second(fabric: Fabric, *, name: str, checkpoint: Path, step: int) -> None:
    """Saves often, and loses rank 1 after `step`."""
    del fabric
    fit.SECONDS_BETWEEN_SAVES = 0
    train(build(name), checkpoint, [KillSecond(step)], strategy="ddp", devices=2)


def resume(fabric: Fabric, *, name: str, checkpoint: Path) -> None:
    module = train(build(name), checkpoint, strategy="ddp", devices=2)
    torch.save(outcome_of(module), checkpoint.with_suffix(f".{fabric.global_rank}.pt"))
