"""A network under diagnosis: its batches, its modes, and how it is given back unchanged."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normexp.errors import UserError, first_line
from normexp.norms.site import install_state, read_state, write_state

Loss = Callable[[Any, Any], Tensor]
Modes = dict[nn.Module, bool]  # `training` of every module
SAMPLES = 512  # of all batches
FEWEST, MOST = 16, 128  # batches
PLAIN = bool | int | float | str | None
FORM = "a batch is a pair (inputs, targets), or a mapping whose keys the model's forward names"


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers, modes, plain attributes and every global random state after the block."""
    buffers, values = dict(model.named_buffers()), read_state(model)
    settings = {
        module: {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
        for module in model.modules()
    }
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        try:
            yield
        finally:
            for module, plain in settings.items():
                vars(module).update(plain)
            install_state(model, buffers)  # a module may have replaced the tensors themselves
            write_state(model, values)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def modes_of(model: nn.Module) -> Modes:
    """The present mode of every module."""
    return {module: module.training for module in model.modules()}


def set_modes(modes: Modes) -> None:
    for module, training in modes.items():
        module.training = training


def training_modes(model: nn.Module) -> Modes:
    """The modes in which the model is trained: as they are, or after `train()` if it evaluates.

    In a model that was handed over in evaluation mode, norms whose weights are frozen stay so.
    """
    modes = _modes_after(model.train, model) if not model.training else modes_of(model)
    for module in model.modules() if not model.training else ():
        parameters = list(module.parameters(recurse=False))
        has_averages = "running_mean" in dict(module.named_buffers(recurse=False))
        if has_averages and parameters and not any(p.requires_grad for p in parameters):
            modes[module] = False
    return modes


def evaluation_modes(model: nn.Module) -> Modes:
    """The modes in which the model is evaluated: as they are, or after `eval()` if it trains."""
    return _modes_after(model.eval, model) if model.training else modes_of(model)


def _modes_after(change: Callable[[], object], model: nn.Module) -> Modes:
    before = modes_of(model)
    change()
    modes = modes_of(model)
    set_modes(before)
    return modes


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
    lengths: list[int] = []
    map_tensors(lambda t: lengths.append(len(t) if t.ndim else 0), batch)
    return lengths[0] if lengths else 0


def take(batch: Any, first: int, last: int) -> Any:
    """Samples `first` to `last` of a batch."""
    num = num_samples(batch)
    return map_tensors(lambda t: t[first:last] if t.ndim and len(t) == num else t, batch)


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


def loss_on(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of a batch as a scalar.

    Raises:
        UserError: the model or the loss does not take the batch.
    """
    try:
        value = loss(*_output_of(model, batch))
    except UserError:
        raise
    except Exception as error:  # of foreign code, any kind
        raise UserError(
            "the model or the loss fails on a batch in "
            f"{'training' if model.training else 'evaluation'} mode "
            f"({type(error).__name__}: {first_line(error)}); loss is called as loss(output, "
            "targets), and must work in both modes"
        ) from error
    if not isinstance(value, Tensor) or not value.numel():
        raise UserError(f"the loss returns a {type(value).__name__}, not a tensor")
    return value.float().mean() if value.ndim else value


def _output_of(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The output of the model on a batch, and what the loss compares it with."""
    if not isinstance(batch, Mapping):
        inputs, targets = batch
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets
    arguments = inspect.signature(model.forward).parameters
    known = {name: value for name, value in batch.items() if name in arguments}
    if not known:
        raise UserError(
            f"batches are mappings of {', '.join(map(str, batch))}, but the model's forward "
            f"takes {', '.join(arguments)}: pass pairs, as in "
            "((batch['image'], batch['label']) for batch in loader)"
        )
    return model(**known), batch
