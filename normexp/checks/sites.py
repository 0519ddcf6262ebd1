"""Probes the sites of a network one by one: their inputs, and the reach of their statistics."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.probe import (
    TOLERANCE,
    Probe,
    after_many_steps,
    changes,
    fixed_draws,
    moves,
    source,
)
from normexp.data.dataset import Data
from normexp.errors import UserError, first_line
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites
from normexp.norms.state import is_sequential
from normexp.records.identity import source_line_of

SHOWN_NAMES = 3  # sites that a message spells out
PROBE_SAMPLES = 4
FEW_POSITIONS = 4  # where many samples are probed
MAX_VALUES = 2**18  # of one site
EXTRA_POSITIONS = 3  # padding appended to a site's input
SHORT_TEXT = 16  # positions


def probe_batch(data: Data, num_samples: int) -> Batch:
    """The first training samples, as a model receives them."""
    batch = data.train.gather(torch.arange(min(num_samples, len(data.train))))
    batch["inputs"] = data.model_inputs(batch["inputs"])
    return batch


class SiteOnMaps(nn.Module):
    """Adapts a site of any view to (N, C, P) -> (N, C, P)."""

    def __init__(self, site: Site, positions: torch.Size) -> None:
        super().__init__()
        self.site = site
        self.positions = positions

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.site.view != "map":
            x = values.transpose(1, 2)
        else:
            x = values.unflatten(-1, self.positions) if self.positions else values[..., 0]
        return as_maps(self.site(x, mask), self.site)


@dataclass(frozen=True)
class EnteredSite:
    """A site with the shape (N, C, P) and the mask (N, P) that reached it in a forward.

    Attributes:
        names: of this site and of all equal ones, which need no probe of their own; a name
            repeats for each time that its site was entered.
        is_frozen: the network keeps the site in evaluation mode while it trains.
    """

    names: list[str]
    module: SiteOnMaps
    shape: torch.Size
    mask: Tensor | None
    is_frozen: bool = False

    def values(self, num_samples: int | None = None, num_positions: int | None = None) -> Tensor:
        """Fixed random numbers (N, C, P) of either sign and magnitude 0.5 to 1.5."""
        shape = (num_samples or self.shape[0], self.shape[1], num_positions or self.shape[2])
        draws = source()
        size = 0.5 + torch.rand(shape, generator=draws)
        return size * (1 - 2 * torch.randint(2, shape, generator=draws))

    @contextmanager
    def probe(self, *, training: bool) -> Iterator[Probe]:
        """A probe of a copy; inside the block any exception is a UserError that names the site."""
        try:
            yield Probe(copy.deepcopy(self.module).train(training and not self.is_frozen), ways=1)
        except Exception as error:  # of foreign code, any kind
            raise UserError(f"norm at {name_some(self.names)}: {first_line(error)}") from error

    @property
    def has_state(self) -> bool:
        """True if its norm keeps averages in training: floating-point buffers, and not frozen."""
        buffers = self.module.site.norm.buffers()
        return not self.is_frozen and any(buffer.is_floating_point() for buffer in buffers)

    def after_many_steps(self) -> EnteredSite | None:
        """The same site late in a training; None if it counts no steps."""
        with self.probe(training=True) as probe:
            mask = () if self.mask is None else (self.mask,)
            module = after_many_steps(probe.module, self.values(), *mask)
        return None if module is None else replace(self, module=cast(SiteOnMaps, module))

    def is_sequential(self) -> bool:
        """True if the norm declares that its state is, or writes parameters in its forward."""
        if is_sequential(self.module):
            return True
        with self.probe(training=True) as probe, fixed_draws(), torch.no_grad():
            before = [parameter.clone() for parameter in probe.module.parameters()]
            probe.module(self.values(), *([] if self.mask is None else [self.mask]))
            return not all(map(torch.equal, before, probe.module.parameters()))

    def mixes_samples(self, num_samples: int, *, training: bool) -> bool:
        """True if a sample depends on others, in a small batch or in one of `num_samples`."""
        with self.probe(training=training) as probe:
            if probe.reads_samples(self.values(), training=training):
                return True
        if num_samples <= PROBE_SAMPLES:
            return False
        small = self._with_few_positions()
        fitting = max(PROBE_SAMPLES, MAX_VALUES // small.shape[1:].numel())
        values = small.values(min(num_samples, fitting))
        with small.probe(training=training) as probe:
            return probe.reads_samples(values, training=training) is not None

    def _with_few_positions(self) -> EnteredSite:
        """The same site on FEW_POSITIONS positions, or this one if it refuses so few."""
        whole = self.module.positions
        few = torch.Size([1] * (len(whole) - 1) + [min(FEW_POSITIONS, whole[-1])] if whole else [])
        module = SiteOnMaps(self.module.site, few)
        small = replace(self, module=module, shape=torch.Size((*self.shape[:2], few.numel())))
        try:
            with small.probe(training=True) as probe:
                probe.observe(small.values())
        except UserError:  # state per position, or a minimum
            return self
        return small

    def reads_later(self, length: int, *, training: bool) -> bool:
        """True if the site reads later positions of a text of `length`; False on other inputs."""
        if self.shape[2] != length:
            return False
        with self.probe(training=training) as probe:
            return probe.reads_later(self.values(), 2) is not None

    def reads_padding(self, *, training: bool) -> bool:
        """True if the values or amount of padding move real outputs or the state."""
        values = self.values(num_positions=self.shape[2] + EXTRA_POSITIONS)
        with self.probe(training=training) as probe:
            return self.mask is not None and probe.reads_padding(values, self.mask)

    def reach(self) -> Reach | None:
        """How many values the site's statistics pool in training; None if it takes no statistic.

        Counts the outputs that an outlier at the first position moves, in two samples and channels;
        cumulative statistics carry the first position to all later ones. If only the outlier's own
        output moves, the input is rescaled: a statistic over one value gives the same (x - x) or
        x / |x| again, while a norm without statistics changes.
        """
        with self.probe(training=True) as probe:
            x = self.values()
            before = probe.observe(x).output
            if not before.isfinite().all():
                raise UserError("returns NaN or infinity in training for inputs of size 1")
            reaches: list[Reach] = []
            for sample, channel in ((0, 0), (len(x) - 1, x.shape[1] - 1)):
                changed = x.clone()
                changed[sample, channel, 0] += math.sqrt(x.numel())
                moved = changes(before, probe.observe(changed).output) > TOLERANCE
                of_samples = moved.flatten(1).sum(dim=1)
                own = int(of_samples[sample])
                others = int(of_samples.sum()) - own
                moved[sample, channel, 0] = False
                if moved.any():
                    reaches.append(Reach(max(own, 1), others / max(len(x) - 1, 1)))
            if reaches:
                return max(reaches)
            small, large = (probe.observe(scale * x).output for scale in (0.1, 3.0))
            return None if moves(small, large, tolerance=1e-2) else Reach(1, 0.0)


@dataclass(frozen=True, order=True)
class Reach:
    """How many values a statistic pools: `own` of one sample, `other` of each further sample."""

    own: int
    other: float

    def num_values(self, group_size: int) -> int:
        """Values in the statistic when `group_size` samples share one."""
        return self.own + round(self.other * (group_size - 1))


def measure_reaches(sites: Sequence[EnteredSite]) -> dict[str, Reach]:
    """The reach of each site that takes statistics, the smallest over its input shapes."""
    reaches: dict[str, Reach] = {}
    for entered in sites:
        reach = entered.reach()
        if reach is not None:
            reaches |= {name: min(reaches.get(name, reach), reach) for name in entered.names}
    return reaches


def enter_sites(network: nn.Module, batch: Batch) -> list[EnteredSite]:
    """The sites that a training forward on `batch` enters, in that order, per input shape.

    Sites of equal content are one entry with several names.

    Raises:
        UserError: an error of a norm or the model, with the name of the site.
    """
    found: dict[Any, EnteredSite] = {}
    inside: list[str] = []

    def enter(name: str, content: Any, site: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        inside.append(name)
        x, mask = input_and_mask(args, kwargs)
        if (content, x.shape) not in found:
            positions = x.shape[2:] if site.view == "map" else x.shape[1:2]
            module = SiteOnMaps(site, positions)
            values = as_maps(x, site)
            found[content, x.shape] = EnteredSite(
                [], module, values.shape, mask, is_frozen=not site.training
            )
        found[content, x.shape].names.append(name)

    handles = []
    for name, site in named_sites(network):
        hook = partial(enter, name, _content(site) or name)
        handles.append(site.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        handles.append(site.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        Probe(network.train()).observe(*model_arguments(batch))
    except Exception as error:  # of foreign code, any kind
        if not inside and isinstance(error, UserError):
            raise
        model = f"model {type(network).__name__} fails:"
        where = f"norm at site {inside[-1]}:" if inside else model
        raise UserError(f"{where} {first_line(error)}{source_line_of(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


class _ContentPickler(pickle.Pickler):
    """Writes tensors by value."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        return str(obj.dtype), obj.shape, obj.requires_grad, obj.detach().numpy().tobytes()


def _content(site: Site) -> bytes | None:
    """Bytes that are equal for sites of equal classes, attributes and tensors; None if unknown."""
    written = io.BytesIO()
    try:
        _ContentPickler(written).dump(site)
    except Exception:  # a local class, a tensor that numpy lacks: this site is probed by itself
        return None
    return written.getvalue()


def expose_branches(network: nn.Module) -> nn.Module:
    """A copy without parameters that are all zero, which would hide a branch from probes.

    All samples of a forward share statistics.
    """
    own = copy.deepcopy(network)
    with fixed_draws(), torch.no_grad():
        for _, site in named_sites(own):
            site.norm_batch_size = None
            for parameter in site.parameters():
                if not parameter.any():
                    parameter.fill_(1)  # a scale of zero hides all dependence
        for parameter in own.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return own


def shorten(network: nn.Module, batch: Batch) -> Batch:
    """The first SHORT_TEXT positions of texts, or the whole ones if the model needs them."""
    if batch["inputs"].is_floating_point():
        return batch
    short = {n: v[:, :SHORT_TEXT] if v.ndim == 2 else v for n, v in batch.items()}
    try:
        Probe(network).observe(*model_arguments(short))
    except Exception:  # a model for one length
        return batch
    return short


def name_some(names: Sequence[str]) -> str:
    """`a, b, c and 6 more`, for messages."""
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:SHOWN_NAMES])
    rest = len(unique) - SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
