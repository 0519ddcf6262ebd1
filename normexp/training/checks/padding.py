"""Whether padding moves anything real, in norms and in the model around them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from normexp.errors import UserError
from normexp.norms.site import named_sites
from normexp.training.batching.copies import copied
from normexp.training.batching.replicas import Batch
from normexp.training.checks.network import (
    PROBE_SAMPLES,
    BuiltNetwork,
    EnteredSite,
    enter_sites,
    names_where,
)
from normexp.training.checks.probe import EVERYWHERE, MODES, difference
from normexp.training.data.dataset import Data


def padded_batch(data: Data) -> Batch | None:
    """Samples from the shorter half of those with padding; None if no sample has any."""
    mask = getattr(data.train, "mask", None)
    if mask is None or mask.all():
        return None
    order = mask.sum(dim=1).argsort(stable=True)
    order = order[mask[order].logical_not().any(dim=1)]
    places = torch.linspace(0, (len(order) - 1) / 2, PROBE_SAMPLES).long()
    return data.train.gather(order[places])


def is_unpadded(site: EnteredSite) -> bool:
    """True if a mask reaches the site, and its norm takes none and gets real positions alone."""
    shown = site.module.site
    return site.mask is not None and not (shown.takes_mask or shown.keeps_padding)


def with_padding(network: BuiltNetwork, padded: Batch) -> BuiltNetwork | None:
    """The network with sites that show padding to norms without `mask`.

    None if there are no such norms, or if showing padding would move a real output, a gradient or
    a state of one: then they pool positions.

    Args:
        padded: samples with padding.
    """
    kept = replace(network, network=copied(network.network))
    with suppress(UserError):  # a norm that fails on padding
        unpadded = [site for site in enter_sites(kept.exposed, padded) if is_unpadded(site)]
        for module in (kept.network, kept.exposed):
            for _, site in named_sites(module):
                site.keeps_padding = True
        if unpadded and not names_where(unpadded, reads_padding):
            return kept
    return None


def check_padding(network: BuiltNetwork, batch: Batch) -> None:
    """Raises UserError if padding moves a real output, a gradient or a running state.

    Args:
        batch: samples with padding.
    """
    sites = [site for site in enter_sites(network.exposed, batch) if site.mask is not None]
    # A norm without `mask` gets one sample at a time, so it must not mix samples.
    apart = [s for s in sites if is_unpadded(s) and s.module.site.view == "sequence"]
    where = names_where(apart, lambda site: bool(site.probe(training=True).reads_across(0)))
    if where:
        raise UserError(
            f"the norm at {where} mixes samples but its forward has no argument `mask`, so texts "
            "of different length reach it one at a time; try norm.view=token, or add `mask`"
        )
    where = names_where(sites, reads_padding)
    if where:
        raise UserError(
            f"norm reads padding at {where}: it moves real positions or the running "
            "state; its forward must leave out values where its argument `mask` is false"
        )
    if model_reads_padding(network, batch):
        raise UserError(
            "model reads padding: its content or amount moves the output, and no norm does; use "
            "`mask` in attention and pooling, and pass it to each site"
        )


def reads_padding(site: EnteredSite) -> bool:
    assert site.mask is not None
    return any(site.probe(training, site.mask).reads_padding() for training in MODES)


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
