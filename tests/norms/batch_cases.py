"""The batch family beside its textbook formulas, over values (number, C) or samples (N, C, P)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from norm_cases import EPS, C
from torch import Tensor, nn

from normexp.norms.deviations import (
    BatchNormBiasedAverage,
    BatchNormEpsOutside,
    BatchNormNaiveVariance,
    BatchNormNoEps,
    BatchNormUnbiased,
    LayerNormNoEps,
    LayerNormOverMap,
    LayerNormOverTime,
    LayerNormUnbiased,
)
from normexp.norms.eval_norm import EvalNorm
from normexp.norms.l1_batch import L1BatchNorm
from normexp.norms.mixtures import BatchInstanceNorm, SwitchableNorm
from normexp.norms.none import FrozenBatchNorm
from normexp.norms.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.renorm import BatchRenorm
from normexp.norms.sharing import GhostBatchNorm, SyncBatchNorm

State = dict[str, Tensor]
Textbook = Callable[[Tensor, State], Tensor]
GHOST = 2


@dataclass(frozen=True)
class FamilyCase:
    """A norm, and its formulas of x (N, C, P) and its state before the forward, without affine."""

    make: Callable[[], nn.Module]
    training: Textbook
    evaluation: Textbook
    needs_positions: bool = False
    mixes_samples: bool = True  # in training
    has_eps: bool = True
    moves_in_backward: bool = False


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


def standard(x: Tensor, *axes: int, eps: float = EPS) -> Tensor:
    return (x - mean_over(x, *axes)) / (variance_over(x, *axes) + eps) ** 0.5


def batch(x: Tensor, _: State) -> Tensor:
    return standard(x, 0, 2)


def running(x: Tensor, state: State, eps: float = EPS) -> Tensor:
    return (x - column(state, "running_mean")) / (column(state, "running_var") + eps) ** 0.5


def renorm(x: Tensor, state: State) -> Tensor:
    """At the third step of ramps from 1 to 5 and 9: half way to r_max 2, a fourth to d_max 1.

    The state of the cases has made two steps.
    """
    r_max, d_max = 1.5, 0.25
    old = (column(state, "running_var") + EPS) ** 0.5
    r = (variance_over(x, 0, 2) + EPS) ** 0.5 / old
    d = (mean_over(x, 0, 2) - column(state, "running_mean")) / old
    r, d = r.clamp(1 / r_max, r_max), d.clamp(-d_max, d_max)
    return batch(x, state) * r + d


def ghost(x: Tensor, _: State) -> Tensor:
    return torch.cat([standard(part, 0, 2) for part in x.split(GHOST)])


def power(x: Tensor, state: State) -> Tensor:
    return x / (column(state, "running_square") + EPS) ** 0.5


def l1(x: Tensor, _: State) -> Tensor:
    mean = mean_over(x, 0, 2)
    return (x - mean) / ((torch.pi / 2) ** 0.5 * mean_over((x - mean).abs(), 0, 2) + EPS)


def l1_running(x: Tensor, state: State) -> Tensor:
    return (x - column(state, "running_mean")) / (column(state, "running_deviation") + EPS)


def with_instance(by_batch: Tensor, x: Tensor, state: State) -> Tensor:
    rho = column(state, "gate").clamp(0, 1)
    return rho * by_batch + (1 - rho) * standard(x, 2)


def moving_average(x: Tensor, state: State) -> Tensor:
    """The third step, which replaces row 0 of the two that are remembered."""
    square = (mean_over(x**2, 0, 2) + state["past_squares"][1].reshape(1, -1, 1)) / 2
    r = ((square + EPS) / (column(state, "running_square") + EPS)) ** 0.5
    return x / (square + EPS) ** 0.5 * r.clamp(1 / 1.2, 1.2)


def eval_norm(x: Tensor, state: State) -> Tensor:
    """Moments of a batch, written out: a sample of weight a among values of mean m, variance v."""
    a, mean, var = (
        state["running_share"],
        column(state, "running_mean"),
        column(state, "running_var"),
    )
    own, own_var = mean_over(x, 2), variance_over(x, 2)
    mixed = a * own + (1 - a) * mean
    square = a * (own_var + own**2) + (1 - a) * (var + mean**2)
    return (x - mixed) / (square - mixed**2 + EPS) ** 0.5


def switch(x: Tensor, state: State, batch_mean: Tensor, batch_var: Tensor) -> Tensor:
    means = [mean_over(x, 2), mean_over(x, 1, 2), batch_mean]
    variances = [variance_over(x, 2), variance_over(x, 1, 2), batch_var]
    of_mean, of_var = state["mean_weight"].exp(), state["var_weight"].exp()
    if x.shape[2] == 1:
        means, variances, of_mean, of_var = means[1:], variances[1:], of_mean[1:], of_var[1:]
    mean = sum(w * m for w, m in zip(of_mean, means, strict=True)) / of_mean.sum()
    var = sum(w * v for w, v in zip(of_var, variances, strict=True)) / of_var.sum()
    return (x - mean) / (var + EPS) ** 0.5


def unbiased(x: Tensor, _: State) -> Tensor:
    count = x.shape[0] * x.shape[2]
    return (x - mean_over(x, 0, 2)) / (variance_over(x, 0, 2) * count / (count - 1) + EPS) ** 0.5


def layer_unbiased(x: Tensor, _: State) -> Tensor:
    return torch.stack([(s - s.mean()) / (s.var() + EPS) ** 0.5 for s in x])


def make_renorm() -> nn.Module:
    ramps = {"warmup": 1, "r_ramp_end": 5, "d_ramp_end": 9}
    return BatchRenorm(C, r_max=2, d_max=1, eps=EPS, **ramps)


def instance(x: Tensor, _: State) -> Tensor:
    return standard(x, 2)


FAMILY = {
    "batch_renorm": FamilyCase(make_renorm, renorm, running),
    "ghost": FamilyCase(lambda: GhostBatchNorm(C, ghost_size=GHOST, eps=EPS), ghost, running),
    "sync": FamilyCase(lambda: SyncBatchNorm(C, eps=EPS), batch, running),
    "frozen": FamilyCase(
        lambda: FrozenBatchNorm(C, eps=EPS), running, running, mixes_samples=False
    ),
    "power": FamilyCase(
        lambda: PowerNorm(C, warmup=1, eps=EPS),
        power,
        power,
        mixes_samples=False,
        moves_in_backward=True,
    ),
    "l1_batch": FamilyCase(lambda: L1BatchNorm(C, eps=EPS), l1, l1_running),
    "batch_instance": FamilyCase(
        lambda: BatchInstanceNorm(C, eps=EPS),
        lambda x, state: with_instance(batch(x, state), x, state),
        lambda x, state: with_instance(running(x, state), x, state),
        needs_positions=True,
    ),
    "moving_average_batch": FamilyCase(
        lambda: MovingAverageBatchNorm(C, memory=2, r_max=1.2, warmup=0, eps=EPS),
        moving_average,
        power,
        moves_in_backward=True,
    ),
    "eval_norm": FamilyCase(lambda: EvalNorm(C, eps=EPS), batch, eval_norm),
    "switchable": FamilyCase(
        lambda: SwitchableNorm(C, eps=EPS),
        lambda x, state: switch(x, state, mean_over(x, 0, 2), variance_over(x, 0, 2)),
        lambda x, s: switch(x, s, column(s, "running_mean"), column(s, "running_var")),
    ),
    "bn_unbiased": FamilyCase(lambda: BatchNormUnbiased(C, eps=EPS), unbiased, running),
    "bn_eps_outside": FamilyCase(
        lambda: BatchNormEpsOutside(C, eps=EPS),
        lambda x, _: (x - mean_over(x, 0, 2)) / (variance_over(x, 0, 2) ** 0.5 + EPS),
        lambda x, s: (x - column(s, "running_mean")) / (column(s, "running_var") ** 0.5 + EPS),
    ),
    "bn_biased_ema": FamilyCase(lambda: BatchNormBiasedAverage(C, eps=EPS), batch, running),
    "bn_naive_var": FamilyCase(lambda: BatchNormNaiveVariance(C, eps=EPS), batch, running),
    "no_eps": FamilyCase(
        lambda: BatchNormNoEps(C),
        lambda x, _: standard(x, 0, 2, eps=0),
        lambda x, state: running(x, state, eps=0),
        has_eps=False,
    ),
    "ln_unbiased": FamilyCase(
        lambda: LayerNormUnbiased(C, eps=EPS), layer_unbiased, layer_unbiased, mixes_samples=False
    ),
    "ln_no_eps": FamilyCase(
        lambda: LayerNormNoEps(C),
        lambda x, _: standard(x, 1, 2, eps=0),
        lambda x, _: standard(x, 1, 2, eps=0),
        mixes_samples=False,
        has_eps=False,
    ),
    "ln_time": FamilyCase(
        lambda: LayerNormOverTime(C, eps=EPS),
        instance,
        instance,
        needs_positions=True,
        mixes_samples=False,
    ),
    "ln_hw": FamilyCase(
        lambda: LayerNormOverMap(C, eps=EPS),
        instance,
        instance,
        needs_positions=True,
        mixes_samples=False,
    ),
}
FAMILY_AND_DIMS = [
    (name, n)
    for name, case in FAMILY.items()
    for n in (2, 3, 4, 5)
    if n > 2 or not case.needs_positions
]
