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
from normexp.norms.state import install_state, read_state, write_state

Loss = Callable[[Any, Any], Tensor]
Modes = dict[nn.Module, bool]  # `training` of every module
SAMPLES = 512  # of all batches
FEWEST, MOST = 16, 128  # batches
PLAIN = bool | int | float | str | None


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
    before = modes_of(model)
    if not model.training:
        model.train()
        for module in model.modules():
            parameters = list(module.parameters(recurse=False))
            has_averages = "running_mean" in dict(module.named_buffers(recurse=False))
            if has_averages and parameters and not any(p.requires_grad for p in parameters):
                module.training = False
    modes = modes_of(model)
    set_modes(before)
    return modes


def evaluation_modes(model: nn.Module) -> Modes:
    """The modes in which the model is evaluated: as they are, or after `eval()` if it trains."""
    before = modes_of(model)
    if model.training:
        model.eval()
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
        UserError: fewer than two, or a batch without a tensor.
    """
    tensor = next((t for t in (*model.parameters(), *model.buffers())), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    read: list[Any] = []
    for batch in islice(batches, most):
        read.append(_map_tensors(batch, lambda t: t.to(device)))
        if most is None and len(read) >= num_batches_of(num_samples(read[0])):
            break
    if len(read) < 2:
        raise UserError(
            f"batches holds {len(read)}: a diagnosis compares batches and needs 2 or more, "
            "better 16; a generator can be read only once"
        )
    for batch in read:
        num_samples(batch)
    return read


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch."""
    first = next(_tensors(batch), None)
    if first is None or first.ndim == 0:
        raise UserError(
            f"a batch is a {type(batch).__name__} without a tensor of samples; a batch is (inputs, "
            "targets) or a mapping of tensors"
        )
    return len(first)


def take(batch: Any, first: int, last: int) -> Any:
    """Samples `first` to `last` of a batch."""
    num = num_samples(batch)
    return _map_tensors(batch, lambda t: t[first:last] if t.ndim and len(t) == num else t)


def join(batches: list[Any]) -> Any:
    """All samples as one batch; None where their shapes differ."""
    first = batches[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(batches) if first.ndim else first
        if isinstance(first, Mapping):
            return {name: join([batch[name] for batch in batches]) for name in first}
        if isinstance(first, tuple | list):
            return type(first)(join(list(parts)) for parts in zip(*batches, strict=True))
    except (RuntimeError, TypeError, KeyError, ValueError):
        return None
    return first


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_map_tensors(part, change) for part in value)
    return value


def inputs_of(batch: Any) -> Tensor:
    """The first tensor of a batch."""
    return next(_tensors(batch))


def output_of(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Calls the model on a batch; returns its output, and what the loss compares it with.

    A batch is (inputs, targets), where inputs may be a tuple or a mapping of arguments. It may also
    be a mapping: the model gets the values that its forward names, and the loss gets the mapping.

    Raises:
        UserError: the forward names none of the keys of a mapping.
    """
    if isinstance(batch, Mapping):
        arguments = inspect.signature(model.forward).parameters
        known = {name: value for name, value in batch.items() if name in arguments}
        if not known:
            raise UserError(
                f"batches are mappings of {', '.join(map(str, batch))}, but the model's forward "
                f"takes {', '.join(arguments)}: pass pairs, as in "
                "((batch['image'], batch['label']) for batch in loader)"
            )
        return model(**known), batch
    if isinstance(batch, tuple | list) and len(batch) > 1:
        inputs, *targets = batch
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
        return output, targets[0] if len(targets) == 1 else tuple(targets)
    only = next(iter(batch)) if isinstance(batch, tuple | list) else batch
    return model(only), only


def loss_on(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of a batch as a scalar.

    Raises:
        UserError: the model or the loss does not take the batch.
    """
    try:
        value = loss(*output_of(model, batch))
    except UserError:
        raise
    except Exception as error:  # of foreign code, any kind
        mode = "training" if model.training else "evaluation"
        raise UserError(
            f"the model or the loss fails on a batch in {mode} mode "
            f"({type(error).__name__}: {first_line(error)}); loss is called as loss(output, "
            "targets), and must work in both modes"
        ) from error
    if not isinstance(value, Tensor) or not value.numel():
        raise UserError(f"the loss returns a {type(value).__name__}, not a tensor")
    return value.float().mean() if value.ndim else value
