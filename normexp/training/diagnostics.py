"""Numbers that describe each norm site during training, recorded beside the metrics of a run."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, Loss, model_arguments
from normexp.norms.contract import State
from normexp.norms.moments import widen
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites
from normexp.norms.state import read_state
from normexp.training.module import TrainingModule
from normexp.training.statistics import gather

FLAT = 1e-2  # share of the largest slope, below which a bounded function counts as saturated


class Diagnostics(pl.Callback):
    """Records `diagnostics/<site>/<name>` for every replica every few epochs and at the end.

    See `measure_sites` for the names. A copy of each replica runs one forward and backward in
    training mode, on the first training samples without augmentation, as many as a forward of
    training has. The training itself is not affected.

    Args:
        every: epochs between two records.
        elementwise: the norm acts on each value by itself, so `saturated` is defined.
    """

    def __init__(self, every: int, *, elementwise: bool) -> None:
        self.every = every
        self.elementwise = elementwise

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record(trainer, pl_module, is_end=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record(trainer, pl_module, is_end=True)

    def _record(self, trainer: pl.Trainer, module: pl.LightningModule, *, is_end: bool) -> None:
        assert isinstance(module, TrainingModule)
        is_due = module.step % (self.every * module.batches.steps_per_epoch) == 0
        if is_due == is_end:  # the end of an epoch comes before that of the training
            return
        data, replicas = module.batches.data, module.replicas
        num_samples = min(module.recipe.sizes.micro, len(data.train))
        batch = gather(replicas, data, "train", torch.arange(num_samples))
        devices = [module.device] if module.device.type == "cuda" else []
        loss, rows = module.criterion.loss, []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for index in range(replicas.num_replicas):
                network = replicas.replica(index)
                with trainer.precision_plugin.forward_context():
                    rows.append(measure_sites(network, batch, loss, elementwise=self.elementwise))
        values = {f"diagnostics/{name}": [row[name] for row in rows] for name in rows[0]}
        module.recorder.record(module.position(module.step), values)


def measure_sites(
    network: nn.Module, batch: Batch, loss: Loss, *, elementwise: bool
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
    """
    network.train()
    sites = dict(named_sites(network))
    calls: dict[str, _Call] = {}  # the first of each site

    def keep(site: nn.Module, args: Any, kwargs: Any, y: Tensor, *, name: str) -> None:
        del site
        x, mask = input_and_mask(args, kwargs)
        calls.setdefault(name, _Call(x.detach(), mask, y.detach()))

    states = {name: read_state(site) for name, site in sites.items()}
    hooks = [
        site.register_forward_hook(partial(keep, name=name), with_kwargs=True)
        for name, site in sites.items()
    ]
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
        values |= {f"{name}/{key}": value for key, value in rows.items()}
    if not values:  # a model without norms
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


class _Call(NamedTuple):
    """Input and output of one forward of a site."""

    x: Tensor
    mask: Tensor | None
    y: Tensor


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
