"""Batches of any form, and what a network and its modules are called with."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normexp.errors import UserError, first_line

Loss = Callable[[Any, Any], Tensor]
SAMPLES = 512  # of all batches
FEWEST, MOST = 16, 128  # batches
FORM = "a batch is a pair (inputs, targets), or a mapping whose keys the model's forward names"


@contextmanager
def unchanged_draws(model: nn.Module) -> Iterator[None]:
    """Restores every global random state after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with


@contextmanager
def hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Calls `hook(path, module, args, kwargs)` before every module, but those of TorchScript."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handle = module.register_forward_pre_hook(partial(hook, path), with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def is_within(path: str, *outer: str) -> bool:
    """True for the path of a module in one of the others, and of that one itself."""
    return any(not name or f"{path}.".startswith(f"{name}.") for name in outer)


def innermost(paths: Iterable[str]) -> list[str]:
    """Those that have no other below them."""
    paths = list(paths)
    return [p for p in paths if not any(q != p and is_within(q, p) for q in paths)]


# --- Batches -------------------------------------------------------------------------------------


def num_batches_of(size: int) -> int:
    """The batches of `size` samples that a diagnosis reads: SAMPLES, within FEWEST and MOST."""
    return max(FEWEST, min(MOST, SAMPLES // max(size, 1)))


def read_batches(batches: Iterable[Any], most: int | None, model: nn.Module) -> list[Any]:
    """The first `most` batches, on the device of the model; None: `num_batches_of` their size.

    Raises:
        UserError: fewer than two, or one of another form.
    """
    tensor = next((t for t in (*model.parameters(), *model.buffers())), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    read: list[Any] = []
    for batch in islice(batches, most):
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not (is_pair or isinstance(batch, Mapping)) or not num_samples(batch):
            raise UserError(f"batches holds a {type(batch).__name__}: {FORM}")
        read.append(map_tensors(lambda t: t.to(device), batch))
        if most is None and len(read) >= num_batches_of(num_samples(read[0])):
            break
    if len(read) < 2:
        raise UserError(
            f"batches holds {len(read)}: a diagnosis compares batches and needs 2 or more, "
            "better 16; a generator can be read only once"
        )
    return read


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch; 0 if it holds none."""
    return next((len(tensor) if tensor.ndim else 0 for tensor in tensors_in(batch)), 0)


def take(batch: Any, samples: slice | Sequence[int], num: int) -> Any:
    """Samples of a batch that has `num` of them."""
    return map_tensors(lambda t: t[samples] if t.ndim and len(t) == num else t, batch)


def join(batches: list[Any]) -> Any:
    """All samples as one batch; None where their shapes differ."""
    try:
        return map_tensors(lambda *parts: torch.cat(parts) if parts[0].ndim else parts[0], *batches)
    except (RuntimeError, TypeError, KeyError, ValueError):
        return None


def map_tensors(change: Callable[..., Any], *values: Any) -> Any:
    """Applies a function to the tensors at each place of values of one form."""
    first = values[0]
    if isinstance(first, Tensor):
        return change(*values)
    if isinstance(first, Mapping):
        return {name: map_tensors(change, *(value[name] for value in values)) for name in first}
    if isinstance(first, tuple | list):
        return tuple(map_tensors(change, *parts) for parts in zip(*values, strict=True))
    return first


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def loss_on(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of a batch as a scalar.

    Raises:
        UserError: the model or the loss does not take the batch; names the module that fails.
    """
    is_mapping = isinstance(batch, Mapping)
    try:
        args, kwargs = call_of(model, batch)
        value = loss(model(*args, **kwargs), batch if is_mapping else batch[1])
    except UserError:
        raise
    except Exception as error:  # of foreign code, any kind
        raise UserError(
            f"the model or the loss fails on a batch of {num_samples(batch)} in "
            f"{'training' if model.training else 'evaluation'} mode{_place_of(error, model)} "
            f"({type(error).__name__}: {first_line(error)}); loss is called as loss(output, "
            "targets), and must work in both modes"
        ) from error
    if not isinstance(value, Tensor) or not value.numel():
        raise UserError(f"the loss returns a {type(value).__name__}, not a tensor")
    return value.float().mean() if value.ndim else value


def _place_of(error: Exception, model: nn.Module) -> str:
    """The innermost module of the model in whose code an error was raised, for a message."""
    paths = {id(module): name for name, module in model.named_modules()}
    running = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
    path = next((paths[i] for i in reversed(running) if i in paths), "")
    return f", at {path}" if path else ""


def call_of(model: nn.Module, batch: Any) -> Call:
    """What the model is called with for a batch."""
    if not isinstance(batch, Mapping):
        inputs = batch[0]
        return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
    arguments = inspect.signature(model.forward).parameters
    known = {name: value for name, value in batch.items() if name in arguments}
    if not known:
        raise UserError(
            f"batches are mappings of {', '.join(map(str, batch))}, but the model's forward "
            f"takes {', '.join(arguments)}; pass pairs"
        )
    return (), known
