"""Norms that change over a training: what a warm-up or a ramp needs.

Such a norm takes an argument `num_training_steps`, which receives the number of optimizer steps.
The bounds of its ramps are shares of that number, like the warm-up of the learning rate, so they
mean the same in a training of any length; `+norm.num_training_steps=N` makes them shares of N
steps. For a norm built outside a training, as for a card, the number is 1000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError

NUM_TRAINING_STEPS = 1000  # of a norm that is built outside a training


def before_step(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `state` as it is before this step writes it, even in the backward of compiled code.

    The partitioner of torch.compile ignores that the forward writes a buffer, and recomputes cheap
    operations on it in the backward, from the new value. A cumulative sum over an axis of size one
    changes nothing, and is not recomputed.
    """
    return state.to(dtype)[None].cumsum(dim=0)[0]


def shares_to_steps(num_training_steps: int, **shares: float) -> list[int]:
    """Converts shares of a training to numbers of steps, rounded.

    Raises:
        UserError: a share outside [0, 1], under the name of its knob.
    """
    for key, share in shares.items():
        if not 0 <= share <= 1:
            raise UserError(
                f"norm.{key}={share} must be a share of the training, from 0 to 1; try "
                f"norm.{key}=0.1"
            )
    return [round(share * num_training_steps) for share in shares.values()]


def linear_ramp(step: Tensor, start: int, end: int) -> Tensor:
    """Returns 0 until the `start`-th step, counted from 1, rising linearly to 1 at the `end`-th."""
    return ((step - start) / max(end - start, 1)).clamp(0, 1)
