"""One optimizer step: its gradient, in parts and in several processes, and the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from normexp.errors import UserError
from normexp.norms.base import wide_dtype
from normexp.norms.contract import State
from normexp.norms.site import read_state, state_after, write_state
from normexp.training.batching.draws import derive_seed
from normexp.training.batching.processes import Processes
from normexp.training.batching.replicas import (
    Batch,
    InTurn,
    Loss,
    Replicas,
    Weight,
    backward,
)
from normexp.training.config.keys import RunningFrom
from normexp.training.config.sizes import WHOLE, Bounds, Share, Sizes
from normexp.training.criterion import Criterion
from normexp.training.optimizer import OwnRates

AddGradient = Callable[[Batch, Loss, Weight], Tensor]  # see `Replicas.add_gradient`


@dataclass(eq=False)
class Step:
    """Takes the optimizer steps of a training.

    Args:
        scheduler: moves the learning rates after each step; None if validations do.
        scheduled_rates: what the scheduler set last, for each group of the optimizer.
        max_grad_norm: of each replica, see `Replicas.clip_gradients`; None: no clipping.
        rates: each replica's own learning rate; None if all have that of the optimizer.
    """

    gradient: StepGradient
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scheduled_rates: list[float]
    max_grad_norm: float | None = None
    rates: OwnRates | None = None

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        return learning_rates(self.optimizer)[0]

    def take(self, index: int, batch: Batch) -> Tensor:
        """Takes step `index`, counted from 0; returns the loss of each replica (S,).

        Args:
            batch: all samples of the step, values (S, N, ...), in every process.

        Raises:
            UserError: a callback has set a learning rate, which the scheduler would set anew.
        """
        if self.scheduler is not None and learning_rates(self.optimizer) != self.scheduled_rates:
            raise UserError(
                f"callback: one sets the learning rate of the optimizer, before step {index + 1}, "
                "and the schedule sets it anew after each step; write a schedule instead, see "
                "conf/README.md, as schedule=my_schedule.triangle"
            )
        torch.clear_autocast_cache()  # of weights before the last update
        self.optimizer.zero_grad()
        losses = self.gradient.add(index, batch)
        if self.max_grad_norm is not None:
            self.gradient.replicas.clip_gradients(self.max_grad_norm)
        if self.rates is None:
            self.optimizer.step()
        else:
            self.rates.step(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step()
            self.scheduled_rates = learning_rates(self.optimizer)
        return losses


def learning_rates(optimizer: Optimizer) -> list[float]:
    """That of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


@dataclass(eq=False)
class StepGradient:
    """Computes the gradient of an optimizer step, part by part.

    A part is one forward and backward pass (a micro-batch). `state_after` says with which buffers
    a part begins and the step ends.

    Args:
        criterion: its loss is summed over the targets that count.
        seeds: one per replica; with the step they determine every draw.
        running_from: what the running averages of a step in parts are taken from.
        processes: the processes that share each step; None for a single one.
        compiled: `replicas.add_gradient` in its compiled form.
    """

    replicas: Replicas
    criterion: Criterion
    sizes: Sizes
    seeds: Sequence[int]
    running_from: RunningFrom = "step"
    processes: Processes | None = None
    compiled: AddGradient | None = None

    def __post_init__(self) -> None:
        self.share = self.processes.share if self.processes else WHOLE
        self._loss = self.criterion.loss  # one object, else a compiled step is compiled anew
        self._dropout_keys: dict[int, Tensor] = {}  # of each drawn step

    def draw(self, steps: range) -> None:
        """Draws the dropout keys of steps at once: a copy per step would wait for the device."""
        count = self.replicas.num_dropouts
        if not count:
            return
        keys = [
            [derive_seed(seed, "dropout", step * count + i) for seed in self.seeds]
            for step in steps
            for i in range(count)
        ]
        device = next(self.replicas.parameters()).device
        drawn = torch.tensor(keys, device=device).unflatten(0, (len(steps), count))
        self._dropout_keys = dict(zip(steps, drawn, strict=True))

    def dropout_keys(self, step: int) -> Tensor | None:
        """The keys of a step, int64 (num_dropouts, S); None without dropout."""
        if not self.replicas.num_dropouts:
            return None
        if step not in self._dropout_keys:
            self.draw(range(step, step + 1))
        return self._dropout_keys[step]

    def add(self, step: int, batch: Batch) -> Tensor:
        """Adds the gradient of `step`, counted from 0, to the parameters and updates the buffers.

        Loss and gradient are means over all targets of the step that count, so a short last part
        counts by its size.

        Args:
            batch: all samples of the step, values (S, N, ...), in every process.

        Returns:
            The loss of each replica (S,).
        """
        num_samples, keys = batch["targets"].shape[1], self.dropout_keys(step)
        bounds = self.sizes.micro_bounds(num_samples, self.share)
        if self.processes is None and len(bounds) == 1:
            return self._add_part(step, 0, batch, batch, keys)
        start = read_state(self.replicas)
        losses = self._add_parts(step, batch, bounds, start, keys)
        if self.processes is None:
            return losses
        shares = [Share(index, self.share.count) for index in range(self.share.count)]
        counts = [_num_samples(self.sizes.micro_bounds(num_samples, share)) for share in shares]
        self.processes.merge_buffers(self.replicas, start, counts, self.running_from)
        return self.processes.sum_gradients(self.replicas, losses, counts)

    def _add_parts(
        self, step: int, batch: Batch, bounds: list[Bounds], start: State, keys: Tensor | None
    ) -> Tensor:
        """Runs the parts of this process; returns the sum of their losses (S,)."""
        losses, ends = [], []
        for first, last in bounds:
            if ends and self.running_from != "sequence":
                write_state(self.replicas, start)
            part = {name: value[:, first:last] for name, value in batch.items()}
            losses.append(self._add_part(step, first, part, batch, keys))
            ends.append(read_state(self.replicas))
        if len(bounds) > 1:
            shares = [(last - first) / _num_samples(bounds) for first, last in bounds]
            end = state_after(self.replicas, start, ends, shares, self.running_from)
            write_state(self.replicas, end)
        if not losses:  # a short batch may leave this process without samples
            return next(self.replicas.parameters()).new_zeros(self.replicas.num_replicas)
        return torch.stack(losses).sum(dim=0)

    def _add_part(
        self, step: int, first_sample: int, part: Batch, batch: Batch, keys: Tensor | None
    ) -> Tensor:
        """All randomness of its forward is a function of (seed, step, sample)."""
        replicas = self.replicas
        num_targets = self.criterion.num_targets(batch["targets"])
        if isinstance(num_targets, Tensor):  # all may be ignored, then loss and gradient are 0
            dtype = wide_dtype(next(replicas.parameters()))
            num_targets = num_targets.where(num_targets > 0, 1).to(dtype)
        if keys is not None:
            replicas.set_dropout(keys, first_sample)
        if isinstance(replicas, InTurn) and replicas.has_foreign_draws:
            index = step * self.sizes.batch_size + first_sample
            replicas.seed_foreign_draws([derive_seed(s, "foreign", index) for s in self.seeds])
        add_gradient = self.compiled or replicas.add_gradient
        return add_gradient(part, self._loss, 1 / num_targets) / num_targets


def _num_samples(bounds: list[Bounds]) -> int:
    return sum(last - first for first, last in bounds)


def compiled_gradient(replicas: Replicas, sizes: Sizes, device: torch.device) -> AddGradient:
    """Returns `replicas.add_gradient` with forward and backward through torch.compile.

    On a GPU a step of one forward is replayed as a CUDA graph (mode `reduce-overhead`). Not with
    accumulation: gradients in a graph's memory must not outlive its next replay.
    """
    torch.compiler.reset()  # its limit of recompilations counts over all networks of a process
    replays = device.type == "cuda" and sizes.micro == sizes.batch_size
    measure = torch.compile(replicas.measure, mode="reduce-overhead" if replays else None)

    def add_gradient(batch: Batch, loss: Loss, weight: Weight) -> Tensor:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()
        return backward(measure(batch, loss), weight)  # compiled with its backward

    return add_gradient
