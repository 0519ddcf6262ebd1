"""The sites of a built network, each to be run by itself on inputs of the shapes that reach it.

A site alone shows what the whole network may hide, where a branch starts at zero for example. Its
values lead with (N, C, P) here whatever its view: samples, channels, positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.probing import first_line, scratch
from normexp.errors import UserError
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites
from normexp.norms.state import State, read_state

SHOWN_NAMES = 3  # sites that a message spells out


@dataclass(frozen=True)
class ProbedSite:
    """A site with the shape and the mask that reached it in a forward of its network."""

    name: str
    site: Site
    shape: torch.Size
    mask: Tensor | None

    def values(self, num_positions: int | None = None) -> Tensor:
        """Fixed random numbers (N, C, P) of either sign and 0.5 to 1.5 in size: none is special."""
        empty = torch.empty(self.shape, device="meta")
        num_samples, channels, positions = as_maps(empty, self.site).shape
        shape = (num_samples, channels, num_positions or positions)
        source = torch.Generator().manual_seed(0)
        size = 0.5 + torch.rand(shape, generator=source)
        sign = 1 - 2 * torch.randint(2, shape, generator=source)
        return size * sign

    def run(
        self, values: Tensor, *, training: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Outputs (N, C, P) of a fresh copy of the site, unsplit, and its state afterwards."""
        own = copy.deepcopy(self.site).train(training)
        own.norm_batch_size = None
        if self.site.view == "map":
            x = values.unflatten(-1, self.shape[2:]) if len(self.shape) > 2 else values[..., 0]
        else:
            x = values.transpose(1, 2)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            try:
                out = own(x, mask)
            except Exception as error:
                raise UserError(f"norm at {self.name}: {first_line(error)}") from error
        return as_maps(out, self.site), read_state(own)


def probe_sites(network: nn.Module, batch: Batch) -> list[ProbedSite]:
    """The sites that a training forward on `batch` enters, in that order, once per input shape.

    Parameters that are all zero are set to one: a scale that starts at zero would hide everything.
    """
    found: dict[tuple[str, torch.Size], ProbedSite] = {}
    with scratch(network, training=True, norm_batch_size=None) as own:

        def enter(name: str, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x, mask = input_and_mask(args, kwargs)
            found.setdefault((name, x.shape), ProbedSite(name, site, x.shape, mask))

        hooks = [
            site.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            for name, site in named_sites(own)
        ]
        own(*model_arguments(batch))
        for hook in hooks:
            hook.remove()
    for probed in found.values():
        _make_visible(probed.site)
    return list(found.values())


def _make_visible(site: Site) -> None:
    with torch.no_grad():
        for parameter in site.parameters():
            if not parameter.any():
                parameter.fill_(1)


def moved_places(before: Tensor, after: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Where two outputs differ by more than rounding, relative to the largest, as booleans."""
    scale = before.abs().amax().clamp(min=1e-6)
    return ((after - before).abs() > tolerance * scale) | (after.isnan() & ~before.isnan())


def outlier(values: Tensor) -> float:
    """What to add to one of these values so that every statistic which contains it moves visibly.

    The root of their number: a mean over m <= n of them moves by sqrt(n) / m, a variance by 1.
    """
    return math.sqrt(values.numel())


def name_some(names: Sequence[str]) -> str:
    """`a, b, c and 6 more sites`, for messages."""
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:SHOWN_NAMES])
    rest = len(unique) - SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
