"""Each shipped norm is its textbook formula, written out here in float64 over x (N, C, P).

So are its gradients, by automatic differentiation of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from norm_cases import (
    EPS,
    GROUPS,
    C,
    gradients,
    inputs,
    make,
    random_tensor,
    state_of,
)
from torch import Tensor
from torch.testing import assert_close

from normexp.norms.zoo.deviations import BatchNormBiasedAverage

State = dict[str, Tensor]
Formula = Callable[[Tensor, State], Tensor]


def mean_over(x: Tensor, *axes: int) -> Tensor:
    """The sum over `axes` divided by the number of values, broadcast to the shape of x."""
    count = math.prod(x.shape[axis] for axis in axes)
    return (x.sum(dim=axes, keepdim=True) / count).expand(x.shape)


def variance_over(x: Tensor, *axes: int) -> Tensor:
    return mean_over((x - mean_over(x, *axes)) ** 2, *axes)


def column(state: State, name: str) -> Tensor:
    return state[name].reshape(1, -1, 1)


def standard(*axes: int, eps: float = EPS) -> Formula:
    return lambda x, _: (x - mean_over(x, *axes)) / (variance_over(x, *axes) + eps) ** 0.5


def running(x: Tensor, state: State, eps: float = EPS) -> Tensor:
    return (x - column(state, "running_mean")) / (column(state, "running_var") + eps) ** 0.5


batch, instance, layer, token = standard(0, 2), standard(2), standard(1, 2), standard(1)


def group(x: Tensor, state: State) -> Tensor:
    return torch.cat([layer(run, state) for run in x.split(C // GROUPS, dim=1)], dim=1)


def on_prefixes(formula: Formula) -> Formula:
    """The formula once per position, on the sequence cut there."""

    def causal(x: Tensor, state: State) -> Tensor:
        outs = [formula(x[..., : t + 1], state)[..., t] for t in range(x.shape[2])]
        return torch.stack(outs, dim=2)

    return causal


def renorm(x: Tensor, state: State) -> Tensor:
    """The third step of ramps from 1 to 5 and 9: half way to r_max 2, a fourth to d_max 1.

    No gradient flows through r and d.
    """
    r_max, d_max = 1.5, 0.25
    old = (column(state, "running_var") + EPS) ** 0.5
    r = (variance_over(x, 0, 2) + EPS) ** 0.5 / old
    d = (mean_over(x, 0, 2) - column(state, "running_mean")) / old
    r, d = r.detach().clamp(1 / r_max, r_max), d.detach().clamp(-d_max, d_max)
    return batch(x, state) * r + d


def ghost(x: Tensor, state: State) -> Tensor:
    return torch.cat([batch(part, state) for part in x.split(2)])


def l1(x: Tensor, _: State) -> Tensor:
    mean = mean_over(x, 0, 2)
    return (x - mean) / ((torch.pi / 2) ** 0.5 * mean_over((x - mean).abs(), 0, 2) + EPS)


def l1_running(x: Tensor, state: State) -> Tensor:
    return (x - column(state, "running_mean")) / (column(state, "running_deviation") + EPS)


def eval_norm(x: Tensor, state: State) -> Tensor:
    """Moments of a batch, written out: a sample of weight a among values of mean m, variance v."""
    mean, var = column(state, "running_mean"), column(state, "running_var")
    a = state["running_share"]
    own, own_var = mean_over(x, 2), variance_over(x, 2)
    mixed = a * own + (1 - a) * mean
    square = a * (own_var + own**2) + (1 - a) * (var + mean**2)
    return (x - mixed) / (square - mixed**2 + EPS) ** 0.5


def mixed(by_batch: Formula, by_sample: Formula) -> Formula:
    def mixture(x: Tensor, state: State) -> Tensor:
        rho = column(state, "gate")
        return rho * by_batch(x, state) + (1 - rho) * by_sample(x, state)

    return mixture


def mode(x: Tensor, state: State, *, running: bool = False) -> Tensor:
    """Sample by sample and mode by mode, each mode's moments from its own weighted sums."""
    logits = x.mean(dim=2) @ state["gates.weight"].T + state["gates.bias"]
    gates = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    out = torch.zeros_like(x)
    for k, own in enumerate(gates.T.reshape(-1, len(x), 1, 1)):
        total = own.sum() * x.shape[2]
        mean = (own * x).sum(dim=(0, 2), keepdim=True) / total
        var = (own * (x - mean) ** 2).sum(dim=(0, 2), keepdim=True) / total
        if running:
            mean, var = (state[name][k].reshape(1, -1, 1) for name in ("mode_mean", "mode_var"))
        out = out + own * (x - mean) / (var + EPS) ** 0.5
    return out


def switch(x: Tensor, state: State, batch_mean: Tensor, batch_var: Tensor) -> Tensor:
    means = [mean_over(x, 2), mean_over(x, 1, 2), batch_mean]
    variances = [variance_over(x, 2), variance_over(x, 1, 2), batch_var]
    of_mean, of_var = state["mean_weight"].exp(), state["var_weight"].exp()
    if x.shape[2] == 1:
        means, variances, of_mean, of_var = means[1:], variances[1:], of_mean[1:], of_var[1:]
    mean = sum(w * m for w, m in zip(of_mean, means, strict=True)) / of_mean.sum()
    var = sum(w * v for w, v in zip(of_var, variances, strict=True)) / of_var.sum()
    return (x - mean) / (var + EPS) ** 0.5


def evonorm_b0(x: Tensor, state: State, batch_var: Tensor) -> Tensor:
    batch_deviation = ((batch_var + EPS) ** 0.5).expand(x.shape)
    own = column(state, "v") * x + (variance_over(x, 2) + EPS) ** 0.5
    return x / torch.where(batch_deviation > own, batch_deviation, own)


def evonorm_s0(x: Tensor, state: State) -> Tensor:
    variances = [variance_over(run, 1, 2) for run in x.split(C // GROUPS, dim=1)]
    gate = 1 / (1 + torch.exp(-column(state, "v") * x))
    return x * gate / (torch.cat(variances, dim=1) + EPS) ** 0.5


def rms(x: Tensor, _: State) -> Tensor:
    return x / (mean_over(x**2, 1) + EPS) ** 0.5


def one_plus(formula: Formula) -> Formula:
    """Divided by the weight, which the test applies."""
    return lambda x, s: formula(x, s) * (1 + column(s, "weight")) / column(s, "weight")


def pre_affine(x: Tensor, state: State) -> Tensor:
    return rms(x * column(state, "pre_weight"), state)


def gated(x: Tensor, state: State) -> Tensor:
    """Position by position; divided by the weight, which the test applies."""
    y = rms(x, state) * column(state, "weight")
    inner = torch.stack([state["down.weight"] @ sample for sample in y])
    inner = inner / (1 + torch.exp(-inner))
    outer = torch.stack([state["up.weight"] @ sample for sample in inner])
    return rms(x, state) / (1 + torch.exp(-outer))


def seed(x: Tensor, state: State) -> Tensor:
    gain = column(state, "alpha") * torch.tanh((column(state, "beta") * x).sum(1, keepdim=True))
    return rms(x, state) * (1 + gain / column(state, "weight"))


def bhyt(x: Tensor, state: State) -> Tensor:
    return torch.tanh(state["alpha"] / 10 * rms(x, state))


def response(x: Tensor, state: State) -> Tensor:
    size = (x**2).sum(dim=2, keepdim=True) ** 0.5
    relative = size / (size.sum(dim=1, keepdim=True) / C + EPS)
    return x + column(state, "response") * relative * x + column(state, "shift")


def scale(x: Tensor, _: State) -> Tensor:
    """Without its weight g, which the test applies like every weight."""
    return x / ((x**2).sum(dim=1, keepdim=True) + C * EPS) ** 0.5


def crms(x: Tensor, state: State) -> Tensor:
    """Layer norm of the vector with its last coordinate, which is then dropped."""
    whole = torch.cat([x, -x.sum(dim=1, keepdim=True)], dim=1)  # (N, C + 1, P), of mean zero
    return token(whole, state)[:, :C]


def dyt(x: Tensor, state: State) -> Tensor:
    power = torch.exp(2 * (state["alpha"] * x).clamp(-300, 300))
    return (power - 1) / (power + 1)


def derf(x: Tensor, state: State) -> Tensor:
    """erf(z) is 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to z, here by quadrature."""
    z = (state["alpha"] * x + state["shift"]).clamp(-8, 8)[..., None]
    nodes, weights = (torch.from_numpy(v) / 2 for v in np.polynomial.legendre.leggauss(64))
    return (weights * 2 / math.pi**0.5 * z * torch.exp(-((z * (nodes + 0.5)) ** 2))).sum(dim=-1)


def isru(x: Tensor, state: State) -> Tensor:
    return torch.sin(torch.atan(state["alpha"] * x + state["shift"]))


def hard_tanh(x: Tensor, state: State) -> Tensor:
    z = state["alpha"] * x + state["shift"]
    return torch.where(z.abs() < 1, z, z.sign())


def salu(x: Tensor, state: State) -> Tensor:
    a, b = column(state, "log_a").exp(), column(state, "log_b").exp()
    return (a / b) ** 0.5 * torch.sin(torch.atan((a * b) ** 0.5 * x))


def with_skip(formula: Formula) -> Formula:
    """The skip is outside the weight, by which the test multiplies the result."""
    return lambda x, s: formula(x, s) + s["alpha"] * x / column(s, "weight")


def half_faded(x: Tensor, state: State) -> Tensor:
    """In the third of six steps of the fade."""
    by_layer = token(x, state) * column(state, "layer_weight") + column(state, "layer_bias")
    by_layer = (by_layer - column(state, "bias")) / column(state, "weight")
    return (by_layer + with_skip(batch)(x, state)) / 2


def unbiased(formula: Formula, *axes: int) -> Formula:
    """(x - mean) / sqrt(n / (n - 1) * var + eps), n the values over `axes`."""

    def divided(x: Tensor, state: State) -> Tensor:
        count = math.prod(x.shape[axis] for axis in axes)
        var = variance_over(x, *axes)
        return formula(x, state) * ((var + EPS) / (var * count / (count - 1) + EPS)) ** 0.5

    return divided


def eps_outside(x: Tensor, _: State) -> Tensor:
    return (x - mean_over(x, 0, 2)) / (variance_over(x, 0, 2) ** 0.5 + EPS)


def eps_outside_running(x: Tensor, state: State) -> Tensor:
    return (x - column(state, "running_mean")) / (column(state, "running_var") ** 0.5 + EPS)


def position_running(x: Tensor, state: State) -> Tensor:
    return (x - state["running_mean"].T) / (state["running_var"].T + EPS) ** 0.5


def flattened(by_sample: Formula) -> Formula:
    def affine(x: Tensor, state: State) -> Tensor:
        return by_sample(x, state) * state["position_weight"].T + state["position_bias"].T

    return affine


def identity(x: Tensor, _: State) -> Tensor:
    return x


# Before weight and bias.
ALIKE: dict[str, Formula] = {
    **dict.fromkeys(("none", "nf", "skipinit", "ws"), identity),
    "frozen": running,
    **dict.fromkeys(("layer", "group1"), layer),
    **dict.fromkeys(("group", "group_ws", "proxy_group"), group),
    **dict.fromkeys(("instance", "deviations/ln_hw", "deviations/ln_time"), instance),
    **dict.fromkeys(("layer2d", "position"), token),
    "causal_group": on_prefixes(group),
    "causal_instance": on_prefixes(instance),
    "frn": lambda x, _: x / (mean_over(x**2, 2) + EPS) ** 0.5,
    **dict.fromkeys(("rms", "simple_rms"), rms),
    "one_plus_rms": one_plus(rms),
    "scale": scale,
    "crms": crms,
    "pre_affine_rms": pre_affine,
    "gated_rms": gated,
    "seednorm": seed,
    "bhyt": bhyt,
    "grn": response,
    "dyt": dyt,
    "derf": derf,
    "isru": isru,
    "hard_tanh": hard_tanh,
    "salu": salu,
    "evonorm_s0": evonorm_s0,
    "deviations/ln_no_eps": standard(1, 2, eps=0),
    "deviations/ln_unbiased": unbiased(layer, 1, 2),
}
# The formula in training, and that in evaluation.
BY_MODE: dict[str, tuple[Formula, Formula]] = {
    **dict.fromkeys(("batch", "sync"), (batch, running)),
    "rep_batch": (with_skip(batch), with_skip(running)),
    "progressive_rep_batch": (half_faded, with_skip(running)),
    "ghost": (ghost, running),
    "batch_renorm": (renorm, running),
    "l1_batch": (l1, l1_running),
    "eval_norm": (batch, eval_norm),
    "batch_per_position": (standard(0), position_running),
    "switchable": (
        lambda x, s: switch(x, s, mean_over(x, 0, 2), variance_over(x, 0, 2)),
        lambda x, s: switch(x, s, column(s, "running_mean"), column(s, "running_var")),
    ),
    "batch_instance": (mixed(batch, instance), mixed(running, instance)),
    "batch_channel": (mixed(batch, layer), mixed(running, layer)),
    "mode": (mode, partial(mode, running=True)),
    "evonorm_b0": (
        lambda x, s: evonorm_b0(x, s, variance_over(x, 0, 2)),
        lambda x, s: evonorm_b0(x, s, column(s, "running_var")),
    ),
    "deviations/bn_biased_ema": (batch, running),
    "deviations/bn_eps_outside": (eps_outside, eps_outside_running),
    "deviations/bn_naive_var": (batch, running),
    "deviations/bn_per_position": (flattened(standard(0)), flattened(position_running)),
    "deviations/bn_unbiased": (unbiased(batch, 0, 2), running),
    "deviations/no_eps": (standard(0, 2, eps=0), partial(running, eps=0)),
}
FORMULAS = {**{name: (formula, formula) for name, formula in ALIKE.items()}, **BY_MODE}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", FORMULAS)
def test_norm_is_its_textbook_formula(name, training):
    for x in inputs(name):
        norm, x = make(name).train(training), x.requires_grad_()
        state = state_of(norm)
        own = [state[key].requires_grad_() for key, _ in norm.named_parameters()]
        flat = x.flatten(2) if x.ndim > 2 else x[..., None]
        expected = FORMULAS[name][0 if training else 1](flat, state)
        if "weight" in state:
            expected = expected * column(state, "weight")
        if "bias" in state:
            expected = expected + column(state, "bias")
        out = norm(x)
        assert_close(out, expected.view(x.shape), rtol=0, atol=1e-11)
        found = gradients(out, [x, *norm.parameters()])
        assert_close(found, gradients(expected.view(x.shape), [x, *own]), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("count", "ratio"), [(2, 0.5), (8, 0.875), (256, 255 / 256)])
def test_biased_average_makes_the_running_variance_too_small(count, ratio):
    norm, x = BatchNormBiasedAverage(C, momentum=1.0).double(), random_tensor(count, C)
    norm(x)
    assert_close(norm.running_var, ratio * x.var(dim=0), rtol=0, atol=1e-12)
