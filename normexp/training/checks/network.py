"""A built network under examination: its sites one by one, and the samples that it is probed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normexp.errors import UserError, one_line
from normexp.norms.site import AsBuiltSite, Site, as_maps, input_and_mask, named_sites
from normexp.training.batching.copies import copied
from normexp.training.batching.replicas import Batch, model_arguments
from normexp.training.checks.probe import Probe, fixed_draws
from normexp.training.config.sizes import Sizes
from normexp.training.data.dataset import Data
from normexp.training.data.views import crop_centre
from normexp.words import name_some

PROBE_SAMPLES = 4
HIDING = 1e-3  # scales below it hide how outputs depend on inputs
SHORT_TEXT = 16  # positions
NETWORK_CUTS = 4  # of a text, into before and after


def probe_batch(data: Data, num_samples: int) -> Batch:
    """The first training samples, as a model receives them."""
    batch = data.train.gather(torch.arange(min(num_samples, len(data.train))))
    if data.crop is not None:
        crop_centre(batch, data.crop)
    batch["inputs"] = data.model_inputs(batch["inputs"])
    return batch


class SiteOnMaps(nn.Module):
    """Adapts a site of any view to (N, C, P) -> (N, C, P).

    Args:
        positions: the sizes of their axes in the input of the site.
        more_inputs: arguments and keywords besides x, of a site of a norm as built.
    """

    def __init__(
        self,
        site: Site,
        positions: torch.Size,
        more_inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
    ) -> None:
        super().__init__()
        self.site = site
        self.positions = positions
        self.more_inputs = more_inputs

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        x = maps.unflatten(-1, self.positions) if self.positions else maps[..., 0]
        if self.site.view != "map":
            x = x.movedim(1, -1)
        if isinstance(self.site, AsBuiltSite):
            args, keywords = self.more_inputs
            out = self.site(x, *args, **keywords)
        else:
            out = self.site(x, mask)
        return as_maps(out, self.site)


class FirstInput(nn.Module):
    """The identity, which ignores all further arguments."""

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        return input_and_mask(args, keywords)[0]


@dataclass(eq=False)
class EnteredSite:
    """A site with the shape (N, C, P) and the mask (N, P) that reached it in a forward.

    Attributes:
        names: of this site and of all equal ones, which need no probe of their own. A site that was
            entered several times has its name as often.
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
            raise _named(where, self.shape[0], error) from error


def names_where(sites: Sequence[EnteredSite], ask: Callable[[EnteredSite], bool]) -> str:
    """The names of the sites for which `ask` is true, for messages; "" if there are none."""
    names: list[str] = []
    for site in sites:
        with site.naming_errors():
            if ask(site):
                names += site.names
    return name_some(names)


def _named(where: str, num_samples: int, error: Exception) -> UserError:
    """An error with its place: a norm's own refusal, or code that fails on so few samples."""
    if isinstance(error, UserError):
        return UserError(f"{where}: {error}")
    return UserError(f"probing the {where} on {num_samples} samples fails: {one_line(error)}")


def enter_sites(network: nn.Module, batch: Batch) -> list[EnteredSite]:
    """The sites that a training forward on `batch` enters, in that order, per input shape.

    Sites of one class, settings and shapes are one entry with several names.

    Raises:
        UserError: an error of a norm or the model, with the name of the site.
    """
    entered: dict[str, EnteredSite] = {}
    running: list[str] = []  # sites whose forward has not ended

    def enter(name: str, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(name)
        x, mask = input_and_mask(args, kwargs)
        shapes = [(key, value.shape) for key, value in site.state_dict().items()]
        content = repr((type(site.norm), site, site.training, shapes, x.shape))
        if content not in entered:
            keywords = {name: value for name, value in kwargs.items() if value is not x}
            more_inputs = tree_map_only(Tensor, Tensor.detach, (args[1:], keywords))
            positions = x.shape[2:] if site.view == "map" else x.shape[1:-1]
            module = SiteOnMaps(site, positions, more_inputs)
            shape = as_maps(x, site).shape
            entered[content] = EnteredSite([], module, shape, mask, is_frozen=not site.training)
        entered[content].names.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    try:
        with ExitStack() as hooks:
            for name, site in named_sites(network):
                before = site.register_forward_pre_hook(
                    partial(enter, name), with_kwargs=True, prepend=True
                )
                after = site.register_forward_hook(leave)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            Probe(network.train(), model_arguments(batch)).observe()
    except Exception as error:  # of foreign code, any kind
        if not running and isinstance(error, UserError):
            raise
        where = f"norm at site {running[-1]}" if running else f"model {type(network).__name__}"
        raise _named(where, len(batch["inputs"]), error) from error
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
        """A copy in which no branch and no scale of a norm is near zero, which would hide it.

        All samples of a forward share statistics.
        """
        exposed = copied(self.network)
        with fixed_draws(), torch.no_grad():
            for _, site in named_sites(exposed):
                site.norm_batch_size = None
                for parameter in site.parameters():
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
        short = {
            name: values[:, :SHORT_TEXT] if values.ndim == 2 else values
            for name, values in self.batch.items()
        }
        try:
            Probe(self.exposed.train(), model_arguments(short)).observe()
        except Exception:  # a model for one length
            return self.batch
        return short

    @cached_property
    def sites(self) -> list[EnteredSite]:
        return enter_sites(self.exposed, self.batch)

    def whole(self, batch: Batch, training: bool) -> Probe:
        """A probe of the whole network."""
        return Probe(
            self.exposed.train(training),
            model_arguments(batch),
            vocab_size=self.data.vocab_size,
            position_axis=1,
            max_cuts=NETWORK_CUTS,
        )

    @cached_property
    def bare(self) -> BuiltNetwork:
        """The network with identities as norms: the faults that it has are not theirs."""
        bare = copied(self.network)
        for _, site in named_sites(bare):
            site.norm = FirstInput()
            site.takes_mask = False
        return replace(self, network=bare)


def smallest_group(sizes: Sizes, num_samples: int, *, drop_last: bool) -> int:
    """Samples in the smallest set that shares batch statistics in an epoch of `num_samples`."""
    last_batch = 0 if drop_last else num_samples % sizes.batch_size
    if not last_batch:
        return sizes.norm
    last_micro = last_batch % sizes.micro or sizes.micro
    return last_micro % sizes.norm or sizes.norm
