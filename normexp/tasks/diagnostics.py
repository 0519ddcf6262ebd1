"""What happens at each norm site as training goes on, recorded beside the metrics of each run."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, Measure, model_arguments
from normexp.norms.contract import Site, named_sites
from normexp.norms.views import as_maps, received
from normexp.tasks.training import TrainingTask

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
        batch["inputs"] = task.data.model_inputs(batch["inputs"], task.dtype)
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

        input_mean, input_std       of x
        output_rms                  sqrt(mean y^2)
        dead                        share of channels with y <= 0 everywhere: a ReLU behind it is dead
        running_gap                 mean over channels of |mean x - running_mean| / running std
        saturated                   share of values whose slope |dy/dx| is below 1 % of the channel's
                                    largest, that at x = 0 included; where `elementwise`
        <parameter>_mean, _std      of each parameter, such as weight and bias
        grad_norm                   2-norm of the loss gradient over the norm's parameters
    """
    found: dict[str, Tensor] = {}
    network.train()
    hooks = []
    for name, site in named_sites(network):
        watch = _Watch(name, site, found, elementwise=elementwise)
        hooks.append(site.register_forward_pre_hook(watch.before, with_kwargs=True))
        hooks.append(site.register_forward_hook(watch.after, with_kwargs=True))
    loss = measure(network(*model_arguments(batch)), batch)["loss"] / batch["targets"].numel()
    loss.backward()
    for hook in hooks:
        hook.remove()
    for name, site in named_sites(network):
        found |= {f"{name}/{key}": value for key, value in describe_parameters(site).items()}
    numbers = torch.stack([value.double() for value in found.values()]).tolist()
    return dict(zip(found, numbers, strict=True))


class _Watch:
    """Describes what passes through one site, at its first call."""

    def __init__(
        self, name: str, site: Site, found: dict[str, Tensor], *, elementwise: bool
    ) -> None:
        self.name = name
        self.site = site
        self.found = found
        self.elementwise = elementwise

    @torch.no_grad()
    def before(self, _: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if self._is_known():
            return
        x, real = self._real(args, kwargs)
        values = x[real.expand_as(x)]
        self._keep("input_mean", values.mean())
        self._keep("input_std", values.std(unbiased=False))
        gap = running_gap(self.site, x, real)
        if gap is not None:
            self._keep("running_gap", gap)
        if self.elementwise:
            slopes = find_slopes(self.site, *received(args, kwargs))
            self._keep("saturated", share_of_flat(slopes, real))

    @torch.no_grad()
    def after(
        self,
        _: object,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        if f"{self.name}/output_rms" in self.found:
            return
        _, real = self._real(args, kwargs)
        y = as_maps(output.float(), self.site)
        self._keep("output_rms", y[real.expand_as(y)].square().mean().sqrt())
        self._keep("dead", ((y <= 0) | ~real).all(dim=2).all(dim=0).float().mean())
