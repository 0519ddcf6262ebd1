"""What a data set of your own is made of; conf/data/README.md shows one."""

from normexp.training.data.augment import Augmentation
from normexp.training.data.dataset import Data, Examples, Windows
from normexp.training.data.images import build_image_data
from normexp.training.data.rows import build_row_data
from normexp.training.data.text import build_text_data

__all__ = [
    "Augmentation",
    "Data",
    "Examples",
    "Windows",
    "build_image_data",
    "build_row_data",
    "build_text_data",
]
