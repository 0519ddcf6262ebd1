"""Any torchvision classifier, with its norms replaced by sites."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable

import torch
from torch import nn

from normexp.errors import UserError
from normexp.models.common import check_image_shape
from normexp.models.surgery import replace_norms
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

log = logging.getLogger(__name__)


def build_torchvision_model(
    norm: NormFactory, input_shape: tuple[int, ...], num_outputs: int, *, name: str
) -> nn.Module:
    """The network `name` of torchvision with new weights; its norms are sites of `norm`.

    Shapes: (N, C, H, W) -> (N, num_outputs). The first convolution is adapted to C channels.

    Raises:
        UserError: a name that torchvision does not have; images that the network cannot take.
    """
    check_image_shape(input_shape, smallest=1, model="torchvision")
    builder = find_builder(name)
    try:
        trial = build_network(builder, input_shape, num_outputs)
        with torch.no_grad():
            trial.eval()(torch.zeros(2, *input_shape))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        shape = "x".join(str(size) for size in input_shape)
        raise UserError(f"model.name={name} cannot take images of {shape}: {reason}") from error
    network = build_network(builder, input_shape, num_outputs)  # one whose forward has not run
    replace_norms(network, norm)
    sites = [site for site, _ in named_sites(network)]
    log.info("%s has %d sites: %s", name, len(sites), ", ".join(sites) or "none")
    return network


def find_builder(name: str) -> Callable[..., nn.Module]:
    """torchvision's function for the classifier `name`; UserError with the nearest names."""
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or ["resnet18", "resnet50"]
        raise UserError(f"model.name={name} is not a torchvision classifier; try {', '.join(near)}")
    return models.get_model_builder(name)


def build_network(
    builder: Callable[..., nn.Module], input_shape: tuple[int, ...], num_outputs: int
) -> nn.Module:
    """torchvision's network for images of `input_shape`, without auxiliary outputs."""
    channels, height, width = input_shape
    offered = {
        "aux_logits": False,  # a single output, also in training
        "init_weights": True,  # GoogLeNet and Inception warn without it
        "image_size": height,  # for learned positions, of square images
        "input_size": (height, width),
    }
    network_class = inspect.signature(builder).return_annotation
    known = inspect.signature(network_class).parameters
    knobs = {key: value for key, value in offered.items() if key in known}
    network = builder(weights=None, num_classes=num_outputs, **knobs)
    adapt_channels(network, channels)
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
    return network


def adapt_channels(network: nn.Module, channels: int) -> None:
    """Gives the first convolution `channels` inputs.

    Its weights are already drawn; they are repeated, and scaled to keep the variance of the output,
    so that the builder's choice of distribution holds.
    """
    conv = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    if conv.in_channels == channels:
        return
    log.info("the first convolution takes %d channels instead of %d", channels, conv.in_channels)
    source = torch.arange(channels) % conv.in_channels
    scale = (conv.in_channels / channels) ** 0.5
    conv.weight = nn.Parameter(conv.weight.detach()[:, source] * scale)
    conv.in_channels = channels
