"""The batches of a diagnosis: reads them, and calls a model and its loss with one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normexp.errors import UserError, one_line
from normexp.norms.samples import count_samples, map_tensors, usual_axis
from normexp.words import name_some

Loss = Callable[[Any, Any], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with
SAMPLES = 512  # of all batches
FEWEST, MOST = 16, 128  # batches
FORM = "a batch is a pair (inputs, targets), or a mapping whose keys the model's forward names"


def num_batches_of(size: int) -> int:
    """How many batches of `size` samples a diagnosis reads: SAMPLES, within FEWEST and MOST."""
    return max(FEWEST, min(MOST, SAMPLES // size))


def stream_batches(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """Yields batches on the device of the model.

    Raises:
        UserError: one is of another form.
    """
    tensors = (*model.parameters(), *model.buffers())
    device = tensors[0].device if tensors else "cpu"
    if not isinstance(batches, Iterable):
        raise UserError(
            f"batches is a {type(batches).__name__}, must be a DataLoader, as "
            f"torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True); {FORM}"
        )
    for given in batches:
        batch: Any = given
        if isinstance(batch, Mapping):
            batch = dict(batch)
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, targets = batch
            batch = (tuple(inputs) if isinstance(inputs, list) else inputs), targets
        else:
            batch = None
        if batch is None or not num_samples(batch):
            raise UserError(f"batches holds a {type(given).__name__}: {FORM}")
        yield map_tensors(batch, lambda tensor: tensor.to(device))


def read_batches(batches: Iterable[Any], most: int | None, model: nn.Module) -> list[Any]:
    """The first `most` batches, on the device of the model; None: `num_batches_of` their size.

    Raises:
        UserError: fewer than two, or one of another form.
    """
    read: list[Any] = []
    for batch in stream_batches(batches, model):
        read.append(batch)
        if len(read) >= (most or num_batches_of(num_samples(read[0]))):
            break
    if len(read) < 2:
        raise UserError(
            f"batches holds {len(read)}: a diagnosis compares batches and needs 2 or more, "
            "better 16; a generator can be read only once"
        )
    return read


def num_samples(batch: Any) -> int:
    """Samples of a batch, where most networks have them."""
    return count_samples(batch, usual_axis(batch))


def first_samples(batches: Sequence[Any]) -> Any:
    """The first batch; the first two as one if they hold a single sample and can be joined."""
    if num_samples(batches[0]) == 1:
        try:
            return tree_map(lambda *parts: torch.cat(parts), *batches[:2])
        except (RuntimeError, TypeError, ValueError):  # their shapes differ
            pass
    return batches[0]


def loss_on(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of a batch as a scalar.

    Raises:
        UserError: the model or the loss does not take the batch; names the module that fails.
    """
    args, kwargs = call_of(model, batch)
    targets = batch if isinstance(batch, dict) else batch[1]
    returned = ""
    try:
        output = model(*args, **kwargs)
        returned = _kind_of(output)
        value = loss(output, targets)
    except Exception as error:  # of foreign code, any kind
        raise UserError(
            f"the model or the loss fails on a batch of {num_samples(batch)} in "
            f"{'training' if model.training else 'evaluation'} mode{_place_of(error, model)} "
            f"({one_line(error)}); loss is called as loss(output, "
            f"targets), and must work in both modes{returned}"
        ) from error
    if not isinstance(value, Tensor) or not value.numel():
        raise UserError(f"the loss returns a {type(value).__name__}, not a tensor")
    return value.float().mean() if value.ndim else value


def _kind_of(output: Any) -> str:
    """What a model returned, unless it is a tensor."""
    if isinstance(output, Tensor):
        return ""
    keys = name_some(map(str, output)) if isinstance(output, Mapping) else ""
    return f"; output is a {type(output).__name__}{keys and f' with the keys {keys}'}"


def _place_of(error: Exception, model: nn.Module) -> str:
    """The innermost module of the model in whose code an error was raised, for a message."""
    paths = {id(module): path for path, module in model.named_modules()}
    path = ""
    for frame, _ in walk_tb(error.__traceback__):
        path = paths.get(id(frame.f_locals.get("self")), path)
    return f", at {path}" if path else ""


def call_of(model: nn.Module, batch: Any) -> Call:
    """What the model is called with for a batch."""
    if not isinstance(batch, dict):
        inputs = batch[0]
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
    arguments = inspect.signature(model.forward).parameters
    keywords = {name: value for name, value in batch.items() if name in arguments}
    if not keywords:
        raise UserError(
            f"batches are mappings of {', '.join(map(str, batch))}, but the model's forward "
            f"takes {', '.join(arguments)}; pass pairs"
        )
    return (), keywords
