"""The recipe of a cell: the last function of a training that reads a config."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig

from normexp.batching.sizes import Share, Sizes
from normexp.build import (
    build_callbacks,
    build_logger,
    build_optimizer,
    build_schedule,
    logger_target,
    synchronized,
)
from normexp.config.compose import DEFAULT_SCHEDULE, shipped_defaults
from normexp.config.rules import as_typed
from normexp.config.spec import CellSpec
from normexp.config.target import plain
from normexp.errors import UserError
from normexp.training.callbacks import act_on_batches
from normexp.training.devices import Devices
from normexp.training.recipe import Recipe
from normexp.training.recorder import Loggers, Wandb
from normexp.training.schedule import (
    Schedule,
    count_steps,
    count_steps_per_epoch,
    momentum_of_half_life,
    scale_learning_rate,
)

OPTIM_SCHEDULE = ("schedule", "warmup")  # keys of `optim` that `schedule` replaces


def recipe_of(spec: CellSpec, *, num_train: int, metrics: Sequence[str]) -> Recipe:
    """The recipe of a cell, before it is known what its norm mixes.

    Args:
        num_train: training samples of its data.
        metrics: names of the metrics that a validation measures.

    Raises:
        UserError: values that contradict each other, or a part that cannot be built.
    """
    cfg = spec.composed
    devices = devices_of(cfg)
    sizes = _sizes_of(cfg, devices, num_train)
    steps_per_epoch = count_steps_per_epoch(num_train, sizes.batch_size, drop_last=cfg.drop_last)
    num_steps = count_steps(
        steps_per_epoch,
        sizes.batch_size,
        epochs=cfg.epochs,
        steps=cfg.steps,
        samples=cfg.samples,
        samples_per_epoch=min(num_train, steps_per_epoch * sizes.batch_size),
    )
    lr, momentum = scale_learning_rate(
        cfg.lr_rule,
        lr=cfg.lr,
        momentum=cfg.optim.get("momentum"),
        batch_size=sizes.batch_size,
        base_batch_size=cfg.base_batch_size,
    )
    callbacks = partial(build_callbacks, _values(cfg.get("callback")), metrics)
    acts_on_batches = act_on_batches(callbacks())
    return Recipe(
        sizes=sizes,
        drop_last=cfg.drop_last,
        steps_per_epoch=steps_per_epoch,
        schedule=_schedule_of(spec, num_steps, metrics),
        optimizer=build_optimizer(plain(cfg.optim), momentum=momentum),
        optimizer_target=cfg.optim._target_,
        lr=lr,
        optimizer_momentum=momentum,
        weight_decay=cfg.optim.weight_decay,
        decay_norm=cfg.optim.decay_norm,
        decay_bias=cfg.optim.get("decay_bias", True),
        max_grad_norm=cfg.max_grad_norm,
        ema=cfg.ema,
        norm_momentum=_norm_momentum(cfg, sizes),
        val_every_epochs=cfg.val_every_epochs,
        statistics=tuple(cfg.evaluate_with),
        precise_samples=cfg.precise_samples,
        evaluation_batch_sizes=_evaluation_batch_sizes(cfg, sizes),
        evaluates_every_epoch=cfg.evaluate_every_epoch,
        devices=devices,
        stack=None if cfg.stack == "auto" else cfg.stack,
        max_chunk=1 if acts_on_batches else cfg.chunk,
        compile=cfg.compile,
        save_weights=cfg.save_weights,
        callbacks=callbacks,
        diagnostics=cfg.diagnostics,
        log_every=cfg.log_every,
        loggers=_loggers_of(cfg),
    )


def deviations(spec: CellSpec, recipe: Recipe, num_train: int) -> list[str]:
    """How a training differs from what was typed, in sentences."""
    cfg, size, notes = spec.composed, recipe.sizes.batch_size, list[str]()
    if (left_out := num_train - recipe.steps_per_epoch * size) > 0:
        notes.append(f"drop_last=true drops {left_out} of {num_train} samples per epoch")
    if recipe.lr != cfg.lr:
        notes.append(
            f"lr_rule={cfg.lr_rule} changes lr={cfg.lr:g} at base_batch_size={cfg.base_batch_size} "
            f"to lr={recipe.lr:g} at batch_size={size}"
        )
    if recipe.ema is not None and (span := 1 / (1 - recipe.ema)) > recipe.num_steps / 2:
        notes.append(
            f"ema={recipe.ema:g} averages over some {span:.0f} steps of {recipe.num_steps}: the "
            "first weights still count at the end"
        )
    return notes


def _values(group: DictConfig | None) -> dict[str, Any] | None:
    return None if group is None else plain(group)


# --- Sizes and devices ----------------------------------------------------------------------------


def devices_of(cfg: DictConfig) -> Devices:
    trainer = cfg.trainer
    return Devices(
        accelerator=trainer.accelerator,
        per_node=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=trainer.strategy,
        precision=trainer.precision,
        matmul_precision=cfg.matmul_precision,
        shares_statistics=synchronized(cfg),
    )


def _sizes_of(cfg: DictConfig, devices: Devices, num_train: int) -> Sizes:
    """The equivalent sizes on one device."""
    typed = Sizes(cfg.batch_size, cfg.micro_batch_size, cfg.norm_batch_size)
    if devices.count > 1 and devices.shares_statistics and typed.norm < typed.micro:
        raise UserError(
            f"norm_batch_size={cfg.norm_batch_size}: the norm takes statistics over all "
            f"{devices.count} devices; try norm_batch_size=null, or norm=batch"
        )
    sizes = typed.shared_by(devices.count, synchronized=devices.shares_statistics)
    if devices.shares_statistics:
        rest = 0 if cfg.drop_last else num_train % sizes.batch_size
        _check_every_device_has_samples(sizes, devices.count, rest)
    limit = cfg.data.get("limit_train")
    if limit is not None and limit < sizes.batch_size:
        raise UserError(
            f"data.limit_train={limit} is less than one batch_size={sizes.batch_size}; "
            f"try data.limit_train={sizes.batch_size} or a smaller batch_size"
        )
    return sizes


def _check_every_device_has_samples(sizes: Sizes, num_devices: int, rest: int) -> None:
    """Raises UserError if a device gets no sample of the last batch, of `rest` samples.

    The other devices would wait forever for its part of the norm's statistics.
    """
    last_device = Share(num_devices - 1, num_devices)
    if len(sizes.micro_bounds(rest, last_device)) < len(sizes.micro_bounds(rest)):
        raise UserError(
            f"drop_last=false: the last batch of an epoch has {rest} samples, which leaves one of "
            f"{num_devices} devices without any; try drop_last=true, or norm=batch"
        )


def _evaluation_batch_sizes(cfg: DictConfig, sizes: Sizes) -> tuple[int, ...]:
    statistics, typed = tuple(cfg.evaluate_with), cfg.evaluate_batch_sizes
    if "batch" in statistics:
        return tuple(typed or [sizes.norm])
    if typed:
        raise UserError(
            f"evaluate_batch_sizes={as_typed(typed)}: only batch statistics use it; add batch, as "
            f"in evaluate_with={as_typed([*statistics, 'batch'])}"
        )
    return ()


# --- Optimizer and schedule -----------------------------------------------------------------------


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


def _schedule_of(spec: CellSpec, num_steps: int, metrics: Sequence[str]) -> Schedule:
    """Refuses keys of `optim` that `schedule` replaces, and a monitor that is not a metric."""
    cfg = spec.composed
    values = _values(cfg.get("schedule"))
    if values is not None:
        defaults = shipped_defaults("optim", spec.choices["optim"]) or DEFAULT_SCHEDULE
        for key in OPTIM_SCHEDULE:
            if cfg.optim[key] != defaults[key]:
                raise UserError(
                    f"optim.{key}={as_typed(cfg.optim[key])}: nothing reads this key, since "
                    "schedule is set; drop one of them"
                )
        monitor = values.get("monitor", "val/loss")
        if monitor not in metrics:
            raise UserError(
                f"schedule.monitor={monitor} is not a metric of the validation; "
                f"try {', '.join(metrics)}"
            )
    return build_schedule(values, num_steps, shape=cfg.optim.schedule, warmup=cfg.optim.warmup)


# --- Loggers --------------------------------------------------------------------------------------


def _loggers_of(cfg: DictConfig) -> Loggers:
    chosen = plain(cfg.logger)
    custom = chosen.get("custom")
    if custom is not None:
        logger_target(custom)
    return Loggers(
        wandb=Wandb(**chosen["wandb"]) if "wandb" in chosen else None,
        tensorboard="tensorboard" in chosen,
        custom=None if custom is None else partial(build_logger, custom),
        is_per_run=custom is not None and custom["per"] == "run",
        names={"study": cfg.study, "experiment": cfg.get("experiment")},
        tags=tuple(map(str, cfg.tags or [])),
        notes=cfg.notes,
    )
