"""Training batches: index gathers from tensors on the device, for all replicas at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normexp.training.batching.draws import generator
from normexp.training.batching.replicas import Batch
from normexp.training.data.dataset import Data, Examples, Windows


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """A permutation of the samples, int64 (num_samples,) on the CPU."""
    return torch.randperm(num_samples, generator=generator(seed, "order", epoch))


def window_offset(seed: int, epoch: int, block_size: int) -> int:
    """Offset of the windows of an epoch, in [0, block_size): each epoch cuts the text anew."""
    return int(torch.randint(block_size, (), generator=generator(seed, "order", epoch)))


@dataclass(eq=False)
class TrainingBatches:
    """The batches of each optimizer step; replica r draws order and augmentation from `seeds[r]`.

    An epoch is one pass over the training samples in batches of `batch_size`; `drop_last` drops a
    shorter last batch. Every tensor of a batch leads with the axes (S, N). Strides do not depend
    on the chunk, so that a compiled step is compiled once.
    """

    data: Data
    seeds: list[int]
    batch_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        num_samples = len(self.data.train)
        num_dropped = num_samples % self.batch_size if self.drop_last else 0
        self.samples_per_epoch = num_samples - num_dropped
        self.steps_per_epoch = -(-self.samples_per_epoch // self.batch_size)
        self._epoch: int | None = None
        self._order = torch.empty(0)  # (S, samples_per_epoch)
        self._offset: Tensor | None = None  # (S, 1), for windows only

    def to(self, device: torch.device | str) -> TrainingBatches:
        """The same batches of a copy of the data on another device."""
        return replace(self, data=self.data.to(device))

    def chunk(
        self, first_step: int, num_steps: int, dtype: torch.dtype = torch.float32
    ) -> Iterator[Batch]:
        """Yields the batches of `num_steps` steps from `first_step`, all within one epoch.

        A batch is made when it is asked for, while a GPU works on the step before; one batch at a
        time is held in floats.

        Args:
            dtype: of images as the model receives them.
        """
        epoch, position = divmod(first_step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._begin(epoch)
        steps = range(first_step, first_step + num_steps)
        first, end = position * self.batch_size, (position + num_steps) * self.batch_size
        batches = self._order[:, first:end].split(self.batch_size, dim=1)
        assert len(batches) == num_steps, "a chunk ends with its epoch"
        augmentation = self.data.augmentation
        draws = self._draw_augmentation(steps)
        for step, indices in enumerate(batches):
            batch = self.data.train.gather(indices, self._offset)
            if augmentation is not None:
                num_samples = indices.shape[1]
                augmentation.apply_to(batch, draws[step, :, :num_samples], self.data.crop)
            batch["inputs"] = self.data.model_inputs(batch["inputs"], dtype)
            yield batch

    def _begin(self, epoch: int) -> None:
        """Draws the order of an epoch, on the device of the data."""
        train, device = self.data.train, self.data.device
        orders = [epoch_order(seed, epoch, len(train)) for seed in self.seeds]
        order = torch.stack(orders).to(device)
        if self.data.order == "sorted" and isinstance(train, Examples):
            for indices in order.split(self.batch_size, dim=1):  # views of the order
                ranks = train.targets[indices].argsort(dim=1, stable=True)
                indices.copy_(indices.gather(1, ranks))
        if isinstance(train, Windows):
            offsets = [window_offset(seed, epoch, train.block_size) for seed in self.seeds]
            self._offset = torch.tensor(offsets, device=device).unsqueeze(1)
        self._order = order[:, : self.samples_per_epoch]
        self._epoch = epoch

    def num_samples_before(self, step: int) -> int:
        """Samples of one replica seen before `step`, by all processes together."""
        epochs, position = divmod(step, self.steps_per_epoch)
        within = min(position * self.batch_size, self.samples_per_epoch)
        return epochs * self.samples_per_epoch + within

    def _draw_augmentation(self, steps: range) -> Tensor:
        """The random numbers (K, S, N, 5) of K steps, on the device of the data; empty for none.

        They are copied at once, because a copy in each step would make the CPU wait for the GPU.
        """
        augmentation = self.data.augmentation
        if augmentation is None:
            return torch.empty(0)
        draws = []
        for step in steps:
            draws += [augmentation.draw(seed, step, self.batch_size) for seed in self.seeds]
        by_step = torch.stack(draws).unflatten(0, (len(steps), len(self.seeds)))
        return by_step.to(self.data.device)
