"""How long a training lasts, in optimizer steps."""

from __future__ import annotations

import math

from normexp.errors import UserError


def count_steps_per_epoch(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Optimizer steps in one pass over the training samples."""
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
    """Optimizer steps of a whole training; `steps` or `samples`, where set, take epochs' place."""
    if steps is not None and samples is not None:
        raise UserError(f"steps={steps} and samples={samples} are both set; take one of them")
    if steps is not None:
        return steps
    if samples is not None:
        if samples < batch_size:
            raise UserError(f"samples={samples} is less than one batch_size={batch_size}")
        whole, rest = divmod(samples, samples_per_epoch)
        return whole * steps_per_epoch + rest // batch_size
    return epochs * steps_per_epoch
