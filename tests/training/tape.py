"""A stand-in for a CUDA graph on a CPU: it freezes what a graph freezes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")  # the CPU waits for a value


class Tape(TorchDispatchMode):
    """Records the operators of `function` while they run, and runs them again on the same numbers.

    A replay computes with the tensors that lie outside the recording as they are then, and writes
    what the recording made to its old places, as a graph does to its memory. Every Python number
    is as it was. Unlike a graph, the recording itself runs.
    """

    device = "cpu"

    def __init__(self, function: Callable[[], Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        with self:
            self.output = function()

    @classmethod
    @contextmanager
    def warming_up(cls) -> Iterator[None]:
        yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        if func.name().removeprefix("aten::").split(".")[0] in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> Tensor:
        fresh: dict[int, Tensor] = {}  # the values of this replay, by the tensor of the recording

        def now(value: Any) -> Any:
            return fresh.get(id(value), value) if isinstance(value, Tensor) else value

        with torch.autocast("cpu", enabled=False):  # casts are among the calls
            for func, args, kwargs, out in self.calls:
                found = func(*tree_map(now, args), **tree_map(now, kwargs))
                for old, new in zip(tree_flatten(out)[0], tree_flatten(found)[0], strict=True):
                    if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                        fresh[id(old)] = new
            for func, _, _, out in self.calls:
                for old in tree_flatten(out)[0]:
                    if isinstance(old, Tensor) and id(old) in fresh and not func.is_view:
                        old.copy_(fresh[id(old)])
        return self.output
