"""The sites of a network one by one, with the inputs that reach them."""

from __future__ import annotations

import copy
import io
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
    Probe,
    after_many_steps,
    fixed_draws,
    in_float64,
    is_foreign,
    phases,
    source,
)
from normexp.config.spec import one_line
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites
from normexp.records.sources import source_line_of

SHOWN_NAMES = 3  # sites that a message spells out
PROBE_SAMPLES = 4
FEW_POSITIONS = 4  # where many samples are probed
MAX_VALUES = 2**18  # of one site
SHORT_TEXT = 16  # positions
NUM_DRAWS = 16  # random states to try; what happens in a quarter of them is missed by 1 %


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
        return as_maps(self.site(self.as_shown(values), mask), self.site)

    def as_shown(self, values: Tensor) -> Tensor:
        """(N, C, P) in the shape that the site takes."""
        if self.site.view != "map":
            return values.transpose(1, 2)
        return values.unflatten(-1, self.positions) if self.positions else values[..., 0]


def _refusal(where: str, num_samples: int, error: Exception) -> UserError:
    """Of a norm that explains itself, or of code that fails on the few samples of a probe."""
    if isinstance(error, UserError):
        return UserError(f"{where}: {explain(error)}")
    return UserError(f"probing the {where} on {num_samples} samples fails: {explain(error)}")


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

    def values(self) -> Tensor:
        """Fixed random numbers (N, C, P) of either sign and magnitude 0.5 to 1.5."""
        draws = source()
        size = 0.5 + torch.rand(self.shape, generator=draws)
        return size * (1 - 2 * torch.randint(2, self.shape, generator=draws))

    def probe(self, training: bool, *mask: Tensor, in_double: bool = False) -> Probe:
        """A probe of a copy, on `values`; in float64 if asked or foreign, where it computes so."""
        inputs = self.values(), *mask
        wide = in_float64(self.module, *inputs) if in_double or self.is_foreign else None
        module, inputs = wide or (copy.deepcopy(self.module), inputs)
        module = self.set_mode(module, training)
        return Probe(module, *inputs, ways=1, is_sensitive=self.is_foreign)

    def set_mode(self, module: nn.Module, training: bool) -> nn.Module:
        return module.train(training and not self.is_frozen)

    def probes(self, training: bool, *mask: Tensor) -> Iterator[Probe]:
        """A probe; for a foreign norm that draws, one for each of several random states."""
        probe = self.probe(training, *mask)
        yield probe
        if self.is_foreign and probe.observe().drew:
            for seed in range(1, NUM_DRAWS):
                probe.seed = seed
                yield probe

    @property
    def is_foreign(self) -> bool:
        """True if the norm is neither torch's nor ours: its probes are finer, and slower."""
        return is_foreign(*self.module.modules())

    def to_save(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """A copy in training mode, and its inputs."""
        return self.set_mode(copy.deepcopy(self.module), training=True), (self.values(),)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Turns any exception into a UserError that names the site."""
        try:
            yield
        except Exception as error:  # of foreign code, any kind
            where = f"norm at {name_some(self.names)}"
            raise _refusal(where, self.shape[0], error) from error

    def later(self) -> list[EnteredSite]:
        """The same site late in a training if it counts steps, and in phases of a foreign norm."""
        module, inputs = self.to_save()
        with self.naming_errors():
            late = after_many_steps(module, *inputs)
            modules = [] if late is None else [late]
            if self.is_foreign and not self.is_frozen:
                modules += phases(module, *inputs)
        return [replace(self, module=cast(SiteOnMaps, module)) for module in modules]

    @property
    def has_state(self) -> bool:
        """True if its norm keeps averages in training: floating-point buffers, and not frozen."""
        buffers = self.module.site.norm.buffers()
        return not self.is_frozen and any(buffer.is_floating_point() for buffer in buffers)

    def crowded(self, num_samples: int) -> EnteredSite | None:
        """The site on a batch of `num_samples`, or as many as fit; None if those are not more."""
        if num_samples <= PROBE_SAMPLES:
            return None
        small = self._with_few_positions()
        fitting = max(PROBE_SAMPLES, MAX_VALUES // small.shape[1:].numel())
        shape = torch.Size((min(num_samples, fitting), *small.shape[1:]))
        return replace(small, shape=shape, mask=None)

    def _with_few_positions(self) -> EnteredSite:
        """The same site on FEW_POSITIONS positions, or this one if it refuses so few."""
        whole = self.module.positions
        few = torch.Size([1] * (len(whole) - 1) + [min(FEW_POSITIONS, whole[-1])] if whole else [])
        module = SiteOnMaps(self.module.site, few)
        shape = torch.Size((*self.shape[:2], few.numel()))
        small = replace(self, module=module, shape=shape, mask=None)
        try:
            small.probe(training=True).observe()
        except Exception:  # foreign code: state per position, or a minimum
            return self
        return small


def enter_sites(network: nn.Module, batch: Batch) -> list[EnteredSite]:
    """The sites that a training forward on `batch` enters, in that order, per input shape.

    Sites of equal content are one entry with several names.

    Raises:
        UserError: an error of a norm or the model, with the name of the site.
    """
    entered: dict[Any, EnteredSite] = {}
    inside: list[str] = []

    def enter(name: str, content: Any, site: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        inside.append(name)
        x, mask = input_and_mask(args, kwargs)
        if (content, x.shape) not in entered:
            positions = x.shape[2:] if site.view == "map" else x.shape[1:2]
            module = SiteOnMaps(site, positions)
            values = as_maps(x, site)
            entered[content, x.shape] = EnteredSite(
                [], module, values.shape, mask, is_frozen=not site.training
            )
        entered[content, x.shape].names.append(name)

    handles = []
    for name, site in named_sites(network):
        hook = partial(enter, name, _content(site) or name)
        handles.append(site.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        handles.append(site.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        Probe(network.train(), *model_arguments(batch)).observe()
    except Exception as error:  # of foreign code, any kind
        if not inside and isinstance(error, UserError):
            raise
        where = f"norm at site {inside[-1]}" if inside else f"model {type(network).__name__}"
        raise _refusal(where, len(batch["inputs"]), error) from error
    finally:
        for handle in handles:
            handle.remove()
    return list(entered.values())


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
    exposed = copy.deepcopy(network)
    with fixed_draws(), torch.no_grad():
        for _, site in named_sites(exposed):
            site.norm_batch_size = None
            for parameter in site.parameters():
                if not parameter.any():
                    parameter.fill_(1)  # a scale of zero hides all dependence
        for parameter in exposed.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return exposed


def shorten(network: nn.Module, batch: Batch) -> Batch:
    """The first SHORT_TEXT positions of texts, or the whole ones if the model needs them."""
    if batch["inputs"].is_floating_point():
        return batch
    short = {n: v[:, :SHORT_TEXT] if v.ndim == 2 else v for n, v in batch.items()}
    try:
        Probe(network, *model_arguments(short)).observe()
    except Exception:  # a model for one length
        return batch
    return short


def explain(error: Exception) -> str:
    """The message of an error; of foreign code also its type, file and line."""
    return str(error) if isinstance(error, UserError) else one_line(error) + source_line_of(error)


def name_some(names: Sequence[str]) -> str:
    """`a, b, c and 6 more`, for messages."""
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:SHOWN_NAMES])
    rest = len(unique) - SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
