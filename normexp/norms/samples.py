"""Which axis of an input counts the samples, of a norm or of a whole network.

The first axis counts samples in most networks. Others take lists with an item for each sample, join
the positions of a sample to rows, or have time first; any_network/split.py tries which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.errors import UserError

# Of the tensors that a network gets; None: its lists have an item for each sample.
Axis = int | None
Order = Literal["first", "rows", "second", "interleaved"]
ORDERS: dict[Order, str] = {  # of x with N samples of T positions
    "first": "(N, ...)",
    "rows": "(N * T, ...), the rows of a sample together",
    "second": "(T, N, ...)",
    "interleaved": "(T * N, ...), the rows of a position together",
}
REMEDY = "so its batches cannot be split by samples; drop norm_batch_size"


@dataclass(eq=False)
class SampleCounter:
    """Notes how many samples a network gets.

    Attributes:
        axis: of its inputs, that of samples.
        num_samples: of the forward that runs; None if none does.
        are_alike: these have equal shapes.
    """

    axis: Axis
    num_samples: int | None = None
    are_alike: bool = True

    def watch(self, network: nn.Module) -> None:
        network.register_forward_pre_hook(self._enter, with_kwargs=True)
        network.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        inputs = (*args, *keywords.values())
        self.num_samples = count_samples(inputs, self.axis)
        self.are_alike = self.axis is not None or _are_alike(inputs)

    def _leave(self, *_: Any) -> None:
        self.num_samples = None


@dataclass(eq=False)
class SampleOrder:
    """How the samples lie in the input of a norm, where the first axis does not count them.

    Attributes:
        counter: of the network around the norm.
        last: the shape of the last input, and its rows per sample.
    """

    order: Order
    counter: SampleCounter
    last: tuple[torch.Size, int] | None = None

    def is_like(self, value: Tensor, x: Tensor) -> bool:
        """True if a tensor beside x has values for the same samples."""
        num_axes = 2 if self.order == "second" else 1
        return value.ndim >= num_axes and value.shape[:num_axes] == x.shape[:num_axes]

    def rows_per_sample(self, x: Tensor) -> int:
        """Rows that belong to one sample, for the x of all samples.

        A part that a backward runs again (gradient checkpointing) is not counted anew; its x has
        the shape that it had.

        Raises UserError unless each sample can have as many.
        """
        if self.order in ("first", "second"):
            return 1
        num_samples = self.counter.num_samples
        if num_samples is None and _in_backward() and self.last and self.last[0] == x.shape:
            return self.last[1]
        if not num_samples:
            raise UserError(
                "how many samples a norm gets is counted where the network itself is called, and a "
                f"part of it is called alone with {x.shape[0]} rows; drop norm_batch_size"
            )
        rows, remainder = divmod(x.shape[0], num_samples)
        if remainder:
            raise UserError(f"a norm gets {x.shape[0]} rows of {num_samples} samples, {REMEDY}")
        if not self.counter.are_alike:
            raise UserError(f"a norm gets the rows of samples of unequal shapes, {REMEDY}")
        self.last = x.shape, rows
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


def _in_backward() -> bool:
    """True while gradients are computed; torch has no public way to ask."""
    return torch._C._current_graph_task_id() != -1


FIRST_AXIS = SampleOrder("first", SampleCounter(0))


# --- Inputs: tensors in tuples, lists, mappings and dataclasses -----------------------------------


def count_samples(value: Any, axis: Axis = 0) -> int:
    """The samples in an input, by the first tensor or list that has some; 0 if none has.

    Tensors in one list count if they have equally many, as maps of several scales do.
    """
    if isinstance(value, Tensor):
        return value.shape[axis] if axis is not None and value.ndim > axis else 0
    if axis is None and isinstance(value, list) and tensors_in(value):
        return len(value)
    counts = [count for item in _items(value) if (count := count_samples(item, axis))]
    if isinstance(value, list) and len(set(counts)) > 1:
        return 0
    return counts[0] if counts else 0


def take_samples(value: Any, indices: slice | Sequence[int], *, num: int, axis: Axis = 0) -> Any:
    """The samples of these indices in an input.

    Args:
        num: samples in all; what has another number is no value per sample, and stays whole.
    """
    if isinstance(indices, slice):
        indices = range(num)[indices]
    if isinstance(value, Tensor):
        own_axis = axis_in(value, num, axis)
        where = torch.tensor([*indices], device=value.device)
        return value if own_axis is None else value.index_select(own_axis, where)
    if isinstance(value, list) and len(value) == num:
        is_cut_inside = axis is not None and count_samples(value, axis) == num
        if not is_cut_inside:
            return [value[i] for i in indices]
    return with_items(value, lambda item: take_samples(item, indices, num=num, axis=axis))


def usual_axis(value: Any) -> Axis:
    """Where samples are in most networks: the items of lists if it has any, or the first axis."""
    return None if count_samples(value, None) else 0


def axis_in(tensor: Tensor, num: int, axis: Axis) -> int | None:
    """The axis of `num` samples: `axis`, or the first, as in a class for each; None: neither."""
    for candidate in (axis or 0, 0):
        if tensor.ndim > candidate and tensor.shape[candidate] == num:
            return candidate
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an input or output, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in _items(value) for tensor in tensors_in(item)]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    return with_items(value, lambda item: map_tensors(item, change))


def with_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with each item changed; anything else as it is."""
    if type(value) is list:
        return [*map(change, value)]
    if isinstance(value, tuple):
        items = map(change, value)
        make: Any = getattr(value, "_make", tuple)  # of a tuple with names
        return make(items)
    if isinstance(value, MutableMapping):
        new: Any = copy.copy(value)
        for name, item in value.items():
            new[name] = change(item)
        return new
    if is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for one in fields(value):
            object.__setattr__(new, one.name, change(getattr(value, one.name)))  # frozen or not
        return new
    return value


def _items(value: Any) -> Iterable[Any]:
    """The items of a container; none of anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in fields(value)]
    return value if isinstance(value, list | tuple) else ()


def _are_alike(inputs: Sequence[Any]) -> bool:
    """True if the items of every list have tensors of equal shapes."""
    if isinstance(inputs, list):
        return len({tuple(tensor.shape for tensor in tensors_in(item)) for item in inputs}) < 2
    return all(map(_are_alike, _items(inputs)))
