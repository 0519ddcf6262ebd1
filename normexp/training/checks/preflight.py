"""Examines a built network before it trains: refuses it, or measures its traits and notes doubts.

Asks whether it reads other samples, later positions or padding, and how far its statistics reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller

from torch import Tensor, nn

from normexp.errors import UserError, one_line, source_line_of
from normexp.training.batching.replicas import Batch
from normexp.training.checks.network import (
    BuiltNetwork,
    EnteredSite,
    names_where,
    probe_batch,
    smallest_group,
)
from normexp.training.checks.padding import check_padding, is_unpadded, padded_batch, with_padding
from normexp.training.checks.probe import TOLERANCE, Probe
from normexp.training.checks.wiring import (
    cannot_stack,
    check_sites,
    check_split,
    check_state,
    note_other_norms,
)
from normexp.training.config.sizes import Sizes
from normexp.training.data.dataset import Data
from normexp.words import name_some

OUTSIDE = "the model outside its norms"
CAUSAL_NORMS = "norm.view=token, norm=causal_instance, norm=causal_group or norm=batch_per_position"


@dataclass(frozen=True, order=True)
class Reach:
    """How many values a statistic pools from one sample, and from each other that shares it."""

    of_sample: int
    of_others: float

    def num_values(self, group_size: int) -> int:
        """Values in the statistic when `group_size` samples share one."""
        return self.of_sample + round(self.of_others * (group_size - 1))


def single_valued(reaches: Mapping[str, Reach], group_size: int) -> list[str]:
    """The sites whose statistics are over one value if `group_size` samples share them."""
    return [name for name, reach in reaches.items() if reach.num_values(group_size) == 1]


@dataclass(frozen=True)
class Traits:
    """Properties of a built network, measured before its training.

    Attributes:
        mixing: where, in training, a sample's output or gradient, or the running state, depends on
            other samples; None if nowhere.
        mixing_in_evaluation: where a sample's output in evaluation depends on other samples.
        leak: where a later position moves an earlier output in evaluation; language models only.
        leaks_future_in_training: a later position moves an earlier output in training.
        draws_for_itself: a module uses torch's global random state.
        stacking_obstacle: why replicas cannot run under vmap.
        elements_per_sample: values of one sample that reach all sites.
        reaches: the sites whose norm takes a statistic, and how far it reaches.
        keeps_padding: norms without `mask` may be shown padding, which moves nothing real.
        notes: what the user should know and nothing forbids, one sentence each.
    """

    mixing: str | None
    mixing_in_evaluation: str | None
    leak: str | None
    leaks_future_in_training: bool
    draws_for_itself: bool
    stacking_obstacle: str | None
    elements_per_sample: int
    reaches: Mapping[str, Reach]
    keeps_padding: bool
    notes: tuple[str, ...]

    @property
    def mixes_samples(self) -> bool:
        return self.mixing is not None

    @property
    def mixes_samples_in_evaluation(self) -> bool:
        return self.mixing_in_evaluation is not None

    @property
    def norms_mix_samples(self) -> bool:
        """True if the samples are mixed by a norm."""
        return self.mixing not in (None, OUTSIDE)

    @property
    def leaks_future(self) -> bool:
        return self.leak is not None


def examine(
    network: nn.Module, data: Data, sizes: Sizes, *, drop_last: bool, allow_leak: bool = False
) -> Traits:
    """Probes a network on a few training samples, at the sizes of its training.

    Raises:
        UserError: a forward fails or returns NaN; no norm has an effect; a statistic is over one
            value; padding is read; a checkpoint would lack state; a sequential state would be
            split; a language model reads the future, unless `allow_leak`. Names the sites.
    """
    try:
        return _examine(BuiltNetwork(network, data, sizes, drop_last), allow_leak)
    except Exception as error:
        if isinstance(error, UserError) or not source_line_of(error):
            raise  # a refusal, or a fault that is not of the user's code
        raise UserError(f"probing the model fails: {one_line(error)}") from error


def _examine(network: BuiltNetwork, allow_leak: bool) -> Traits:
    padded = padded_batch(network.data)
    kept = None if padded is None else with_padding(network, padded)
    network = kept or network
    num_elements = sum(len(site.names) * site.shape.numel() for site in network.sites)
    notes = [*check_sites(network), *note_other_norms(network)]
    check_split(network)
    reaches = reaches_of(network)
    if padded is not None:
        check_padding(network, padded)
    check_state(network)
    leak_in_training = where_future_leaks(network, training=True)
    leak = where_future_leaks(network, training=False)
    if leak and not allow_leak:
        remedy = "mask its attention, or use model=gpt" if leak == OUTSIDE else CAUSAL_NORMS
        raise UserError(
            f"earlier positions see later ones at {leak}, so the loss is meaningless; try "
            f"{remedy}, or allow_leak=true to train it with every number marked INVALID"
        )
    if leak_in_training and not leak:
        notes.append(
            f"in training, earlier positions see later ones at {leak_in_training}, so train/loss "
            "is meaningless; evaluation with running statistics is not affected"
        )
    draws = network.whole(network.short, training=True).observe().drew
    mixing = where_samples_mix(network, training=True)
    if mixing == OUTSIDE:
        notes.append(
            "the model mixes samples outside its norms, or along another axis than the first of a "
            "norm's input; norm_batch_size has no effect there"
        )
    return Traits(
        mixing=mixing,
        mixing_in_evaluation=where_samples_mix(network, training=False),
        leak=leak,
        leaks_future_in_training=leak_in_training is not None,
        draws_for_itself=draws,
        stacking_obstacle=why_not_stacked(network, draws=draws),
        elements_per_sample=num_elements // len(network.batch["targets"]),
        reaches=reaches,
        keeps_padding=kept is not None,
        notes=tuple(notes),
    )


def why_not_stacked(network: BuiltNetwork, *, draws: bool) -> str | None:
    """Says why replicas cannot run under vmap; None if they can.

    Args:
        draws: a module uses torch's global random state.
    """
    if draws:
        return "a module draws its own random numbers"
    reason = cannot_stack(network.network, network.short)
    unpadded = names_where(network.sites, is_unpadded)
    if reason and unpadded:
        return f"the norm at {unpadded} pools positions and takes no `mask`: padding is removed"
    return reason


# ---------------------------------------------------------------- other samples, later positions


def where_samples_mix(network: BuiltNetwork, training: bool) -> str | None:
    """The norms, or else the model outside of them, that let samples influence each other.

    In training, also among as many samples as a step has: a norm may split larger batches alone.
    """
    mixes = methodcaller("reads_across", 0, gradients=training, state=True)
    place = _place_of(network, network.sites, network.short, training, mixes)
    if place or not training:
        return place
    mixes = methodcaller("reads_across", 0, all_pairs=False)
    step = probe_batch(network.data, network.sizes.micro)
    return _place_of(network, [], step, training, mixes)


def where_future_leaks(network: BuiltNetwork, training: bool) -> str | None:
    """The norms, or else the model outside of them, that let a text read its later positions."""
    if network.data.task != "language_modeling":
        return None
    length = network.batch["inputs"].shape[1]
    sites = [site for site in network.sites if site.shape[2] == length]
    return _place_of(network, sites, network.batch, training, Probe.reads_later)


def _place_of(
    network: BuiltNetwork,
    sites: Sequence[EnteredSite],
    batch: Batch,
    training: bool,
    has_fault: Callable[[Probe], object],
) -> str | None:
    """The sites that have a fault, or else where the whole network has it; None if nowhere."""
    names = names_where(sites, lambda site: bool(has_fault(site.probe(training))))
    if names:
        return names
    if not has_fault(network.whole(batch, training)):
        return None
    # No site shows the fault by itself: the model has it if it stays without the norms.
    if has_fault(network.bare.whole(batch, training)):
        return OUTSIDE
    return name_some([name for site in network.sites for name in site.names])


# ---------------------------------------------------------------- values per statistic


def reach_of(site: EnteredSite) -> Reach | None:
    """How many values do a site's statistics pool in training? None if it takes no statistic.

    Puts an outlier (o) at a first position and counts the outputs that it moves (o and x):

                    batch norm    layer norm    instance norm    RMS norm by position    tanh
        channel      0     1       0     1        0     1             0     1            0     1
        sample 0    oxxx  ....    oxxx  xxxx     oxxx  ....          o...  x...         o...  ....
        sample 1    xxxx  ....    ....  ....     ....  ....          ....  ....         ....  ....
        of_sample        4             8              4                   2                  1
        of_others        4             0              0                   0                  0

    Cumulative statistics carry the first position to all later ones. Outputs that move like those
    of tanh have no statistic, or one over a single value: see `_erases_first_position`.

    Raises:
        UserError: the outputs are not finite.
    """
    probe = site.probe(training=True)
    (x,) = probe.inputs
    before = probe.observe().output  # (N, C, P)
    if not before.isfinite().all():
        raise UserError("returns NaN or infinity in training for inputs of size 1")
    # A bias or a large running variance may hide the input in the output. So each change is
    # compared with how far the same channel moves when the whole input is negated.
    by_sign = (before - probe.observe(-x).output).abs().amax(dim=(0, 2), keepdim=True)  # (1, C, 1)
    least = TOLERANCE * before.abs().max()
    num_others = len(x) - 1
    reaches: list[Reach] = []
    for sample, channel in ((0, 0), (num_others, x.shape[1] - 1)):
        changed = x.clone()
        changed[sample, channel, 0] += math.sqrt(x.numel())
        change = (probe.observe(changed).output - before).abs()
        moved = ~(change <= (TOLERANCE * by_sign).clamp_min(least))  # (N, C, P), true for NaN
        of_sample = int(moved[sample].sum())
        of_others = int(moved.sum()) - of_sample
        moved[sample, channel, 0] = False
        if moved.any():
            reaches.append(Reach(max(of_sample, 1), of_others / max(num_others, 1)))
    if reaches:
        return max(reaches)
    return Reach(1, 0.0) if _erases_first_position(probe, least) else None


def _erases_first_position(probe: Probe, least: Tensor) -> bool:
    """True if the output shows no more of the first position than its sign.

        first position times     0.1     3     -3
        x - x                     0      0      0      a statistic over x alone
        x / |x|                   1      1     -1      a statistic over x alone
        x / |later x|            0.1     3     -3      a statistic of later positions
        tanh x                   0.1     1     -1      no statistic

    Args:
        least: smaller changes are rounding.
    """
    (x,) = probe.inputs
    outputs: list[Tensor] = []
    for factor in (0.1, 3.0, -3.0):
        scaled = x.clone()
        scaled[:, :, 0] *= factor
        outputs.append(probe.observe(scaled).output[:, :, 0])
    small, large, flipped = outputs
    by_size = (large - small).abs().max()
    by_sign = (large - flipped).abs().max()
    return bool(by_size <= max(1e-2 * by_sign, least))


def reaches_of(network: BuiltNetwork) -> dict[str, Reach]:
    """How far statistics reach at each site that takes some: the least over its input shapes.

    Raises:
        UserError: a statistic is over one value.
    """
    reaches: dict[str, Reach] = {}
    for site in network.sites:
        with site.naming_errors():
            reach = reach_of(site)
        if reach is not None:
            for name in site.names:
                reaches[name] = min(reaches.get(name, reach), reach)
    size = smallest_group(network.sizes, len(network.data.train), drop_last=network.drop_last)
    single = single_valued(reaches, size)
    if single:
        raise UserError(
            f"the norm takes statistics over 1 value at {name_some(single)}, which erases its "
            f"input (samples per statistic: {size}); try a larger batch_size or "
            "norm_batch_size, fewer groups, or norm=layer"
        )
    return reaches
