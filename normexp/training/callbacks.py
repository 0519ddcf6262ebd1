"""The user's callbacks of Lightning: built, checked, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks as shipped

from normexp.errors import UserError
from normexp.training.config.keys import Index
from normexp.training.config.target import read_target
from normexp.training.config.validate import check_value
from normexp.training.monitor import check_monitor

# Callbacks of Lightning that cannot be used, and what to use instead.
UNSUPPORTED: dict[type, str] = {
    shipped.Checkpoint: "normexp writes checkpoints and weights.pt itself, and resumes from them",
    shipped.ProgressBar: "normexp shows its own progress",
    shipped.ModelSummary: "the result and the report have the number of parameters",
    shipped.GradientAccumulationScheduler: "set micro_batch_size=...",
    shipped.StochasticWeightAveraging: "the weights of the last step are evaluated",
    shipped.WeightAveraging: "the weights of the last step are evaluated",
    shipped.BatchSizeFinder: "set micro_batch_size=...",
    shipped.LearningRateFinder: "python -m normexp.tune searches it",
    shipped.Timer: "set steps=... or epochs=...",
    shipped.BaseFinetuning: "its parameters would leave the optimizer's groups",
    shipped.ModelPruning: "it renames parameters, so that no checkpoint would fit",
    shipped.BasePredictionWriter: "nothing is predicted",
}
ON_BATCHES = ("on_train_batch_start", "on_train_batch_end")
NEVER_CALLED = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)


def build_callbacks(values: Mapping[str, Any], metrics: Sequence[str]) -> list[pl.Callback]:
    """New instances of the callbacks in `callback`: one with a `_target_`, or several by name.

    Args:
        values: of the group `callback`.
        metrics: names of validation metrics that a callback may monitor.
    """
    parts: Mapping[str, Any] = {"callback": values}
    if values and "_target_" not in values:
        parts = {f"callback.{name}": part for name, part in values.items()}
    callbacks = []
    for key, part in parts.items():
        target = read_target(part, key)
        callback = target.make(pl.Callback)
        check_callback(callback, target.name)
        is_early_stopping = isinstance(callback, shipped.EarlyStopping)
        monitor = getattr(callback, "monitor", None)
        if is_early_stopping or monitor is not None:
            check_monitor(key, monitor, getattr(callback, "mode", None), metrics)
        if is_early_stopping:
            check_value(f"{key}.patience", callback.patience, Index, "validations")
        callbacks.append(callback)
    return callbacks


def check_callback(callback: pl.Callback, name: str) -> None:
    """Raises UserError for a callback that cannot work here.

    Args:
        name: its key and class, for messages.
    """
    for kind, instead in UNSUPPORTED.items():
        if isinstance(callback, kind):
            raise UserError(f"{name} cannot be used: {instead}")
    never = _own_hooks(callback, NEVER_CALLED)
    if never:
        raise UserError(
            f"{name}: {never[0]} is never called, since normexp takes the optimizer steps itself; "
            "try on_train_batch_end"
        )


def describe_monitor(callback: pl.Callback) -> str | None:
    """`EarlyStopping acts on val/loss`; None for a callback without a `monitor`."""
    metric = getattr(callback, "monitor", None)
    return None if metric is None else f"{type(callback).__name__} acts on {metric}"


def act_on_batches(callbacks: Iterable[pl.Callback]) -> bool:
    """True if a callback acts on training batches: each must then be a single optimizer step."""
    return any(_own_hooks(callback, ON_BATCHES) for callback in callbacks)


def why_stopped(trainer: pl.Trainer) -> str | None:
    """Why an EarlyStopping ended the training; None if none did."""
    for callback in trainer.early_stopping_callbacks:
        if trainer.should_stop and callback.stopping_reason_message:
            reason = callback.stopping_reason_message.partition(" Signaling")[0]
            return f"{type(callback).__name__}: {reason}"
    return None


def _own_hooks(callback: pl.Callback, hooks: Sequence[str]) -> list[str]:
    """The hooks that a callback defines, in its class or on the instance."""
    functions = {hook: getattr(getattr(callback, hook), "__func__", None) for hook in hooks}
    return [
        hook for hook, function in functions.items() if function is not getattr(pl.Callback, hook)
    ]
