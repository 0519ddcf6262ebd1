"""Checks of a model's arguments."""

from __future__ import annotations

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
            f"{tuple(input_shape)}; try model=gpt or model=text_encoder for texts, or "
            "model=deep_mlp for rows"
        )
    _, height, width = input_shape
    if min(height, width) < smallest:
        raise UserError(
            f"images of {height}x{width} are too small for model={model}; "
            f"it needs {smallest}x{smallest} or larger"
        )
