"""One step by several processes, a device each, as one process would take it."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from normexp.batching.replicas import Replicas
from normexp.batching.sizes import Share
from normexp.norms.state import State, write_state


class Processes:
    """This process among those that train together; every call is made by all of them.

    Gradients are summed here and not by DistributedDataParallel. Its hooks average over processes
    at every backward, and wait for one that has no sample of a short last forward; a step wants
    one sum at its end, of losses that each process has divided by the whole step's targets.

    Args:
        device: where tensors that travel must be.
    """

    def __init__(self, share: Share, device: torch.device) -> None:
        self.share = share
        self.device = device

    def agree(self, number: int) -> int:
        """The first process's number: clocks differ, and all must take the same path."""
        return int(self._reduce(number if self.share.index == 0 else 0, distributed.ReduceOp.SUM))

    def highest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return int(self._reduce(number, distributed.ReduceOp.MAX))

    def _reduce(self, number: int, how: distributed.ReduceOp.RedOpType) -> Tensor:
        value = torch.tensor(number, device=self.device)
        distributed.all_reduce(value, how)
        return value

    @torch.no_grad()
    def sum_gradients(self, replicas: Replicas, losses: Tensor, taken: list[int]) -> Tensor:
        """Leaves the step's whole gradient in each process; returns the step's losses (S,).

        Args:
            losses: of this process's samples.
            taken: samples of the step that each process had.
        """
        trained = [p for p in replicas.parameters() if p.requires_grad]
        if 0 in taken:  # a process without samples does not know which parameters a forward uses
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
        """Those that the first process has a gradient of; where missing, it starts at zero."""
        flags = torch.tensor([p.grad is not None for p in parameters], device=self.device).int()
        distributed.broadcast(flags, 0)
        used = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used

    @torch.no_grad()
    def merge_buffers(self, replicas: Replicas, start: list[State], taken: list[int]) -> None:
        """Ends a step that all processes began at `start`: their buffers become the merged ones.

        The processes' parts are merged as ghost sub-batches are. What a norm that spans devices has
        measured is of all samples already.
        """
        own = replicas.read_buffers()
        ends = self._gather(own)
        present = [index for index, count in enumerate(taken) if count]
        total = sum(taken)
        shares = [taken[index] / total for index in present]
        replicas.merge_buffers(start, [ends[index] for index in present], shares)
        for tree, state in zip(replicas.trees, own, strict=True):
            write_state(tree, _of_spanning(tree, state))

    def _gather(self, states: list[State]) -> list[list[State]]:
        """The buffers of each process, by the trees of its replicas."""
        gathered: list[list[State]] = [[{} for _ in states] for _ in range(self.share.count)]
        places = [(tree, name) for tree, state in enumerate(states) for name in state]
        for dtype in dict.fromkeys(states[tree][name].dtype for tree, name in places):
            group = [(t, name) for t, name in places if states[t][name].dtype == dtype]
            flat = torch.cat([states[t][name].reshape(-1) for t, name in group])
            rows = [torch.empty_like(flat) for _ in range(self.share.count)]
            distributed.all_gather(rows, flat)
            for process, row in enumerate(rows):
                parts = row.split([states[t][name].numel() for t, name in group])
                for (t, name), part in zip(group, parts, strict=True):
                    gathered[process][t][name] = part.view_as(states[t][name])
        return gathered


def spans_devices(norm: object) -> bool:
    """Whether a norm, or the class of one, takes its statistics over all devices of a step."""
    is_torchs = isinstance(norm, nn.SyncBatchNorm) or norm is nn.SyncBatchNorm
    return is_torchs or bool(getattr(norm, "spans_devices", False))


def _of_spanning(tree: nn.Module, state: State) -> State:
    """The part of a tree's buffers that belongs to norms that span devices."""
    paths = [f"{path}." for path, module in tree.named_modules() if spans_devices(module)]
    return {name: value for name, value in state.items() if name.startswith(tuple(paths))}


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
