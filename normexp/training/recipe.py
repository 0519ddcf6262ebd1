"""The recipe of a training: the settings of a cell, and what follows from them and its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.optim import Optimizer

from normexp.errors import UserError
from normexp.training.batching.processes import is_synchronized
from normexp.training.callbacks import act_on_batches, build_callbacks
from normexp.training.config.keys import Settings
from normexp.training.config.sizes import Share, Sizes
from normexp.training.config.spec import CellSpec
from normexp.training.config.target import Target, read_target
from normexp.training.criterion import Criterion, criterion_of
from normexp.training.data.dataset import Data
from normexp.training.data.views import View, read_view
from normexp.training.monitor import check_monitor
from normexp.training.optimizer import (
    OptimizerFactory,
    build_optimizer,
    parameter_groups,
)
from normexp.training.schedule import Schedule, build_schedule
from normexp.training.statistics import STATISTICS


@dataclass(frozen=True)
class Recipe:
    """How a cell is trained, evaluated and logged.

    Attributes:
        settings: as typed.
        criterion: the loss and the metrics of its data's task.
        num_train: training samples of its data.
        sizes: those with which one device trains like all devices together.
        schedule: the learning rate of each of all optimizer steps.
        optimizer: builds it, from parameters and a learning rate.
        lr: as typed, scaled by `lr_rule`.
        optimizer_momentum: scaled likewise; None for an optimizer without momentum.
        max_chunk: at most so many optimizer steps in one call of training_step.
        is_synchronized: the norm takes its statistics over all of several devices.
        callbacks: builds those of the user.
        loggers: what the user's loggers are.
        mixes_samples, mixes_in_evaluation: whether its norms do, as probed.
        channels_last: how networks that train in turn lie in the memory of a CPU.
        views: what evaluation shows of images besides what training did.
        lr_scales: the learning rate of each replica of a stack, as a share of `lr`.
    """

    settings: Settings
    criterion: Criterion
    num_train: int
    sizes: Sizes
    schedule: Schedule
    optimizer: OptimizerFactory
    lr: float
    optimizer_momentum: float | None
    max_chunk: int
    is_synchronized: bool
    callbacks: Callable[[], list[Callback]]
    loggers: Sequence[Target]
    mixes_samples: bool = True
    mixes_in_evaluation: bool = False
    channels_last: bool = False
    views: Sequence[View] = ()
    lr_scales: tuple[float, ...] | None = None

    @property
    def steps_per_epoch(self) -> int:
        drop_last = self.settings.drop_last
        return count_steps_per_epoch(self.num_train, self.sizes.batch_size, drop_last=drop_last)

    @property
    def num_steps(self) -> int:
        return self.schedule.total_steps

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.steps_per_epoch

    @property
    def norm_momentum(self) -> float | None:
        """The momentum of running averages, from a half-life; None: that of the norm."""
        half_life = self.settings.norm.half_life
        if half_life is None:
            return None
        is_sequence = self.settings.norm.running_from == "sequence"
        num_samples = self.sizes.norm if is_sequence else self.sizes.batch_size
        return momentum_of_half_life(half_life, num_samples)

    @property
    def statistics(self) -> Sequence[str]:
        """The kinds of statistics that evaluation uses: those asked for that the norm has."""
        kinds = self.settings.evaluate_with
        if not self.mixes_samples:
            kinds = [k for k in kinds if k not in STATISTICS or not STATISTICS[k].needs_mixing]
        return kinds

    @property
    def evaluation_batch_sizes(self) -> list[int]:
        """Samples per batch, for batch statistics."""
        if "batch" not in self.statistics:
            return []
        return self.settings.evaluate_batch_sizes or [self.sizes.norm]

    @property
    def mixed_in_evaluation(self) -> int | None:
        """Samples that the norm mixes in evaluation; None if it mixes none."""
        return self.sizes.norm if self.mixes_in_evaluation else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optim = self.settings.optim
        norm_decay = None if optim.decay_norm is False else optim.decay_norm
        if norm_decay is True:
            norm_decay = optim.weight_decay
        groups = parameter_groups(
            model,
            weight_decay=optim.weight_decay,
            norm_decay=norm_decay,
            decay_bias=bool(optim.decay_bias),
        )
        return self.optimizer(groups, lr=self.lr)


def recipe_of(spec: CellSpec, data: Data) -> Recipe:
    """The recipe of a cell on its data, before it is known what its norm mixes.

    Raises:
        UserError: values that contradict each other, or a part that cannot be built.
    """
    settings, config, num_train = spec.settings, spec.config, len(data.train)
    criterion = criterion_of(data, settings.class_weights)
    metrics = [f"val/{name}" for name in criterion.metrics]
    synchronized = settings.trainer.num_processes > 1 and is_synchronized(config["norm"])
    sizes = _sizes_of(settings, num_train, synchronized=synchronized)
    limit, batch_size = settings.data.limit_train, sizes.batch_size
    if limit is not None and limit < batch_size:
        raise UserError(
            f"data.limit_train={limit} is less than one batch_size={batch_size}; "
            f"try data.limit_train={batch_size} or a smaller batch_size"
        )
    lr, momentum = spec.scaled_rate()
    _check_half_life(config["norm"])
    loggers = [
        read_target(part, f"logger.{name}") for name, part in settings.logger.items() if part
    ]
    callbacks: Callable[[], list[Callback]] = list
    max_chunk = settings.chunk
    if settings.callback is not None:
        callbacks = partial(build_callbacks, settings.callback, metrics)
        max_chunk = 1 if act_on_batches(callbacks()) else max_chunk
    schedule = build_schedule(config["schedule"], count_steps(settings, num_train))
    if schedule.monitor is not None:
        check_monitor("schedule", schedule.monitor, schedule.mode, metrics)
    return Recipe(
        settings=settings,
        criterion=criterion,
        num_train=num_train,
        sizes=sizes,
        schedule=schedule,
        optimizer=build_optimizer(config["optim"], momentum=momentum),
        lr=lr,
        optimizer_momentum=momentum,
        max_chunk=max_chunk,
        is_synchronized=synchronized,
        callbacks=callbacks,
        loggers=loggers,
        views=[read_view(name) for name in settings.evaluate_at or []],
    )


# --- Sizes and length ----------------------------------------------------------------------------


def _sizes_of(settings: Settings, num_train: int, *, synchronized: bool) -> Sizes:
    """The sizes with which one device trains like all devices of a training."""
    typed, num_devices = settings.sizes, settings.trainer.num_processes
    if num_devices > 1 and settings.norm.running_from == "sequence":
        raise UserError(
            f"norm.running_from=sequence: {num_devices} devices run their groups at the same time; "
            "try norm.running_from=group or step"
        )
    if num_devices > 1 and synchronized and typed.norm < typed.micro:
        raise UserError(
            f"norm_batch_size={typed.norm}: the norm takes statistics over all "
            f"{num_devices} devices; try norm_batch_size=null, or norm=batch"
        )
    sizes = typed.shared_by(num_devices, synchronized=synchronized)
    rest = 0 if settings.drop_last else num_train % sizes.batch_size
    last_device = Share(num_devices - 1, num_devices)
    has_samples = len(sizes.micro_bounds(rest, last_device)) == len(sizes.micro_bounds(rest))
    if synchronized and not has_samples:  # the others would wait for its part of the statistics
        raise UserError(
            f"drop_last=false: the last batch of an epoch has {rest} samples, which leaves one of "
            f"{num_devices} devices without any; try drop_last=true, or norm=batch"
        )
    return sizes


def count_steps_per_epoch(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """The number of optimizer steps in one pass over the training samples."""
    steps = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    if steps == 0:
        raise UserError(
            f"batch_size={batch_size} is more than the {num_samples} training samples; "
            f"try batch_size={num_samples} or drop_last=false"
        )
    return steps


def count_steps(settings: Settings, num_train: int) -> int:
    """The optimizer steps of a whole training; `steps` or `samples` override `epochs`."""
    size, samples = settings.batch_size, settings.samples
    per_epoch = count_steps_per_epoch(num_train, size, drop_last=settings.drop_last)
    if settings.steps is not None:
        return settings.steps
    if samples is None:
        return settings.epochs * per_epoch
    if samples < size:
        raise UserError(f"samples={samples} is less than one batch_size={size}")
    whole, rest = divmod(samples, min(num_train, per_epoch * size))
    return whole * per_epoch + rest // size


# --- What contradicts each other ------------------------------------------------------------------


def momentum_of_half_life(half_life: float, num_samples: int) -> float:
    """The momentum (weight of the new value) that halves the past in `half_life` samples.

    1 - 2^(-num_samples / half_life), for averages that move once every `num_samples`: they remember
    equally many samples at every batch size.
    """
    return 1 - 2 ** (-num_samples / half_life)


def _check_half_life(norm: Mapping[str, Any]) -> None:
    """Refuses a half-life beside a momentum, among the values of `norm`."""
    half_life, momentum = norm.get("half_life"), norm.get("momentum")
    if half_life is not None and momentum is not None:
        raise UserError(
            f"norm.momentum={momentum} and norm.half_life={half_life} are both set; "
            "add norm.momentum=null to use the half-life"
        )
