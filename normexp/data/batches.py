"""Training batches: index gathers from tensors on the device, for all replicas at once."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.data.dataset import Data, Windows


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
    shorter last batch. Every tensor of a batch leads with the axes (S, N).
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
    ) -> list[Batch]:
        """The batches of `num_steps` optimizer steps from `first_step`, all within one epoch.

        Args:
            dtype: of images as the model receives them.
        """
        epoch, position = divmod(first_step, self.steps_per_epoch)
        assert position + num_steps <= self.steps_per_epoch, "a chunk ends with its epoch"
        self._enter(epoch)
        first = position * self.batch_size
        last = min(first + num_steps * self.batch_size, self.samples_per_epoch)
        batch = self.data.train.gather(self._order[:, first:last], self._offset)  # (S, K*N, ...)
        at_once = self.data.augmentation is None and batch["inputs"].numel() <= _MAX_AT_ONCE
        if at_once:
            batch["inputs"] = self.data.model_inputs(batch["inputs"], dtype)
        parts = {name: value.split(self.batch_size, dim=1) for name, value in batch.items()}
        batches = [{name: value[k] for name, value in parts.items()} for k in range(num_steps)]
        if not at_once:
            for step, step_batch in enumerate(batches, start=first_step):
                step_batch["inputs"] = self.data.model_inputs(
                    self._augmented(step_batch["inputs"], step), dtype
                )
        return batches

    def num_samples_before(self, step: int) -> int:
        """Samples of one replica seen before `step`, by all processes together."""
        epochs, position = divmod(step, self.steps_per_epoch)
        within = min(position * self.batch_size, self.samples_per_epoch)
        return epochs * self.samples_per_epoch + within

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        num_samples = len(self.data.train)
        orders = [epoch_order(seed, epoch, num_samples) for seed in self.seeds]
        self._order = torch.stack(orders)  # (S, num_samples)
        if isinstance(self.data.train, Windows):
            length = self.data.train.block_size
            offsets = [window_offset(seed, epoch, length) for seed in self.seeds]
            self._offset = torch.tensor(offsets).unsqueeze(1)  # (S, 1)
        self._epoch = epoch

    def _augmented(self, images: Tensor, step: int) -> Tensor:
        """The images (S, N, ...) of a step; sample i of a step gets the draws of index i."""
        augmentation = self.data.augmentation
        if augmentation is None:
            return images
        rows = [augmentation.draw(seed, step, images.shape[1]) for seed in self.seeds]
        draws = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return augmentation.apply(images, draws)
