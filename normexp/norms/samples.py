"""Where the samples of a forward are in its inputs, and in the input of a norm.

The first axis counts samples in most networks. Others join the positions of a sample to rows, or
have time first; models/split.py finds out which by trying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.errors import UserError

Order = Literal["first", "rows", "second", "interleaved"]
ORDERS: dict[Order, str] = {  # of x with N samples of T positions
    "first": "(N, ...)",
    "rows": "(N * T, ...), the rows of a sample together",
    "second": "(T, N, ...)",
    "interleaved": "(T * N, ...), the rows of a position together",
}


@dataclass(eq=False)
class SampleCounter:
    """A forward pre-hook of a network that notes how many samples it gets.

    Attributes:
        axis: of its inputs, that of samples.
    """

    axis: int
    num_samples: int = 0

    def __call__(self, _: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self.num_samples = count_samples((*args, *keywords.values()), self.axis)


@dataclass(frozen=True)
class SampleOrder:
    """How the samples lie in the input of a norm, where the first axis does not count them.

    Attributes:
        counter: of the network around the norm.
    """

    order: Order
    counter: SampleCounter

    def is_like(self, value: Tensor, x: Tensor) -> bool:
        """True if a tensor beside x has values for the same samples."""
        num_axes = 2 if self.order == "second" else 1
        return value.ndim >= num_axes and value.shape[:num_axes] == x.shape[:num_axes]

    def rows_per_sample(self, x: Tensor) -> int:
        """Rows that belong to one sample, for the x of all samples.

        Raises UserError unless each sample can have as many.
        """
        if self.order in ("first", "second"):
            return 1
        num_samples = self.counter.num_samples
        if not num_samples:
            raise UserError(
                "how many samples a norm gets is counted where the network itself is called, and a "
                "part of it was called first; drop norm_batch_size"
            )
        rows, remainder = divmod(x.shape[0], num_samples)
        if remainder:
            raise UserError(
                f"a norm gets {x.shape[0]} rows of {self.counter.num_samples} samples, so its "
                "batches cannot be split by samples; drop norm_batch_size"
            )
        return rows

    def arrange(self, x: Tensor, rows_per_sample: int) -> Tensor:
        """Puts the samples first: (N, T, ...), or (N * T, ...) with a sample's rows together."""
        if self.order == "second":
            return x.transpose(0, 1)
        if self.order == "interleaved":
            return x.unflatten(0, (rows_per_sample, -1)).transpose(0, 1).flatten(0, 1)
        return x

    def restore(self, x: Tensor, rows_per_sample: int) -> Tensor:
        """Undoes `arrange`."""
        if self.order == "second":
            return x.transpose(0, 1)
        if self.order == "interleaved":
            return x.unflatten(0, (-1, rows_per_sample)).transpose(0, 1).flatten(0, 1)
        return x


FIRST_AXIS = SampleOrder("first", SampleCounter(0))


def count_samples(inputs: Sequence[Any], axis: int = 0) -> int:
    """The samples in the inputs of a network, by the first that has some; 0 if none has."""
    for value in inputs:
        if isinstance(value, Tensor) and value.ndim > axis:
            return value.shape[axis]
        if isinstance(value, list) and axis == 0 and value and not _is_plain(value[0]):
            return len(value)
        if isinstance(value, Mapping):
            value = [*value.values()]
        if isinstance(value, list | tuple) and (count := count_samples(value, axis)):
            return count
    return 0


def take_samples(value: Any, indices: Sequence[int], *, num: int, axis: int = 0) -> Any:
    """The samples of these indices in an input, or in any collection of inputs.

    Args:
        num: samples in all; what has another number is no value per sample, and stays whole.
    """
    if isinstance(value, Tensor):
        has_samples = value.ndim > axis and value.shape[axis] == num
        where = torch.tensor([*indices], device=value.device)
        return value.index_select(axis, where) if has_samples else value
    if isinstance(value, list) and axis == 0 and len(value) == num:
        return [value[i] for i in indices]
    if type(value) is dict:
        return {k: take_samples(v, indices, num=num, axis=axis) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(take_samples(v, indices, num=num, axis=axis) for v in value)
    return value


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
