"""How long a training is, and how its learning rate and momenta follow the batch size."""

from __future__ import annotations

import math

from normexp.errors import UserError


def count_steps_per_epoch(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Returns the number of optimizer steps in one pass over the training samples."""
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
    """Returns the optimizer steps of a whole training; `steps` or `samples` override `epochs`."""
    if steps is not None and samples is not None:
        raise UserError(f"steps={steps} and samples={samples} are both set; set only one of them")
    if steps is not None:
        return steps
    if samples is not None:
        if samples < batch_size:
            raise UserError(f"samples={samples} is less than one batch_size={batch_size}")
        whole, rest = divmod(samples, samples_per_epoch)
        return whole * steps_per_epoch + rest // batch_size
    return epochs * steps_per_epoch


def scale_learning_rate(
    rule: str, *, lr: float, momentum: float | None, batch_size: int, base_batch_size: int
) -> tuple[float, float | None]:
    """Returns learning rate and momentum for `batch_size`, given those for `base_batch_size`.

    With k = batch_size / base_batch_size:
        none            unchanged
        linear          lr * k (Goyal et al., arXiv:1706.02677)
        sqrt            lr * sqrt(k) (Hoffer et al., arXiv:1705.08741)
        momentum_aware  m' = m^k, lr * k * (1 - m') / (1 - m): past samples have the same weight
                        at every batch size (Chiley et al., arXiv:1905.05894)

    Raises:
        UserError: momentum_aware for an optimizer without momentum.
    """
    k = batch_size / base_batch_size
    if rule == "momentum_aware":
        if momentum is None:
            raise UserError("lr_rule=momentum_aware needs optim.momentum; try optim=sgd")
        scaled = momentum**k
        return lr * k * (1 - scaled) / (1 - momentum), scaled
    factor = {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]
    return lr * factor, momentum


def momentum_of_half_life(half_life: float, batch_size: int) -> float:
    """Returns the momentum (weight of the new value) that halves the past in `half_life` samples.

    1 - 2^(-batch_size / half_life): the running average remembers equally many samples at every
    batch size.
    """
    return 1 - 2 ** (-batch_size / half_life)
