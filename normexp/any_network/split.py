"""Tests whether splitting a batch into groups of k samples equals separate passes of k.

In training mode, a network whose norms split their batch into groups of k must give on 2k samples
what two passes of k give, from the same parameters and buffers: equal outputs, and gradients of a
fixed random weighting of them that add up. Losses that a network computes by itself are left out.

It is tried where a control holds (control.py), and untried elsewhere, because what differs
may not be the norms. Where the first axis of a norm's input does not count the samples, the order
that the control shows is tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normexp.any_network.control import NO_AXIS, UNTRIED, Control, Untried, find_control, too_few
from normexp.any_network.passes import find_views
from normexp.any_network.trial import Inputs, widened
from normexp.errors import UserError
from normexp.norms.samples import ORDERS, Axis, Order, SampleCounter, SampleOrder
from normexp.norms.site import named_sites
from normexp.training.batching.copies import copied
from normexp.words import name_some

MOST_SAMPLES = 4  # of a group in the trial: larger groups are cut in the same way


@dataclass
class Split:
    """How the sites of a network find the samples of their inputs.

    Attributes:
        axis: of the network's inputs, that of samples.
        orders: by site, where the first axis of its input does not count the samples.
        notes: lines for the log.
    """

    axis: Axis = 0
    orders: dict[str, Order] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def install(self, network: nn.Module) -> None:
        """Tells the sites of a network like the one that was tried."""
        for _, site in named_sites(network):
            site.order = None
        if not self.orders:
            return
        counter = SampleCounter(self.axis)
        counter.watch(network)
        for name, order in self.orders.items():
            site: Any = network.get_submodule(name)
            site.order = SampleOrder(order, counter)


def try_split(network: nn.Module, inputs: Inputs) -> Split:
    """Tries the split of a network's sites, if any splits its batch or pools a sample's positions.

    Raises:
        UserError: a control holds, and no order of the samples gives the same as two passes.
    """
    sites = dict(named_sites(network))
    sizes = [site.norm_batch_size for site in sites.values() if site.norm_batch_size is not None]
    if not sizes and all(site.view != "sequence" for site in sites.values()):
        return Split()
    size = min([MOST_SAMPLES, *sizes])
    remedy = (
        "drop norm_batch_size and pass as many samples at a time (micro_batch_size), or use "
        "norm=as_built without it"
    )
    trial = _Trial(*widened(network, inputs), remedy if sizes else "use norm=as_built")
    refusal = untried = None
    for axis in (None, 0, 1):
        try:
            outcome = trial.try_axis(axis, size)
        except UserError as error:
            if axis == 0:
                raise
            if axis is None:  # a second axis rarely holds samples: what fails there tells nothing
                refusal = error
        else:
            if isinstance(outcome, Split):
                return outcome
            untried = untried or outcome
    if refusal is not None:
        raise refusal
    return Split(notes=[f"{UNTRIED}: {untried or NO_AXIS}"])


@dataclass
class _Trial:
    """A network, the inputs to try it on, in double precision if `is_wide`, and the way out."""

    network: nn.Module
    inputs: Inputs
    is_wide: bool
    remedy: str

    def try_axis(self, axis: Axis, size: int) -> Split | Untried | None:
        """Tries groups of `size` samples, if these may be on an axis of the inputs.

        Raises UserError if no order of the samples gives the same as two passes.
        """
        num = self.inputs.count(axis)
        if not num or axis == 1 and self.inputs.count(None):
            return None
        if 4 <= num < 2 * size:
            size = 2
        for _, site in named_sites(self.network):
            site.norm_batch_size, site.running_from, site.order = size, "step", None
        paths = [path for path, _ in named_sites(self.network)]
        control = find_control(self.network, paths, self.inputs, size, [axis], is_wide=self.is_wide)
        if isinstance(control, Untried):
            return control
        if control.size == size:
            return self._try_orders(control)
        few = too_few(num, size)
        if axis is None:  # or maps of several scales
            return Untried(few)
        return _in_orders(control, control.find_orders(), f"{UNTRIED}: {few}")

    def _try_orders(self, control: Control) -> Split:
        failure = None
        try:
            if _holds(control, {}):
                return Split(notes=control.notes)
        except UserError as error:
            failure = error
        orders = control.find_orders()
        split = _in_orders(control, orders, *control.notes)
        if split.orders and _holds(control, split.orders):
            return split
        lost = [name for name, order in orders.items() if order is None]
        if failure is not None and not lost:
            raise failure
        size, where = control.size, name_some(lost or orders)
        raise UserError(
            f"in training, {2 * size} samples give other outputs than two passes of {size}, "
            f"because the input of the norm at {where} has its samples on no axis and in no equal "
            f"blocks of rows; {self.remedy}"
        )


def _in_orders(control: Control, orders: Mapping[str, Order | None], *notes: str) -> Split:
    """The split by those orders that a control shows."""
    turned: dict[str, Order] = {}
    for name, order in orders.items():
        if order is not None and order != "first":
            turned[name] = order
    lines = [*notes]
    for order in dict.fromkeys(turned.values()):
        names = name_some(name for name in turned if turned[name] == order)
        lines.append(f"at {names} samples are counted in inputs of shape {ORDERS[order]}")
    return Split(control.axis, turned, lines)


def _holds(control: Control, orders: Mapping[str, Order]) -> bool:
    """True if one pass over two groups gives what a pass over each of them gives."""
    of_all = control.copy(training=True)
    Split(control.axis, dict(orders)).install(of_all)
    of_group = copied(of_all)
    for _, site in named_sites(of_group):
        site.norm_batch_size = None
    passes = control.passes(control.size)
    tolerance = control.tolerance
    return find_views(of_all, of_group, passes, tolerance, tolerance) is not None
