"""The recipe of a training: every choice but its network, its data and its seeds.

Its devices, the number of its steps, their learning rates, and the optimizer of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from normexp.batching.replicas import Replicas
from normexp.config.sizes import Sizes
from normexp.errors import UserError
from normexp.training.devices import Devices
from normexp.training.optimizer import OwnRates, parameter_groups
from normexp.training.schedule import Schedule

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers import Logger

OptimizerFactory = Callable[..., Optimizer]


@dataclass(frozen=True)
class Recipe:
    """How a cell is trained, evaluated and logged. Its factories build anew for each training."""

    # Length
    sizes: Sizes  # those with which one device trains like all devices together
    drop_last: bool  # drop the last incomplete batch of each epoch
    steps_per_epoch: int
    schedule: Schedule  # the learning rate of each of all optimizer steps

    # Optimizer steps
    optimizer: OptimizerFactory  # has `optimizer_momentum`
    optimizer_target: str  # its dotted path, for messages
    lr: float
    optimizer_momentum: float | None  # None for an optimizer without momentum
    weight_decay: float
    decay_norm: bool  # also the parameters of norms
    decay_bias: bool  # also biases of modules other than norms
    max_grad_norm: float | None  # 2-norm per replica; None: no clipping
    norm_momentum: float | None  # of running averages, from a half-life; None: that of the norm

    # Evaluation
    val_every_epochs: int
    statistics: tuple[str, ...]  # of running, precise, own_share and batch; running always
    precise_samples: int  # training samples to pool for precise statistics
    evaluation_batch_sizes: tuple[int, ...]  # samples per batch, for batch statistics
    evaluates_every_epoch: bool  # all statistics at every validation, not only at the end

    # Execution
    devices: Devices
    stack: bool | None  # train seeds together; None: where it pays
    max_chunk: int  # at most so many optimizer steps in one call of training_step
    compile: bool  # torch.compile the forward of training
    cuda_graph: bool  # record an optimizer step once and replay it
    save_weights: bool
    allow_leak: bool  # train a network that sees future tokens; its numbers are INVALID

    # What watches and records
    callbacks: Callable[[], list[Callback]]  # the user's
    log_every: int  # optimizer steps per row of train/loss
    loggers: Callable[[Mapping[str, Any]], list[Logger]]  # of one run, from its names and folders

    # Of one training
    lr_scales: tuple[float, ...] | None = None  # each replica's learning rate, as a share of `lr`
    mixed_in_evaluation: int | None = None  # samples that the norm mixes there; None if it does not

    @property
    def num_steps(self) -> int:
        return self.schedule.total_steps

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.steps_per_epoch

    def for_norm(self, *, mixes_samples: bool, mixes_in_evaluation: bool) -> Recipe:
        """The recipe for a norm that was probed: what does not depend on batches is left out."""
        return replace(
            self,
            evaluation_batch_sizes=self.evaluation_batch_sizes if mixes_samples else (),
            statistics=tuple(s for s in self.statistics if mixes_samples or s != "own_share"),
            mixed_in_evaluation=self.sizes.norm if mixes_in_evaluation else None,
        )

    def build_optimizer(self, replicas: Replicas) -> torch.optim.Optimizer:
        groups = parameter_groups(
            replicas,
            weight_decay=self.weight_decay,
            decay_norm=self.decay_norm,
            decay_bias=self.decay_bias,
        )
        return self.optimizer(groups, lr=self.lr)

    def build_rates(self, replicas: Replicas) -> OwnRates | None:
        return None if self.lr_scales is None else OwnRates(replicas, self.lr_scales)


def count_steps_per_epoch(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Returns the number of optimizer steps in one pass over the training samples."""
    steps = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    if steps == 0:
        raise UserError(
            f"batch_size={batch_size} is more than the {num_samples} training samples; "
            f"try batch_size={num_samples} or drop_last=false"
        )
    return steps


def count_steps(
    steps_per_epoch: int,
    batch_size: int,
    *,
    epochs: int,
    steps: int | None,
    samples: int | None,
    samples_per_epoch: int,
) -> int:
    """Returns the optimizer steps of a whole training; `steps` or `samples` override `epochs`."""
    if steps is not None:
        return steps
    if samples is not None:
        if samples < batch_size:
            raise UserError(f"samples={samples} is less than one batch_size={batch_size}")
        whole, rest = divmod(samples, samples_per_epoch)
        return whole * steps_per_epoch + rest // batch_size
    return epochs * steps_per_epoch


def momentum_of_half_life(half_life: float, batch_size: int) -> float:
    """Returns the momentum (weight of the new value) that halves the past in `half_life` samples.

    1 - 2^(-batch_size / half_life): the running average remembers equally many samples at every
    batch size.
    """
    return 1 - 2 ** (-batch_size / half_life)
