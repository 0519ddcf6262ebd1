"""The metric that a callback or a schedule acts on."""

from __future__ import annotations

from collections.abc import Sequence

from normexp.errors import UserError
from normexp.verdicts.metric import direction_of
from normexp.words import as_typed


def check_monitor(key: str, monitor: str | None, mode: str | None, metrics: Sequence[str]) -> None:
    """Raises UserError for a metric that no validation has, or one that improves the other way.

    Args:
        key: of the callback or schedule, for messages.
        mode: `min` or `max`, which way its values are taken to improve; None if it does not say.
        metrics: names of the metrics of the validation.
    """
    if monitor is None or monitor not in metrics:
        raise UserError(
            f"{key}.monitor={as_typed(monitor)} is not a metric of the validation; "
            f"try {', '.join(metrics)}"
        )
    direction = direction_of(monitor)
    if {mode, direction} == {"min", "max"}:
        which = "higher" if direction == "max" else "lower"
        raise UserError(
            f"{key}.mode={mode}: {monitor} is better if it is {which}; try {key}.mode={direction}"
        )
