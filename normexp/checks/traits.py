"""Everything that is measured of a built network before its training, and what is refused of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from normexp.batching.replicas import Batch
from normexp.batching.sizes import Sizes
from normexp.checks.causality import Leak, find_leak, note_of
from normexp.checks.padding import check_padding, padded_batch
from normexp.checks.probing import (
    cannot_stack,
    draws_for_itself,
    ignores_inputs,
    mixes_samples,
    probe_batch,
    run_through,
)
from normexp.checks.reach import Reach, measure_reaches
from normexp.checks.sites import ProbedSite, probe_sites
from normexp.checks.statistics_size import check_counts, count_values, smallest_group
from normexp.data.dataset import Data
from normexp.errors import UserError

logger = logging.getLogger(__name__)

PROBE_SAMPLES = 4


@dataclass(frozen=True)
class Traits:
    """What was measured of a built network before its training.

    Attributes:
        mixes_samples: another sample moves this sample's output in training.
        mixes_samples_in_evaluation: the same in evaluation.
        leak: how a later position moves an earlier output in evaluation; language models only.
        leaks_future_in_training: a later position moves an earlier output in training.
        pools: the norm takes statistics; without, it acts on each value by itself.
        draws_for_itself: a module uses torch's global random state.
        stacking_obstacle: why replicas cannot run under vmap.
        elements_per_sample: values of one sample that reach all sites.
    """

    mixes_samples: bool
    mixes_samples_in_evaluation: bool
    leak: Leak | None
    leaks_future_in_training: bool
    pools: bool
    draws_for_itself: bool
    stacking_obstacle: str | None
    elements_per_sample: int

    @property
    def leaks_future(self) -> bool:
        return self.leak is not None


def measure_traits(network: nn.Module, data: Data, sizes: Sizes, *, drop_last: bool) -> Traits:
    """Probes one network on a few training samples, under the sizes it will meet.

    Raises:
        UserError: a forward fails, a statistic is over one value, or padding is read; with the
            names of the sites.
    """
    group_size = smallest_group(sizes, len(data.train), drop_last=drop_last)
    small = min(group_size, PROBE_SAMPLES)
    elements = run_through(network, probe_batch(data, small), sizes.norm_batch_size)
    batch = probe_batch(data, PROBE_SAMPLES)
    sites = probe_sites(network, batch)
    reaches = {mode: measure_reaches(sites, training=mode) for mode in (True, False)}
    check_counts(count_values(reaches[True], group_size), group_size)
    if len(batch["inputs"]) > 1 and ignores_inputs(network, batch):
        raise UserError(
            "the model's output is the same for every input with this norm, as where a mean over "
            "positions follows a norm that centres each channel over them; try norm=layer"
        )
    _check_padding(network, data)
    leaks = [_find_leak(network, sites, batch, data, training=mode) for mode in (False, True)]
    if leaks[1] and not leaks[0]:
        logger.info(note_of(leaks[1]))
    own_draws = draws_for_itself(network, batch)
    obstacle = (
        "a module draws its own random numbers" if own_draws else cannot_stack(network, batch)
    )
    return Traits(
        mixes_samples=_mixes_samples(network, reaches[True], batch, training=True),
        mixes_samples_in_evaluation=_mixes_samples(network, reaches[False], batch, training=False),
        leak=leaks[0],
        leaks_future_in_training=leaks[1] is not None,
        pools=any(reach.pools for _, reach in reaches[True]),
        draws_for_itself=own_draws,
        stacking_obstacle=obstacle,
        elements_per_sample=elements,
    )


def _mixes_samples(
    network: nn.Module, reaches: Sequence[tuple[str, Reach]], batch: Batch, *, training: bool
) -> bool:
    """At a site, which a branch that starts at zero would hide, or anywhere in the network."""
    at_a_site = any(reach.other_samples for _, reach in reaches)
    return at_a_site or mixes_samples(network, batch, training=training)


def _find_leak(
    network: nn.Module, sites: Sequence[ProbedSite], batch: Batch, data: Data, *, training: bool
) -> Leak | None:
    if data.task != "language_modeling":
        return None
    assert data.vocab_size is not None
    return find_leak(network, sites, batch, data.vocab_size, training=training)


def _check_padding(network: nn.Module, data: Data) -> None:
    batch = padded_batch(data, PROBE_SAMPLES)
    if batch is not None:
        assert data.vocab_size is not None
        check_padding(network, probe_sites(network, batch), batch, data.vocab_size)
