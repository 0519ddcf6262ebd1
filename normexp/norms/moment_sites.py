"""The norms of any network that keep running mean and variance, and what passes through them.

In evaluation such a norm computes f((x - running_mean) / sqrt(running_var + eps)). So it can be
shown any other moments, even those of each sample apart, by a change of its input alone:

    x' = (x - mean) * sqrt((running_var + eps) / (var + eps)) + running_mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normexp.norms.base import Moments, measure, mix, pool, unbiased, widen, zero_padding
from normexp.norms.contract import Mask
from normexp.norms.site import Site, as_maps, input_and_mask

INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(eq=False)
class NormSite:
    """A norm with running moments at one place of a network.

    Attributes:
        name: its path.
        norm: holds the running moments.
        entry: its input is what `norm` normalizes: `norm` itself, or the `Site` around it.
        pools_samples: False for instance norm, whose training statistics are each sample's own.
        has_averages: False if it keeps no running moments (track_running_stats=False).
        mean, var: names of the running moments among the attributes of `norm`.
    """

    name: str
    norm: Any
    entry: nn.Module
    pools_samples: bool
    has_averages: bool
    mean: str = "running_mean"
    var: str = "running_var"

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose mode decides which statistics are used."""
        return list(self.entry.modules()) if isinstance(self.entry, Site) else [self.norm]

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Running mean and variance (C,), in float32 or wider."""
        mean, var = (getattr(self.norm, name).detach() for name in (self.mean, self.var))
        return widen(mean.flatten()), widen(var.flatten())

    @property
    def eps(self) -> float:
        """What it adds to a variance; torch's default if it does not say."""
        eps = getattr(self.norm, "eps", None)
        return 1e-5 if eps is None else float(eps)

    @property
    def counter(self) -> int | None:
        """Updates so far; None if the norm does not count them."""
        counter = getattr(self.norm, "num_batches_tracked", None)
        return int(counter.max()) if isinstance(counter, Tensor) and counter.numel() else None

    def group_size(self, num_samples: int) -> int:
        """Samples that share statistics in training, of a forward pass of `num_samples`."""
        if not self.pools_samples:
            return 1
        sizes = [getattr(self.entry, "norm_batch_size", None), getattr(self.norm, "ghost_size", 0)]
        return min([num_samples, *(size for size in sizes if size)])

    def maps(self, x: Tensor) -> Tensor:
        """The input of `entry` as (N, C, P)."""
        return as_maps(x, self.entry)

    def like_input(self, maps: Tensor, x: Tensor) -> Tensor:
        """Maps (N, C, P) in the shape and dtype of the input x of `entry`."""
        if isinstance(self.entry, Site) and self.entry.view != "map":
            maps = maps.transpose(1, 2)
        return maps.reshape(x.shape).to(x.dtype)

    def of_samples(self, x: Tensor, mask: Mask) -> Moments:
        """The moments (N, C, 1) of each sample over its positions."""
        real = None if mask is None else mask.reshape(len(x), 1, -1)
        maps = widen(self.maps(x.detach()))
        return measure(zero_padding(maps, real), real, (2,))

    def pooled(self, samples: Moments) -> Moments:
        """The moments (C,) that a training forward on these samples sees and averages, biased."""
        mean, var, count = pool(samples, dim=0)
        if not self.pools_samples:  # the mean of the samples' variances
            var, count = samples.var.mean(dim=0, keepdim=True), samples.count
            count = count.float().mean() if isinstance(count, Tensor) else count
        total = count.flatten()[0] if isinstance(count, Tensor) else count
        return Moments(mean.flatten(), var.flatten(), total)

    def shown(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """The input x as the norm must see it to use `mean` and `var` (N or 1, C, 1)."""
        running_mean, running_var = (value.view(1, -1, 1) for value in self.running)
        scale = torch.sqrt((running_var + self.eps) / (var + self.eps))
        return self.like_input((widen(self.maps(x)) - mean) * scale + running_mean, x)


def find_sites(model: nn.Module) -> list[NormSite]:
    """Every norm with mean and variance of its channels, or built to have them."""
    inside = {
        module: (name, site)
        for name, site in model.named_modules()
        if isinstance(site, Site)
        for module in site.modules()
    }
    sites = []
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        moments = [buffers.get("running_mean"), buffers.get("running_var")]
        has_averages = all(isinstance(m, Tensor) and m.ndim == 1 for m in moments)
        is_batch = isinstance(module, BATCH) or hasattr(module, "track_running_stats")
        without = is_batch and not isinstance(module, INSTANCE) and moments == [None, None]
        if (has_averages and hasattr(module, "eps")) or without:
            name, entry = inside.get(module, (path, module))
            pools_samples = not isinstance(module, INSTANCE)
            sites.append(NormSite(name or "the model", module, entry, pools_samples, has_averages))
    return sites


Samples = dict[NormSite, list[Moments]]  # of each call of a site within one forward


@contextmanager
def watching(sites: list[NormSite]) -> Iterator[Samples]:
    """Collects the moments of the samples that pass each site inside the block."""
    seen: Samples = {site: [] for site in sites}

    def watch(site: NormSite, x: Tensor, mask: Mask) -> None:
        seen[site].append(site.of_samples(x, mask))

    with _hooked(sites, watch):
        yield seen


@contextmanager
def inputs_to(sites: list[NormSite]) -> Iterator[dict[NormSite, Tensor]]:
    """Keeps the input of each site's first call."""
    inputs: dict[NormSite, Tensor] = {}

    def keep(site: NormSite, x: Tensor, _: Mask) -> None:
        inputs.setdefault(site, x)

    with _hooked(sites, keep):
        yield inputs


class Population(NamedTuple):
    """Mean and biased variance (C,) over many samples."""

    mean: Tensor
    var: Tensor


@contextmanager
def with_moments(
    populations: Mapping[NormSite, Sequence[Population]], *, own_share: bool
) -> Iterator[None]:
    """Norms in evaluation mode use these moments, one for each call within a forward.

    With `own_share`, those expected of a training batch that holds the sample. With m_i, v_i the
    sample's own moments, m, v those of the population and a = 1 / n its share of a batch of n
    (arXiv:1904.06031): a m_i + (1 - a) m and a v_i + (1 - a) v + a (1 - a) (m_i - m)^2. That the
    mean of the others varies too is left out: of a drop it counts as training noise.
    """
    num_calls = dict.fromkeys(populations, 0)

    def show(site: NormSite, x: Tensor, mask: Mask) -> Tensor:
        of_calls = populations[site]
        of_call = of_calls[min(num_calls[site], len(of_calls) - 1)]
        num_calls[site] += 1
        mean, var = (value.view(1, -1, 1) for value in of_call)
        if own_share:
            mean, var = mix(site.of_samples(x, mask), 1 / site.group_size(len(x)), mean, var)
        return site.shown(x, mean, var)

    with _hooked(populations, show):
        yield


def write_populations(populations: Mapping[NormSite, Population]) -> None:
    """Writes moments into the running ones."""
    for site, moments in populations.items():
        for name, value in zip((site.mean, site.var), moments, strict=True):
            running = getattr(site.norm, name)
            running.copy_(value.view_as(running))


def can_be_shown(site: NormSite, x: Tensor) -> bool:
    """True if the norm's evaluation depends on running moments as this file assumes.

    Compares, on an input of the network, other running moments with an input changed instead. The
    norm must be in evaluation mode. Its state is changed.
    """
    mean, var = site.running
    if x.dim() < 2 or site.maps(x).shape[1] != len(mean):
        return False
    if not (mean.isfinite().all() and (var >= 0).all() and var.isfinite().all()):
        mean, var = torch.zeros_like(mean), torch.ones_like(var)
        write_populations({site: Population(mean, var)})
    pooled = site.pooled(site.of_samples(x, None))
    other = Population(pooled.mean + pooled.var.sqrt(), 2 * pooled.var + site.eps)
    try:
        changed = site.entry(site.shown(x, *(value.view(1, -1, 1) for value in other)))
        write_populations({site: other})
        direct = site.entry(x)
    except Exception:  # of foreign code, any kind
        return False
    error, size = (changed - direct).abs().max(), direct.abs().max()
    return bool(error <= 0.01 * size + 1e-6)


@contextmanager
def _hooked(
    sites: Iterable[NormSite], hook: Callable[[NormSite, Tensor, Mask], Tensor | None]
) -> Iterator[None]:
    """Calls `hook` with what enters each site, and shows the site what it returns instead."""

    def call(site: NormSite, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, mask = input_and_mask(args, kwargs)
        shown = hook(site, x, mask if isinstance(site.entry, Site) else None)
        if shown is None:
            return None
        if args:
            return (shown, *args[1:]), kwargs
        return args, kwargs | {next(iter(kwargs)): shown}

    with ExitStack() as hooks:
        for site in sites:
            handle = site.entry.register_forward_pre_hook(partial(call, site), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def pool_batches(site: NormSite, batches: list[Moments]) -> Population:
    """The moments of all samples of several batches, from those of each (arXiv:2105.07576)."""
    means = torch.stack([batch.mean for batch in batches])
    variances = torch.stack([batch.var for batch in batches])
    if not site.pools_samples:
        return Population(means.mean(dim=0), variances.mean(dim=0))
    counts = means.new_tensor([float(batch.count) for batch in batches])[:, None]
    mean, var, _ = pool(Moments(means, variances, counts), dim=0)
    return Population(mean[0], var[0])


def distances(running: Tensor, batches: Sequence[Tensor], scale: Tensor) -> Tensor:
    """|running - mean over batches| in standard deviations of these, by channel.

    Of constant channels, in thousandths of their scale.
    """
    if len(batches) < 2:
        return running.new_empty(0)
    values = torch.stack(list(batches)).double()
    spread = values.std(dim=0).maximum(1e-3 * scale.double())
    return (running.double() - values.mean(dim=0)).abs() / spread


def averaged_var(moments: Moments) -> Tensor:
    """The variance of a batch as running averages take it: n / (n - 1) times the biased one."""
    return unbiased(moments.var, moments.count)
