"""Data sources and what they return."""

from normexp.data.augment import Augmentation
from normexp.data.batches import epoch_order, window_offset
from normexp.data.dataset import Data, Examples, Windows, validate
from normexp.data.images import build_image_data
from normexp.data.text import build_text_data

__all__ = [
    "Augmentation",
    "Data",
    "Examples",
    "Windows",
    "build_image_data",
    "build_text_data",
    "epoch_order",
    "validate",
    "window_offset",
]
