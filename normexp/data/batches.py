"""Training batches: index gathers from tensors on the device, for all replicas at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.data.dataset import Data, Examples, Windows


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """A permutation of the samples, int64 (num_samples,) on the CPU."""
    return torch.randperm(num_samples, generator=generator(seed, "order", epoch))


def window_offset(seed: int, epoch: int, block_size: int) -> int:
    """Offset of the windows of an epoch, in [0, block_size): each epoch cuts the text anew."""
    return int(torch.randint(block_size, (), generator=generator(seed, "order", epoch)))


Batch = dict[str, Tensor]

_MAX_AT_ONCE = 2**22  # values that are converted to float at once; 16 MB


class TrainingBatches:
    """The batches of each optimizer step; replica r draws order and augmentation from `seeds[r]`.

    An epoch is one pass over the training samples in batches of `batch_size`; `drop_last` drops a
    shorter last batch. Every tensor of a batch leads with the axes (S, N), and is contiguous: its
    strides do not depend on the chunk, so that a compiled step is compiled once.
    """

    def __init__(self, data: Data, seeds: list[int], batch_size: int, *, drop_last: bool) -> None:
        self.data = data
        self.seeds = seeds
        self.batch_size = batch_size
        self.drop_last = drop_last
        num_samples = len(data.train)
        self.samples_per_epoch = num_samples - (num_samples % batch_size if drop_last else 0)
        self.steps_per_epoch = -(-self.samples_per_epoch // batch_size)
        self._epoch: int | None = None
        self._order = torch.empty(0)
        self._offset: Tensor | None = None  # (S, 1), of windows alone

    def to(self, device: torch.device | str) -> TrainingBatches:
        """The same batches of a copy of the data on another device."""
        data = self.data.to(device)
        return TrainingBatches(data, self.seeds, self.batch_size, drop_last=self.drop_last)

    def chunk(
        self, first_step: int, num_steps: int, dtype: torch.dtype = torch.float32
    ) -> Iterator[Batch]:
        """Yields the batches of `num_steps` steps from `first_step`, all within one epoch.

        Each is made when it is asked for: a GPU still works on the step before, and no more than
        one batch is held in floats.

        Args:
            dtype: of images as the model receives them.
        """
        epoch, position = divmod(first_step, self.steps_per_epoch)
        assert position + num_steps <= self.steps_per_epoch, "a chunk ends with its epoch"
        if epoch != self._epoch:
            num_samples = len(self.data.train)
            orders = [epoch_order(seed, epoch, num_samples) for seed in self.seeds]
            self._order = torch.stack(orders)  # (S, num_samples)
            if isinstance(self.data.train, Windows):
                length = self.data.train.block_size
                offsets = [window_offset(seed, epoch, length) for seed in self.seeds]
                self._offset = torch.tensor(offsets).unsqueeze(1)  # (S, 1)
            self._epoch = epoch
        first = position * self.batch_size
        last = min(first + num_steps * self.batch_size, self.samples_per_epoch)
        num_whole = (last - first) // self.batch_size  # all but a shorter last batch
        middle = first + num_whole * self.batch_size
        if num_whole:
            yield from self._batches(first_step, num_whole, self._order[:, first:middle], dtype)
        if middle < last:
            rest = first_step + num_whole
            yield from self._batches(rest, 1, self._order[:, middle:last], dtype)

    def _batches(
        self, first_step: int, num_steps: int, indices: Tensor, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """The batches of steps of equal size: of the samples at `indices` (S, K * N)."""
        indices = indices.unflatten(1, (num_steps, -1)).transpose(0, 1).contiguous()  # (K, S, N)
        if self.data.order == "sorted" and isinstance(self.data.train, Examples):
            targets = self.data.train.targets.cpu()[indices]
            indices = indices.gather(-1, targets.argsort(dim=-1, stable=True))
        batch = self.data.train.gather(indices, self._offset)  # (K, S, N, ...)
        at_once = self.data.augmentation is None and batch["inputs"].numel() <= _MAX_AT_ONCE
        if at_once:
            batch["inputs"] = self.data.model_inputs(batch["inputs"], dtype)
        draws = self._augmentation_draws(first_step, num_steps, indices.shape[2])
        for k in range(num_steps):
            step_batch = {name: value[k] for name, value in batch.items()}
            if not at_once:
                images = step_batch["inputs"]
                if self.data.augmentation is not None:
                    step_draws = {name: draw[k] for name, draw in draws.items()}
                    images = self.data.augmentation.apply(images, step_draws)
                step_batch["inputs"] = self.data.model_inputs(images, dtype)
            yield step_batch

    def num_samples_before(self, step: int) -> int:
        """Samples of one replica seen before `step`, by all processes together."""
        epochs, position = divmod(step, self.steps_per_epoch)
        within = min(position * self.batch_size, self.samples_per_epoch)
        return epochs * self.samples_per_epoch + within

    def _augmentation_draws(
        self, first_step: int, num_steps: int, num_samples: int
    ) -> dict[str, Tensor]:
        """The draws of all samples of some steps (K, S, N); those of a step depend on it alone.

        On the device of the data: a copy in each step would make the CPU wait for the GPU.
        """
        augmentation = self.data.augmentation
        if augmentation is None:
            return {}
        steps = range(first_step, first_step + num_steps)
        rows = [augmentation.draw(seed, k, num_samples) for k in steps for seed in self.seeds]
        shape, device = (num_steps, len(self.seeds)), self.data.train.tensors[0].device
        return {
            name: torch.stack([row[name] for row in rows]).unflatten(0, shape).to(device)
            for name in rows[0]
        }
