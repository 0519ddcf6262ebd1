"""What a recognised norm is: its formula, settings, and the roles of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.norms.base import AffineNorm
from normexp.norms.batch import BatchNorm, FrozenBatchNorm
from normexp.norms.sample import GroupNorm, LayerNorm2d, RMSNorm

# A norm's tensors, by their names in torch's batch norm, and their initial values.
COUNT = "num_batches_tracked"
INITIAL_VALUES = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, COUNT: 0}


FORMULAS: dict[str, type[AffineNorm]] = {
    "layer": LayerNorm2d,  # moments over the channels of a position
    "rms": RMSNorm,  # the same without centring
    "batch": BatchNorm,  # moments over all values of a channel
    "group": GroupNorm,  # moments over C / num_groups channels of a sample
    "frozen": FrozenBatchNorm,  # moments are tensors of the module
}


@dataclass(frozen=True)
class Formula:
    """Which values share their moments, for x (N, C, *), or (N, *, C) if `is_last`.

    Attributes:
        name: a key of FORMULAS.
    """

    name: str
    is_last: bool
    num_groups: int = 1

    def __str__(self) -> str:
        groups = f" of {self.num_groups} groups" if self.name == "group" else ""
        return f"{self.name} norm{groups}, channels {'last' if self.is_last else 'first'}"

    def build(self, num_features: int, **settings: Any) -> nn.Module:
        """The shipped norm for (N, C, *), in float64; settings that it lacks are ignored."""
        norm = FORMULAS[self.name]
        if self.name == "group":
            settings["num_groups"] = self.num_groups
        knobs = {field.name for field in fields(norm) if field.init}
        taken = {name: value for name, value in settings.items() if name in knobs}
        return norm(num_features, **taken).double()


@dataclass(frozen=True)
class CallForm:
    """How a module is called: with x, and perhaps a mask that is true where a value is real.

    Attributes:
        shape: of x.
        layouts: the values of `is_last` that are possible; a mask has the other axes.
        mask: how the mask is passed; None without one.
        dtype: in which the module is measured.
    """

    shape: torch.Size
    layouts: tuple[bool, ...]
    mask: Literal["position", "keyword"] | None = None
    dtype: torch.dtype = torch.double


@dataclass(frozen=True)
class NormDescription:
    """The norm that a module computes.

    Attributes:
        settings: those that the shipped norm must get to be the same, as eps and affine.
        roles: the names of its tensors that are its gain (`weight`) and its shift (`bias`).
        form: how it was called while it was measured; None if it was read, as torch's own norms.
        tail: the names of its children that follow the norm: dropout and activation.
        has_averages: it evaluates by running moments.
        holds_averages: training does not move them, as if `track_running_stats` was set to False.
        moments: the names of its tensors that are the mean and variance of a frozen norm.
    """

    formula: Formula
    num_features: int
    settings: dict[str, Any]
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    form: CallForm | None = None
    tail: tuple[str, ...] = ()
    has_averages: bool = False
    holds_averages: bool = False
    moments: tuple[str, ...] = ()


class Misfit(Exception):
    """Why a module is no norm."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
