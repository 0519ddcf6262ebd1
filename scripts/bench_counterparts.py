"""What each shipped norm is measured against: torch.nn's module, or else the plain formula.

A counterpart takes the shape of x, and does the work that the norm in conf/norm does.
"""

from __future__ import annotations

from collections.abc import Callable

import bench_formulas as formulas
import bench_square_formulas as square_formulas
import torch
from bench_formulas import EPS, Formula, Shape
from torch import Tensor, nn


class ChannelsLast(nn.Module):
    """A norm of the last axis on channels that come second."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class PerPosition(nn.Module):
    """torch's batch norm of (N, C * T)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(torch.Size(shape[1:]).numel())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view_as(x)


def _torch_batch(shape: Shape) -> nn.Module:
    return (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1])


def _torch_instance(shape: Shape) -> nn.Module:
    make = nn.InstanceNorm2d if len(shape) == 4 else nn.InstanceNorm1d
    return make(shape[1], affine=True)


def _group(num_groups: int) -> Callable[[Shape], nn.Module]:
    return lambda shape: nn.GroupNorm(num_groups, shape[1])


def _last(make: type[nn.Module], **options: bool) -> Callable[[Shape], nn.Module]:
    return lambda shape: ChannelsLast(make(shape[1], eps=EPS, **options))


def _formula(compute: Callable[[Formula, Tensor], Tensor]) -> tuple[str, Callable]:
    return "plain formula", lambda shape: Formula(shape, compute)


BATCH = ("torch.nn.BatchNorm", _torch_batch)
INSTANCE = ("torch.nn.InstanceNorm", _torch_instance)
IDENTITY = ("torch.nn.Identity", lambda _: nn.Identity())

COUNTERPARTS: dict[str, tuple[str, Callable[[Shape], nn.Module]]] = {
    "batch": BATCH,
    "sync": BATCH,  # one process
    "eval_norm": BATCH,  # in training
    "frozen": ("torch.nn.BatchNorm in evaluation", lambda shape: _torch_batch(shape).eval()),
    "batch_per_position": ("torch.nn.BatchNorm1d of C * T", PerPosition),
    "deviations/bn_per_position": ("torch.nn.BatchNorm1d of C * T", PerPosition),
    "group": ("torch.nn.GroupNorm", _group(8)),
    "group_ws": ("torch.nn.GroupNorm", _group(8)),
    "group1": ("torch.nn.GroupNorm", _group(1)),
    "layer": ("torch.nn.GroupNorm(1)", _group(1)),
    "layer2d": ("torch.nn.LayerNorm", _last(nn.LayerNorm)),
    "position": ("torch.nn.LayerNorm", _last(nn.LayerNorm, elementwise_affine=False)),
    "instance": INSTANCE,
    "deviations/ln_hw": INSTANCE,  # another norm in name alone
    "deviations/ln_time": INSTANCE,
    "rms": ("torch.nn.RMSNorm", _last(nn.RMSNorm)),
    "none": IDENTITY,
    "nf": IDENTITY,
    "skipinit": IDENTITY,
    "ws": IDENTITY,
    "deviations/bn_biased_ema": _formula(formulas.biased_average),
    "deviations/bn_eps_outside": _formula(formulas.eps_outside),
    "deviations/bn_naive_var": _formula(formulas.naive_variance),
    "deviations/bn_unbiased": _formula(formulas.unbiased_batch),
    "deviations/no_eps": _formula(formulas.no_eps),
    "l1_batch": _formula(formulas.l1_batch),
    "batch_renorm": _formula(formulas.renorm),
    "switchable": _formula(formulas.switchable),
    "batch_instance": _formula(formulas.batch_instance),
    "evonorm_b0": _formula(formulas.evonorm_b0),
    "evonorm_s0": _formula(formulas.evonorm_s0),
    "frn": _formula(formulas.frn),
    "deviations/ln_no_eps": _formula(formulas.layer_no_eps),
    "deviations/ln_unbiased": _formula(formulas.layer_unbiased),
    "simple_rms": _formula(formulas.simple_rms),
    "scale": _formula(formulas.scale),
    "crms": _formula(formulas.crms),
    "dyt": _formula(formulas.dyt),
    "derf": _formula(formulas.derf),
    "power": _formula(square_formulas.power),
    "moving_average_batch": ("plain formula", square_formulas.AverageFormula),
    "ghost": _formula(formulas.ghost),
    "causal_group": _formula(formulas.causal_group),
    "causal_instance": _formula(formulas.causal_instance),
}
