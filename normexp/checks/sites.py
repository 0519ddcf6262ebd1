"""Prepares a network and its sites for probes: their inputs, and the reach of their statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.probe import Probe, fixed_draws, moved_places, source
from normexp.data.dataset import Data
from normexp.errors import UserError, first_line
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites

SHOWN_NAMES = 3  # sites that a message spells out


def probe_batch(data: Data, num_samples: int) -> Batch:
    """The first training samples, as a model receives them."""
    batch = data.train.gather(torch.arange(min(num_samples, len(data.train))))
    batch["inputs"] = data.model_inputs(batch["inputs"])
    return batch


class SiteOnMaps(nn.Module):
    """Wraps a site of any view as (N, C, P) -> (N, C, P), with all samples sharing statistics.

    Sets all-zero parameters to one, because a scale of zero would hide all dependence.
    """

    def __init__(self, site: Site, positions: torch.Size) -> None:
        super().__init__()
        self.site = copy.deepcopy(site)
        self.site.norm_batch_size = None
        self.positions = positions
        with torch.no_grad():
            for parameter in self.site.parameters():
                if not parameter.any():
                    parameter.fill_(1)

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.site.view != "map":
            x = values.transpose(1, 2)
        else:
            x = values.unflatten(-1, self.positions) if self.positions else values[..., 0]
        return as_maps(self.site(x, mask), self.site)


@dataclass(frozen=True)
class EnteredSite:
    """A site with the shape (N, C, P) and the mask (N, P) that reached it in a forward."""

    name: str
    module: SiteOnMaps
    shape: torch.Size
    mask: Tensor | None

    def values(self, num_positions: int | None = None) -> Tensor:
        """Fixed random numbers (N, C, P) of either sign and magnitude 0.5 to 1.5."""
        shape = (*self.shape[:2], num_positions or self.shape[2])
        draws = source()
        size = 0.5 + torch.rand(shape, generator=draws)
        return size * (1 - 2 * torch.randint(2, shape, generator=draws))

    def probe(self, *, training: bool) -> Probe:
        return Probe(copy.deepcopy(self.module).train(training), ways=1)


def enter_sites(network: nn.Module, batch: Batch) -> list[EnteredSite]:
    """The sites that a training forward on `batch` enters, in that order, once per input shape."""
    found: dict[tuple[str, torch.Size], EnteredSite] = {}

    def enter(name: str, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, mask = input_and_mask(args, kwargs)
        if (name, x.shape) not in found:
            positions = x.shape[2:] if site.view == "map" else x.shape[1:2]
            module = SiteOnMaps(site, positions)
            found[name, x.shape] = EnteredSite(name, module, as_maps(x, site).shape, mask)

    probe = network_probe(network, training=True)
    for name, site in named_sites(probe.module):
        site.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
    probe.observe(*model_arguments(batch))
    return list(found.values())


def network_probe(
    network: nn.Module, *, training: bool, opened: bool = False, vocab_size: int | None = None
) -> Probe:
    """A probe of the whole network, with all samples of a forward sharing statistics.

    Args:
        opened: replaces all-zero parameters by random ones, because they would hide a branch.
    """
    own = copy.deepcopy(network).train(training)
    for _, site in named_sites(own):
        site.norm_batch_size = None
    if opened:
        with fixed_draws(), torch.no_grad():
            for parameter in own.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
    return Probe(own, vocab_size=vocab_size, ways=1)


def run_through(network: nn.Module, batch: Batch, norm_batch_size: int | None) -> int:
    """Runs one forward as in training; returns how many values per sample reach the sites.

    Raises:
        UserError: an error of a norm or the model, with the name of the site.
    """
    entered: list[str] = []
    seen: list[int] = []
    own = copy.deepcopy(network).train()

    def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(name)
        seen.append(input_and_mask(args, kwargs)[0].numel())

    for name, site in named_sites(own):
        site.norm_batch_size = norm_batch_size
        site.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        site.register_forward_hook(lambda *_: entered.pop() and None)
    try:
        with fixed_draws(), torch.no_grad():
            own(*model_arguments(batch))
    except Exception as error:  # of foreign code, any kind
        if not entered and isinstance(error, UserError):
            raise
        where = f"norm at site {entered[-1]}" if entered else "model"
        raise UserError(f"{where}: {first_line(error)}") from error
    return sum(seen) // len(batch["targets"])


@dataclass(frozen=True)
class Reach:
    """How many values one statistic of a site pools: `own` of a sample, `other` of each other."""

    own: int
    other: float

    def num_values(self, group_size: int) -> int:
        """Values in the statistic when `group_size` samples share one."""
        return self.own + round(self.other * (group_size - 1))


def measure_reaches(sites: Sequence[EnteredSite]) -> dict[str, Reach]:
    """The reach of each site's statistics in training, the smallest over its input shapes.

    Leaves out sites whose norm takes no statistic.
    """
    reaches: dict[str, Reach] = {}
    for entered in sites:
        with naming(entered):
            reach = _measure_reach(entered)
        if reach is not None:
            before = reaches.get(entered.name, reach)
            reaches[entered.name] = min(before, reach, key=lambda r: (r.own, r.other))
    return reaches


def _measure_reach(entered: EnteredSite) -> Reach | None:
    """Counts the outputs that an outlier moves at the first position, of two samples and channels.

    Cumulative statistics carry the first position to all later ones. If no other value moves, the
    input is rescaled: a statistic over one value gives the same (x - x) or x / |x|, while a norm
    without statistics changes.
    """
    probe, x = entered.probe(training=True), entered.values()
    before = probe.observe(x).output
    if not before.isfinite().all():
        raise UserError("returns NaN or infinity in training for inputs of size 1")
    counts: list[Reach] = []
    for sample, channel in ((0, 0), (len(x) - 1, x.shape[1] - 1)):
        changed = x.clone()
        changed[sample, channel, 0] += math.sqrt(x.numel())
        moved = moved_places(before, probe.observe(changed).output)
        of_others = moved.flatten(1).sum(dim=1).float()
        own = int(of_others[sample])
        others = (of_others.sum() - own) / max(len(x) - 1, 1)
        moved[sample, channel, 0] = False
        if moved.any():
            counts.append(Reach(max(own, 1), float(others)))
    if counts:
        return max(counts, key=lambda reach: (reach.own, reach.other))
    small, large = (probe.observe(scale * x).output for scale in (0.1, 3.0))
    return None if moved_places(small, large, tolerance=1e-2).any() else Reach(1, 0.0)


@contextmanager
def naming(entered: EnteredSite) -> Iterator[None]:
    """Turns any exception inside the block into a UserError that names the site."""
    try:
        yield
    except Exception as error:  # of foreign code, any kind
        raise UserError(f"norm at {entered.name}: {first_line(error)}") from error


def name_some(names: Sequence[str]) -> str:
    """`a, b, c and 6 more`, for messages."""
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:SHOWN_NAMES])
    rest = len(unique) - SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
