"""How the learning rate follows the batch size, `lr_rule`."""

from __future__ import annotations

import math

from normexp.errors import UserError


def scale_learning_rate(
    rule: str, *, lr: float, momentum: float | None, batch_size: int, base_batch_size: int
) -> tuple[float, float | None]:
    """Returns learning rate and momentum for `batch_size`, given those for `base_batch_size`.

    With k = batch_size / base_batch_size:
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
    return lr * {"linear": k, "sqrt": math.sqrt(k)}[rule], momentum
