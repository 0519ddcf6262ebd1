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
from torch.utils._pytree import tree_leaves

from normexp.errors import UserError, one_line
from normexp.norms.samples import (
    Axis,
    count_samples,
    map_tensors,
    take_samples,
    tensors_in,
    usual_axis,
)
from normexp.training.batching.copies import copied
from normexp.training.batching.draws import keeping_random_state

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

    def count(self, axis: Axis) -> int:
        """The number of samples, if they are on this axis; 0 if nothing has it."""
        return count_samples((*self.args, *self.keywords.values()), axis)

    def take(self, indices: Sequence[int], axis: Axis) -> Inputs:
        """Those samples that have these indices."""
        inputs = self.args, dict(self.keywords)
        return Inputs(*take_samples(inputs, indices, num=self.count(axis), axis=axis))

    def first(self, number: int) -> Inputs:
        """The first samples, if they are where most networks have them; or else all."""
        axis = usual_axis((*self.args, *self.keywords.values()))
        return self.take(range(number), axis) if self.count(axis) > number else self


def run_network(
    network: nn.Module, inputs: Inputs, *, with_gradients: bool = False, seed: int = 0
) -> Any:
    """A forward with fixed draws, on copies of the inputs.

    Without gradients, unless the forward itself takes some, as those of an energy.

    Raises UserError if it fails.
    """
    for enabled in (with_gradients, True):
        eagerly = torch.compiler.set_stance("force_eager")  # in a graph no call is seen
        args, keywords = copied((inputs.args, dict(inputs.keywords)))
        with keeping_random_state(network), torch.set_grad_enabled(enabled), eagerly:
            seed_all(seed)
            try:
                return network(*args, **keywords)
            except UserError:
                raise
            except Exception as error:  # foreign code may raise anything
                if enabled:
                    raise UserError(
                        f"a forward of the model {type(network).__name__} fails: {one_line(error)}"
                    ) from error


def seed_all(seed: int = 0) -> None:
    """Seeds every source of random numbers that networks draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def widened(network: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs, bool]:
    """Copies of network and inputs, in double precision if a training forward runs there.

    The third value is true if it does. A few samples are tried first.
    """

    def widen(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    wide = copied(network).double()
    wide_inputs = Inputs(*map_tensors((inputs.args, dict(inputs.keywords)), widen))
    for tried in (wide_inputs.first(FEW), wide_inputs):
        try:
            run_network(copied(wide).train(), tried)
            return wide, wide_inputs, True
        except UserError:  # some inputs cannot be cut
            continue
    return copied(network), inputs, False


def real_outputs(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in a fixed order."""
    return [value for value in tensors_in(output) if value.is_floating_point()]


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


def differing_values(module: nn.Module, other: nn.Module) -> list[str]:
    """The paths of parameters, buffers and attributes whose values differ between two modules.

    Args:
        other: of the same structure, as a copy is.
    """
    others = dict(other.named_modules())
    names: list[str] = []
    for path, child in module.named_modules():
        if path in others:
            values = attributes_of(others[path])
            for name, value in attributes_of(child).items():
                if _differ(value, values.get(name)):
                    names.append(f"{path}.{name}".lstrip("."))
    return names


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes, parameters and buffers of a module itself, by name."""
    internal = vars(nn.Module())
    values = {name: value for name, value in vars(module).items() if name not in internal}
    values |= dict(module.named_parameters(recurse=False))
    return values | dict(module.named_buffers(recurse=False))


def _differ(value: Any, other: Any) -> bool:
    """True if tensors, numbers or texts differ, also those in nested collections."""
    leaves, others = tree_leaves(value), tree_leaves(other)
    return len(leaves) != len(others) or any(map(_is_other_value, leaves, others))


def _is_other_value(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        is_equal = value.dtype == other.dtype and torch.equal(value, other)  # nearly always
        return not (is_equal or agree(value, other, 0.0))
    is_plain = value is None or isinstance(value, bool | int | float | str | Tensor)
    return is_plain and repr(value) != repr(other)  # in which NaN is NaN
