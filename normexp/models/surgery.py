"""Any classifier of torchvision with this project's sites in the place of its norms."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.initialization import check_image_shape
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, named_sites

log = logging.getLogger(__name__)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class ChannelsLast(nn.Module):
    """A token site for x (B, *, C): the positions * are one axis for the site."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        return self.site(x.reshape(len(x), -1, x.shape[-1])).view(x.shape)


def build_torchvision_model(
    norm: NormFactory, input_shape: tuple[int, ...], num_outputs: int, *, name: str
) -> nn.Module:
    """The network `name` of torchvision, untrained, without pretrained weights.

    Its norms become sites: through the builder's `norm_layer` where it has batch norms only and
    takes one, else by replacing its norm modules. A first convolution for three channels is
    adapted to `input_shape`. Shapes: (N, C, H, W) -> (N, num_outputs).

    Raises:
        UserError: a name that torchvision does not have; images that the network cannot take.
    """
    check_image_shape(input_shape, smallest=1, model="torchvision")
    build = partial(_build, find_builder(name), input_shape, num_outputs)
    try:
        original = build()
        with torch.no_grad():
            original.eval()(torch.zeros(2, *input_shape))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        shape = "x".join(str(size) for size in input_shape)
        raise UserError(f"model.name={name} cannot take images of {shape}: {reason}") from error
    if input_shape[0] != 3:
        log.info("the first convolution takes %d channels in place of 3", input_shape[0])
    network = inject_norms(original.train(), build, norm)
    sites = [site for site, _ in named_sites(network)]
    log.info("%s has %d sites: %s", name, len(sites), ", ".join(sites) or "none")
    return network


def find_builder(name: str) -> Callable[..., nn.Module]:
    """torchvision's function for the classifier `name`; UserError with the nearest names."""
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or ["resnet18", "resnet50"]
        raise UserError(f"model.name={name} is no classifier of torchvision; try {', '.join(near)}")
    return models.get_model_builder(name)


def _build(
    builder: Callable[..., nn.Module],
    input_shape: tuple[int, ...],
    num_outputs: int,
    **norm_layer: Callable[[int], nn.Module],
) -> nn.Module:
    channels, height, width = input_shape
    wishes = {
        "aux_logits": False,  # one output, in training too
        "init_weights": True,  # unsaid, GoogLeNet and Inception warn
        "image_size": height,  # learned positions, of square images
        "input_size": (height, width),
    }
    network_class = inspect.signature(builder).return_annotation
    known = inspect.signature(network_class).parameters
    knobs = {key: value for key, value in wishes.items() if key in known}
    network = builder(weights=None, num_classes=num_outputs, **knobs, **norm_layer)
    adapt_channels(network, channels)
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its own output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
    return network


def adapt_channels(network: nn.Module, channels: int) -> None:
    """Gives the first convolution `channels` inputs.

    Its weights are drawn already; they are repeated and scaled to the same output variance, so that
    the builder's own choice of distribution holds.
    """
    conv = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    if conv.in_channels == channels:
        return
    source = torch.arange(channels) % conv.in_channels
    scale = (conv.in_channels / channels) ** 0.5
    conv.weight = nn.Parameter(conv.weight.detach()[:, source] * scale)
    conv.in_channels = channels


def inject_norms(
    original: nn.Module, build: Callable[..., nn.Module], norm: NormFactory
) -> nn.Module:
    """The network with sites of `norm`; `build(norm_layer=)` makes one with other norms."""
    if all(isinstance(module, BATCH_NORMS) for module in find_norms(original).values()):
        try:
            network = build(norm_layer=norm)
        except TypeError:  # takes no norm_layer, or sets its own
            pass
        else:
            log.info("sites come through norm_layer")
            return network
    replace_norms(original, norm)
    log.info("sites replace the norm modules")
    return original


def find_norms(network: nn.Module) -> dict[str, nn.Module]:
    """The norm modules of a network, by module path."""
    from torchvision.ops import FrozenBatchNorm2d

    kinds = (
        *BATCH_NORMS,
        *INSTANCE_NORMS,
        FrozenBatchNorm2d,
        nn.GroupNorm,
        nn.LayerNorm,
        nn.RMSNorm,
    )
    return {name: module for name, module in network.named_modules() if isinstance(module, kinds)}


def replace_norms(network: nn.Module, norm: NormFactory) -> None:
    """Puts a site in the place of each norm module, in the layout that the module had."""
    for path, old in find_norms(network).items():
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, build_site(old, norm))


def build_site(old: nn.Module, norm: NormFactory) -> nn.Module:
    """A site for the features and layout of a norm module of torch or torchvision."""
    from torchvision.models.convnext import LayerNorm2d
    from torchvision.ops import FrozenBatchNorm2d

    if isinstance(old, LayerNorm2d):  # a LayerNorm by class that takes maps
        return norm(old.normalized_shape[0])
    if isinstance(old, (nn.LayerNorm, nn.RMSNorm)):
        return ChannelsLast(norm.tokens(old.normalized_shape[-1]))
    if isinstance(old, nn.GroupNorm):
        return norm(old.num_channels)
    if isinstance(old, FrozenBatchNorm2d):
        return norm(len(old.weight))  # pyright: ignore[reportArgumentType]
    assert isinstance(old, (*BATCH_NORMS, *INSTANCE_NORMS))
    return norm(old.num_features)
