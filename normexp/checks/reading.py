"""What a network reads: other samples, later positions, padding; and how far statistics reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from normexp.batching.replicas import Batch
from normexp.checks.network import (
    PROBE_SAMPLES,
    BuiltNetwork,
    EnteredSite,
    enter_sites,
    name_some,
    padded_batch,
)
from normexp.checks.probe import EVERYWHERE, MODES, TOLERANCE, difference
from normexp.errors import UserError
from normexp.norms.site import named_sites

EXTRA_POSITIONS = 3  # of padding, appended to ask about its amount
OUTSIDE = "the model outside its norms"


def names_where(sites: Sequence[EnteredSite], ask: Callable[[EnteredSite], bool]) -> str:
    """The sites for which a question finds something; "" if there are none."""
    names: list[str] = []
    for site in sites:
        with site.naming_errors():
            names += site.names if ask(site) else []
    return name_some(names)


def _blame(network: BuiltNetwork, *, bare_does: bool) -> str:
    """Where the fault of a whole network lies if no site shows it by itself.

    Args:
        bare_does: the network without its norms has the fault as well.
    """
    names = [name for site in network.sites for name in site.names]
    return OUTSIDE if bare_does or not names else name_some(names)


# ---------------------------------------------------------------- other samples


def where_samples_mix(network: BuiltNetwork, training: bool) -> str | None:
    """The norms, or else the model outside of them, that let samples influence each other."""
    reads = lambda site: site.probe(training).reads_samples(gradients=training) is not None  # noqa: E731
    if sites := names_where(network.sites, reads):
        return sites
    asked = network.short
    if network.whole(asked, training).reads_samples(gradients=training) is None:
        return None
    bare = network.bare.whole(asked, training)
    return _blame(network, bare_does=bare.reads_samples(gradients=training) is not None)


def mixing(network: BuiltNetwork) -> str | None:
    """Where do samples influence each other in training?"""
    return network.once(where_samples_mix, True)


def samples_mix_in_evaluation(network: BuiltNetwork) -> bool:
    """In evaluation, does a sample depend on other samples?"""
    return where_samples_mix(network, False) is not None


def samples_mix_outside_norms(network: BuiltNetwork) -> str | None:
    """Does anything but the norms mix samples?"""
    if mixing(network) != OUTSIDE:
        return None
    return (
        "the model mixes samples outside its norms, or along another axis than the first of a "
        "norm's input; norm_batch_size has no effect there"
    )


# ---------------------------------------------------------------- values per statistic


@dataclass(frozen=True, order=True)
class Reach:
    """How many values a statistic pools: of one sample, and of each further one."""

    of_sample: int
    of_others: float

    def num_values(self, group_size: int) -> int:
        """Values in the statistic when `group_size` samples share one."""
        return self.of_sample + round(self.of_others * (group_size - 1))


def reach_of(site: EnteredSite) -> Reach | None:
    """How many values do a site's statistics pool in training? None if it takes no statistic.

    Counts the outputs that an outlier at the first position moves, in two samples and channels;
    cumulative statistics carry the first position to all later ones. If only the outlier's own
    output moves, the input is rescaled: a statistic over one value gives the same (x - x) or
    x / |x| again, while a norm without statistics changes. Changes are relative to what the sign
    of the input moves, as a bias or a large running variance may hide the input in the output.
    """
    probe = site.probe(training=True)
    (x,), before = probe.inputs, probe.observe().output
    if not before.isfinite().all():
        raise UserError("returns NaN or infinity in training for inputs of size 1")
    least = TOLERANCE * before.abs().max()
    by_sign = (before - probe.observe(-x).output).abs().amax(dim=(0, 2), keepdim=True)  # (1, C, 1)
    reaches: list[Reach] = []
    for sample, channel in ((0, 0), (len(x) - 1, x.shape[1] - 1)):
        changed = x.clone()
        changed[sample, channel, 0] += math.sqrt(x.numel())
        far = (probe.observe(changed).output - before).abs()
        moved = ~(far <= (TOLERANCE * by_sign).clamp_min(least))  # (N, C, P), true for NaN
        of_samples = moved.flatten(1).sum(dim=1)
        of_sample = int(of_samples[sample])
        others = int(of_samples.sum()) - of_sample
        moved[sample, channel, 0] = False
        if moved.any():
            reaches.append(Reach(max(of_sample, 1), others / max(len(x) - 1, 1)))
    if reaches:
        return max(reaches)
    small, large, flipped = (probe.observe(scale * x).output for scale in (0.1, 3.0, -3.0))
    by_sign, by_scale = ((large - other).abs().max() for other in (flipped, small))
    return Reach(1, 0.0) if by_scale <= max(1e-2 * by_sign, least) else None


def reaches_of(network: BuiltNetwork) -> dict[str, Reach]:
    """How far do statistics reach at each site that takes some? The least over its input shapes."""
    reaches: dict[str, Reach] = {}
    for site in network.sites:
        with site.naming_errors():
            reach = reach_of(site)
        if reach is not None:
            reaches |= {name: min(reaches.get(name, reach), reach) for name in site.names}
    return reaches


def statistics_over_one_value(network: BuiltNetwork) -> str | None:
    """Has each statistic more than one value?"""
    reaches = network.once(reaches_of)
    single = [n for n, reach in reaches.items() if reach.num_values(network.group_size) == 1]
    if not single:
        return None
    return (
        f"the norm takes statistics over 1 value at {name_some(single)}, which erases its "
        f"input (samples per statistic: {network.group_size}); try a larger batch_size or "
        "norm_batch_size, fewer groups, or norm=layer"
    )


# ---------------------------------------------------------------- later positions


def where_future_leaks(network: BuiltNetwork, training: bool) -> str | None:
    """Where does a later position of a language model move an earlier output?"""
    if network.data.task != "language_modeling":
        return None
    leaks = lambda site: site.probe(training).reads_later() is not None  # noqa: E731
    if sites := names_where(_sites_of_texts(network), leaks):
        return sites
    if network.whole(network.batch, training).reads_later() is None:
        return None
    bare = network.bare.whole(network.batch, training)
    return _blame(network, bare_does=bare.reads_later() is not None)


def _sites_of_texts(network: BuiltNetwork) -> list[EnteredSite]:
    length = network.batch["inputs"].shape[1]
    return [site for site in network.sites if site.shape[2] == length]


def leak(network: BuiltNetwork) -> str | None:
    """Where does a later position move an earlier output in evaluation?"""
    return network.once(where_future_leaks, False)


def future_leaks_in_training(network: BuiltNetwork) -> bool:
    """Does a later position move an earlier output in training?"""
    return network.once(where_future_leaks, True) is not None


def future_leaks_in_evaluation(network: BuiltNetwork) -> str | None:
    """Is the loss of a language model a likelihood?"""
    where = leak(network)
    if not where or network.allow_leak:
        return None
    remedy = (
        "mask its attention, or use model=gpt"
        if where == OUTSIDE
        else "norm.view=token, norm=causal_instance, norm=causal_group or norm=batch_per_position"
    )
    return (
        f"a later position moves an earlier output at {where}, so the loss is "
        f"meaningless; try {remedy}, or allow_leak=true to train it with "
        "every number marked INVALID"
    )


def future_leaks_in_training_alone(network: BuiltNetwork) -> str | None:
    """Is the training loss of a language model a likelihood?"""
    where = network.once(where_future_leaks, True)
    if not where or leak(network):
        return None
    return (
        f"in training a later position moves an earlier output at {where}, so train/loss is "
        "meaningless; evaluation with running statistics is not affected"
    )


# ---------------------------------------------------------------- padding


def reads_padding(site: EnteredSite, training: bool) -> bool:
    """Do the values or amount of padding move real outputs or the state?"""
    mask = site.mask
    return mask is not None and site.probe(training, mask).reads_padding(EXTRA_POSITIONS)


def padding_is_read(network: BuiltNetwork) -> str | None:
    """Does padding move a real output, a gradient or a running state?"""
    batch = padded_batch(network.data, PROBE_SAMPLES)
    if batch is None:
        return None
    sites = enter_sites(network.exposed, batch)
    # A norm without `mask` gets one sample at a time, so it must not mix samples.
    alone = [
        site
        for site in sites
        if site.mask is not None
        and not site.module.site.takes_mask
        and site.module.site.view == "sequence"
    ]
    if where := names_where(alone, lambda site: bool(site.probe(training=True).reads_across(0))):
        return (
            f"the norm at {where} mixes samples but its forward has no argument `mask`, so texts "
            "of different length reach it one at a time; try norm.view=token, or add `mask`"
        )
    if where := names_where(sites, lambda site: any(reads_padding(site, m) for m in MODES)):
        return (
            f"norm reads padding at {where}: it moves real positions or the running "
            "state; its forward must leave out values where its argument `mask` is false"
        )
    if not model_reads_padding(network, batch):
        return None
    return (
        "model reads padding: its content or amount moves the output, and no norm does; use "
        "`mask` in attention and pooling, and pass it to each site"
    )


def model_reads_padding(network: BuiltNetwork, batch: Batch) -> bool:
    """Does padding move a network's outputs, with norms in either mode and dropout off?

    Tries less padding instead of more, because learned positions end at the longest text.
    """
    inputs, mask = batch["inputs"], batch["mask"]
    longest = int(mask.any(dim=0).nonzero().max()) + 1
    for training in MODES:
        probe = network.whole(batch, training=False)
        for _, site in named_sites(probe.module):
            site.train(training)
        before = probe.observe()
        changed = torch.where(mask, inputs, probe.replacement(inputs, 0))
        others = [probe.observe(changed, mask)]
        with suppress(ValueError, RuntimeError):  # a model for one length
            others.append(probe.observe(inputs[:, :longest], mask[:, :longest]))
        if any(difference(before, after, EVERYWHERE, state=True) for after in others):
            return True
    return False
