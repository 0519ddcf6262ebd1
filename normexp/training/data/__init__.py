"""Data sets. Write your own with `build_image_data` or `build_text_data`, which return `Data`."""

from normexp.training.data.augment import Augmentation
from normexp.training.data.dataset import Data, Examples, Windows
from normexp.training.data.images import build_image_data
from normexp.training.data.text import build_text_data

__all__ = ["Augmentation", "Data", "Examples", "Windows", "build_image_data", "build_text_data"]
