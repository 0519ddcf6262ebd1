"""Any classifier of timm, as timm builds it."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from normexp.errors import UserError
from normexp.models.torchvision import (
    build_for_images,
    check_weights,
    download,
    resizing,
    shape_after,
)
from normexp.models.weights import Values


def build_timm_model(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    name: str,
    image_size: int | None = None,
    **knobs: Any,
) -> nn.Module:
    """The network `name` of timm with new weights, as `timm.create_model` returns it.

    Shapes: (N, C, H, W) -> (N, num_outputs). A network with learned positions is built for the size
    of the images.

    Args:
        image_size: side in pixels to which images are resized; None leaves them as they are.
        knobs: further arguments of the network.

    Raises:
        UserError: timm is not installed, or lacks the name; images that the network cannot take.
    """
    timm = import_timm(name)
    channels, height, width = shape_after(input_shape, image_size, model="timm")
    knobs = {"num_classes": num_outputs, "in_chans": channels} | knobs

    def build() -> nn.Module:
        try:
            network = timm.create_model(name, **{"img_size": (height, width)} | knobs)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            network = timm.create_model(name, **knobs)
        return resizing(network, image_size)

    return build_for_images(build, name, input_shape, image_size)


def import_timm(name: str) -> ModuleType:
    """The package timm, if it has the model `name`; else UserError names the nearest ones."""
    if find_spec("timm") is None:
        raise UserError("model=timm needs the package timm; pip install 'normexp[timm]'")
    import timm

    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        names = ", ".join(near or ["resnet18", "convnext_atto"])
        raise UserError(f"model.name={name} is not a model of timm; try {names}")
    return timm


def named_weights(name: str, weights: str) -> tuple[str, Callable[[], Values]]:
    """The tag of the model's pretrained weights, and a function that downloads them."""
    timm = import_timm(name)
    base, _, tag = name.partition(".")
    tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{base}.*")]
    check_weights("timm", base, weights, tags)
    default = tag or timm.get_pretrained_cfg(base).tag
    tag = default if weights == "DEFAULT" else weights
    full = f"{base}.{tag}"

    def get() -> Values:
        return timm.create_model(full, pretrained=True).state_dict()

    return tag, partial(download, get, weights, full)
