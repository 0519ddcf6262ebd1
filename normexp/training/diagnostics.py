"""What happens at each norm site as training goes on, recorded beside the metrics of each run."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, Measure, model_arguments
from normexp.norms.moments import widen
from normexp.norms.site import Site, as_maps, input_and_mask, named_sites
from normexp.norms.state import State, read_state
from normexp.training.module import TrainingTask

FLAT = 1e-2  # of the largest slope: below it a bounded function counts as saturated


class Diagnostics(pl.Callback):
    """Records `diagnostics/<site>/<name>` for every replica each few epochs, and at the end.

    The names are those of `measure_sites`. One forward and backward of a copy of each replica, in
    training mode on the first samples of the training split without augmentation, as many as a
    forward of training has: the training itself is not touched.

    Args:
        every: epochs between two records.
        elementwise: the norm takes no statistic, so `saturated` is a question to ask of it.
    """

    def __init__(self, every: int, *, elementwise: bool) -> None:
        self.every = every
        self.elementwise = elementwise

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingTask)
        if self._is_due(pl_module):
            self._record(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingTask)
        if not self._is_due(pl_module):
            self._record(trainer, pl_module)

    def _is_due(self, task: TrainingTask) -> bool:
        return task.step % (self.every * task.batches.steps_per_epoch) == 0

    def _record(self, trainer: pl.Trainer, task: TrainingTask) -> None:
        num_samples = min(task.recipe.sizes.micro, len(task.data.train))
        batch = task.data.train.gather(torch.arange(num_samples, device=task.device))
        batch["inputs"] = task.data.model_inputs(batch["inputs"], task.batches.dtype)
        devices = [task.device] if task.device.type == "cuda" else []
        rows = []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for index in range(task.replicas.num_replicas):
                network = task.replicas.replica(index)
                with trainer.precision_plugin.forward_context():
                    rows.append(
                        measure_sites(network, batch, task.measure, elementwise=self.elementwise)
                    )
        values = {f"diagnostics/{name}": [row[name] for row in rows] for name in rows[0]}
        task.recorder.record(task.position(task.step), values)


def measure_sites(
    network: nn.Module, batch: Batch, measure: Measure, *, elementwise: bool
) -> dict[str, float]:
    """`<site>/<name>` to a number, from one training forward and backward; the network changes.

    For each site, over the real values of its input x (N, C, P) and output y:

        input_mean, input_std   of x
        output_rms              sqrt(mean y^2)
        dead                    share of channels with y <= 0 everywhere, dead to a ReLU
        running_gap             mean over channels of |mean x - running_mean| / running std
        saturated               share of values whose slope |dy/dx| is below 1 % of the channel's
                                largest, that at x = 0 included; where `elementwise`
        weight_mean, weight_std of the parameter `weight`, and so for every other one
        grad_norm               2-norm of the loss gradient over the norm's parameters
    """
    network.train()
    calls: dict[str, _Call] = {}
    states = {name: read_state(site) for name, site in named_sites(network)}
    hooks = [
        site.register_forward_hook(partial(_keep_first, calls, name), with_kwargs=True)
        for name, site in named_sites(network)
    ]
    loss = measure(network(*model_arguments(batch)), batch)["loss"] / batch["targets"].numel()
    loss.backward()
    for hook in hooks:
        hook.remove()
    found: dict[str, Tensor] = {}
    for name, site in named_sites(network):
        rows = describe_parameters(site)
        if name in calls:
            rows |= describe_values(site, calls[name], states[name])
            if elementwise:
                rows["saturated"] = share_of_flat(site, calls[name])
        found |= {f"{name}/{key}": value for key, value in rows.items()}
    if not found:  # a model without norms
        return {}
    numbers = torch.stack([value.double() for value in found.values()]).tolist()
    return dict(zip(found, numbers, strict=True))


class _Call(NamedTuple):
    """One forward of a site; tensors as it received and returned them."""

    x: Tensor
    mask: Tensor | None
    y: Tensor


def _keep_first(
    calls: dict[str, _Call], name: str, _: Any, args: Any, kwargs: Any, y: Tensor
) -> None:
    x, mask = input_and_mask(args, kwargs)
    calls.setdefault(name, _Call(x.detach(), mask, y.detach()))


def describe_values(site: Site, call: _Call, state: State) -> dict[str, Tensor]:
    """The rows of `measure_sites` on input and output; `state` is from before the forward."""
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
    running_mean, running_var = (_find(state, name) for name in ("running_mean", "running_var"))
    if running_mean is not None and running_var is not None:
        gap = (x * real).sum(dim=(0, 2)) / num_real - running_mean
        if gap.shape == running_var.shape == x.shape[1:2]:
            rows["running_gap"] = (gap.abs() / running_var.sqrt()).mean()
    return rows


def _find(state: State, name: str) -> Tensor | None:
    """The buffer of this name, however deep the norm holds it."""
    return next((value for path, value in state.items() if path.split(".")[-1] == name), None)


def describe_parameters(site: Site) -> dict[str, Tensor]:
    """Mean and std of each parameter, and the norm of all gradients."""
    rows: dict[str, Tensor] = {}
    squares = []
    for path, parameter in site.named_parameters():
        values = widen(parameter.detach())
        name = path.removeprefix("norm.").removeprefix("norm.")  # a wrapped norm lies one deeper
        rows[f"{name}_mean"] = values.mean()
        rows[f"{name}_std"] = values.std(correction=0)
        if parameter.grad is not None:
            squares.append(widen(parameter.grad).square().sum())
    if squares:
        rows["grad_norm"] = torch.stack(squares).sum().sqrt()
    return rows


def share_of_flat(site: Site, call: _Call) -> Tensor:
    """Share of values where an elementwise norm is nearly flat, as a saturated tanh is."""
    at_zero = torch.zeros_like(call.x[:1])
    slopes = [_slopes(site, x, mask) for x, mask in ((call.x, call.mask), (at_zero, None))]
    steepest = torch.cat([s.amax(dim=2).amax(dim=0, keepdim=True) for s in slopes]).amax(dim=0)
    flat = slopes[0] < FLAT * steepest[:, None]
    if call.mask is None:
        return flat.double().mean()
    real = call.mask[:, None]
    return (flat & real).sum() / (real.sum() * flat.shape[1])


def _slopes(site: Site, x: Tensor, mask: Tensor | None) -> Tensor:
    """|dy/dx| (N, C, P) of a norm that acts on each value by itself."""
    x = x.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(site(x, mask).sum(), x)
    return as_maps(widen(slopes), site).abs()
