"""Several processes, one per device, that share each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from normexp.batching.replicas import Replicas
from normexp.config.identity import declared_synchronized
from normexp.config.sizes import Share
from normexp.config.target import locate
from normexp.norms.contract import DeclaresSpan, State
from normexp.norms.site import merge_state, read_state, write_state


class Processes:
    """Collective operations of the processes of a training: every process must make every call.

    Gradients are summed here and not by DistributedDataParallel. Its hooks average over processes
    at every backward, and hang if a process has no sample of a short last forward. Here every
    process divides its losses by the targets of the whole step, and one sum ends the step.

    Args:
        share: the part of each step that this process computes.
        device: holds all exchanged tensors.
    """

    def __init__(self, share: Share, device: torch.device) -> None:
        self.share = share
        self.device = device

    def maximum(self, number: int) -> int:
        """The largest of the processes' numbers."""
        value = torch.tensor(number, device=self.device)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return int(value)

    @torch.no_grad()
    def sum_gradients(self, replicas: Replicas, losses: Tensor, counts: list[int]) -> Tensor:
        """Sums the gradients and losses (S,) of all processes; returns the losses.

        Args:
            counts: samples of the step in each process.
        """
        trained = [p for p in replicas.parameters() if p.requires_grad]
        if 0 in counts:  # a process without samples cannot know which parameters get a gradient
            self._fill_missing(trained)
        tensors = [losses, *(p.grad for p in trained if p.grad is not None)]
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        distributed.all_reduce(whole)
        parts = whole.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        return losses

    def _fill_missing(self, parameters: list[nn.Parameter]) -> None:
        """Sets missing gradients that the first process has to zero."""
        flags = torch.tensor([p.grad is not None for p in parameters], device=self.device).int()
        distributed.broadcast(flags, 0)
        for parameter, flag in zip(parameters, flags.tolist(), strict=True):
            if flag and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def merge_buffers(self, replicas: Replicas, start: State, counts: list[int]) -> None:
        """Merges the buffers of a step that all processes began at `start`, like ghost sub-batches.

        Norms that span devices are left alone: they have seen all samples already.
        """
        state = read_state(replicas)
        ends = self._gather(state)
        present = [index for index, count in enumerate(counts) if count]
        total = sum(counts)
        shares = [counts[index] / total for index in present]
        merged = merge_state(replicas, start, [ends[index] for index in present], shares)
        write_state(replicas, {**merged, **_of_spanning(replicas, state)})

    def _gather(self, state: State) -> list[State]:
        """Returns the buffers of each process."""
        rows: State = {}
        for name, value in state.items():
            flat = value.new_empty(self.share.count * value.numel())
            distributed.all_gather_into_tensor(flat, value.reshape(-1))
            rows[name] = flat.view(-1, *value.shape)
        return [{name: row[k] for name, row in rows.items()} for k in range(self.share.count)]


def spans_devices(norm: object) -> bool:
    """True if a norm, or the class of one, computes its statistics over all devices."""
    is_torchs = isinstance(norm, nn.SyncBatchNorm) or norm is nn.SyncBatchNorm
    return is_torchs or (isinstance(norm, DeclaresSpan) and norm.spans_devices)


def _of_spanning(replicas: Replicas, state: State) -> State:
    """Returns the buffers that belong to norms that span devices."""
    paths = [f"{path}." for path, module in replicas.named_modules() if spans_devices(module)]
    return {name: value for name, value in state.items() if name.startswith(tuple(paths))}


def is_synchronized(values: Mapping[str, Any]) -> bool:
    """True if the norm computes its statistics over all devices.

    As its YAML says (`synchronized`); a foreign norm may also say it by `spans_devices`.
    """
    from_config = declared_synchronized(values)
    if from_config is not None:
        return from_config
    try:
        return spans_devices(locate(values["_target_"]))
    except Exception:  # a user's module may raise anything on import: `build_norm` reports it
        return False
