"""Handwritten digits that travel inside scikit-learn: image data without a network."""

from __future__ import annotations

import numpy as np
import torch

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data
from normexp.data.images import build_image_data
from normexp.data.samples import Examples
from normexp.data.split import stratified_holdout

_TEST_FRACTION = 0.2
_TEST_SEED = 0  # a constant: the test set is the same whatever split_seed is


def load_digits(*, val_fraction: float, split_seed: int, augmentation: Augmentation | None) -> Data:
    """1,797 grey 8x8 images of ten classes, uint8 (N, 1, 8, 8); a fifth of each class is test.

    The source's 0..16 becomes 0..255, rounded. Alpaydin & Kaynak 1998, UCI "Optical Recognition of
    Handwritten Digits" (its test part).
    """
    import sklearn
    from sklearn import datasets

    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    grey = torch.from_numpy(pixels).view(-1, 1, 8, 8)  # float64 in 0..16
    images = (grey * (255 / 16)).round().to(torch.uint8)
    targets = torch.from_numpy(labels).long()
    rest, held_out = stratified_holdout(targets, _TEST_FRACTION, _TEST_SEED)
    return build_image_data(
        "digits",
        Examples(images[rest], targets[rest]),
        Examples(images[held_out], targets[held_out]),
        class_names=tuple(str(digit) for digit in range(10)),
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
        source_version=f"scikit-learn {sklearn.__version__}",
    )
