"""The recipe of a cell: the last function of a training that reads a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from normexp.batching.sizes import SIZES, Share, Sizes
from normexp.build import (
    NetworkBuilder,
    build_callbacks,
    build_loggers,
    build_optimizer,
    build_schedule,
    logger_targets,
    synchronized,
)
from normexp.checks.preflight import Traits
from normexp.config.cells import CellSpec
from normexp.config.compose import DEFAULT_SCHEDULE, parts_with_target, shipped_defaults
from normexp.config.identity import canonical_sizes, defining_values
from normexp.config.schema import OPTIONAL_GROUPS, PARTS
from normexp.config.words import as_typed
from normexp.data.dataset import Data, describe_data
from normexp.errors import UserError
from normexp.norms.slots import SLOTS, changed
from normexp.records.provenance import source_digest
from normexp.training.fit import act_on_batches
from normexp.training.recipe import (
    Devices,
    Recipe,
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
        shares_statistics=synchronized(spec.config["norm"]),
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


# --- What result.json says about the cell, and what of it was trained -----------------------------

RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)
# Keys that a recorded recipe has in derived form only: as numbers of steps, rates and slots.
DERIVED_KEYS = ("epochs", "steps", "samples", "lr_rule", "base_batch_size", *SLOTS)
DERIVED_KEYS_OF_NORM = ("half_life", *SLOTS)


def describe_cell(
    spec: CellSpec, recipe: Recipe, build: NetworkBuilder, data: Data, traits: Traits
) -> dict[str, Any]:
    """The config in result.json: names, canonical sizes, traits, and `recipe`: what was trained.

    Does not depend on which of several equivalent command lines trained the cell.
    """
    chance, slots = data.chance_accuracy, {slot: spec.config["norm"].get(slot) for slot in SLOTS}
    trained = _describe_training(spec, recipe, build, data, mixes_samples=traits.mixes_samples)
    sizes = {key: trained[key] for key in SIZES}
    return {
        **choices_in(spec.choices),
        **{key: spec.config[key] for key in ("lr_rule", "eps", "drop_last")},
        **sizes,
        "devices": recipe.devices.count,
        "epochs": recipe.num_epochs,
        "num_steps": recipe.num_steps,
        "lr": recipe.lr,
        "max_grad_norm": recipe.max_grad_norm,
        "precision": recipe.devices.precision,
        "matmul_precision": recipe.devices.matmul_precision,
        "recipe": trained,
        "data_set": describe_data(data),
        "norm_slots": {slot: value for slot, value in slots.items() if value is not None},
        **_slots(build),
        **{name: getattr(traits, name) for name in RECORDED_TRAITS},
        **({} if chance is None else {"chance_accuracy": chance}),
    }


def choices_in(description: Mapping[str, Any]) -> dict[str, str]:
    """The choice in each config group of a cell, as `compose_cell` returned them."""
    return {
        group: description[group] for group in (*PARTS, *OPTIONAL_GROUPS) if group in description
    }


def _describe_training(
    spec: CellSpec, recipe: Recipe, build: NetworkBuilder, data: Data, *, mixes_samples: bool
) -> dict[str, Any]:
    """Everything that defined the training except its seed, in canonical form.

    Has digests of the data, of weights and of the user's own modules.
    """
    values = {
        key: value for key, value in defining_values(spec.config).items() if key not in DERIVED_KEYS
    }
    norm = {k: value for k, value in values["norm"].items() if k not in DERIVED_KEYS_OF_NORM}
    optim, model, content = dict(values["optim"]), dict(values["model"]), dict(values["data"])
    content["digest"] = data.digest
    if build.weights is not None:
        model["weights_digest"] = build.weights.digest
    if recipe.optimizer_momentum is not None:
        optim["momentum"] = recipe.optimizer_momentum
    if recipe.norm_momentum is not None:
        norm["momentum"] = recipe.norm_momentum
    if "schedule" in values:
        optim = {key: value for key, value in optim.items() if key not in OPTIM_SCHEDULE}
    # A device's share of a forward pass is a ghost sub-batch, so the recipe's sizes count devices.
    sizes = [getattr(recipe.sizes, key) for key in SIZES]
    values |= canonical_sizes(*sizes, mixes_samples=mixes_samples)
    values |= {"norm": norm, "optim": optim, "model": model, "data": content, **_slots(build)}
    values |= {"num_steps": recipe.num_steps, "lr": recipe.lr}
    acts_on_validations = "callback" in values or recipe.schedule.monitor is not None
    if "val_every_epochs" in spec.identity and acts_on_validations:
        values["val_every_epochs"] = recipe.val_every_epochs
    for part in parts_with_target(values):
        if digest := source_digest(part["_target_"]):
            part["source_digest"] = digest
    return values


def _slots(build: NetworkBuilder) -> dict[str, Any]:
    """The slots that the model uses and that differ from their defaults."""
    assert build.norm is not None
    return changed(build.norm.slots, build.norm.used)
