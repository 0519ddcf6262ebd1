"""What a data set of your own is made of; conf/data/README.md shows one."""

from normexp.training.data import (
    Augmentation,
    Data,
    Examples,
    Windows,
    build_image_data,
    build_row_data,
    build_text_data,
)

__all__ = [
    "Augmentation",
    "Data",
    "Examples",
    "Windows",
    "build_image_data",
    "build_row_data",
    "build_text_data",
]
