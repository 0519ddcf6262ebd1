"""The samples of an evaluation: their order, their number per forward, and how they are shown."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.training.batching.draws import generator
from normexp.training.batching.replicas import Batch, Replicas
from normexp.training.data.dataset import SPLITS, Data
from normexp.training.data.views import View, crop_centre

LARGE_IMAGE = 64  # pixels of a side, above which a CPU takes fewer images
STACK_SAMPLES = 512  # per forward in evaluation, over all replicas; a GPU takes more


def shuffled(data: Data, split: str) -> Tensor:
    """Returns the sample indices of a split (N,) in a random order.

    The order is the same for every run, so that runs are compared on the same batches.
    """
    source = generator(0, "evaluate", SPLITS.index(split))
    return torch.randperm(len(getattr(data, split)), generator=source)


def samples_per_forward(
    replicas: Replicas, data: Data, group_size: int, *, shows_all: bool = False
) -> int:
    """Returns the samples per forward in evaluation, a multiple of `group_size`.

    Args:
        shows_all: of images whole images, whatever networks saw in training.
    """
    total = STACK_SAMPLES
    shape = data.stored_shape if shows_all else data.input_shape
    is_image = len(shape) == 3
    if next(replicas.parameters()).device.type != "cpu":
        # Memory grows with the area of an image, and under attention with the length squared.
        size = shape[1] * shape[2] / 32**2 if is_image else (shape[-1] / 256) ** 2
        total = int(8 * total / max(1, size))
    elif is_image and (shows_all or data.task == "segmentation"):  # whose outputs are as large
        total = int(total / max(1, shape[1] * shape[2] / LARGE_IMAGE**2))
    at_once = replicas.num_replicas if replicas.is_stacked else 1
    return max(1, total // at_once // group_size) * group_size


def gather(
    replicas: Replicas, data: Data, split: str, indices: Tensor, view: View | None = None
) -> Batch:
    """Returns the samples at `indices` (N,) as model inputs; those of `train` are augmented.

    How a sample is augmented depends on its index alone.

    Args:
        view: how images are shown; None: as networks saw them in training.
    """
    batch = getattr(data, split).gather(indices)
    if split == "train" and data.augmentation is not None:
        draws = data.augmentation.draw(0, 0, len(data.train))[indices.cpu()]
        data.augmentation.apply_to(batch, draws, data.crop)
    elif side := data.crop if view is None else view.crop:
        crop_centre(batch, side)
    batch["inputs"] = data.model_inputs(batch["inputs"], next(replicas.parameters()).dtype)
    return batch
