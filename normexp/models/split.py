"""Tests whether splitting a batch into groups of k samples equals separate passes of k.

In training mode, a network whose norms split their batch into groups of k must give on 2k samples
what two passes of k give, from the same parameters and buffers: equal outputs, and gradients of a
fixed random weighting of them that add up. Losses that a network computes by itself are left out.

A control comes first: without batch statistics, each pass must handle its samples independently.
Where it fails the split is untried, because what differs may not be the norms. The control also
shows where the samples are in the input of each norm (norms/samples.py), which is tried where they
are not its first axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.errors import UserError, one_line
from normexp.models.trial import (
    Inputs,
    agree,
    draw_weights,
    largest_value,
    real_outputs,
    run_network,
    widened,
)
from normexp.norms.samples import (
    ORDERS,
    Order,
    SampleCounter,
    SampleOrder,
)
from normexp.norms.site import input_and_mask, named_sites
from normexp.words import format_count, name_some

TOLERANCE = 1e-4, 1e-2  # in double precision, and else; a wrong split is off by a tenth and more
AXES = (0, 1)  # of a network's inputs, on which its samples may be
MEET = (
    "samples meet outside of its norms, also in evaluation mode, or the first axis of its inputs "
    "does not count them"
)
IN_TRAINING = "the split by samples is untried with other modules than the norms in training mode: "
MEET_IN_TRAINING = f"{IN_TRAINING}there samples meet outside of the norms"
DRAWS_IN_TRAINING = f"{IN_TRAINING}these draw random numbers"
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)  # off in a trial
MOST_SAMPLES = 4  # of a group in the trial: larger groups are cut in the same way


@dataclass
class Split:
    """How the sites of a network find the samples of their inputs.

    Attributes:
        axis: of the network's inputs, that of samples.
        orders: by site, where the first axis of its input does not count the samples.
        notes: lines for the log.
    """

    axis: int = 0
    orders: dict[str, Order] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def install(self, network: nn.Module) -> None:
        """Tells the sites of a network like the one that was tried."""
        if not self.orders:
            return
        counter = SampleCounter(self.axis)
        network.register_forward_pre_hook(counter, with_kwargs=True)
        for name, order in self.orders.items():
            site: Any = network.get_submodule(name)
            site.order = SampleOrder(order, counter)


def try_split(network: nn.Module, inputs: Inputs) -> Split:
    """Tries the split of a network's sites, if any splits its batch or pools a sample's positions.

    Raises:
        UserError: the control holds, and no order of the samples gives the same as two passes.
    """
    sites = dict(named_sites(network))
    sizes = [site.norm_batch_size for site in sites.values() if site.norm_batch_size is not None]
    if not sizes and all(site.view != "sequence" for site in sites.values()):
        return Split()
    size = min([MOST_SAMPLES, *sizes])
    if 4 <= inputs.count() < 2 * size:
        size = 2
    network, inputs, is_wide = widened(network, inputs)
    for _, site in named_sites(network):
        site.norm_batch_size, site.running_from, site.order = size, "step", None
    control = find_control(network, [*sites], inputs, size)
    if isinstance(control, Untried):
        return Split(notes=[f"the split by samples is untried: {control}"])
    tolerance = TOLERANCE[0 if is_wide else 1]
    failure = None
    try:
        if _split_holds(control, {}, tolerance):
            return Split(notes=control.notes)
    except UserError as error:
        failure = error
    lost: list[str] = []
    turned: dict[str, Order] = {}
    for name, order in control.find_orders().items():
        if order is None:
            lost.append(name)
        elif order != "first":
            turned[name] = order
    if turned and _split_holds(control, turned, tolerance):
        return Split(control.axis, turned, [*control.notes, *_describe(turned)])
    if control.axis != 0:  # so samples meet on the first axis, which usually counts them
        return Split(notes=[f"the split by samples is untried: {MEET}"])
    if failure is not None and not lost:
        raise failure
    where = name_some(lost or sites)
    instead = "use norm=as_built"
    if sizes:
        instead = (
            "drop norm_batch_size and pass as many samples at a time (micro_batch_size), or use "
            "norm=as_built without it"
        )
    raise UserError(
        f"in training, {2 * size} samples give other outputs than two passes of {size}, because "
        f"the input of the norm at {where} has its samples on no axis and in no equal blocks of "
        f"rows; {instead}"
    )


def _describe(orders: Mapping[str, Order]) -> Iterator[str]:
    for order in dict.fromkeys(orders.values()):
        names = name_some(name for name in orders if orders[name] == order)
        yield f"at {names} samples are counted in inputs of shape {ORDERS[order]}"


def _split_holds(control: Control, orders: Mapping[str, Order], tolerance: float) -> bool:
    """True if one pass over two groups gives what a pass over each of them gives."""
    network = copied(control.network)
    Split(control.axis, dict(orders)).install(network)
    control.set_modes(network, training=True)
    copies = [copied(network) for _ in range(3)]
    for part in copies[1:]:
        for _, site in named_sites(part):
            site.norm_batch_size = None
    whole, *parts = (
        real_outputs(run_network(one, inputs, with_gradients=True))
        for one, inputs in zip(copies, control.passes(), strict=True)
    )
    views = match_samples(whole, parts)
    if views is None:
        return False
    for view in views:
        if not agree(view.of(whole), parts[view.part][view.leaf], tolerance):
            return False
    weights = draw_weights(whole)
    expected = _gradients(copies[0], [(view.of(whole), view.of(weights)) for view in views])
    largest = max(map(largest_value, expected.values()), default=0.0)
    of_parts: list[dict[str, Tensor]] = []
    for index in range(len(parts)):
        own = [view for view in views if view.part == index]
        pairs = [(parts[index][view.leaf], view.of(weights)) for view in own]
        of_parts.append(_gradients(copies[1 + index], pairs))
    for name, gradient in expected.items():
        total = torch.stack([gradients[name] for gradients in of_parts]).sum(0)
        if not agree(gradient, total, tolerance, largest):
            return False
    return True


def _gradients(network: nn.Module, outputs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The gradients of the sum of outputs times weights, by name of the parameter."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    total = sum((out * weight).sum() for out, weight in outputs)
    if not named or not isinstance(total, Tensor) or not total.requires_grad:
        return {}
    try:
        total.backward(retain_graph=True)
    except Exception as error:  # foreign code may raise anything
        raise UserError(f"a backward of the model fails: {one_line(error)}") from error
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


# --- Which outputs belong to which samples --------------------------------------------------------


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


def match_samples(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[View] | None:
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
    for axis in range(len(whole)):
        if any(len(part) != len(whole) for part in parts):
            return None
        total = sum(part[axis] for part in parts)
        others = {(*part[:axis], *part[axis + 1 :]) for part in parts}
        if total == whole[axis] and others == {(*whole[:axis], *whole[axis + 1 :])}:
            return axis
    return None


# --- The control ----------------------------------------------------------------------------------


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
        all_training: other modules than the norms are in training mode too.
        bypasses: the norms return their input; else they are in evaluation mode.
        notes: lines for the log.
    """

    network: nn.Module
    paths: Sequence[str]
    inputs: Inputs
    size: int
    axis: int
    all_training: bool
    bypasses: bool
    notes: list[str] = field(default_factory=list)

    def set_modes(self, network: nn.Module, *, training: bool) -> None:
        """Sets the mode of the norms, and of the other modules as in the control."""
        network.train(self.all_training)
        for module in network.modules():
            if isinstance(module, DROPOUT):
                module.eval()
        for path in self.paths:
            network.get_submodule(path).train(training)

    def passes(self, length: int | None = None) -> list[Inputs]:
        """The inputs of all samples, then those of each `length` of them, `size` unless given."""
        length = length or self.size
        passes = [self.inputs]
        for start in range(0, 2 * self.size, length):
            passes.append(self.inputs.take(range(start, start + length), self.axis))
        return passes

    def holds(self) -> bool:
        """True if passes over some of the samples give what one over all of them gives.

        Raises UserError if a forward fails, or the outputs cannot tell.
        """
        whole, *parts = (real_outputs(out) for out, _ in self._run(self.passes()))
        views = match_samples(whole, parts)
        if views == []:
            raise UserError("its outputs have no value for each sample")
        return views is not None and all(
            agree(view.of(whole), parts[view.part][view.leaf], TOLERANCE[0]) for view in views
        )

    def meet(self) -> bool:
        """True if outputs of the first half of the samples depend on the others.

        As they have the same shapes, random draws are the same.
        """
        doubled = self.inputs.take([*range(self.size)] * 2, self.axis)
        whole, *parts, other = (
            real_outputs(out) for out, _ in self._run([*self.passes(), doubled])
        )
        views = match_samples(whole, parts) or []
        first = [view for view in views if view.part == 0]
        return not all(agree(view.of(whole), view.of(other), TOLERANCE[0]) for view in first)

    def find_orders(self) -> dict[str, Order | None]:
        """By path, where the samples are in the input of a norm that is called; None if unknown."""
        length = 1
        try:
            whole, *parts = (calls for _, calls in self._run(self.passes(length)))
        except UserError:  # some networks take no single sample
            length = self.size
            whole, *parts = (calls for _, calls in self._run(self.passes()))
        orders: dict[str, Order | None] = {}
        for path, inputs in whole.items():
            of_parts = [part.get(path, []) for part in parts]
            orders[path] = None
            for order in reversed(ORDERS):  # the simplest last
                if _have_order(order, inputs, of_parts, length):
                    orders[path] = order
        return orders

    def _run(self, passes: Iterable[Inputs]) -> Iterator[tuple[Any, dict[str, list[Tensor]]]]:
        """The output of each pass, and the inputs of its norms by path."""
        for inputs in passes:
            network = copied(self.network)
            self.set_modes(network, training=False)
            calls: defaultdict[str, list[Tensor]] = defaultdict(list)
            with _norms_watched(network, self.paths, calls, bypasses=self.bypasses):
                yield run_network(network, inputs), calls


@contextmanager
def _norms_watched(
    network: nn.Module,
    paths: Sequence[str],
    calls: defaultdict[str, list[Tensor]],
    *,
    bypasses: bool,
) -> Iterator[None]:
    """Keeps the input of every call of a norm, which is also its output if it `bypasses`."""

    def keep(path: str, _: nn.Module, args: Any, keywords: Any, out: Any) -> Any:
        x, _mask = input_and_mask(args, keywords)
        calls[path].append(x.detach().clone())
        return x if bypasses else out

    with ExitStack() as hooks:
        for path in paths:
            module = network.get_submodule(path)
            handle = module.register_forward_hook(partial(keep, path), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


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
    network: nn.Module, paths: Sequence[str], inputs: Inputs, size: int
) -> Control | Untried:
    """The control with the most in training mode, among those that hold; or why none does."""
    reason = Untried("its inputs have no axis of samples")
    for axis, all_training, bypasses in product(AXES, (True, False), (False, True)):
        num = inputs.count(axis)
        if num < 2 * size:
            if axis == 0:
                reason = Untried(f"{format_count(num, 'sample')} given, it needs {2 * size}")
            continue
        few = inputs.take(range(2 * size), axis)
        control = Control(network, paths, few, size, axis, all_training, bypasses)
        try:
            holds, failure = control.holds(), MEET
        except UserError as error:
            holds, failure = False, str(error)
        if holds:
            if not all_training:
                control.notes.append(_why_not_in_training(control))
            return control
        if axis == 0:
            reason = Untried(failure)
    return reason


def _why_not_in_training(control: Control) -> str:
    try:
        meet = replace(control, all_training=True).meet()
    except UserError as error:
        return f"{IN_TRAINING}{error}"
    return MEET_IN_TRAINING if meet else DRAWS_IN_TRAINING
