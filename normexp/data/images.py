"""From two sets of labelled images to Data: split, channel statistics, check."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples, split_off_val, validate
from normexp.errors import UserError


def build_image_data(
    name: str,
    train: Examples,
    test: Examples,
    *,
    class_names: tuple[str, ...],
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None = None,
    source_version: str = "",
) -> Data:
    """Data for image classification; val is taken out of `train`, test stays as it is.

    Shapes: inputs uint8 (N, C, H, W), targets int64 (N,) in [0, len(class_names)).

    Raises:
        UserError: a wrong dtype, shape or target, or a fraction that leaves a split empty.
    """
    if train.inputs.ndim != 4 or train.inputs.dtype != torch.uint8:
        found = f"{train.inputs.dtype} {tuple(train.inputs.shape)}"
        raise UserError(f"data={name}: images are {found}, must be torch.uint8 (N, C, H, W)")
    if len(train.inputs) != len(train.targets):
        raise UserError(
            f"data={name}: train has {len(train.inputs)} images and {len(train.targets)} targets"
        )
    train_indices, val_indices = split_off_val(len(train), val_fraction, split_seed)
    kept, val = (
        Examples(train.inputs[indices], train.targets[indices])
        for indices in (train_indices, val_indices)
    )
    mean, std = compute_channel_moments(kept.inputs)
    return validate(
        Data(
            name=name,
            task="classification",
            train=kept,
            val=val,
            test=test,
            num_outputs=len(class_names),
            input_shape=tuple(train.inputs.shape[1:]),
            mean=mean,
            std=std,
            augmentation=augmentation if augmentation and augmentation.is_on else None,
            class_names=class_names,
            source_version=source_version,
        )
    )


def compute_channel_moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 (N, C, H, W), in 0..1 units.

    Exact, from a histogram of the 256 values, so without a float copy of the images. A constant
    channel gets a standard deviation of 1.
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)  # (C, 256)
    for part in images.split(4096):
        for channel, pixels in enumerate(part.unbind(dim=1)):
            counts[channel] += torch.bincount(pixels.flatten(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    weights = counts / counts.sum(dim=1, keepdim=True)
    mean = weights @ values  # (C,)
    var = (weights * (values - mean[:, None]).square()).sum(dim=1)
    std = torch.where(var > 0, var.sqrt(), torch.ones_like(var))
    return tuple(mean.tolist()), tuple(std.tolist())
