"""The plan of a training: sizes, number of steps, learning rate, momenta."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from omegaconf import DictConfig

from normexp.batching.sizes import Share, Sizes
from normexp.build import synchronized
from normexp.checks.preflight import Traits
from normexp.checks.sites import name_some
from normexp.config.rules import as_typed
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.training.evaluation import EvaluationPlan
from normexp.training.schedule import (
    count_steps,
    count_steps_per_epoch,
    momentum_of_half_life,
    scale_learning_rate,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes, length and learning rate of one training."""

    sizes: Sizes  # the equivalent sizes on one device
    steps_per_epoch: int
    num_steps: int
    lr: float
    optimizer_momentum: float | None  # None for an optimizer without momentum
    norm_momentum: float | None  # of the running averages; None unless norm.half_life is set
    notes: tuple[str, ...] = ()  # to log once the cell is accepted


def plan_training(cfg: DictConfig, num_train: int) -> TrainingPlan:
    """The plan of a cell. Raises UserError for values that contradict each other."""
    sizes = sizes_of(cfg)
    if synchronized(cfg):
        _check_every_device_has_samples(cfg, sizes, num_train)
    limit = cfg.data.get("limit_train")
    if limit is not None and limit < sizes.batch_size:
        raise UserError(
            f"data.limit_train={limit} is less than one batch_size={sizes.batch_size}; "
            f"try data.limit_train={sizes.batch_size} or a smaller batch_size"
        )
    steps_per_epoch = count_steps_per_epoch(num_train, sizes.batch_size, drop_last=cfg.drop_last)
    lr, momentum = scale_learning_rate(
        cfg.lr_rule,
        lr=cfg.lr,
        momentum=cfg.optim.get("momentum"),
        batch_size=sizes.batch_size,
        base_batch_size=cfg.base_batch_size,
    )
    notes = []
    if (left_out := num_train - steps_per_epoch * sizes.batch_size) > 0:
        notes.append(f"drop_last=true drops {left_out} of {num_train} samples per epoch")
    if lr != cfg.lr:
        notes.append(
            f"lr_rule={cfg.lr_rule} changes lr={cfg.lr:g} at base_batch_size={cfg.base_batch_size} "
            f"to lr={lr:g} at batch_size={sizes.batch_size}"
        )
    num_steps = count_steps(
        steps_per_epoch,
        sizes.batch_size,
        epochs=cfg.epochs,
        steps=cfg.steps,
        samples=cfg.samples,
        samples_per_epoch=min(num_train, steps_per_epoch * sizes.batch_size),
    )
    if cfg.ema is not None and (span := 1 / (1 - cfg.ema)) > num_steps / 2:
        notes.append(
            f"ema={cfg.ema:g} averages over some {span:.0f} steps of {num_steps}: the first "
            "weights still count at the end"
        )
    return TrainingPlan(
        sizes=sizes,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        lr=lr,
        optimizer_momentum=momentum,
        norm_momentum=_norm_momentum(cfg, sizes),
        notes=tuple(notes),
    )


def num_devices_of(cfg: DictConfig) -> int:
    """The number of devices that train a cell together, over all nodes."""
    return cfg.trainer.devices * cfg.trainer.num_nodes


def sizes_of(cfg: DictConfig) -> Sizes:
    """The equivalent sizes on one device. Raises UserError, see `Sizes`."""
    typed = Sizes(cfg.batch_size, cfg.micro_batch_size, cfg.norm_batch_size)
    num_devices, is_synchronized = num_devices_of(cfg), synchronized(cfg)
    if num_devices > 1 and is_synchronized and typed.norm < typed.micro:
        raise UserError(
            f"norm_batch_size={cfg.norm_batch_size}: the norm takes statistics over all "
            f"{num_devices} devices; try norm_batch_size=null, or norm=batch"
        )
    return typed.shared_by(num_devices, synchronized=is_synchronized)


def use_one_device(cfg: DictConfig) -> None:
    """Changes `cfg` to the same training on one device."""
    cfg.norm_batch_size = sizes_of(cfg).norm_batch_size
    cfg.trainer.devices = cfg.trainer.num_nodes = 1
    cfg.trainer.strategy = "auto"


def check_norm_batch_size(cfg: DictConfig, sizes: Sizes) -> None:
    """Raises UserError if a norm that mixes samples needs statistics over several devices."""
    if cfg.norm_batch_size is not None and cfg.norm_batch_size > sizes.norm:
        raise UserError(
            f"norm_batch_size={cfg.norm_batch_size}: each of {num_devices_of(cfg)} devices has "
            f"{sizes.norm} samples of each forward; try norm_batch_size={sizes.norm}, or norm=sync"
        )


def _check_every_device_has_samples(cfg: DictConfig, sizes: Sizes, num_train: int) -> None:
    """Raises UserError if a device gets no sample of the last batch.

    The other devices would wait forever for its part of the norm's statistics.
    """
    rest = 0 if cfg.drop_last else num_train % sizes.batch_size
    count = num_devices_of(cfg)
    last_device = Share(count - 1, count)
    if len(sizes.micro_bounds(rest, last_device)) < len(sizes.micro_bounds(rest)):
        raise UserError(
            f"drop_last=false: the last batch of an epoch has {rest} samples, which leaves one of "
            f"{count} devices without any; try drop_last=true, or norm=batch"
        )


def _norm_momentum(cfg: DictConfig, sizes: Sizes) -> float | None:
    half_life = cfg.norm.get("half_life")
    if half_life is None:
        return None
    if cfg.norm.get("momentum") is not None:
        raise UserError(
            f"norm.momentum={cfg.norm.momentum} and norm.half_life={half_life} are both set; "
            "add norm.momentum=null to use the half-life"
        )
    return momentum_of_half_life(half_life, sizes.batch_size)


def plan_evaluation(cfg: DictConfig, sizes: Sizes, data: Data, traits: Traits) -> EvaluationPlan:
    """The evaluation plan of `evaluate_with` and related keys in `cfg`.

    Raises:
        UserError: a batch larger than a split; batch statistics over a single value, or over later
            positions of a text.
    """
    statistics = tuple(cfg.evaluate_with)
    if cfg.evaluate_batch_sizes and "batch" not in statistics:
        typed_sizes = as_typed(cfg.evaluate_batch_sizes)
        raise UserError(
            f"evaluate_batch_sizes={typed_sizes}: only batch statistics use it; add batch, as in "
            f"evaluate_with={as_typed([*statistics, 'batch'])}"
        )
    batch_sizes: tuple[int, ...] = ()
    if "batch" in statistics:
        batch_sizes = tuple(cfg.evaluate_batch_sizes or [sizes.norm])
        _check_batch_sizes(batch_sizes, data)
        if traits.leaks_future_in_training:
            raise UserError(
                "evaluate_with=batch: batch statistics of this norm include later positions of the "
                "text, so the loss is meaningless; try evaluate_with=[running,precise]"
            )
        if not traits.mixes_samples:
            batch_sizes = ()
            logger.info("no batch statistics to evaluate with: the norm does not mix samples")
        elif single := traits.single_valued(min(batch_sizes)):
            raise UserError(
                f"evaluate_batch_sizes={min(batch_sizes)} leaves one value per statistic at "
                f"{name_some(single)}; try evaluate_batch_sizes=[{2 * min(batch_sizes)}]"
            )
    return EvaluationPlan(
        statistics=statistics,
        precise_samples=cfg.precise_samples,
        group_size=sizes.norm,
        batch_sizes=batch_sizes,
        every_epoch=cfg.evaluate_every_epoch,
    )


def _check_batch_sizes(batch_sizes: tuple[int, ...], data: Data) -> None:
    """Raises UserError unless every split fills at least one batch."""
    for split in ("val", "test"):
        num_samples = len(getattr(data, split))
        if max(batch_sizes) > num_samples:
            raise UserError(
                f"evaluate_batch_sizes: {max(batch_sizes)} is more than the {num_samples} samples "
                f"of {split}; try evaluate_batch_sizes=[{num_samples}] or less"
            )
