"""A built network under examination: its sites one by one, and the samples that it is probed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normexp.batching.copies import copied
from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.probe import Probe, fixed_draws
from normexp.config.sizes import Sizes
from normexp.data.dataset import Data
from normexp.errors import UserError, one_line
from normexp.norms.site import AsBuiltSite, Site, as_maps, input_and_mask, named_sites
from normexp.words import name_some

PROBE_SAMPLES = 4
HIDING = 1e-3  # scales below it hide how outputs depend on inputs
SHORT_TEXT = 16  # positions
NETWORK_CUTS = 4  # of a text, into before and after


def probe_batch(data: Data, num_samples: int) -> Batch:
    """The first training samples, as a model receives them."""
    batch = data.train.gather(torch.arange(min(num_samples, len(data.train))))
    batch["inputs"] = data.model_inputs(batch["inputs"])
    return batch


class SiteOnMaps(nn.Module):
    """Adapts a site of any view to (N, C, P) -> (N, C, P).

    Args:
        positions: their axes in the input of the site.
        more: its further arguments, if it is a site of a norm as built.
    """

    def __init__(self, site: Site, positions: torch.Size, more: tuple[Any, ...] = ((), {})) -> None:
        super().__init__()
        self.site = site
        self.positions = positions
        self.more = more

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        shown = values.unflatten(-1, self.positions) if self.positions else values[..., 0]
        if self.site.view != "map":
            shown = shown.movedim(1, -1)
        if isinstance(self.site, AsBuiltSite):
            args, keywords = self.more
            return as_maps(self.site(shown, *args, **keywords), self.site)
        return as_maps(self.site(shown, mask), self.site)


class FirstInput(nn.Module):
    """y = x, whatever else it is given."""

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        return input_and_mask(args, keywords)[0]


@dataclass(eq=False)
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

    def probe(self, training: bool, *mask: Tensor) -> Probe:
        """A probe of a copy, on fixed random numbers of either sign and magnitude 0.5 to 1.5."""
        module = copied(self.module).train(training and not self.is_frozen)
        draws = torch.Generator().manual_seed(0)
        size = 0.5 + torch.rand(self.shape, generator=draws)
        values = size * (1 - 2 * torch.randint(2, self.shape, generator=draws))
        return Probe(module, (values, *mask))

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Turns any exception into a UserError that names the site."""
        try:
            yield
        except Exception as error:  # of foreign code, any kind
            where = f"norm at {name_some(self.names)}"
            raise _refusal(where, self.shape[0], error) from error


def names_where(sites: Sequence[EnteredSite], ask: Callable[[EnteredSite], bool]) -> str:
    """The sites for which a question finds something; "" if there are none."""
    names: list[str] = []
    for site in sites:
        with site.naming_errors():
            names += site.names if ask(site) else []
    return name_some(names)


def _refusal(where: str, num_samples: int, error: Exception) -> UserError:
    """Of a norm that explains itself, or of code that fails on the few samples of a probe."""
    if isinstance(error, UserError):
        return UserError(f"{where}: {error}")
    return UserError(f"probing the {where} on {num_samples} samples fails: {one_line(error)}")


def enter_sites(network: nn.Module, batch: Batch) -> list[EnteredSite]:
    """The sites that a training forward on `batch` enters, in that order, per input shape.

    Sites of one class, settings and shapes are one entry with several names.

    Raises:
        UserError: an error of a norm or the model, with the name of the site.
    """
    entered: dict[Any, EnteredSite] = {}
    inside: list[str] = []

    def enter(name: str, site: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        x, mask = input_and_mask(args, kwargs)
        named = {name: value for name, value in kwargs.items() if value is not x}
        more = tree_map_only(Tensor, Tensor.detach, (args[1:], named))
        shapes = [(key, value.shape) for key, value in site.state_dict().items()]
        content = repr((type(site.norm), site, site.training, shapes, x.shape))
        if content not in entered:
            positions = x.shape[2:] if site.view == "map" else x.shape[1:-1]
            shape, module = as_maps(x, site).shape, SiteOnMaps(site, positions, more)
            entered[content] = EnteredSite([], module, shape, mask, not site.training)
        entered[content].names.append(name)
        inside.append(name)

    handles: list[Any] = []
    for name, site in named_sites(network):
        hook = partial(enter, name)
        handles.append(site.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        handles.append(site.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        Probe(network.train(), model_arguments(batch)).observe()
    except Exception as error:  # of foreign code, any kind
        if not inside and isinstance(error, UserError):
            raise
        where = f"norm at site {inside[-1]}" if inside else f"model {type(network).__name__}"
        raise _refusal(where, len(batch["inputs"]), error) from error
    finally:
        for handle in handles:
            handle.remove()
    return list(entered.values())


@dataclass(frozen=True, eq=False)
class BuiltNetwork:
    """A network as it will train, with the data and the sizes of its training."""

    network: nn.Module
    data: Data
    sizes: Sizes
    drop_last: bool

    @cached_property
    def exposed(self) -> nn.Module:
        """A copy without branches at zero and scales of norms near it, which hide from probes.

        All samples of a forward share statistics.
        """
        exposed = copied(self.network)
        with fixed_draws(), torch.no_grad():
            for _, site in named_sites(exposed):
                site.norm_batch_size = None
                for parameter in site.parameters():
                    # A scale of zero hides all dependence.
                    parameter.masked_fill_(parameter.abs() < HIDING, 1)
            for parameter in exposed.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
        return exposed

    @cached_property
    def batch(self) -> Batch:
        return probe_batch(self.data, PROBE_SAMPLES)

    @cached_property
    def short(self) -> Batch:
        """The batch, with texts cut short if the model takes them so."""
        if self.batch["inputs"].is_floating_point():
            return self.batch
        short = {n: v[:, :SHORT_TEXT] if v.ndim == 2 else v for n, v in self.batch.items()}
        try:
            Probe(self.exposed.train(), model_arguments(short)).observe()
        except Exception:  # a model for one length
            return self.batch
        return short

    @cached_property
    def sites(self) -> list[EnteredSite]:
        return enter_sites(self.exposed, self.batch)

    def whole(self, batch: Batch, training: bool) -> Probe:
        """A probe of all of it. A fault that it has, and no site, lies outside of its norms."""
        return Probe(
            *(self.exposed.train(training), model_arguments(batch)),
            vocab_size=self.data.vocab_size,
            position_axis=1,
            max_cuts=NETWORK_CUTS,
        )

    @cached_property
    def bare(self) -> BuiltNetwork:
        """The network with identities as norms, whose faults are those of the model."""
        bare = copied(self.network)
        for _, site in named_sites(bare):
            site.norm, site.takes_mask = FirstInput(), False
        return replace(self, network=bare)


def smallest_group(sizes: Sizes, num_samples: int, *, drop_last: bool) -> int:
    """Samples in the smallest set that shares batch statistics in an epoch of `num_samples`."""
    rest = 0 if drop_last else num_samples % sizes.batch_size
    if not rest:
        return sizes.norm
    last_micro = rest % sizes.micro or sizes.micro
    return last_micro % sizes.norm or sizes.norm
