"""Compares one pass over all samples with a pass over each part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normexp.any_network.trial import (
    Inputs,
    agree,
    draw_weights,
    largest_value,
    real_outputs,
    run_network,
)
from normexp.errors import UserError, one_line
from normexp.training.batching.copies import copied


@dataclass(frozen=True)
class View:
    """The place of a part's output among the outputs for all samples.

    Attributes:
        part, leaf: the part, and the number of its output.
        whole: the number of the output for all samples.
        axis, start, length: of the values in it; an axis of None is all of it.
    """

    part: int
    leaf: int
    whole: int
    axis: int | None
    start: int = 0
    length: int = 0

    def of(self, outputs: Sequence[Tensor]) -> Tensor:
        value = outputs[self.whole]
        return value if self.axis is None else value.narrow(self.axis, self.start, self.length)


def find_views(
    of_all: nn.Module,
    of_part: nn.Module,
    passes: Sequence[Inputs],
    tolerance: float,
    gradient_tolerance: float | None,
) -> list[View] | None:
    """Where the outputs of each part are among those of all samples; None if they do not agree.

    Args:
        of_all, of_part: run on all samples and on each part of them, always on copies.
        passes: the inputs of all samples, then those of each part.
        gradient_tolerance: of the gradients of a random weighting of outputs, which are those of
            all parts added up; None: they are not compared.
    """
    copies = [copied(of_all), *(copied(of_part) for _ in passes[1:])]
    whole, *parts = (
        real_outputs(run_network(one, inputs, with_gradients=gradient_tolerance is not None))
        for one, inputs in zip(copies, passes, strict=True)
    )
    views = _match(whole, parts)
    if views is None:
        return None
    for view in views:
        if not agree(view.of(whole), parts[view.part][view.leaf], tolerance):
            return None
    if gradient_tolerance is None:
        return views
    weights = draw_weights(whole)
    expected = _gradients(copies[0], [(view.of(whole), view.of(weights)) for view in views])
    of_parts: list[dict[str, Tensor]] = []
    for index, outputs in enumerate(parts):
        own = [view for view in views if view.part == index]
        pairs = [(outputs[view.leaf], view.of(weights)) for view in own]
        of_parts.append(_gradients(copies[1 + index], pairs))
    largest = max(map(largest_value, expected.values()), default=0.0)
    for name, gradient in expected.items():
        total = torch.stack([gradients[name] for gradients in of_parts]).sum(0)
        if not agree(gradient, total, gradient_tolerance, largest):
            return None
    return views


def _gradients(network: nn.Module, outputs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The gradients of the sum of outputs times weights, by name of the parameter."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    total = sum((out * weight).sum() for out, weight in outputs)
    if isinstance(total, Tensor) and total.requires_grad:
        try:
            total.backward(retain_graph=True)
        except Exception as error:  # foreign code may raise anything
            raise UserError(f"a backward of the model fails: {one_line(error)}") from error
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


def _match(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[View] | None:
    """Where the outputs of each part are in those for all samples; None if they do not fit.

    What has no axis of samples, as a loss, is left out.
    """
    views: list[View] = []
    if sum(map(len, parts)) == len(whole):  # one output a sample
        for part, outputs in enumerate(parts):
            views += [View(part, leaf, len(views) + leaf, None) for leaf in range(len(outputs))]
        return views
    if any(len(part) != len(whole) for part in parts):
        return None
    for leaf, value in enumerate(whole):
        axis = _sample_axis(value.shape, [part[leaf].shape for part in parts])
        if axis is None:
            continue
        start = 0
        for part, outputs in enumerate(parts):
            length = outputs[leaf].shape[axis]
            views.append(View(part, leaf, leaf, axis, start, length))
            start += length
    return views


def _sample_axis(whole: torch.Size, parts: Sequence[torch.Size]) -> int | None:
    """The axis along which parts of these shapes make up the whole; None if there is none."""
    if any(len(part) != len(whole) for part in parts):
        return None
    for axis in range(len(whole)):
        total = sum(part[axis] for part in parts)
        others = {(*part[:axis], *part[axis + 1 :]) for part in parts}
        if total == whole[axis] and others == {(*whole[:axis], *whole[axis + 1 :])}:
            return axis
    return None
