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
    """Raises UserError if a model reads images and the data are texts, or its mask does not fit.

    Args:
        model: its class, or a function that returns it.
        names: of its arguments; those that read texts take `vocab_size`.
    """
    forward = getattr(model, "forward", None)  # a function has none, and may return any model
    mask = inspect.signature(forward).parameters.get("mask") if forward else None
    has_mask = getattr(data.train, "mask", None) is not None
    takes_it = mask is not None if has_mask else mask is None or mask.default is not mask.empty
    reads_text, is_text = "vocab_size" in names, data.vocab_size is not None
    if reads_text == is_text and (takes_it or not is_text or forward is None):
        return
    fits = f"model={'text_encoder' if has_mask else 'gpt'}"
    if reads_text:
        fits = "data=manual" if mask is None else "data=langid"
    raise UserError(
        f"model={getattr(model, '__name__', model)} does not fit data={data.name}; try {fits}"
    )
