"""Norms that change over their training, in shares of its length.

A norm with an argument `num_training_steps` receives the number of optimizer steps of its training
under that name. Its knobs are shares, like the warm-up of the learning rate, so that they mean the
same in a training of any length; `+norm.num_training_steps=N` makes them shares of N steps. Outside
a training, as for a card, the length is 1000 steps.
"""

from __future__ import annotations

from torch import Tensor

from normexp.errors import UserError

NUM_TRAINING_STEPS = 1000  # of a norm that is built outside a training


def steps_of(num_training_steps: int, **shares: float) -> list[int]:
    """Returns the whole number of steps that each share of a training stands for, rounded.

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


def rise(step: Tensor, start: int, end: int) -> Tensor:
    """Returns 0 until the `start`-th step, counted from 1, rising linearly to 1 at the `end`-th."""
    return ((step - start) / max(end - start, 1)).clamp(0, 1)
