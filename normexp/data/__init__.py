"""Data sets. Write your own with `build_image_data` or `build_text_data`, which return `Data`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {  # imported on first use, since ids need a data set's text without torch
    "Augmentation": "augment",
    "Data": "dataset",
    "Examples": "dataset",
    "Windows": "dataset",
    "build_image_data": "images",
    "build_text_data": "text",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a public name."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
