"""Any classifier of torchvision or timm, as its package builds it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from normexp.any_network.weights import Values
from normexp.errors import UserError, one_line
from normexp.training.models.common import check_image_shape, check_positive
from normexp.training.records.locks import one_at_a_time
from normexp.words import suggest

# What networks raise for images of a size that they do not support.
MISFITS = (RuntimeError, AssertionError, ValueError, IndexError, ZeroDivisionError)


def build_torchvision_model(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    name: str,
    image_size: int | None = None,
    **knobs: Any,
) -> nn.Module:
    """The network `name` of torchvision with new weights, without auxiliary outputs.

    Shapes: (N, C, H, W) -> (N, num_outputs), or for segmentation a mapping with `out` of (N,
    num_outputs, H, W). The first convolution is adapted to C channels.

    Args:
        image_size: side in pixels to which images are resized; None leaves them as they are.
        knobs: further arguments of torchvision's function or class.

    Raises:
        UserError: a name that torchvision does not have; images that the network cannot take.
    """
    builder = find_builder(name)
    channels, height, width = shape_after(input_shape, image_size, model="torchvision")
    offered = {
        "aux_logits": False,  # a single output, also in training
        "init_weights": True,  # GoogLeNet and Inception warn without it
        "image_size": height,  # for learned positions, of square images
        "input_size": (height, width),
    }
    network_class = inspect.signature(builder).return_annotation
    accepted = inspect.signature(network_class).parameters
    knobs = {key: value for key, value in offered.items() if key in accepted} | knobs
    if "weights_backbone" in inspect.signature(builder).parameters:
        knobs = {"weights_backbone": None} | knobs  # of a network for segmentation: a download

    def build() -> nn.Module:
        network = builder(weights=None, num_classes=num_outputs, **knobs)
        adapt_channels(network, channels)
        return network

    return build_for_images(build, name, input_shape, image_size)


def find_builder(name: str) -> Callable[..., nn.Module]:
    """torchvision's function for the network `name`; UserError names the nearest ones."""
    from torchvision import models

    names = models.list_models(module=models) + models.list_models(module=models.segmentation)
    if name not in names:
        raise unknown_name(name, names, "torchvision")
    return models.get_model_builder(name)


def unknown_name(name: str, names: Sequence[str], package: str) -> UserError:
    hint = suggest(name, names, most=3) or "try resnet18 or resnet50"
    return UserError(f"model.name={name} is no classifier of {package}; {hint}")


def torchvision_weights(name: str, weights: str) -> tuple[str, Callable[[], Values]]:
    """The full name of the classifier's pretrained weights, and a function that downloads them."""
    from torchvision import models

    find_builder(name)
    available = models.get_model_weights(name)
    check_weights("torchvision", name, weights, [member.name for member in available])
    chosen = available[weights]
    get = partial(chosen.get_state_dict, progress=False, check_hash=True)
    return chosen.name, partial(download, get, weights, chosen.url)


def check_weights(library: str, name: str, weights: str, names: Sequence[str]) -> None:
    """Raises UserError unless `weights` is DEFAULT or one of `names`."""
    if not names or weights not in ("DEFAULT", *names):
        has = ", ".join(["DEFAULT", *names]) if names else "none"
        raise UserError(
            f"model.weights={weights} is neither a file nor weights of {library}; "
            f"model.name={name} has {has}"
        )


def download(get: Callable[[], Any], weights: str, source: str) -> Values:
    """Calls `get`; a failure becomes a UserError."""
    try:
        with one_at_a_time("weights"):
            return dict(get())
    except Exception as error:  # the library's client raises many kinds
        raise UserError(
            f"model.weights={weights}: downloading {source} failed ({one_line(error)}); "
            "download it on another machine, and set model.weights to the file"
        ) from error


def adapt_channels(network: nn.Module, channels: int) -> None:
    """Gives the first convolution `channels` inputs.

    Its weights, already drawn by the builder, are repeated and scaled to keep the variance of the
    output.
    """
    conv = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    if conv.in_channels == channels:
        return
    source = torch.arange(channels) % conv.in_channels
    scale = (conv.in_channels / channels) ** 0.5
    conv.weight = nn.Parameter(conv.weight.detach()[:, source] * scale)
    conv.in_channels = channels


def shape_after(
    input_shape: tuple[int, ...], image_size: int | None, *, model: str
) -> tuple[int, int, int]:
    """The shape (C, H, W) of images after resizing to `image_size`, unless None."""
    check_image_shape(input_shape, smallest=1, model=model)
    channels, height, width = input_shape
    if image_size is None:
        return channels, height, width
    check_positive(image_size=image_size)
    return channels, image_size, image_size


def build_for_images(
    build: Callable[[], nn.Module], name: str, input_shape: tuple[int, ...], image_size: int | None
) -> nn.Module:
    """Builds the network, which resizes images if `image_size` is given, and runs a copy on some.

    Raises UserError if either fails.
    """
    key = f"model.name={name}"
    try:
        network = build()
        if image_size is not None:
            network.register_forward_pre_hook(partial(_resize, image_size))
        with torch.no_grad():  # a copy: no forward of the network itself has run
            copy.deepcopy(network).eval()(torch.zeros(2, *input_shape))
        return network
    except MISFITS as error:
        shape = "x".join(map(str, input_shape))
        resized = f" at model.image_size={image_size}" if image_size else ""
        raise UserError(
            f"{key} cannot take images of {shape}{resized}: {one_line(error)}; "
            f"try model.image_size={64 if (image_size or 0) < 64 else 224}, which resizes them"
        ) from error
    except TypeError as error:
        raise UserError(f"{key} cannot be built: {one_line(error)}") from error


def _resize(size: int, _: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Images (N, C, H, W) as (N, C, size, size), bilinear."""
    return functional.interpolate(args[0], size=(size, size), mode="bilinear", align_corners=False)


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
            return timm.create_model(name, **{"img_size": (height, width)} | knobs)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return timm.create_model(name, **knobs)

    return build_for_images(build, name, input_shape, image_size)


def import_timm(name: str) -> ModuleType:
    """The package timm, if it has the model `name`; else UserError names the nearest ones."""
    if find_spec("timm") is None:
        raise UserError("model=timm needs the package timm; pip install -e '.[timm]'")
    import timm

    if not timm.is_model(name):
        raise unknown_name(name, timm.list_models(), "timm")
    return timm


def timm_weights(name: str, weights: str) -> tuple[str, Callable[[], Values]]:
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
