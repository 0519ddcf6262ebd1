"""Handwritten digits that travel inside scikit-learn: image data without a network."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples, stratified_holdout
from normexp.data.images import build_image_data

_TEST_FRACTION = 0.2
_TEST_SEED = 0  # a constant: the test set is the same whatever split_seed is


def load_digits(*, val_fraction: float, split_seed: int, augmentation: Augmentation | None) -> Data:
    """1,797 grey 8x8 images of ten classes, uint8 (N, 1, 8, 8); a fifth of each class is test.

    The source's 0..16 becomes 0..255, rounded. Alpaydin & Kaynak 1998, UCI "Optical Recognition of
    Handwritten Digits" (its test part).
    """
    table = torch.from_numpy(np.loadtxt(_find_table(), delimiter=","))  # float64 (1797, 65)
    grey = table[:, :-1].reshape(-1, 1, 8, 8)  # in 0..16
    images = (grey * (255 / 16)).round().to(torch.uint8)
    targets = table[:, -1].long()
    rest, held_out = stratified_holdout(targets, _TEST_FRACTION, _TEST_SEED)
    return build_image_data(
        "digits",
        Examples(images[rest], targets[rest]),
        Examples(images[held_out], targets[held_out]),
        class_names=tuple(str(digit) for digit in range(10)),
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
        source_version=f"scikit-learn {version('scikit-learn')}",
    )


def _find_table() -> Path:
    """The file behind sklearn.datasets.load_digits, which takes two seconds to import for it."""
    found = find_spec("sklearn")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
