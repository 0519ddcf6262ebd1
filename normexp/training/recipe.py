"""How a stack is trained: sizes, optimizer, schedule and what else a step needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from normexp.batching.replicas import Replicas
from normexp.batching.sizes import Sizes
from normexp.training.optim import OptimizerFactory, parameter_groups
from normexp.training.schedule import Schedule


@dataclass(frozen=True)
class Recipe:
    """How a stack is trained: everything but the network, the data and the seeds."""

    sizes: Sizes
    optimizer: OptimizerFactory
    schedule: Schedule
    lr: float
    weight_decay: float = 0.0
    decay_norm: bool = False
    decay_bias: bool = True  # of modules other than norms
    max_grad_norm: float | None = None  # 2-norm per replica; None: no clipping
    eval_group: int | None = None  # samples that a norm mixes in evaluation; None if it mixes none
    log_every: int = 10  # optimizer steps per row of train/loss
    max_chunk: int = 64  # most optimizer steps in one call of training_step
    lr_scales: tuple[float, ...] | None = None  # each replica's learning rate, as a share of `lr`
    compile: bool = False  # torch.compile the forward of training
    ema: float | None = None  # weight of the past in averaged weights; None: no average

    def build_optimizer(self, replicas: Replicas) -> torch.optim.Optimizer:
        groups = parameter_groups(
            replicas,
            weight_decay=self.weight_decay,
            decay_norm=self.decay_norm,
            decay_bias=self.decay_bias,
        )
        return self.optimizer(groups, lr=self.lr)
