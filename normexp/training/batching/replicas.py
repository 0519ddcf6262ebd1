"""Several networks of one cell trained together: stacked under vmap, or one after another.

Both forms offer the same calls. Results lead with the replica axis S.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from normexp.norms.contract import State
from normexp.norms.counters import Counters, norms_with_counters
from normexp.training.batching.copies import copied
from normexp.training.batching.draws import Dropout

Batch = dict[str, Tensor]
Measurements = dict[str, Tensor]
T = TypeVar("T", Tensor, Measurements)
Measure = Callable[[Tensor, Batch], T]  # of a model's output and its batch
Loss = Measure[Tensor]  # returns a scalar
Weight = float | Tensor  # of all replicas, or (S,)


def model_arguments(batch: Batch) -> tuple[Tensor, ...]:
    """Returns the arguments of a model's forward: inputs, and the mask if the batch has one."""
    mask = batch.get("mask")
    return (batch["inputs"],) if mask is None else (batch["inputs"], mask)


class Replicas(nn.Module, ABC):
    """S networks trained together.

    Attributes:
        trees: the modules that hold the tensors: one per network, or one for the whole stack.
        has_foreign_draws: a module draws from torch's global generator in its training forward.
        num_dropouts: active dropout modules in a network.
    """

    is_stacked: bool
    has_foreign_draws = False

    def __init__(self, trees: list[nn.Module], num_replicas: int) -> None:
        super().__init__()
        self.trees = nn.ModuleList(trees)
        self.num_replicas = num_replicas
        self._dropouts = [_active_dropouts(tree) for tree in trees]
        self.num_dropouts = len(self._dropouts[0])
        counting = norms_with_counters(self)
        self._counting = Counters(counting).moving_at_end if counting else nullcontext

    @abstractmethod
    def measure(self, batch: Batch, function: Measure[T], *, shared: bool = False) -> T:
        """Returns `function(output, batch)` of every replica, stacked to (S, ...).

        Args:
            batch: values (S, N, ...), or (N, ...) if `shared` by all replicas.
            function: of a model's output and its batch; returns a tensor or a dict of tensors.
        """

    def add_gradient(self, batch: Batch, loss: Loss, weight: Weight) -> Tensor:
        """Adds the gradient of `weight` times each replica's loss; returns the losses (S,)."""
        with self._counting():
            return backward(self.measure(batch, loss), weight)

    @abstractmethod
    def replica(self, index: int) -> nn.Module:
        """Returns a copy of replica `index` as a plain module."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> None:
        """Scales each replica's gradient to at most `max_norm` (2-norm over its parameters)."""

    @abstractmethod
    def gradient_norms(self) -> Tensor:
        """Returns the 2-norm of each replica's gradient over its parameters, (S,)."""

    def set_dropout(self, keys: Tensor, first_sample: int) -> None:
        """Sets the noise of the next forward.

        Args:
            keys: one per dropout and replica, int64 (num_dropouts, S).
            first_sample: index of the forward's first sample within the optimizer step.
        """
        for index, dropouts in enumerate(self._dropouts):
            for key, dropout in zip(keys, dropouts, strict=True):
                dropout.key.copy_(key if self.is_stacked else key[index])
                dropout.first_sample.fill_(first_sample)


class InTurn(Replicas):
    """Plain networks, run one after another; a single network has this form too."""

    is_stacked = False

    def __init__(self, networks: list[nn.Module], *, has_foreign_draws: bool = False) -> None:
        super().__init__(networks, len(networks))
        self.has_foreign_draws = has_foreign_draws
        self._foreign_seeds: Sequence[int] | None = None

    def measure(self, batch: Batch, function: Measure[T], *, shared: bool = False) -> T:
        measured = [
            self._measure_replica(index, batch, function, shared=shared)
            for index in range(self.num_replicas)
        ]
        return tree_map(lambda *values: torch.stack(values), *measured)

    def add_gradient(self, batch: Batch, loss: Loss, weight: Weight) -> Tensor:
        """As the base class, but holds the activations of one network at a time."""
        losses = []
        with self._counting():
            for index in range(self.num_replicas):
                own = weight[index] if isinstance(weight, Tensor) else weight
                losses.append(backward(self._measure_replica(index, batch, loss), own))
        return torch.stack(losses)

    def _measure_replica(
        self, index: int, batch: Batch, function: Measure[T], *, shared: bool = False
    ) -> T:
        network = self.trees[index]
        replica_batch = batch if shared else {name: value[index] for name, value in batch.items()}
        if self._foreign_seeds is not None and network.training:
            torch.manual_seed(self._foreign_seeds[index])
        return function(network(*model_arguments(replica_batch)), replica_batch)

    def seed_foreign_draws(self, seeds: Sequence[int]) -> None:
        """Seeds torch's global generator by seeds[r] before each training forward of replica r."""
        self._foreign_seeds = seeds

    def replica(self, index: int) -> nn.Module:
        return copied(self.trees[index])

    def clip_gradients(self, max_norm: float) -> None:
        for network in self.trees:
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)

    def gradient_norms(self) -> Tensor:
        return torch.stack([nn.utils.get_total_norm(_gradients(network)) for network in self.trees])


class Stacked(Replicas):
    """One module whose parameters, leaves, and buffers lead with axis S, run under vmap."""

    is_stacked = True

    def __init__(self, networks: list[nn.Module]) -> None:
        stacked = copied(networks[0])
        states = [dict((*net.named_parameters(), *net.named_buffers())) for net in networks]
        for name, tensor in (*stacked.named_parameters(), *stacked.named_buffers()):
            tensor.data = torch.stack([state[name].detach() for state in states])
        super().__init__([stacked], len(networks))

    def measure(self, batch: Batch, function: Measure[T], *, shared: bool = False) -> T:
        network = self.trees[0]
        buffers = dict(network.named_buffers())
        tensors = dict(network.named_parameters()) | buffers

        def run_replica(tensors: dict[str, Tensor], batch: Batch) -> tuple[T, State]:
            before = dict(tensors)
            output = functional_call(network, tensors, model_arguments(batch))
            # Buffers that were written in place are the same tensors and need no copy.
            replaced = {
                name: tensors[name] for name in buffers if tensors[name] is not before[name]
            }
            return function(output, batch), replaced

        run = vmap(run_replica, in_dims=(0, None if shared else 0))
        measured, replaced = run(tensors, batch)
        for name, value in replaced.items():
            buffers[name].copy_(value.detach())
        return measured

    def replica(self, index: int) -> nn.Module:
        network = copied(self.trees[0])
        network.zero_grad()  # its gradients are those of the whole stack
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = tensor.detach()[index].clone()
        return network

    def clip_gradients(self, max_norm: float) -> None:
        scale = (max_norm / (self.gradient_norms() + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_
        for gradient in _gradients(self.trees[0]):
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))

    def gradient_norms(self) -> Tensor:
        squares = [g.reshape(len(g), -1).square().sum(dim=1) for g in _gradients(self.trees[0])]
        return torch.stack(squares).sum(dim=0).sqrt()


def _active_dropouts(network: nn.Module) -> list[Dropout]:
    """Returns the dropouts that draw; those with p = 0 do not."""
    return [m for m in network.modules() if isinstance(m, Dropout) and m.p > 0]


def _gradients(network: nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters() if p.grad is not None]


def backward(losses: Tensor, weight: Weight) -> Tensor:
    """Adds the gradient of the sum of `weight` times `losses`; returns the losses, detached."""
    # Not Lightning's manual_backward, whose hooks cost more than the optimizer of a small step. No
    # supported precision scales the loss.
    weights = weight.to(losses) if isinstance(weight, Tensor) else torch.full_like(losses, weight)
    losses.backward(weights)
    return losses.detach()


# --- What is faster: stacked or in turn, channels last, one CPU thread or several -----------------

# Stacking pays on a CPU up to this many normalized elements in the forward pass of a replica.
# Measured on two cores (shipped convnet, 8 replicas, one thread): stacking is 1.4x faster at half
# the limit, 1.0x at it, 0.8x at twice.
SMALL_FORWARD = 2**17

# Networks of batch norm that train in turn are faster on a CPU with their channels last in memory,
# if a site normalizes at least this many elements together, on average. Measured on two cores of a
# loaded Xeon (n = 3 to 5): 0.9x to 1.0x as fast at 5,000, 1.1x to 1.6x at 20,000 and above.
LARGE_GROUP = 2**13

# A second thread pays above this many. Measured as typed on two cores (noisy, n = 3): small_resnet
# is 0.9x as fast at 2.4M, 1.3x at 4.7M, 1.5x at 9.4M; resnet20 0.9x at 6M.
LARGE_FORWARD = 2**22


@contextmanager
def suitable_threads(elements_per_forward: int = 0, threads: int = 1) -> Iterator[None]:
    """Inside the block torch uses one CPU thread, or `threads` if a network is large."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads if elements_per_forward > LARGE_FORWARD else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
