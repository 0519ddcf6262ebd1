"""Several processes, one per device, that share each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from normexp.norms.contract import DeclaresSynchronized, State
from normexp.norms.site import read_state, state_after, write_state
from normexp.training.batching.replicas import Replicas
from normexp.training.config.identity import declared_synchronized
from normexp.training.config.keys import RunningFrom
from normexp.training.config.sizes import Share
from normexp.training.config.target import locate


@dataclass(eq=False)
class Processes:
    """Collective operations of the processes of a training: every process must make every call.

    DistributedDataParallel could sum gradients, but its hooks average over processes at every
    backward, and hang if a process has no sample of a short last forward. Here every process
    divides its losses by the targets of the whole step, and one sum ends the step.

    Args:
        share: the samples of each forward that this process computes.
        device: holds all exchanged tensors.
    """

    share: Share
    device: torch.device

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
        parameters = [p for p in replicas.parameters() if p.requires_grad]
        if 0 in counts:  # a process without samples cannot know which parameters get a gradient
            self._fill_missing(parameters)
        tensors = [losses, *(p.grad for p in parameters if p.grad is not None)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        distributed.all_reduce(flat)
        sums = flat.split([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.view_as(tensor))
        return losses

    def _fill_missing(self, parameters: list[nn.Parameter]) -> None:
        """Sets gradients to zero that the first process has and this one lacks."""
        flags = torch.tensor([p.grad is not None for p in parameters], device=self.device).int()
        distributed.broadcast(flags, 0)
        for parameter, flag in zip(parameters, flags.tolist(), strict=True):
            if flag and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def merge_buffers(
        self, replicas: Replicas, start: State, counts: list[int], running_from: RunningFrom
    ) -> None:
        """Merges the buffers of a step that all processes began at `start`, like ghost sub-batches.

        Synchronized norms keep theirs: they have seen all samples already.
        """
        state = read_state(replicas)
        ends = self._gather(state)
        active = [index for index, count in enumerate(counts) if count]
        shares = [counts[index] / sum(counts) for index in active]
        of_active = [ends[index] for index in active]
        merged = state_after(replicas, start, of_active, shares, running_from)
        for path, module in replicas.named_modules():
            if declares_synchronized(module):
                merged |= {k: v for k, v in state.items() if k.startswith(f"{path}.")}
        write_state(replicas, merged)

    def _gather(self, state: State) -> list[State]:
        """Returns the buffers of each process."""
        num_processes = self.share.count
        ends: list[State] = [{} for _ in range(num_processes)]
        for name, value in state.items():
            flat = value.new_empty(num_processes * value.numel())
            distributed.all_gather_into_tensor(flat, value.reshape(-1))
            for end, row in zip(ends, flat.view(-1, *value.shape), strict=True):
                end[name] = row
        return ends


def declares_synchronized(norm: object) -> bool:
    """True if a norm, or a class of norms, says that it takes statistics over all devices."""
    is_torchs = isinstance(norm, nn.SyncBatchNorm) or norm is nn.SyncBatchNorm
    return is_torchs or (isinstance(norm, DeclaresSynchronized) and norm.synchronized)


def is_synchronized(values: Mapping[str, Any]) -> bool:
    """True if the norm of a config takes its statistics over all devices.

    Its YAML says so by `synchronized`, or the class of a foreign norm by an attribute of that name.
    """
    from_config = declared_synchronized(values)
    if from_config is not None:
        return from_config
    try:
        return declares_synchronized(locate(values["_target_"]))
    except Exception:  # a user's module may raise anything on import: `build_norm` reports it
        return False
