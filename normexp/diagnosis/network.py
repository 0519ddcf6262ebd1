"""A network under diagnosis: its copies, its modes, its batches, and what reaches its modules."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.errors import UserError, first_line

Loss = Callable[[Any, Any], Tensor]
Modes = Mapping[str, bool]  # `training` of every module, by its path
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


@dataclass(eq=False)
class Call:
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)


class Subject:
    """A copy of the user's model that is never run; each forward gets a fresh copy of this one.

    Attributes:
        modules: of the copy, by path.
        training: the modes in which the model is trained: as they are, or after `train()` if it
            was handed over in evaluation mode.
        evaluation: the modes in which it is evaluated: as they are, or after `eval()`.
        fixed: parameters that no forward moves, which all copies share.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copied(model)
        self.modules = dict(self.model.named_modules())
        self.fixed: list[nn.Parameter] = []
        given, other = modes_of(model), copied(model)
        other.train(not given[""])
        modes = given, modes_of(other)
        self.training, self.evaluation = modes if given[""] else modes[::-1]
        self.silent = dict.fromkeys(given, False)

    def fresh(self, modes: Modes, path: str = "") -> nn.Module:
        """A copy of the module at a path, in these modes."""
        return set_modes(copied(self.modules[path], self.fixed), modes, path)


def modes_of(model: nn.Module) -> Modes:
    """The present mode of every module; one frozen by TorchScript evaluates."""
    return {name: getattr(module, "training", False) for name, module in model.named_modules()}


def set_modes(module: nn.Module, modes: Modes, path: str = "") -> nn.Module:
    """Sets the mode of the module at `path` and of all inside; returns it."""
    for name, part in module.named_modules():
        if hasattr(part, "training"):
            part.training = modes[f"{path}.{name}".strip(".")]
    return module


@contextmanager
def refusing_runs(original: nn.Module) -> Iterator[None]:
    """Raises UserError if the user's own modules are run, by a function that a copy still holds."""

    def refuse(path: str, *_: Any) -> None:
        where = f"self.{path}" if path else "self"
        raise UserError(
            f"a function inside the model holds its module {path or 'itself'}, so a copy of the "
            f"model would run the original; let that function be a method that uses {where}"
        )

    with _hooked(original, refuse):
        yield


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Call]]:
    """Keeps the first call of every module, by path."""
    calls: dict[str, Call] = {}

    def record(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in calls:
            calls[path] = Call(*map_tensors(lambda t: t.detach().clone(), (args, kwargs)))

    with _hooked(model, record):
        yield calls


@contextmanager
def _hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Calls `hook(path, module, args, kwargs)` before every module, but those of TorchScript."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handle = module.register_forward_pre_hook(partial(hook, path), with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def is_within(path: str, outer: str) -> bool:
    """True for the path of a module in another, and of that one itself."""
    return not outer or f"{path}.".startswith(f"{outer}.")


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


def take(batch: Any, samples: slice | Sequence[int], num: int | None = None) -> Any:
    """Samples of a batch; `num` is how many it has."""
    num = num_samples(batch) if num is None else num
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
        value = loss(call_of(model, batch)(model), batch if is_mapping else batch[1])
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
        return Call(inputs if isinstance(inputs, tuple) else (inputs,), {})
    arguments = inspect.signature(model.forward).parameters
    known = {name: value for name, value in batch.items() if name in arguments}
    if not known:
        raise UserError(
            f"batches are mappings of {', '.join(map(str, batch))}, but the model's forward "
            f"takes {', '.join(arguments)}: pass pairs, as in "
            "((batch['image'], batch['label']) for batch in loader)"
        )
    return Call((), known)
