"""The per-sample and the statistics-free norms beside their textbook formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from norm_cases import EPS, C
from scipy.special import erf
from torch import Tensor, nn

from normexp.norms.evonorm import EvoNormB0, EvoNormS0
from normexp.norms.filter_response import FilterResponseNorm
from normexp.norms.group import GroupNorm, PositionNorm
from normexp.norms.pointwise import Derf, DyT
from normexp.norms.rms import CRMSNorm, ScaleNorm, SimpleRMSNorm

State = dict[str, Tensor]
GROUPS = 4


@dataclass(frozen=True)
class ZooCase:
    """A norm and the formula that it is, of x (N, C, P) with P positions and of its state."""

    make: Callable[[], nn.Module]
    textbook: Callable[[Tensor, State], Tensor]
    needs_positions: bool = False
    reads_positions: bool = False  # of the same sample


def mean_over(x: Tensor, *axes: int) -> Tensor:
    """The sum over `axes` by their number of values, broadcast to the shape of x."""
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return (x.sum(dim=axes, keepdim=True) / count).expand(x.shape)


def variance_over(x: Tensor, *axes: int) -> Tensor:
    return mean_over((x - mean_over(x, *axes)) ** 2, *axes)


def column(state: State, name: str) -> Tensor:
    return state[name].reshape(1, -1, 1)


def affine(x: Tensor, state: State) -> Tensor:
    return x * column(state, "weight") + column(state, "bias")


def one_group(x: Tensor, state: State) -> Tensor:
    return affine((x - mean_over(x, 1, 2)) / (variance_over(x, 1, 2) + EPS) ** 0.5, state)


def position(x: Tensor, state: State) -> Tensor:
    assert not state
    return (x - mean_over(x, 1)) / (variance_over(x, 1) + EPS) ** 0.5


def simple_rms(x: Tensor, state: State) -> Tensor:
    assert not state
    return x / (mean_over(x**2, 1) + EPS) ** 0.5


def scale(x: Tensor, state: State) -> Tensor:
    return state["weight"] * x / ((x**2).sum(dim=1, keepdim=True) + C * EPS) ** 0.5


def crms(x: Tensor, state: State) -> Tensor:
    """Layer norm of the vector with its last coordinate, cut again."""
    whole = torch.cat([x, -x.sum(dim=1, keepdim=True)], dim=1)  # (N, C + 1, P), of mean zero
    normalized = (whole - mean_over(whole, 1)) / (variance_over(whole, 1) + EPS) ** 0.5
    return normalized[:, :C] * column(state, "weight")


def filter_response(x: Tensor, state: State) -> Tensor:
    eps = EPS + state["learned_eps"].abs() if "learned_eps" in state else EPS
    return affine(x / (mean_over(x**2, 2) + eps) ** 0.5, state)


def evonorm_b0(x: Tensor, state: State) -> Tensor:
    batch = (variance_over(x, 0, 2) + EPS) ** 0.5
    own = column(state, "v") * x + (variance_over(x, 2) + EPS) ** 0.5
    return affine(x / torch.where(batch > own, batch, own), state)


def evonorm_s0(x: Tensor, state: State) -> Tensor:
    size = C // GROUPS
    runs = [variance_over(x[:, i : i + size], 1, 2) for i in range(0, C, size)]
    gate = 1 / (1 + torch.exp(-column(state, "v") * x))
    return affine(x * gate / (torch.cat(runs, dim=1) + EPS) ** 0.5, state)


def dynamic_tanh(x: Tensor, state: State) -> Tensor:
    power = torch.exp(2 * state["alpha"] * x)
    return affine((power - 1) / (power + 1), state)


def dynamic_erf(x: Tensor, state: State) -> Tensor:
    inner = state["alpha"] * x + state["shift"]
    return affine(torch.from_numpy(erf(inner.numpy())), state)


ZOO = {
    "group1": ZooCase(lambda: GroupNorm(C, num_groups=1, eps=EPS), one_group, reads_positions=True),
    "position": ZooCase(lambda: PositionNorm(C, eps=EPS), position),
    "scale": ZooCase(lambda: ScaleNorm(C, eps=EPS), scale),
    "simple_rms": ZooCase(lambda: SimpleRMSNorm(C, eps=EPS), simple_rms),
    "crms": ZooCase(lambda: CRMSNorm(C, eps=EPS), crms),
    "frn": ZooCase(
        lambda: FilterResponseNorm(C, eps=EPS),
        filter_response,
        needs_positions=True,
        reads_positions=True,
    ),
    "frn_learn_eps": ZooCase(
        lambda: FilterResponseNorm(C, eps=EPS, learn_eps=True),
        filter_response,
        reads_positions=True,
    ),
    "evonorm_b0": ZooCase(lambda: EvoNormB0(C, eps=EPS), evonorm_b0, reads_positions=True),
    "evonorm_s0": ZooCase(
        lambda: EvoNormS0(C, num_groups=GROUPS, eps=EPS), evonorm_s0, reads_positions=True
    ),
    "dyt": ZooCase(lambda: DyT(C), dynamic_tanh),
    "derf": ZooCase(lambda: Derf(C), dynamic_erf),
}
ZOO_AND_DIMS = [
    (name, n)
    for name, case in ZOO.items()
    for n in (2, 3, 4, 5)
    if n > 2 or not case.needs_positions
]
