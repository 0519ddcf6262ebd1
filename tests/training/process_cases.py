"""Trainings that two processes share, and the one process that trains the same; run as a script.

`python process_cases.py FOLDER` in each process leaves FOLDER/<case>.pt, written by the first.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from test_splits import StrangerNorm
from torch import Tensor, nn
from training_cases import (
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

from normexp.batching.sizes import Sizes
from normexp.norms.group import GroupNorm
from normexp.norms.sharing import SyncBatchNorm
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
    "group": {"sizes": Sizes(8), "make_norm": lambda c: GroupNorm(c, eps=1e-5, num_groups=4)},
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


def main(folder: Path) -> None:
    for name in CASES:
        module = build(name)
        train(module, folder / f"{name}.ckpt", strategy="ddp", devices=2)
        torch.save(outcome_of(module), folder / f"{name}.{module.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
