"""Numbers that describe each norm site during training, recorded beside the metrics of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, Loss, model_arguments
from normexp.norms.contract import State
from normexp.norms.moment_sites import NormSite, find_sites, pool_batches, watching
from normexp.norms.moments import Moments, widen
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites
from normexp.norms.state import read_state, write_state
from normexp.training.module import TrainingModule
from normexp.training.statistics import block_size, gather, shuffled

NUM_GROUPS = 8  # that share statistics, to see how these scatter; fewer only if data are short
FEWEST_GROUPS = 4
FLAT = 1e-2  # share of the largest slope, below which a bounded function counts as saturated


class Diagnostics(pl.Callback):
    """Records `diagnostics/<site>/<name>` for every replica every few epochs and at the end.

    See `measure_sites` and `measure_groups` for the names. A copy of each replica runs one forward
    and backward in training mode, on the first training samples without augmentation, as many as a
    forward of training has; if samples mix, also forwards of NUM_GROUPS groups that share
    statistics. The training itself is not affected.

    Args:
        every: epochs between two records.
        elementwise: the norm acts on each value by itself, so `saturated` is defined.
        mixes_samples: the norm takes statistics over samples.
    """

    def __init__(self, every: int, *, elementwise: bool, mixes_samples: bool = False) -> None:
        self.every = every
        self.elementwise = elementwise
        self.mixes_samples = mixes_samples

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record(trainer, pl_module, is_end=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record(trainer, pl_module, is_end=True)

    def _record(self, trainer: pl.Trainer, module: pl.LightningModule, *, is_end: bool) -> None:
        assert isinstance(module, TrainingModule)
        is_due = module.step % (self.every * module.batches.steps_per_epoch) == 0
        if is_due == is_end:  # the end of an epoch comes before that of the training
            return
        data, replicas, sizes = module.batches.data, module.replicas, module.recipe.sizes
        num_samples = min(sizes.micro, len(data.train))
        batch = gather(replicas, data, "train", torch.arange(num_samples))
        batches = []
        if self.mixes_samples:
            indices = shuffled(data, "train")[: max(sizes.micro, NUM_GROUPS * sizes.norm)]
            limit = module.recipe.evaluation_limit
            blocks = indices.split(block_size(replicas, sizes.norm, limit))
            batches = [gather(replicas, data, "train", block) for block in blocks]
        devices = [module.device] if module.device.type == "cuda" else []
        loss, rows, rates = module.criterion.loss, [], _rates_of(module)
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for network, lr in zip(map(replicas.replica, range(len(rates))), rates, strict=True):
                with trainer.precision_plugin.forward_context():
                    of_groups = measure_groups(network, batches, sizes.norm) if batches else {}
                    of_sites = measure_sites(
                        network, batch, loss, elementwise=self.elementwise, lr=lr
                    )
                rows.append(of_sites | of_groups)
        values = {f"diagnostics/{name}": [row[name] for row in rows] for name in rows[0]}
        module.recorder.record(module.position(module.step), values)


def _rates_of(module: TrainingModule) -> list[float | None]:
    """The learning rate of each replica's last step; None for optimizers other than SGD."""
    optimizer, count = module.optimizers(use_pl_optimizer=False), module.replicas.num_replicas
    if not isinstance(optimizer, torch.optim.SGD):
        return [None] * count
    lr = optimizer.param_groups[0]["lr"]
    return [lr * scale for scale in module.recipe.lr_scales or [1.0] * count]


def measure_sites(
    network: nn.Module, batch: Batch, loss: Loss, *, elementwise: bool, lr: float | None = None
) -> dict[str, float]:
    """Returns `<site>/<name>` to a number, from one training forward and backward of `network`.

    Over the real values of each site's input x (N, C, P) and output y:

        input_mean, input_std   of x
        output_rms              sqrt(mean y^2)
        dead                    share of channels with y <= 0 everywhere, dead to a ReLU
        running_gap             mean over channels of |mean x - running_mean| / running std
        saturated               share of values whose slope |dy/dx| is below 1 % of the channel's
                                largest slope, including the one at x = 0; if `elementwise`
        weight_mean, weight_std of the parameter `weight`; the same for every other parameter
        grad_norm               2-norm of the loss gradient over the norm's parameters
        effective_lr            lr / |w|^2 of the layer whose output is x; if `lr` is given. The
                                norm undoes the scale of w, so SGD turns w by this rate times the
                                gradient at |w| = 1 (arXiv:1706.05350)
    """
    network.train()
    sites = dict(named_sites(network))
    calls: dict[str, _Call] = {}  # the first of each site
    outputs: dict[int, tuple[nn.Module, Tensor]] = {}  # of layers, by identity

    def keep_output(layer: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[id(output)] = layer, output

    def keep(site: nn.Module, args: Any, kwargs: Any, y: Tensor, *, name: str) -> None:
        del site
        x, mask = input_and_mask(args, kwargs)
        layer, _ = outputs.get(id(x), (None, None))
        calls.setdefault(name, _Call(x.detach(), mask, y.detach(), layer))

    states = {name: read_state(site) for name, site in sites.items()}
    hooks = [
        site.register_forward_hook(partial(keep, name=name), with_kwargs=True)
        for name, site in sites.items()
    ]
    hooks += [layer.register_forward_hook(keep_output) for layer in _weight_layers(network)]
    output = network(*model_arguments(batch))
    (loss(output, batch) / batch["targets"].numel()).backward()
    for hook in hooks:
        hook.remove()
    values: dict[str, Tensor] = {}
    for name, site in sites.items():
        rows = _describe_parameters(site)
        if name in calls:
            rows |= _describe_values(site, calls[name], states[name])
            if elementwise:
                rows["saturated"] = _share_of_flat(site, calls[name])
            if lr is not None and (layer := calls[name].layer) is not None:
                rows["effective_lr"] = lr / widen(layer.weight.detach()).square().sum()
        values |= {f"{name}/{key}": value for key, value in rows.items()}
    if not values:  # a model without norms
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


class _Call(NamedTuple):
    """Input and output of one forward of a site, and the layer with weights before it."""

    x: Tensor
    mask: Tensor | None
    y: Tensor
    layer: Any


def _weight_layers(network: nn.Module) -> Iterator[nn.Module]:
    """Modules with a weight of their own that is a matrix or a filter."""
    for module in network.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.ndim > 1:
            yield module


def measure_groups(
    network: nn.Module, batches: Sequence[Batch], group_size: int
) -> dict[str, float]:
    """Returns `<site>/<name>` to a number: how statistics differ between groups that share them.

    Of every norm with running mean and variance, from training forwards of `batches`; the state
    is restored. Over groups of `group_size` samples, in the mean over channels that vary:

        mean_scatter    sd of the groups' means, in sd of all values
        var_scatter     sd of the groups' variances, in variances of all values
        mean_distance   |running_mean - mean of all values|, in sd of the groups' means
        var_distance    |running_var - variance of all values|, in sd of the groups' variances

    With independent samples the scatter falls as 1 / sqrt(group size).
    """
    sites, start = [site for site in find_sites(network) if site.pools_samples], read_state(network)
    groups: dict[NormSite, list[Moments]] = {site: [] for site in sites}
    network.train()
    for _, site in named_sites(network):
        site.norm_batch_size = group_size
    for batch in batches:
        with torch.no_grad(), watching(sites) as seen:
            network(*model_arguments(batch))
        write_state(network, start)
        for site in sites:
            for samples in seen[site][:1]:
                groups[site] += _groups_of(site, samples)
    values: dict[str, Tensor] = {}
    for site in sites:
        if len(groups[site]) >= FEWEST_GROUPS:
            rows = _describe_groups(site, groups[site])
            values |= {f"{site.name}/{name}": value for name, value in rows.items()}
    if not values:
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _groups_of(site: NormSite, samples: Moments) -> list[Moments]:
    """The moments (C,) of each whole group of samples that share statistics."""
    size = site.group_size(len(samples.mean))
    starts = range(0, len(samples.mean) - size + 1, size)

    def part(value: Any, start: int) -> Any:
        return value[start : start + size] if isinstance(value, Tensor) else value

    return [site.pooled(Moments(*(part(value, k) for value in samples))) for k in starts]


def _describe_groups(site: NormSite, groups: list[Moments]) -> dict[str, Tensor]:
    mean, var = pool_batches(site, groups)
    mean_sd = torch.stack([group.mean for group in groups]).std(dim=0)
    var_sd = torch.stack([group.var for group in groups]).std(dim=0)
    varies = (mean_sd > 0) & (var_sd > 0)

    def over_channels(values: Tensor) -> Tensor:
        return values[varies].mean()  # NaN if every channel is constant: not recorded

    rows = {
        "mean_scatter": over_channels(mean_sd / var.sqrt()),
        "var_scatter": over_channels(var_sd / var),
    }
    if site.has_averages:
        running_mean, running_var = site.running
        rows["mean_distance"] = over_channels((running_mean - mean).abs() / mean_sd)
        rows["var_distance"] = over_channels((running_var - var).abs() / var_sd)
    return rows


def _describe_values(site: Site, call: _Call, state: State) -> dict[str, Tensor]:
    """Returns the numbers about input and output; `state` is from before the forward."""
    x, y = (as_maps(widen(value), site) for value in (call.x, call.y))
    real = torch.ones_like(x[:, :1]) if call.mask is None else call.mask[:, None].to(x.dtype)
    num_real = real.sum()
    count = num_real * x.shape[1]
    mean = (x * real).sum() / count
    rows = {
        "input_mean": mean,
        "input_std": ((x - mean).square() * real).sum().div(count).sqrt(),
        "output_rms": (y.square() * real).sum().div(count).sqrt(),
        "dead": (y * real <= 0).all(dim=2).all(dim=0).double().mean(),
    }
    running: dict[str, Tensor] = {}  # at any depth of the norm, the first of each name
    for path, value in state.items():
        running.setdefault(path.rpartition(".")[2], value)
    if {"running_mean", "running_var"} <= running.keys():
        gap = (x * real).sum(dim=(0, 2)) / num_real - running["running_mean"]
        if gap.shape == running["running_var"].shape == x.shape[1:2]:
            rows["running_gap"] = (gap.abs() / running["running_var"].sqrt()).mean()
    return rows


def _describe_parameters(site: Site) -> dict[str, Tensor]:
    """Returns mean and std of each parameter, and the norm of all gradients."""
    rows: dict[str, Tensor] = {}
    squares = []
    for path, parameter in site.named_parameters():
        name = re.sub(r"^(norm\.){1,2}", "", path)  # a wrapped norm is one level deeper
        values = widen(parameter.detach())
        rows |= {f"{name}_mean": values.mean(), f"{name}_std": values.std(correction=0)}
        if parameter.grad is not None:
            squares.append(widen(parameter.grad).square().sum())
    if squares:
        rows["grad_norm"] = torch.stack(squares).sum().sqrt()
    return rows


def _share_of_flat(site: Site, call: _Call) -> Tensor:
    """Returns the share of values where an elementwise norm is nearly flat."""

    def slopes(x: Tensor, mask: Tensor | None) -> Tensor:  # |dy/dx| (N, C, P)
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(site(x, mask).sum(), x)
        return as_maps(widen(gradient), site).abs()

    at_values, at_zero = slopes(call.x, call.mask), slopes(torch.zeros_like(call.x[:1]), None)
    steepest = torch.cat([s.amax(dim=2).amax(dim=0, keepdim=True) for s in (at_values, at_zero)])
    flat = at_values < FLAT * steepest.amax(dim=0)[:, None]
    if call.mask is None:
        return flat.double().mean()
    real = call.mask[:, None]
    return (flat & real).sum() / (real.sum() * flat.shape[1])
