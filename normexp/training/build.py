"""Builds the callbacks and loggers that a config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from normexp.config.keys import Index
from normexp.config.target import Target, read_target
from normexp.config.validate import check_value

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers import Logger


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
