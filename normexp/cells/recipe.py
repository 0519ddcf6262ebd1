"""The recipe of a cell: the last function of a training that reads a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from normexp.batching.processes import is_synchronized
from normexp.config.compose import DEFAULT_SCHEDULE
from normexp.config.groups import OPTIONAL_GROUPS, PARTS
from normexp.config.shipped import shipped_defaults
from normexp.config.sizes import SIZES, Share, Sizes
from normexp.config.spec import CellSpec
from normexp.config.words import as_typed
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.models.weights import Weights
from normexp.records.result import Result
from normexp.training.callbacks import act_on_batches, build_callbacks
from normexp.training.devices import Devices
from normexp.training.optimizer import build_optimizer, scale_learning_rate
from normexp.training.recipe import (
    Recipe,
    count_steps,
    count_steps_per_epoch,
    momentum_of_half_life,
)
from normexp.training.schedule import build_schedule
from normexp.training.trackers import build_loggers, logger_targets

OPTIM_SCHEDULE = ("schedule", "warmup")  # keys of `optim` that `schedule` replaces


def recipe_of(spec: CellSpec, *, num_train: int, metrics: Sequence[str]) -> Recipe:
    """The recipe of a cell, before it is known what its norm mixes.

    Args:
        num_train: training samples of its data.
        metrics: names of the metrics that a validation measures.

    Raises:
        UserError: values that contradict each other, or a part that cannot be built.
    """
    config, optim = spec.config, spec.config["optim"]
    drop_last = config["drop_last"]
    devices = devices_of(spec)
    sizes = _sizes_of(Sizes(**spec.sizes), devices, num_train, drop_last=drop_last)
    limit = config["data"].get("limit_train")
    if limit is not None and limit < sizes.batch_size:
        raise UserError(
            f"data.limit_train={limit} is less than one batch_size={sizes.batch_size}; "
            f"try data.limit_train={sizes.batch_size} or a smaller batch_size"
        )
    steps_per_epoch = count_steps_per_epoch(num_train, sizes.batch_size, drop_last=drop_last)
    num_steps = count_steps(
        steps_per_epoch,
        sizes.batch_size,
        epochs=config["epochs"],
        steps=config["steps"],
        samples=config["samples"],
        samples_per_epoch=min(num_train, steps_per_epoch * sizes.batch_size),
    )
    lr, momentum = scale_learning_rate(
        config["lr_rule"],
        lr=config["lr"],
        momentum=optim.get("momentum"),
        batch_size=sizes.batch_size,
        base_batch_size=config["base_batch_size"],
    )
    schedule = config.get("schedule")
    if schedule is not None:
        _check_schedule(schedule, optim, spec.choices["optim"], metrics)
    logger_targets(config["logger"])  # refuses a mistake before a training begins
    callbacks = partial(build_callbacks, config.get("callback"), metrics)
    acts_on_batches = act_on_batches(callbacks())
    statistics = tuple(config["evaluate_with"])
    return Recipe(
        sizes=sizes,
        drop_last=drop_last,
        steps_per_epoch=steps_per_epoch,
        schedule=build_schedule(
            schedule, num_steps, shape=optim["schedule"], warmup=optim["warmup"]
        ),
        optimizer=build_optimizer(optim, momentum=momentum),
        optimizer_target=optim["_target_"],
        lr=lr,
        optimizer_momentum=momentum,
        weight_decay=optim["weight_decay"],
        decay_norm=optim["decay_norm"],
        decay_bias=optim.get("decay_bias", True),
        max_grad_norm=config["max_grad_norm"],
        norm_momentum=_norm_momentum(config["norm"], sizes.batch_size),
        val_every_epochs=config["val_every_epochs"],
        statistics=statistics,
        precise_samples=config["precise_samples"],
        evaluation_batch_sizes=tuple(
            (config["evaluate_batch_sizes"] or [sizes.norm]) if "batch" in statistics else ()
        ),
        evaluates_every_epoch=config["evaluate_every_epoch"],
        devices=devices,
        stack=None if config["stack"] == "auto" else config["stack"],
        max_chunk=1 if acts_on_batches else config["chunk"],
        compile=config["compile"],
        cuda_graph=config["cuda_graph"],
        save_weights=config["save_weights"],
        allow_leak=bool(config["allow_leak"]),
        callbacks=callbacks,
        log_every=config["log_every"],
        loggers=partial(build_loggers, config["logger"]),
    )


def deviations(spec: CellSpec, recipe: Recipe, num_train: int) -> list[str]:
    """How a training differs from what was typed, in sentences."""
    config, size, notes = spec.config, recipe.sizes.batch_size, list[str]()
    if (left_out := num_train - recipe.steps_per_epoch * size) > 0:
        notes.append(f"drop_last=true drops {left_out} of {num_train} samples per epoch")
    if recipe.lr != spec.lr:
        notes.append(
            f"lr_rule={config['lr_rule']} changes lr={spec.lr:g} at "
            f"base_batch_size={config['base_batch_size']} to lr={recipe.lr:g} at batch_size={size}"
        )
    return notes


# --- Sizes and devices ----------------------------------------------------------------------------


def devices_of(spec: CellSpec) -> Devices:
    """The devices that train a cell, before its data are known."""
    trainer = spec.config["trainer"]
    return Devices(
        accelerator=trainer["accelerator"],
        per_node=trainer["devices"],
        num_nodes=trainer["num_nodes"],
        strategy=trainer["strategy"],
        precision=trainer["precision"],
        matmul_precision=spec.config["matmul_precision"],
        shares_statistics=is_synchronized(spec.config["norm"]),
    )


def _sizes_of(typed: Sizes, devices: Devices, num_train: int, *, drop_last: bool) -> Sizes:
    """The equivalent sizes on one device."""
    if devices.count > 1 and devices.shares_statistics and typed.norm < typed.micro:
        raise UserError(
            f"norm_batch_size={typed.norm}: the norm takes statistics over all "
            f"{devices.count} devices; try norm_batch_size=null, or norm=batch"
        )
    sizes = typed.shared_by(devices.count, synchronized=devices.shares_statistics)
    if devices.shares_statistics:
        rest = 0 if drop_last else num_train % sizes.batch_size
        _check_every_device_has_samples(sizes, devices.count, rest)
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


# --- Optimizer and schedule -----------------------------------------------------------------------


def _norm_momentum(norm: Mapping[str, Any], batch_size: int) -> float | None:
    """The momentum of running averages with the half-life among the values of `norm`."""
    half_life = norm.get("half_life")
    if half_life is None:
        return None
    if norm.get("momentum") is not None:
        raise UserError(
            f"norm.momentum={norm['momentum']} and norm.half_life={half_life} are both set; "
            "add norm.momentum=null to use the half-life"
        )
    return momentum_of_half_life(half_life, batch_size)


def _check_schedule(
    schedule: Mapping[str, Any], optim: Mapping[str, Any], optimizer: str, metrics: Sequence[str]
) -> None:
    """Refuses keys of `optim` that `schedule` replaces, and a monitor that is not a metric."""
    defaults = shipped_defaults("optim", optimizer) or DEFAULT_SCHEDULE
    for key in OPTIM_SCHEDULE:
        if optim[key] != defaults[key]:
            raise UserError(
                f"optim.{key}={as_typed(optim[key])}: nothing reads this key, since "
                "schedule is set; drop one of them"
            )
    monitor = schedule.get("monitor", "val/loss")
    if monitor not in metrics:
        raise UserError(
            f"schedule.monitor={monitor} is not a metric of the validation; "
            f"try {', '.join(metrics)}"
        )


# --- What result.json says about the cell ---------------------------------------------------------


def defines_of(spec: CellSpec, data: Data, weights: Weights | None) -> dict[str, Any]:
    """What the id of a cell hashes, and digests of what was loaded."""
    digests = {"data": data.digest}
    if weights is not None:
        digests["weights"] = weights.digest
    return {**spec.identity, "digests": digests}


def derived_of(spec: CellSpec, recipe: Recipe, *, mixes_samples: bool) -> dict[str, Any]:
    """The values of a training that follow from its config and its data."""
    derived = {
        **_effective(recipe.sizes, mixes_samples=mixes_samples),
        "steps": recipe.num_steps,
        "epochs": recipe.num_epochs,
        "lr": recipe.lr,
        "devices": recipe.devices.count,
        **names_in(spec),
    }
    if spec.config["lr_rule"] == "momentum_aware":
        derived["optim.momentum"] = recipe.optimizer_momentum
    if recipe.norm_momentum is not None:
        derived["norm.momentum"] = recipe.norm_momentum
    return derived


def typed_values(spec: CellSpec) -> dict[str, Any]:
    """The part of `derived_of` that is known before a cell is prepared."""
    return {**_effective(Sizes(**spec.sizes)), "lr": spec.lr, **names_in(spec)}


def _effective(sizes: Sizes, *, mixes_samples: bool = True) -> dict[str, int]:
    """The three sizes as numbers; a device's share of a forward pass is a ghost sub-batch."""
    norm = sizes.norm if mixes_samples else sizes.micro
    return dict(zip(SIZES, (sizes.batch_size, sizes.micro, norm), strict=True))


def names_in(spec: CellSpec) -> dict[str, str]:
    """The names of a cell's parts that are not those of shipped choices: `resnet50`, `MyNorm`."""
    names = {}
    for group in (*PARTS, *OPTIONAL_GROUPS):
        content = spec.identity.get(group)
        if not isinstance(content, Mapping):
            continue
        if isinstance(spec.config[group].get("name"), str):
            names[group] = spec.config[group]["name"]
        elif "choice" not in content:
            names[group] = spec.choices[group]
    return names


def choices_of(result: Result) -> dict[str, str]:
    """The choice in each config group of a recorded cell, as `compose_cell` returned them."""
    groups = [group for group in (*PARTS, *OPTIONAL_GROUPS) if group in result.settings]
    return {
        group: result.defines.get(group, {}).get("choice", result.settings[group])
        for group in groups
    }
