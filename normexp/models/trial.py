"""A network that is run to see whether an identity holds: on copies, with the same draws each time.

It runs in double precision if it can, so that what is equal differs by rounding alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normexp.batching.copies import copied
from normexp.batching.draws import keeping_random_state
from normexp.errors import UserError, one_line
from normexp.norms.samples import count_samples, take_samples

FEW = 4  # samples, which are enough for most trials


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

    def count(self, axis: int = 0) -> int:
        """The number of samples, if they are on this axis; 0 if nothing has it."""
        return count_samples((*self.args, *self.keywords.values()), axis)

    def take(self, indices: Sequence[int], axis: int = 0) -> Inputs:
        """Those samples that have these indices."""
        take = partial(take_samples, indices=indices, num=self.count(axis), axis=axis)
        return Inputs(tuple(map(take, self.args)), take(dict(self.keywords)))


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

    The third value is true if it does. A few samples are tried first.
    """

    def widen(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_real else value

    wide = copied(network).double()
    args, keywords = tree_map(widen, (inputs.args, dict(inputs.keywords)))
    wide_inputs = Inputs(args, keywords)
    few = wide_inputs.take(range(FEW)) if inputs.count() > FEW else wide_inputs
    for tried in (few, wide_inputs):
        try:
            run_network(copied(wide).train(), tried)
            return wide, wide_inputs, True
        except UserError:  # some inputs cannot be cut
            continue
    return copied(network), inputs, False


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
