"""Several processes, one per device, that share each optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from normexp.batching.replicas import Replicas
from normexp.batching.sizes import Share
from normexp.norms.contract import DeclaresSpan, State
from normexp.norms.state import merge_state, read_state, write_state


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
            trained = self._used(trained)
        trained = [p for p in trained if p.grad is not None]
        gradients: list[Tensor] = [p.grad for p in trained if p.grad is not None]
        for group in _by_dtype([*gradients, losses]):
            whole = torch.cat([tensor.reshape(-1) for tensor in group])
            distributed.all_reduce(whole)
            parts = whole.split([tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        return losses

    def _used(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters with a gradient in the first process; sets missing gradients to zero."""
        flags = torch.tensor([p.grad is not None for p in parameters], device=self.device).int()
        distributed.broadcast(flags, 0)
        used = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used

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
        gathered: list[State] = [{} for _ in range(self.share.count)]
        for dtype in dict.fromkeys(value.dtype for value in state.values()):
            group = {name: value for name, value in state.items() if value.dtype == dtype}
            flat = torch.cat([value.reshape(-1) for value in group.values()])
            rows = [torch.empty_like(flat) for _ in gathered]
            distributed.all_gather(rows, flat)
            for of_process, row in zip(gathered, rows, strict=True):
                parts = row.split([value.numel() for value in group.values()])
                for (name, value), part in zip(group.items(), parts, strict=True):
                    of_process[name] = part.view_as(value)
        return gathered


def spans_devices(norm: object) -> bool:
    """True if a norm, or the class of one, computes its statistics over all devices."""
    is_torchs = isinstance(norm, nn.SyncBatchNorm) or norm is nn.SyncBatchNorm
    return is_torchs or (isinstance(norm, DeclaresSpan) and norm.spans_devices)


def _of_spanning(replicas: Replicas, state: State) -> State:
    """Returns the buffers that belong to norms that span devices."""
    paths = [f"{path}." for path, module in replicas.named_modules() if spans_devices(module)]
    return {name: value for name, value in state.items() if name.startswith(tuple(paths))}


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
