"""CIFAR-10 and CIFAR-100; torchvision downloads and verifies them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.images import build_image_data
from normexp.errors import UserError

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
    train, test = (_read(name, source, data_dir, train=train) for train in (True, False))
    return build_image_data(
        name,
        _examples(train),
        _examples(test),
        class_names=tuple(train.classes),
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )


def _read(name: str, source: type[CIFAR10], data_dir: str, *, train: bool) -> CIFAR10:
    """The torchvision data set; a failed download leaves nothing behind."""
    folder = Path(data_dir)
    archive = folder / source.filename
    had_folder, had_archive = folder.exists(), archive.exists()
    try:
        return source(root=data_dir, train=train, download=True)
    except (OSError, RuntimeError) as error:  # URLError is an OSError
        if not had_archive:
            archive.unlink(missing_ok=True)
        if not had_folder and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise UserError(
            f"data={name} wants {source.filename}, and its download failed ({error}); put the "
            f"file into {folder.resolve()} or set data_dir to where it is; data=digits needs none"
        ) from error


def _examples(source: CIFAR10) -> Examples:
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()  # NHWC -> NCHW
    return Examples(images, torch.tensor(source.targets))
