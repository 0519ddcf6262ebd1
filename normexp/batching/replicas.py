"""Several networks of one cell trained together: stacked under vmap, or one after another.

Both forms answer to the same few calls, and values they return lead with the replica axis S.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normexp.batching.draws import Dropout
from normexp.norms.state import State, merge_state, read_state, write_state

Batch = dict[str, Tensor]
Measured = dict[str, Tensor]
Measure = Callable[[Tensor, Batch], Measured]


def model_arguments(batch: Batch) -> tuple[Tensor, ...]:
    """What a model's forward receives of a batch: its inputs, and its mask where it has one."""
    mask = batch.get("mask")
    return (batch["inputs"],) if mask is None else (batch["inputs"], mask)


class Replicas(nn.Module, ABC):
    """S networks trained together. `trees` are the modules that hold their tensors."""

    is_stacked: bool
    foreign_seeds: list[int] | None = None  # one per replica, where a module draws for itself

    def __init__(self, trees: list[nn.Module], num_replicas: int) -> None:
        super().__init__()
        self.trees = nn.ModuleList(trees)
        self.num_replicas = num_replicas

    @abstractmethod
    def measure(self, batch: Batch, measure: Measure, *, shared: bool = False) -> Measured:
        """`measure(output, batch)` of every replica, stacked to (S, ...).

        Values of `batch` are (S, N, ...), or (N, ...) where it is `shared` by the replicas.
        """

    def add_gradient(self, batch: Batch, measure: Measure, weight: float) -> Tensor:
        """Adds the gradient of `weight` times each replica's measured "loss"; those losses (S,)."""
        return backward(self.measure(batch, measure)["loss"], weight)

    @abstractmethod
    def replica(self, index: int) -> nn.Module:
        """Replica `index` as a plain module of its own."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> None:
        """Scales each replica's gradient to at most `max_norm` (2-norm over its parameters)."""

    @abstractmethod
    def set_dropout(self, keys: Tensor, first_sample: int) -> None:
        """Hands each dropout its keys, (num_dropouts, S), and where this part begins."""

    def read_buffers(self) -> list[State]:
        """A copy of the buffers of each tree."""
        return [read_state(tree) for tree in self.trees]

    def write_buffers(self, states: list[State]) -> None:
        for tree, state in zip(self.trees, states, strict=True):
            write_state(tree, state)

    def merge_buffers(
        self, start: list[State], parts: list[list[State]], shares: list[float]
    ) -> None:
        """Ends a step run in parts: buffers become what `merge_state` makes of them."""
        for index, tree in enumerate(self.trees):
            ends = [part[index] for part in parts]
            write_state(tree, merge_state(tree, start[index], ends, shares))


class InTurn(Replicas):
    """Plain networks, run one after another; also the form of a single network."""

    is_stacked = False

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__(networks, len(networks))

    def measure(self, batch: Batch, measure: Measure, *, shared: bool = False) -> Measured:
        owns = [batch if shared else _of_replica(batch, i) for i in range(self.num_replicas)]
        rows = [self._measure_one(index, own, measure) for index, own in enumerate(owns)]
        if len(rows) == 1:
            return {name: value.unsqueeze(0) for name, value in rows[0].items()}
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def add_gradient(self, batch: Batch, measure: Measure, weight: float) -> Tensor:
        """A network's backward follows its forward: memory for the activations of one."""
        losses = []
        for index in range(self.num_replicas):
            row = self._measure_one(index, _of_replica(batch, index), measure)
            losses.append(backward(row["loss"], weight))
        return torch.stack(losses)

    def _measure_one(self, index: int, batch: Batch, measure: Measure) -> Measured:
        network = self.trees[index]
        if self.foreign_seeds is not None and network.training:
            torch.manual_seed(self.foreign_seeds[index])
        return measure(network(*model_arguments(batch)), batch)

    def replica(self, index: int) -> nn.Module:
        return copy.deepcopy(self.trees[index])

    def clip_gradients(self, max_norm: float) -> None:
        for network in self.trees:
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)

    def set_dropout(self, keys: Tensor, first_sample: int) -> None:
        for index, network in enumerate(self.trees):
            for own, dropout in zip(keys, dropouts(network), strict=True):
                dropout.key.copy_(own[index])
                dropout.first_sample.fill_(first_sample)


class Stacked(Replicas):
    """One module whose parameters and buffers lead with axis S, run under vmap."""

    is_stacked = True

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__([stack_networks(networks)], len(networks))

    @property
    def network(self) -> nn.Module:
        return self.trees[0]

    def measure(self, batch: Batch, measure: Measure, *, shared: bool = False) -> Measured:
        network = self.network
        buffers = dict(network.named_buffers())
        tensors = {**dict(network.named_parameters()), **buffers}

        def one(own: dict[str, Tensor], own_batch: Batch) -> tuple[Measured, State]:
            given = {name: own[name] for name in buffers}
            output = functional_call(network, own, model_arguments(own_batch))
            changed = {name: own[name] for name in buffers if own[name] is not given[name]}
            return measure(output, own_batch), changed

        run = vmap(one, in_dims=(0, None if shared else 0))
        measured, reassigned = run(tensors, batch)  # buffers written in place are so already
        for name, value in reassigned.items():
            buffers[name].copy_(value.detach())
        return measured

    def replica(self, index: int) -> nn.Module:
        own = copy.deepcopy(self.network)
        _replace_tensors(own, lambda tensor: tensor[index].clone())
        return own

    def clip_gradients(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        squares = [g.reshape(len(g), -1).square().sum(dim=1) for g in gradients]  # each (S,)
        norm = torch.stack(squares).sum(dim=0).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))

    def set_dropout(self, keys: Tensor, first_sample: int) -> None:
        for own, dropout in zip(keys, dropouts(self.network), strict=True):
            dropout.key.copy_(own)
            dropout.first_sample.fill_(first_sample)


def backward(losses: Tensor, weight: float) -> Tensor:
    """Adds the gradient of `weight` times the losses' sum; returns them without their graph."""
    # Not Lightning's manual_backward: its hooks cost more than a small step's optimizer, and none
    # of the precisions here scales a loss.
    losses.backward(torch.full_like(losses, weight))
    return losses.detach()


def _of_replica(batch: Batch, index: int) -> Batch:
    return {name: value[index] for name, value in batch.items()}


def dropouts(network: nn.Module) -> list[Dropout]:
    """The network's dropout modules, those that would drop nothing left out."""
    return [m for m in network.modules() if isinstance(m, Dropout) and m.p > 0]


def stack_networks(networks: list[nn.Module]) -> nn.Module:
    """One module with the networks' tensors stacked on a new first axis; parameters are leaves."""
    parameters, buffers = stack_module_state(networks)
    stacked: Mapping[str, Tensor] = {**parameters, **buffers}
    skeleton = copy.deepcopy(networks[0])
    names = {id(t): name for name, t in _named_tensors(skeleton)}
    _replace_tensors(skeleton, lambda tensor: stacked[names[id(tensor)]].detach())
    return skeleton


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _replace_tensors(module: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    """Swaps every parameter and buffer in place of the module tree; shared ones stay shared."""
    done: dict[int, Tensor] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in done:
                new = nn.Parameter(replace(parameter).detach(), parameter.requires_grad)
                done[id(parameter)] = new
            child.register_parameter(name, done[id(parameter)])  # type: ignore[arg-type]
        for name, buffer in list(child.named_buffers(recurse=False)):
            setattr(child, name, replace(buffer))  # keeps a buffer's persistence


# Up to this many normalized elements in one replica's forward pass, a CPU gains from stacking and
# loses from a second thread; beyond it, the other way round. On two cores with the shipped convnet
# and 8 replicas, one thread: stacked against in turn 1.4x at half of it, 1.0x at it, 0.8x at twice.
SMALL_FORWARD = 2**17


def stacks(device_type: str, num_replicas: int, elements_per_forward: int) -> bool:
    """Whether to stack replicas rather than run one after another.

    Args:
        device_type: "cpu", "cuda" and so on.
        elements_per_forward: values that reach all sites of one replica in one forward pass.
    """
    if num_replicas == 1:
        return False
    return device_type != "cpu" or elements_per_forward <= SMALL_FORWARD


@contextmanager
def suitable_threads(elements_per_forward: int) -> Iterator[None]:
    """One CPU thread while inside for a network too small to share; else what torch was given."""
    before = torch.get_num_threads()
    if elements_per_forward <= SMALL_FORWARD:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
