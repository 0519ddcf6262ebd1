"""The control of a split: without batch statistics, each sample is handled by itself.

Where that fails, what differs between a pass over all samples and passes over some may not be the
norms. The control also shows on which axis of a network's inputs its samples are, and where they
are in the input of each norm (norms/samples.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from normexp.any_network.passes import find_views
from normexp.any_network.trial import Inputs, agree, real_outputs, run_network
from normexp.errors import UserError
from normexp.norms.samples import ORDERS, Axis, Order
from normexp.norms.site import input_and_mask
from normexp.training.batching.copies import copied
from normexp.words import format_count

AXES: tuple[Axis, ...] = (0, None, 1)  # on which a network's samples may be
TOLERANCE = 1e-4, 1e-2  # in double precision, and else; a wrong split is off by a tenth and more
MEET = (
    "samples meet outside of its norms, also in evaluation mode, or the first axis of its inputs "
    "does not count them"
)
DRAWS = "it draws random numbers, also in evaluation mode"
NO_AXIS = "its inputs have no axis of samples"
NO_OUTPUT = "its outputs have no value for each sample"
UNTRIED = "the split by samples is untried"
# Off in a trial. What else draws random numbers, as a skipped path, is told by a line.
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Untried(str):
    """Why a split cannot be tried."""


@dataclass
class Control:
    """A network that handles each sample by itself where its norms do not use batch statistics.

    Attributes:
        network: in which the norms at `paths` may use batch statistics.
        paths: of the norms.
        inputs: of two groups of `size` samples.
        axis: of the inputs, that of samples.
        is_wide: the network runs in double precision.
        all_training: other modules than the norms are in training mode too.
        bypasses: the norms return their input; else they are in evaluation mode.
        notes: lines for the log.
    """

    network: nn.Module
    paths: Sequence[str]
    inputs: Inputs
    size: int
    axis: Axis
    is_wide: bool
    all_training: bool
    bypasses: bool
    notes: list[str] = field(default_factory=list)

    def copy(self, *, training: bool) -> nn.Module:
        """A copy of the network; its norms are in training mode, or as in the control."""
        network = copied(self.network)
        network.train(self.all_training)
        for module in network.modules():
            if isinstance(module, DROPOUT):
                module.eval()
        for path in self.paths:
            norm = network.get_submodule(path).train(training)
            if self.bypasses and not training:
                norm.register_forward_hook(_return_input, with_kwargs=True)
        return network

    @property
    def tolerance(self) -> float:
        return TOLERANCE[0 if self.is_wide else 1]

    def passes(self, length: int) -> list[Inputs]:
        """The inputs of all samples, then those of each `length` of them."""
        passes = [self.inputs]
        for first in range(0, 2 * self.size, length):
            passes.append(self.inputs.take(range(first, first + length), self.axis))
        return passes

    def why_not(self) -> str:
        """Why the control does not hold; "" if it does."""
        network = self.copy(training=False)
        gradients = self.tolerance if self.all_training else None
        try:
            views = find_views(network, network, self.passes(self.size), TOLERANCE[0], gradients)
        except UserError as error:
            return f"with some of its samples, {error}"
        if views == []:
            return NO_OUTPUT
        if views is None:
            return DRAWS if self.draws() else MEET
        return ""

    def draws(self) -> bool:
        """True if outputs change with the seed of random numbers."""
        one, other = (
            real_outputs(run_network(self.copy(training=False), self.inputs, seed=seed))
            for seed in (0, 1)
        )
        pairs = zip(one, other, strict=False)
        return not all(agree(out, again, TOLERANCE[0]) for out, again in pairs)

    def find_orders(self) -> dict[str, Order | None]:
        """By path, where the samples are in the input of a norm that is called; None if unknown."""
        length = 1
        try:
            whole, *parts = map(self._calls, self.passes(length))
        except UserError:  # some networks take no single sample
            length = self.size
            whole, *parts = map(self._calls, self.passes(length))
        orders: dict[str, Order | None] = {}
        for path, inputs in whole.items():
            of_parts = [part.get(path, []) for part in parts]
            orders[path] = None
            for order in reversed(ORDERS):  # the simplest last
                if _have_order(order, inputs, of_parts, length):
                    orders[path] = order
        return orders

    def _calls(self, inputs: Inputs) -> dict[str, list[Tensor]]:
        """The inputs of the norms in one pass, by path."""
        network = self.copy(training=False)
        calls: dict[str, list[Tensor]] = {}

        def keep(path: str, _: nn.Module, args: Any, keywords: Any) -> None:
            x, _mask = input_and_mask(args, keywords)
            calls.setdefault(path, []).append(x.detach().clone())

        for path in self.paths:
            norm = network.get_submodule(path)
            norm.register_forward_pre_hook(partial(keep, path), with_kwargs=True)
        run_network(network, inputs)
        return calls


def _return_input(_: nn.Module, args: Any, keywords: Any, __: Any) -> Any:
    return input_and_mask(args, keywords)[0]


def _have_order(
    order: Order, whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], length: int
) -> bool:
    """True if in every call of a norm the inputs of parts, in this order, make up the whole.

    Args:
        parts: the inputs of each part of `length` samples.
    """
    if any(len(part) != len(whole) for part in parts):
        return False
    for x, *xs in zip(whole, *parts, strict=True):
        if len({part.shape for part in xs}) > 1 or not xs[0].ndim:
            return False
        joined = _joined(order, xs, length)
        if joined is None or not agree(x, joined, TOLERANCE[0]):
            return False
    return True


def _joined(order: Order, parts: Sequence[Tensor], length: int) -> Tensor | None:
    """The input of all samples from those of parts, if they have this order; else None."""
    rows, *others = parts[0].shape
    if order == "first":
        return torch.cat([*parts]) if rows == length else None
    if order == "second":
        return torch.cat([*parts], dim=1) if others and others[0] == length else None
    if rows % length:
        return None
    if order == "rows":
        return torch.cat([*parts])
    by_position = [part.unflatten(0, (-1, length)) for part in parts]  # (T, N, ...)
    return torch.cat(by_position, dim=1).flatten(0, 1)


def find_control(
    network: nn.Module,
    paths: Sequence[str],
    inputs: Inputs,
    size: int,
    axes: Sequence[Axis] = AXES,
    *,
    is_wide: bool = False,
) -> Control | Untried:
    """The control with the most in training mode on the first of these axes where one holds.

    Its groups are smaller than `size` where fewer samples are given.

    Returns:
        why none holds otherwise.
    """
    reason = Untried(NO_AXIS)
    for axis, all_training, bypasses in product(axes, (True, False), (False, True)):
        num = inputs.count(axis)
        own_size = min(size, num // 2)
        if not own_size:
            if num:
                reason = Untried(too_few(num, size))
            continue
        few = inputs.take(range(2 * own_size), axis)
        control = Control(network, paths, few, own_size, axis, is_wide, all_training, bypasses)
        failure = control.why_not()
        if not failure:
            if not all_training:
                with_all = replace(control, all_training=True)
                control.notes.append(_in_training(with_all.why_not()))
            return control
        if axis != 1:
            reason = Untried(failure)
    return reason


def too_few(num: int, size: int) -> str:
    return f"{format_count(num, 'sample')} given, it needs {2 * size}"


def _in_training(failure: str) -> str:
    """Says why a control does not hold with all in training mode."""
    said = {MEET: "there samples meet outside of the norms", DRAWS: "these draw random numbers"}
    said = said.get(failure, failure)
    return f"{UNTRIED} with other modules than the norms in training mode: {said}"
