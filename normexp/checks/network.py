"""A built network under examination: its sites, and the few samples that it is probed on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.batching.sizes import Sizes
from normexp.checks.probe import Probe, in_float64, is_foreign
from normexp.checks.sites import (
    PROBE_SAMPLES,
    EnteredSite,
    enter_sites,
    expose_branches,
    probe_batch,
    shorten,
)
from normexp.data.dataset import Data
from normexp.norms.site import named_sites

MAX_ELEMENTS = 2**15  # that reach a network's sites, where many samples are probed
MANY_SAMPLES = 13  # of foreign code, which may treat more than 8, or odd numbers, otherwise
NETWORK_CUTS = 4  # of a text, into before and after

Value = TypeVar("Value")


class Case(Protocol):
    """A module with an input, which one question may ask of a norm, a site and a network."""

    def probes(self, training: bool) -> Iterator[Probe]:
        """Of each stage of a training in which it may answer otherwise."""
        ...

    def to_save(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module in training mode, and its inputs."""
        ...


@dataclass(frozen=True)
class WholeNetwork:
    """A network with a batch. A fault that it has, and no site, lies outside of its norms."""

    module: nn.Module
    batch: Batch
    vocab_size: int | None
    is_foreign: bool = False

    def probes(self, training: bool) -> Iterator[Probe]:
        module, inputs = self.module.train(training), model_arguments(self.batch)
        if self.is_foreign:
            module, inputs = in_float64(module, *inputs) or (module, inputs)
        yield Probe(
            module,
            *inputs,
            vocab_size=self.vocab_size,
            ways=1,
            position_axis=1,
            max_cuts=NETWORK_CUTS,
            is_sensitive=self.is_foreign,
        )

    def to_save(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return self.module.train(), model_arguments(self.batch)


@dataclass(frozen=True, eq=False)
class BuiltNetwork:
    """A network, the data and the sizes of its training, and the answers so far.

    Attributes:
        network: as it will train; questions are asked of `exposed` where branches could hide.
        drop_last, allow_leak: as configured.
    """

    network: nn.Module
    data: Data
    sizes: Sizes
    drop_last: bool
    allow_leak: bool = False

    @property
    def group_size(self) -> int:
        """Samples in the smallest set that shares batch statistics."""
        return smallest_group(self.sizes, len(self.data.train), drop_last=self.drop_last)

    @cached_property
    def exposed(self) -> nn.Module:
        return expose_branches(self.network)

    @cached_property
    def batch(self) -> Batch:
        return probe_batch(self.data, PROBE_SAMPLES)

    @cached_property
    def short(self) -> Batch:
        """The batch, with texts cut short."""
        return shorten(self.exposed.train(), self.batch)

    @cached_property
    def sites(self) -> list[EnteredSite]:
        return enter_sites(self.exposed, self.batch)

    @cached_property
    def stages(self) -> list[EnteredSite]:
        """The sites as they start and, where they differ then, as they are later in a training."""
        return [*self.sites, *(stage for site in self.sites for stage in site.later())]

    @cached_property
    def crowded_stages(self) -> list[EnteredSite]:
        """The stages on larger batches, up to that of a forward in training."""
        sites = (site.crowded(self.sizes.micro) for site in self.stages)
        return [site for site in sites if site is not None]

    @cached_property
    def elements_per_sample(self) -> int:
        """The number of values per sample that reach the sites in a forward as in training.

        Raises:
            UserError: an error of a norm or the model, with the name of the site.
        """
        network = copy.deepcopy(self.network)
        for _, site in named_sites(network):
            site.norm_batch_size = self.sizes.norm_batch_size
        batch = probe_batch(self.data, min(self.group_size, PROBE_SAMPLES))
        sites = enter_sites(network, batch)
        return sum(len(e.names) * e.shape.numel() for e in sites) // len(batch["targets"])

    def whole(self, batch: Batch) -> WholeNetwork:
        return WholeNetwork(self.exposed, batch, self.data.vocab_size, self.has_foreign_model)

    @cached_property
    def has_foreign_model(self) -> bool:
        """True if a module outside of the norms is neither torch's nor ours."""
        norms = {id(m) for _, site in named_sites(self.network) for m in site.norm.modules()}
        return is_foreign(*(m for m in self.network.modules() if id(m) not in norms))

    @cached_property
    def is_foreign(self) -> bool:
        """True if any module is neither torch's nor ours."""
        return is_foreign(*self.network.modules())

    @cached_property
    def bare(self) -> BuiltNetwork:
        """The network with identities as norms, whose faults are those of the model."""
        return replace(self, network=without_norms(self.network))

    @cached_property
    def many_samples(self) -> Batch:
        """As many samples as a forward in training has, if the network is small enough."""
        fitting = max(PROBE_SAMPLES, MAX_ELEMENTS // max(self.elements_per_sample, 1))
        return shorten(self.exposed, probe_batch(self.data, min(self.sizes.micro, fitting)))

    @property
    def padded_batches(self) -> Iterator[Batch]:
        """Batches with padding, if the data have any.

        With foreign code also one of many rows, and one whose first row has no padding.
        """
        batch = padded_batch(self.data, PROBE_SAMPLES)
        if batch is None:
            return
        yield batch
        if self.is_foreign:
            many = padded_batch(self.data, MANY_SAMPLES)
            assert many is not None
            yield many
            mask = batch["mask"].clone()
            mask[0] = True
            yield {**batch, "mask": mask}

    def once(self, ask: Callable[..., Value], *arguments: Any) -> Value:
        """The answer of ask(self, *arguments), computed once."""
        answers = self._answers
        if (ask, *arguments) not in answers:
            answers[ask, *arguments] = ask(self, *arguments)
        return answers[ask, *arguments]

    @cached_property
    def _answers(self) -> dict[Any, Any]:
        return {}


def without_norms(network: nn.Module) -> nn.Module:
    """A copy with the identity at every site."""
    bare = copy.deepcopy(network)
    for _, site in named_sites(bare):
        site.norm, site.takes_mask = nn.Identity(), False
    return bare


def places_where(
    ask: Callable[[EnteredSite, bool], Any], sites: Sequence[EnteredSite], *, training: bool
) -> Iterator[EnteredSite]:
    """The sites for which a question finds something. Raises UserError with the site's name."""
    for site in sites:
        with site.naming_errors():
            is_such = ask(site, training)
        if is_such:
            yield site


def smallest_group(sizes: Sizes, num_samples: int, *, drop_last: bool) -> int:
    """Samples in the smallest set that shares batch statistics in an epoch of `num_samples`."""
    rest = 0 if drop_last else num_samples % sizes.batch_size
    if not rest:
        return sizes.norm
    last_micro = rest % sizes.micro or sizes.micro
    return last_micro % sizes.norm or sizes.norm


def padded_batch(data: Data, num_samples: int) -> Batch | None:
    """Training samples from the shorter half of those with padding; None if none has padding."""
    mask = getattr(data.train, "mask", None)
    if mask is None or bool(mask.all()):
        return None
    order = mask.sum(dim=1).argsort(stable=True)
    order = order[mask[order].logical_not().any(dim=1)]
    places = torch.linspace(0, (len(order) - 1) / 2, num_samples).long()
    return data.train.gather(order[places])
