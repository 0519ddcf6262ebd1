"""A network that is run to see whether an identity holds: on copies, with the same draws each time.

It runs in double precision if it can, so that what is equal differs by rounding alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normexp.batching.copies import copied
from normexp.batching.draws import keeping_random_state
from normexp.errors import UserError, one_line


@dataclass
class Inputs:
    """The arguments of a forward."""

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """From a tensor, a tuple of arguments, or a mapping of keyword arguments."""
        if isinstance(value, Mapping):
            return cls((), value)
        return cls(value if isinstance(value, tuple) else (value,), {})


def run_network(network: nn.Module, inputs: Inputs, *, with_gradients: bool = False) -> Any:
    """A forward with fixed draws, on copies of the inputs. Raises UserError if it fails."""
    eagerly = torch.compiler.set_stance("force_eager")  # in a graph no call is seen
    args, keywords = copied((inputs.args, dict(inputs.keywords)))
    with keeping_random_state(network), torch.set_grad_enabled(with_gradients), eagerly:
        seed_all()
        try:
            return network(*args, **keywords)
        except UserError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise UserError(
                f"a forward of the model {type(network).__name__} fails: {one_line(error)}"
            ) from error


def seed_all() -> None:
    """Seeds every source of random numbers that networks draw from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def widened(network: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs, bool]:
    """Copies of network and inputs, in double precision if a training forward runs there.

    The third value is true if it does.
    """

    def widen(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_real else value

    wide = copied(network).double()
    args, keywords = tree_map(widen, (inputs.args, dict(inputs.keywords)))
    wide_inputs = Inputs(args, keywords)
    try:
        run_network(copied(wide).train(), wide_inputs)
    except UserError:
        return copied(network), inputs, False
    return wide, wide_inputs, True


def real_outputs(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in a fixed order."""
    leaves = tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def draw_weights(outputs: Sequence[Tensor]) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    weights: list[Tensor] = []
    for out in outputs:
        drawn = torch.randn(out.shape, generator=draws, dtype=torch.double)
        weights.append(drawn.to(out.device, out.dtype))
    return weights


def agree(expected: Tensor, value: Tensor, tolerance: float, scale: float = 0.0) -> bool:
    """True if no value differs by more than `tolerance` of the largest, or of `scale` if larger.

    NaN equals NaN.
    """
    if expected.shape != value.shape:
        return False
    if not expected.numel():
        return True
    expected, value = expected.detach().double(), value.detach().double()
    same = (expected == value) | (expected.isnan() & value.isnan())
    largest = max(float(largest_value(expected)), scale)
    return bool(((expected - value).abs() <= tolerance * largest)[~same].all())


def largest_value(values: Tensor) -> float:
    """The largest absolute value that is finite; 0 if there is none."""
    if not values.numel():
        return 0.0
    return float(values.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max())
