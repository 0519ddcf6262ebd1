"""Recognises the norm modules of any library: features, layout, settings, affine parameters.

A class of torch is known by its type. Any other is recognised by its name, which holds `norm`, and
by its tensors: vectors of one length with the names that weights, biases and running statistics
have. Its layout is found by showing it inputs. A module with an activation inside its formula, such
as EvoNorm, has further parameters and is not recognised; one that holds an activation as a
submodule, such as timm's BatchNormAct2d, is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.adapt import EPS_NAMES, FEATURE_NAMES, Layout, find_layout

CHANNELS_FIRST = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm)  # subclasses may differ
OTHERS = ("GlobalResponseNorm", "LocalResponseNorm")  # compare channels, and keep the scale

GAINS = ("weight", "gamma", "scale", "gain", "g")
SHIFTS = ("bias", "beta", "shift", "b")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
KEPT = ("drop", "act")  # submodules of norms that hold their activation, in the order of timm


@dataclass(frozen=True)
class ForeignNorm:
    """A norm module that a network was built with.

    Attributes:
        settings: its eps, momentum and affine, as far as it has them.
        layout: where its channels are.
        kept: its dropout and activation, by name.
    """

    module: nn.Module
    num_features: int
    layout: Layout
    settings: dict[str, Any]
    kept: dict[str, nn.Module]

    def values(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (role, own name, value) of weight, bias and running statistics.

        The weight is the factor that multiplies the normalized input, also for a norm that
        multiplies by 1 + weight.
        """
        for name, value in _own_tensors(self.module).items():
            if name in GAINS:
                yield "weight", name, value + self._added_to_weight(name)
            elif name in SHIFTS:
                yield "bias", name, value
            elif name in STATISTICS:
                yield name, name, value

    def _added_to_weight(self, name: str) -> int:
        """1 if the norm multiplies by 1 + weight: at weight zero its output is not zero."""
        if isinstance(self.module, (*CHANNELS_FIRST, *CHANNELS_LAST)):
            return 0
        own = copy.deepcopy(self.module).eval()
        for child in self.kept:
            setattr(own, child, nn.Identity())
        sizes = [2] * (self.layout.num_dims[-1] - 1)
        sizes.insert(len(sizes) if self.layout.channels_last else 1, self.num_features)
        x = torch.linspace(-1, 2, torch.Size(sizes).numel()).view(sizes)
        with torch.no_grad():
            for key, value in _own_tensors(own).items():
                if key == name or key in SHIFTS:
                    value.zero_()
            return int(bool(own(x).any()))


def recognise(module: nn.Module) -> ForeignNorm | str | None:
    """The norm that a module is; the reason if it is like one but not recognised; else None."""
    name = type(module).__name__
    if not isinstance(module, (*CHANNELS_FIRST, *CHANNELS_LAST)):
        if "norm" not in name.lower() or name.startswith("_"):  # torch's weight norms
            return None
        if name in OTHERS:
            return "it keeps the scale of its input"
        known = {*GAINS, *SHIFTS, *STATISTICS}
        if further := [key for key in _own_tensors(module) if key not in known]:
            return f"its {further[0]} is neither a weight nor a running statistic"
    if children := [key for key, _ in module.named_children() if key not in KEPT]:
        # Without tensors of its own it is a block, whose norms are inside.
        return f"it holds {children[0]}" if _own_tensors(module) else None
    try:
        return describe(module)
    except UserError as error:
        return str(error)


def describe(module: nn.Module) -> ForeignNorm:
    """A module as a norm, whatever its name. Raises UserError if features or layout are unknown."""
    num_features = _count_features(module)
    tensors = _own_tensors(module)
    settings: dict[str, Any] = {"affine": any(name in tensors for name in GAINS)}
    eps = next((vars(module)[name] for name in EPS_NAMES if name in vars(module)), None)
    if isinstance(module, nn.RMSNorm) and eps is None:
        eps = torch.finfo(torch.float32).eps
    if isinstance(eps, float | int):
        settings["eps"] = float(eps)
    if "momentum" in vars(module):
        settings["momentum"] = module.momentum
    kept = {name: child for name, child in module.named_children() if name in KEPT}
    return ForeignNorm(module, num_features, _layout_of(module, num_features), settings, kept)


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules whose description differs in the module alone."""
    shapes = tuple((name, value.shape) for name, value in _own_tensors(module).items())
    plain = (bool, int, float, str, tuple, type(None))
    knobs = {name: value for name, value in vars(module).items() if isinstance(value, plain)}
    return type(module), shapes, repr(sorted(knobs.items()))


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, without those of submodules."""
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _count_features(module: nn.Module) -> int:
    vectors = {value.numel() for value in _own_tensors(module).values() if value.ndim == 1}
    shapes = {value.shape for value in _own_tensors(module).values() if value.ndim > 1}
    if len(vectors) == 1 and vectors != {1} and not shapes:
        return vectors.pop()
    if vectors <= {1} and not shapes:
        for name in FEATURE_NAMES:
            value = getattr(module, name, None)
            if isinstance(value, tuple) and len(value) == 1:
                value = value[0]
            if isinstance(value, int) and value > 0:
                return value
    if shapes or isinstance(getattr(module, "normalized_shape", None), tuple):
        raise UserError("it normalizes several axes, and a site one axis of channels")
    raise UserError("its number of channels is not known")


def _layout_of(module: nn.Module, num_features: int) -> Layout:
    if isinstance(module, CHANNELS_FIRST):
        return Layout(channels_last=False, num_dims=(4,))
    if type(module) in CHANNELS_LAST:
        return Layout(channels_last=True, num_dims=(3,))
    if any(p.default is p.empty for p in list(_forward_arguments(module))[1:]):
        raise UserError("its forward takes more than the input")
    target = type(module).__name__
    try:
        return find_layout(lambda _: copy.deepcopy(module).cpu(), num_features, target=target)
    except UserError as error:
        raise UserError(str(error).removeprefix(f"norm._target_={target} ")) from error


def _forward_arguments(module: nn.Module) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield parameter
