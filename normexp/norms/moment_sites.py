"""The norms of any network that keep running mean and variance, and the moments of their inputs.

In evaluation such a norm computes f((x - running_mean) / sqrt(running_var + eps)). A change of its
input alone makes it use any other moments, which may differ between samples:

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

from normexp.norms.base import (
    Moments,
    measure,
    pool,
    pool_with_others,
    unbiased,
    widen,
    zero_padding,
)
from normexp.norms.contract import Mask
from normexp.norms.sample import InstanceNorm
from normexp.norms.samples import FIRST_AXIS, SampleOrder
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites

INSTANCE = (InstanceNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(eq=False)
class MomentSite:
    """A place of any network where a norm with running moments sits, with or without a `Site`.

    Attributes:
        name: its path.
        norm: holds the running moments.
        entry: the module whose input `norm` normalizes: `norm` itself, or the `Site` around it.
        pools_samples: False for instance norm, whose training statistics are those of each sample.
        has_averages: False if it keeps no running moments (track_running_stats=False).
        mean, var: names of the running moments among the attributes of `norm`.
        order: of the samples in the input of `entry`.
    """

    name: str
    norm: Any
    entry: nn.Module
    pools_samples: bool
    has_averages: bool
    mean: str = "running_mean"
    var: str = "running_var"
    order: SampleOrder = FIRST_AXIS

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose training mode decides which statistics are used."""
        return list(self.entry.modules()) if isinstance(self.entry, Site) else [self.norm]

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Running mean and variance (C,), in float32 or wider."""
        mean, var = getattr(self.norm, self.mean), getattr(self.norm, self.var)
        return widen(mean.detach().flatten()), widen(var.detach().flatten())

    @property
    def eps(self) -> float:
        """The constant that the norm adds to a variance; torch's default if it does not say."""
        eps = getattr(self.norm, "eps", None)
        return 1e-5 if eps is None else float(eps)

    @property
    def counter(self) -> int | None:
        """The number of updates so far; None if the norm does not count them."""
        counter = getattr(self.norm, "num_batches_tracked", None)
        return int(counter.max()) if isinstance(counter, Tensor) and counter.numel() else None

    def group_size(self, num_samples: int) -> int:
        """Returns how many samples of a training forward of `num_samples` share statistics."""
        if not self.pools_samples:
            return 1
        sizes = [getattr(self.entry, "norm_batch_size", None), getattr(self.norm, "ghost_size", 0)]
        return min([num_samples, *(size for size in sizes if size)])

    def maps(self, x: Tensor) -> Tensor:
        """Returns the input of `entry` as (N, C, P); the rows of a sample are positions."""
        num_rows = self.order.rows_per_sample(x)
        rows = as_maps(self.order.arrange(x, num_rows), self.entry)
        return rows.unflatten(0, (-1, num_rows)).transpose(1, 2).flatten(2)

    def like_input(self, maps: Tensor, x: Tensor) -> Tensor:
        """Returns maps (N, C, P) in the shape and dtype of the input x of `entry`."""
        num_rows = self.order.rows_per_sample(x)
        rows = maps.unflatten(2, (num_rows, -1)).transpose(1, 2).flatten(0, 1)
        if isinstance(self.entry, Site) and self.entry.view != "map":
            rows = rows.transpose(1, 2)
        arranged = rows.reshape(self.order.arrange(x, num_rows).shape)
        return self.order.restore(arranged, num_rows).to(x.dtype)

    def measure_samples(self, x: Tensor, mask: Mask) -> Moments:
        """Returns the moments (N, C, 1) of each sample over its positions."""
        maps = widen(self.maps(x.detach()))
        if mask is not None:
            mask = self.order.arrange(mask, self.order.rows_per_sample(x)).reshape(len(maps), 1, -1)
        return measure(zero_padding(maps, mask), mask, (2,))

    def pooled(self, samples: Moments) -> Moments:
        """Returns the (biased) moments (C,) that the running moments average in a training forward.

        Args:
            samples: moments (N, C, 1) of the samples of the forward.
        """
        mean, var, count = pool(samples, dim=0)
        if not self.pools_samples:
            var, count = samples.var.mean(dim=0, keepdim=True), samples.count
            count = count.float().mean() if isinstance(count, Tensor) else count
        total = count.flatten()[0] if isinstance(count, Tensor) else count
        return Moments(mean.flatten(), var.flatten(), total)

    def moved_input(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Returns x' by which the norm uses `mean` and `var` (N or 1, C, 1) in evaluation."""
        running_mean, running_var = (value.view(1, -1, 1) for value in self.running)
        scale = torch.sqrt((running_var + self.eps) / (var + self.eps))
        return self.like_input((widen(self.maps(x)) - mean) * scale + running_mean, x)


def find_sites(model: nn.Module) -> list[MomentSite]:
    """Returns every norm that keeps mean and variance of its channels, or could keep them."""
    around = dict[nn.Module, tuple[str, Site]]()  # the site around a module, with its name
    for name, site in named_sites(model):
        around |= dict.fromkeys(site.modules(), (name, site))
    sites = []
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        moments = [buffers.get("running_mean"), buffers.get("running_var")]
        has_averages = all(isinstance(m, Tensor) and m.ndim == 1 for m in moments)
        pools_samples = not isinstance(module, INSTANCE)
        lacks_averages = pools_samples and getattr(module, "running_mean", 0) is None
        if (has_averages and hasattr(module, "eps")) or lacks_averages:
            name, entry = around.get(module, (path, module))
            name = name or "the model"
            sites.append(MomentSite(name, module, entry, pools_samples, has_averages))
    return sites


# Of the samples in each call of a site within a forward.
SampleMoments = dict[MomentSite, list[Moments]]


@contextmanager
def watching(sites: list[MomentSite]) -> Iterator[SampleMoments]:
    """Collects the moments of the samples that pass each site inside the block."""
    samples: SampleMoments = {site: [] for site in sites}

    def watch(site: MomentSite, x: Tensor, mask: Mask) -> None:
        samples[site].append(site.measure_samples(x, mask))

    with _hooked(sites, watch):
        yield samples


@contextmanager
def inputs_to(sites: list[MomentSite]) -> Iterator[dict[MomentSite, Tensor]]:
    """Keeps the input of each site's first call."""
    inputs: dict[MomentSite, Tensor] = {}

    def keep(site: MomentSite, x: Tensor, _: Mask) -> None:
        inputs.setdefault(site, x)

    with _hooked(sites, keep):
        yield inputs


class Population(NamedTuple):
    """Mean and biased variance (C,) over many samples."""

    mean: Tensor
    var: Tensor


# The moments (N or 1, C, 1) to normalize by, from a site, its input and mask, and those of a
# population (1, C, 1).
Rule = Callable[[MomentSite, Tensor, Mask, Population], Population]


def of_population(site: MomentSite, x: Tensor, mask: Mask, population: Population) -> Population:
    del site, x, mask
    return population


def with_own_share(site: MomentSite, x: Tensor, mask: Mask, population: Population) -> Population:
    """For each sample, the moments expected of a training batch that holds it.

    With m_i, v_i the moments of the sample, m, v those of the population and a = 1 / n the share of
    a sample in a batch of n (arXiv:1904.06031), these are a m_i + (1 - a) m and
    a v_i + (1 - a) v + a (1 - a) (m_i - m)^2. The variation of the mean of the other samples is
    left out, so that it counts as training noise.
    """
    samples = site.measure_samples(x, mask)
    share = 1 / site.group_size(len(samples.mean))
    return Population(*pool_with_others(samples, share, *population))


@contextmanager
def with_moments(
    populations: Mapping[MomentSite, Sequence[Population]], rule: Rule = of_population
) -> Iterator[None]:
    """Norms in evaluation mode use moments by a rule.

    Args:
        populations: of each site, one for each of its calls within a forward.
    """
    num_calls = dict.fromkeys(populations, 0)

    def move(site: MomentSite, x: Tensor, mask: Mask) -> Tensor:
        calls = populations[site]
        population = calls[min(num_calls[site], len(calls) - 1)]
        num_calls[site] += 1
        by_channel = Population(*(value.view(1, -1, 1) for value in population))
        return site.moved_input(x, *rule(site, x, mask, by_channel))

    with _hooked(populations, move):
        yield


def write_populations(populations: Mapping[MomentSite, Population]) -> None:
    """Writes moments into the running ones."""
    for site, population in populations.items():
        for name, value in zip((site.mean, site.var), population, strict=True):
            running = getattr(site.norm, name)
            running.copy_(value.view_as(running))


def can_be_shown(site: MomentSite, x: Tensor) -> bool:
    """True if the norm's evaluation depends on running moments as this file assumes.

    Compares, on an input of the network, other running moments with a change of the input instead.
    The norm must be in evaluation mode, and its state is changed.
    """
    mean, var = site.running
    if x.dim() < 2 or site.maps(x).shape[1] != len(mean):
        return False
    if not (mean.isfinite().all() and (var >= 0).all() and var.isfinite().all()):
        write_populations({site: Population(torch.zeros_like(mean), torch.ones_like(var))})
    pooled = site.pooled(site.measure_samples(x, None))
    other = Population(pooled.mean + pooled.var.sqrt(), 2 * pooled.var + site.eps)
    try:
        moved = site.moved_input(x, other.mean.view(1, -1, 1), other.var.view(1, -1, 1))
        by_input = site.entry(moved)
        write_populations({site: other})
        by_moments = site.entry(x)
    except Exception:  # foreign code may raise anything
        return False
    error = (by_input - by_moments).abs().max()
    return bool(error <= 0.01 * by_moments.abs().max() + 1e-6)


@contextmanager
def _hooked(
    sites: Iterable[MomentSite], hook: Callable[[MomentSite, Tensor, Mask], Tensor | None]
) -> Iterator[None]:
    """Calls `hook` with the input of each site, which is replaced by what the hook returns."""

    def call(site: MomentSite, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, mask = input_and_mask(args, kwargs)
        moved = hook(site, x, mask if isinstance(site.entry, Site) else None)
        if moved is None:
            return None
        if args:
            return (moved, *args[1:]), kwargs
        return args, kwargs | {next(iter(kwargs)): moved}

    with ExitStack() as hooks:
        for site in sites:
            handle = site.entry.register_forward_pre_hook(partial(call, site), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def pool_batches(site: MomentSite, batches: list[Moments]) -> Population:
    """Returns the moments of all samples of several batches, from those of each batch.

    This is precise batch norm (arXiv:2105.07576).
    """
    means = torch.stack([batch.mean for batch in batches])
    variances = torch.stack([batch.var for batch in batches])
    if not site.pools_samples:
        return Population(means.mean(dim=0), variances.mean(dim=0))
    counts = means.new_tensor([float(batch.count) for batch in batches])[:, None]
    mean, var, _ = pool(Moments(means, variances, counts), dim=0)
    return Population(mean[0], var[0])


def averaged(site: MomentSite, batches: list[Moments]) -> Population:
    """Returns running averages of the moments of batches, at the norm's momentum, the last newest.

    They leave out the variance between batches. Torch's momentum counts where the norm names none.
    """
    momentum = getattr(site.norm, "momentum", None) or 0.1
    ages = torch.arange(len(batches) - 1, -1, -1)
    weights = ((1 - momentum) ** ages).to(batches[0].mean)[:, None]
    means = torch.stack([batch.mean for batch in batches])
    variances = torch.stack([averaged_var(batch) for batch in batches])
    mean, var = ((weights * values).sum(dim=0) / weights.sum() for values in (means, variances))
    return Population(mean, var)


def distances(running: Tensor, batches: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Returns |running - mean over batches| of each channel, in standard deviations over batches.

    The unit is at least a thousandth of `scale`, for channels that are constant.
    """
    if len(batches) < 2:
        return running.new_empty(0)
    values = torch.stack(list(batches)).double()
    spread = values.std(dim=0).maximum(1e-3 * scale.double())
    return (running.double() - values.mean(dim=0)).abs() / spread


def averaged_var(moments: Moments) -> Tensor:
    """Returns the variance of a batch that running averages take, which is the unbiased one."""
    return unbiased(moments.var, moments.count)
