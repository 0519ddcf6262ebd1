"""Handwritten digits included in scikit-learn: image data without a download."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.sources import build_image_data, split_off_test


def load_digits(*, val_fraction: float, split_seed: int, augmentation: Augmentation | None) -> Data:
    """1,797 grey 8x8 images of ten classes, uint8 (N, 1, 8, 8); a fifth of each class is test.

    Grey values 0..16 become 0..255, rounded. Alpaydin & Kaynak 1998, UCI "Optical Recognition of
    Handwritten Digits" (its test part).
    """
    table = torch.from_numpy(np.loadtxt(_find_table(), delimiter=","))  # float64 (1797, 65)
    grey = table[:, :-1].reshape(-1, 1, 8, 8)  # in 0..16
    images = (grey * (255 / 16)).round().to(torch.uint8)
    targets = table[:, -1].long()
    train, test = (Examples(images[part], targets[part]) for part in split_off_test(targets))
    return build_image_data(
        "digits",
        train,
        test,
        num_classes=10,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
        source_version=f"scikit-learn {version('scikit-learn')}",
    )


def _find_table() -> Path:
    """The file that sklearn.datasets.load_digits reads; importing sklearn takes two seconds."""
    found = find_spec("sklearn")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
