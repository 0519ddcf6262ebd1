"""The contract of a norm: its forward, and what it may define besides.

A norm is an `nn.Module`; `Norm` is its forward. Every other protocol is optional, and holds for any
module that has its member. Without `NormOfGroups` a batch that is split runs the norm once per
part; without `MergesState` the state after a split step is the mean over the parts.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

State = dict[str, Tensor]  # buffers by name
Mask = Tensor | None  # true where a value is real; None: everywhere


class Norm(Protocol):
    """Maps x (N, C, *) to the same shape and dtype, with statistics in float32 or wider.

    Axis letters as in norms/base.py. The mask (N, *) is true where a value is real: values
    elsewhere have no influence, and outputs there are zero. A norm that pools neither positions nor
    samples may lack the argument `mask`; a site shows any other norm without it the real positions
    alone.
    """

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor: ...


@runtime_checkable
class NormOfGroups(Protocol):
    """A norm that takes all groups of a split batch in one call, which is faster."""

    def forward_groups(self, x: Tensor, mask: Mask = None) -> Tensor:
        """Returns the output for x (G, N, C, *), mask (G, N, *): statistics per group."""
        ...


@runtime_checkable
class MergesState(Protocol):
    """A norm whose state after a split step is not the mean of the states of the parts."""

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Returns buffers as they are after a step that was run in parts, each from `start`.

        Buffers that it leaves out are averaged by `shares`. Leading replica axes pass through.
        """
        ...


@runtime_checkable
class DeclaresOrder(Protocol):
    """A norm that may need its samples in order: if true, a step that splits a batch is refused."""

    sequential_state: bool


@runtime_checkable
class DeclaresSynchronized(Protocol):
    """A norm that may pool the samples of all devices: if true, its states are not merged."""

    synchronized: bool


@runtime_checkable
class HasMomentum(Protocol):
    """A norm with running averages; `momentum` is the weight of the new value, as in torch.nn."""

    momentum: float | None


@runtime_checkable
class HasRamp(Protocol):
    """A norm that changes over a training, whose `num_training_steps` optimizer steps it counts."""

    num_training_steps: int


@runtime_checkable
class HasNormParameters(Protocol):
    """A module around a norm; weight decay treats these of its parameters as a norm's."""

    norm_parameters: tuple[str, ...]
