"""The gradient of one optimizer step, taken part by part and in several processes if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normexp.batching.draws import derive_seed
from normexp.batching.processes import Processes
from normexp.batching.replicas import Batch, InTurn, Loss, Replicas, backward
from normexp.batching.sizes import WHOLE, Bounds, Share, Sizes
from normexp.norms.contract import State
from normexp.norms.site import merge_state, read_state, write_state

AddGradient = Callable[[Batch, Loss, float], Tensor]  # see `Replicas.add_gradient`


class StepGradient:
    """Computes the gradient of an optimizer step, part by part.

    A part is one forward and backward pass (a micro-batch). Every part starts from the buffers at
    the start of the step, which ends with the parts' buffers merged by their share of samples.

    Args:
        loss: of a model's output, summed over the targets.
        seeds: one per replica; with the step they determine every draw.
        processes: the processes that share each step; None for a single one.
        add_gradient: `replicas.add_gradient`, or its compiled form.
    """

    def __init__(
        self,
        replicas: Replicas,
        loss: Loss,
        sizes: Sizes,
        seeds: Sequence[int],
        processes: Processes | None = None,
        add_gradient: AddGradient | None = None,
    ) -> None:
        self.replicas = replicas
        self.loss = loss
        self.sizes = sizes
        self.seeds = seeds
        self.processes = processes
        self.share = processes.share if processes else WHOLE
        self._add_gradient = add_gradient or replicas.add_gradient
        self._dropout_keys: dict[int, Tensor] = {}  # (num_dropouts, S) of each drawn step

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

    def add(self, step: int, batch: Batch) -> Tensor:
        """Adds the gradient of `step`, counted from 0, to the parameters and updates the buffers.

        Loss and gradient are means over all targets of the step, so a short last part counts by
        its size.

        Args:
            batch: all samples of the step, values (S, N, ...), in every process.

        Returns:
            The loss of each replica (S,).
        """
        num_samples = batch["targets"].shape[1]
        bounds = self.sizes.micro_bounds(num_samples, self.share)
        if self.processes is None and len(bounds) == 1:
            return self._add_part(step, 0, batch, batch)
        start = read_state(self.replicas)
        losses = self._add_parts(step, batch, bounds, start)
        if self.processes is None:
            return losses
        shares = [Share(index, self.share.count) for index in range(self.share.count)]
        counts = [_num_samples(self.sizes.micro_bounds(num_samples, share)) for share in shares]
        self.processes.merge_buffers(self.replicas, start, counts)
        return self.processes.sum_gradients(self.replicas, losses, counts)

    def _add_parts(self, step: int, batch: Batch, bounds: list[Bounds], start: State) -> Tensor:
        """Runs the parts of this process; returns the sum of their losses (S,)."""
        losses, ends = [], []
        for first, last in bounds:
            if ends:
                write_state(self.replicas, start)
            part = {name: value[:, first:last] for name, value in batch.items()}
            losses.append(self._add_part(step, first, part, batch))
            ends.append(read_state(self.replicas))
        if len(bounds) > 1:
            shares = [(last - first) / _num_samples(bounds) for first, last in bounds]
            write_state(self.replicas, merge_state(self.replicas, start, ends, shares))
        if not losses:  # a short batch may leave this process without samples
            return next(self.replicas.parameters()).new_zeros(self.replicas.num_replicas)
        return torch.stack(losses).sum(dim=0)

    def _add_part(self, step: int, first_sample: int, part: Batch, batch: Batch) -> Tensor:
        """All randomness of its forward is a function of (seed, step, sample)."""
        replicas, num_targets = self.replicas, batch["targets"][0].numel()
        if replicas.num_dropouts:
            if step not in self._dropout_keys:
                self.draw(range(step, step + 1))
            replicas.set_dropout(self._dropout_keys[step], first_sample)
        if isinstance(replicas, InTurn) and replicas.has_foreign_draws:
            index = step * self.sizes.batch_size + first_sample
            replicas.seed_foreign_draws([derive_seed(s, "foreign", index) for s in self.seeds])
        return self._add_gradient(part, self.loss, 1 / num_targets) / num_targets


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

    def add_gradient(batch: Batch, loss: Loss, weight: float) -> Tensor:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()
        return backward(measure(batch, loss), weight)  # compiled with its backward

    return add_gradient
