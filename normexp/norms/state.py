"""The state of a norm: its buffers by name, read, written, swapped, and merged from parts."""

from __future__ import annotations

import torch
from torch import nn

from normexp.norms.contract import DeclaresOrder, MergesState, State


def merge_state(module: nn.Module, start: State, parts: list[State], shares: list[float]) -> State:
    """Returns the buffers of `module` after a step run in parts that all began at `start`.

    Floating-point buffers are the share-weighted mean of the parts; integers (counters) are as the
    first part left them, so that a counter rises by one per step. A submodule's own `merge_state`
    takes precedence for the buffers that it returns. Leading replica axes pass through.
    """
    merged: State = {}
    for path, child in module.named_modules():
        if isinstance(child, MergesState):
            prefix = f"{path}." if path else ""
            first, *ends = (_below(prefix, state) for state in (start, *parts))
            values = child.merge_state(first, ends, shares)
            merged |= {prefix + name: value for name, value in values.items()}
    for name in parts[0].keys() - merged.keys():
        first = parts[0][name]
        weighted = (part[name] * share for part, share in zip(parts, shares, strict=True))
        merged[name] = torch.stack([*weighted]).sum(0) if first.is_floating_point() else first
    return merged


def _below(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}


def is_sequential(module: nn.Module) -> bool:
    """True if a norm in `module` declares that its state must see samples in order."""
    norms = (child for child in module.modules() if isinstance(child, DeclaresOrder))
    return any(norm.sequential_state for norm in norms)


def read_state(module: nn.Module) -> State:
    """Returns a copy of the module's buffers."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def write_state(module: nn.Module, state: State) -> None:
    """Copies values into the module's buffers in place, which stacked replicas need."""
    buffers = dict(module.named_buffers())
    for name, value in state.items():
        buffers[name].copy_(value)


def install_state(module: nn.Module, state: State) -> None:
    """Makes the tensors of `state` themselves the module's buffers."""
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value)
