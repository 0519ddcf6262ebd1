"""A network of the zoo: how it is built, its samples, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Sample = tuple[Any, ...]  # the arguments of a forward, of one sample, without its axis
# Several samples as the arguments of one forward, by position or by name.
Arguments = tuple[Any, ...] | Mapping[str, Any]
Collate = Callable[[Sequence[Sample]], Arguments]

# What `norm=batch norm_batch_size=2` must come to; REFUSED may also be split rightly.
RIGHT = "right"
UNTRIED = "untried: samples meet elsewhere"
LEFT_ALONE = "left alone"
REFUSED = "refused"
UNKNOWN = "right, untried, left alone or refused"


@dataclass(frozen=True)
class Case:
    """A network and how to hold it to the identities.

    Attributes:
        name: what people call it.
        build: with weights drawn from torch's generator.
        draw: one sample.
        expected: of batch norm at a size of 2.
        own: the norm that replaces the network's own by the same; None where it has several kinds.
        knobs: of `own`.
        axis: of the samples, in inputs and outputs.
        collate: several samples as the arguments of one forward; None stacks them along `axis`.
        alone: True if the network also takes one sample without its axis.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[], Sample]
    expected: str = RIGHT
    own: str | None = "batch"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    axis: int = 0
    collate: Collate | None = None
    alone: bool = False

    def inputs(self, samples: Sequence[Sample]) -> Arguments:
        if self.collate is not None:
            return self.collate(samples)
        return tuple(torch.stack(values, self.axis) for values in zip(*samples, strict=True))


def call(network: nn.Module, inputs: Arguments) -> Any:
    return network(**inputs) if isinstance(inputs, Mapping) else network(*inputs)


def normal(*shape: int) -> Callable[[], Sample]:
    """Draws samples of one tensor; 0.5 keeps its mean from 0."""
    return lambda: (torch.randn(shape) + 0.5,)


def as_lists(samples: Sequence[Sample]) -> tuple[list[Any], ...]:
    """Each argument as a list of the samples' values, as detectors take them."""
    return tuple(list(values) for values in zip(*samples, strict=True))


def as_rows(samples: Sequence[Sample]) -> tuple[Any, ...]:
    """The rows of all samples in one axis, and the number of the sample of each row."""
    rows = torch.cat([sample[0] for sample in samples])
    lengths = torch.tensor([len(sample[0]) for sample in samples])
    return rows, torch.arange(len(samples)).repeat_interleave(lengths)


def mean_of_rows(rows: Tensor, owners: Tensor) -> Tensor:
    """Rows (R, C) and their owners (R,) to the mean of each owner (N, C)."""
    num = int(owners.max()) + 1
    sums = rows.new_zeros(num, rows.shape[1]).index_add(0, owners, rows)
    counts = torch.bincount(owners, minlength=num)
    return sums / counts[:, None]
