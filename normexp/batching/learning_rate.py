"""How the learning rate follows the batch size, and a running average its samples."""

from __future__ import annotations

import math

from normexp.errors import UserError

RULES = ("none", "linear", "sqrt", "momentum_aware")


def scale_learning_rate(
    rule: str, *, lr: float, momentum: float | None, batch_size: int, base_batch_size: int
) -> tuple[float, float | None]:
    """Learning rate and momentum at `batch_size`, given those that suit `base_batch_size`.

    With k = batch_size / base_batch_size:
        none            as given
        linear          lr * k (Goyal et al., arXiv:1706.02677)
        sqrt            lr * sqrt(k) (Hoffer et al., arXiv:1705.08741)
        momentum_aware  m' = m^k, lr * k * (1 - m') / (1 - m): past samples weigh the same whatever
                        the batch size (Chiley et al., arXiv:1905.05894)

    Raises:
        UserError: an unknown rule, or momentum_aware for an optimizer without momentum.
    """
    if rule not in RULES:
        raise UserError(f"lr_rule={rule} is none of {', '.join(RULES)}")
    k = batch_size / base_batch_size
    if rule == "momentum_aware":
        if momentum is None:
            raise UserError("lr_rule=momentum_aware needs optim.momentum; try optim=sgd")
        scaled = momentum**k
        return lr * k * (1 - scaled) / (1 - momentum), scaled
    factor = {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]
    return lr * factor, momentum


def momentum_of_half_life(half_life: float, batch_size: int) -> float:
    """Weight of the new value in a running average that forgets half of the past in `half_life`.

    1 - 2^(-batch_size / half_life), in samples: the same memory at every batch size, where one
    momentum would mean another at each.
    """
    if half_life <= 0:
        raise UserError(f"norm.half_life={half_life} is not positive; try norm.half_life=1000")
    return 1 - 2 ** (-batch_size / half_life)
