"""Builds the optimizer, schedule, callbacks and loggers that a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from normexp.config.keys import Index, own_keys
from normexp.config.target import Target, read_target
from normexp.config.validate import check_value
from normexp.training.recipe import Schedule, named_schedule, own_schedule

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers import Logger


def build_optimizer(
    values: Mapping[str, Any], *, momentum: float | None = None
) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer that `optim` names, to be called with parameters and a learning rate.

    Args:
        values: of the group `optim`.
        momentum: in place of that among the values.

    Raises:
        UserError: a knob that it does not take.
    """
    own = own_keys("optim")
    values = {key: value for key, value in values.items() if key not in own}
    if momentum is not None:
        values["momentum"] = momentum
    target = read_target(values, "optim")
    target.require(1, "lr", "weight_decay")
    return target.call


def build_schedule(
    values: Mapping[str, Any] | None, num_steps: int, *, shape: str, warmup: float
) -> Schedule:
    """The schedule that `schedule` names; without one, a shape by name.

    Args:
        values: of the group `schedule`.
        shape, warmup: of the group `optim`.

    Raises:
        UserError: a knob that it does not take, or an error of its own code.
    """
    if values is None:
        return named_schedule(shape, warmup, num_steps)
    values = dict(values)
    monitor = values.pop("monitor", None)
    target = read_target(values, "schedule")
    if isinstance(target.call.func, type):  # a function gets step and total by position
        target = target.filled_in({"total_steps": num_steps})
    target.require(1 if isinstance(target.call.func, type) else 2)
    with target.explaining_errors():
        return own_schedule(target.call, target.call.func, num_steps, monitor, target.name)


def build_callbacks(values: Mapping[str, Any] | None, metrics: Sequence[str]) -> list[Callback]:
    """New instances of the callbacks in `callback`: one with a `_target_`, or several by name.

    Args:
        values: of the group `callback`.
        metrics: names of validation metrics that a callback may monitor.
    """
    if values is None:
        return []
    from pytorch_lightning.callbacks import Callback, EarlyStopping

    from normexp.training.fit import check_callback

    parts: Mapping[str, Any] = {"callback": values}
    if values and "_target_" not in values:
        parts = {f"callback.{name}": part for name, part in values.items()}
    callbacks = []
    for key, part in parts.items():
        target = read_target(part, key)
        callback = target.make(Callback)
        check_callback(callback, target.name, metrics)
        if isinstance(callback, EarlyStopping):
            check_value(f"{key}.patience", callback.patience, Index, "validations")
        callbacks.append(callback)
    return callbacks


def logger_targets(values: Mapping[str, Any]) -> dict[str, Target]:
    """What each logger names. Raises UserError for a knob that it does not take."""
    return {name: read_target(part, f"logger.{name}") for name, part in values.items() if part}


def build_loggers(values: Mapping[str, Any], available: Mapping[str, Any]) -> list[Logger]:
    """New loggers of one run; a training goes on if one fails.

    Args:
        values: of the group `logger`.
        available: names and folders of the run, passed where a signature has an argument of that
            name and the config does not set it.

    """
    from pytorch_lightning.loggers import Logger

    from normexp.training.trackers import Guarded

    loggers = list[Logger]()
    for name, target in logger_targets(values).items():
        target = target.filled_in({**available, "save_dir": f"{available['save_dir']}/{name}"})
        loggers.append(Guarded(target.key, partial(target.make, Logger)))
    return loggers
