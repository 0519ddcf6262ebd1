"""CIFAR-10 and CIFAR-100; torchvision downloads and verifies them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.sources import build_image_data, downloading

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10


def load_cifar10(
    *, data_dir: str, val_fraction: float, split_seed: int, augmentation: Augmentation | None
) -> Data:
    """50,000 train and 10,000 test images, uint8 (N, 3, 32, 32), 10 classes. Krizhevsky 2009."""
    from torchvision.datasets import CIFAR10

    return _load("cifar10", CIFAR10, data_dir, val_fraction, split_seed, augmentation)


def load_cifar100(
    *, data_dir: str, val_fraction: float, split_seed: int, augmentation: Augmentation | None
) -> Data:
    """50,000 train and 10,000 test images, uint8 (N, 3, 32, 32), 100 classes. Krizhevsky 2009."""
    from torchvision.datasets import CIFAR100

    return _load("cifar100", CIFAR100, data_dir, val_fraction, split_seed, augmentation)


def _load(
    name: str,
    source: type[CIFAR10],
    data_dir: str,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None,
) -> Data:
    with downloading(name, Path(data_dir) / source.filename):
        train, test = (source(data_dir, train=train, download=True) for train in (True, False))
    return build_image_data(
        name,
        _examples(train),
        _examples(test),
        num_classes=len(train.classes),
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )


def _examples(source: CIFAR10) -> Examples:
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()  # NHWC -> NCHW
    return Examples(images, torch.tensor(source.targets))
