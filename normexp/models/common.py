"""Checks of a model's arguments and its data."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from normexp.data.dataset import Data
from normexp.errors import UserError


def check_positive(**knobs: int) -> None:
    """Raises UserError unless every knob of the model is a whole number of at least 1."""
    for key, value in knobs.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"model.{key}={value} must be a whole number above 0")


def check_image_shape(input_shape: tuple[int, ...], *, smallest: int, model: str) -> None:
    """Raises UserError unless `input_shape` is (C, H, W) with H and W at least `smallest`."""
    if len(input_shape) != 3:
        raise UserError(
            f"model={model} takes images (C, H, W), but the data has inputs of shape "
            f"{tuple(input_shape)}; try model=gpt or model=text_encoder"
        )
    _, height, width = input_shape
    if min(height, width) < smallest:
        raise UserError(
            f"images of {height}x{width} are too small for model={model}; "
            f"it needs {smallest}x{smallest} or larger"
        )


def refuse_misfit(model: Any, names: Collection[str], data: Data) -> None:
    """Raises UserError if one of model and data is for texts alone, or the model's mask misfits.

    Args:
        model: its class, or a function that returns it.
        names: of its arguments; a model that reads texts takes `vocab_size`.
    """
    reads_text = "vocab_size" in names
    is_text = data.vocab_size is not None
    has_mask = getattr(data.train, "mask", None) is not None
    fits = reads_text == is_text
    mask = None
    if hasattr(model, "forward"):  # a function has none, and may return any model
        mask = inspect.signature(model.forward).parameters.get("mask")
        needs_mask = mask is not None and mask.default is mask.empty
        if is_text and (mask is None if has_mask else needs_mask):
            fits = False
    if fits:
        return
    if not reads_text:
        remedy = "model=text_encoder" if has_mask else "model=gpt"
    else:
        remedy = "data=manual" if mask is None else "data=langid"
    raise UserError(
        f"model={getattr(model, '__name__', model)} does not fit data={data.name}; try {remedy}"
    )
