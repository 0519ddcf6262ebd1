"""Finds what a module computes if it is a norm, from its outputs alone.

A few shipped norms n are fitted to it on random inputs, by least squares in each channel:

    out = gain * n(x) + shift

with all of its parameters drawn. In evaluation it is the same, or the affine map of its running
moments, which moved in training. A norm of fixed moments is an affine map of x in both modes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.errors import UserError
from normexp.norms.base import AffineNorm
from normexp.norms.batch import BatchNorm, FrozenBatchNorm
from normexp.norms.sample import GroupNorm, LayerNorm2d, RMSNorm
from normexp.norms.site import InPlaceOfNorm

FITS = 1e-4  # of an output: what a formula may leave unexplained
EQUALS = 1e-5  # of an output: between a module, or a network, and its description
LARGE, SMALL = 100.0, 0.01  # inputs: large against eps, and near eps
ROUNDING = 1e-6  # of a norm that computes in float32
LEAST_EPS = 1e-12  # of a norm that has none: a row of zeros gives no NaN
NUM_SAMPLES, NUM_POSITIONS = 4, 5  # of an input, positions along each axis


class RMSNormWithBias(RMSNorm):
    """RMS norm with a bias, which some have."""

    has_bias = True


FORMULAS: dict[str, type[AffineNorm]] = {
    "layer": LayerNorm2d,  # moments over the channels at a position
    "rms": RMSNormWithBias,  # the same without centring
    "batch": BatchNorm,  # over all values of a channel
    "group": GroupNorm,  # over a run of C / num_groups channels of a sample
    "frozen": FrozenBatchNorm,  # over none: they are tensors of the module
}
Values = dict[str, Tensor]  # (C,) by the names of torch's batch norm, and num_batches_tracked


@dataclass(frozen=True)
class Formula:
    """A key of FORMULAS, for x (N, C, *), or (N, *, C) if `is_last`."""

    pool: str
    is_last: bool
    num_groups: int = 1

    def __str__(self) -> str:
        groups = f" of {self.num_groups} groups" if self.pool == "group" else ""
        return f"{self.pool} norm{groups}, channels {'last' if self.is_last else 'first'}"

    def build(self, num_features: int, *, averages: bool = False, **knobs: Any) -> nn.Module:
        """The shipped norm for (N, C, *), in float64.

        Args:
            averages: a batch norm evaluates by running moments.
            knobs: eps and affine.
        """
        if self.pool == "group":
            knobs["num_groups"] = self.num_groups
        if self.pool == "batch":
            knobs["track_running_stats"] = averages
        return FORMULAS[self.pool](num_features, **knobs).double()


@dataclass(frozen=True)
class Call:
    """How a module is called: with x of this shape, and with a mask by position or keyword.

    Attributes:
        layouts: whether the channels may be the last axis; the mask has the other axes.
    """

    shape: torch.Size
    layouts: tuple[bool, ...]
    mask: Literal["position", "keyword"] | None = None


@dataclass(frozen=True)
class Norm:
    """A module that was recognised.

    Attributes:
        settings: eps, momentum and affine, as far as it has them.
        call: an input that it gets; None for torch's own norms, which are not measured.
        tail: names of its children that follow the norm: dropout and activation.
        averages: evaluation uses running moments.
        moments: the names of its tensors that are mean and variance, if these are fixed.
    """

    formula: Formula
    num_features: int
    settings: dict[str, Any]
    call: Call | None = None
    tail: tuple[str, ...] = ()
    averages: bool = False
    moments: tuple[str, ...] = ()


class DescribedNorm(InPlaceOfNorm):
    """Computes what was recognised of a module, at values that were found, and its tail."""

    def __init__(self, norm: Norm, values: Values, module: nn.Module) -> None:
        super().__init__()
        self.axis = -1 if norm.formula.is_last else 1
        eps = norm.settings["eps"]
        self.norm = norm.formula.build(norm.num_features, eps=eps, averages=norm.averages)
        self.norm.load_state_dict(values, strict=False)
        self.tail = nn.Sequential(*(copied(module.get_submodule(n)) for n in norm.tail))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.norm(x.double().movedim(self.axis, 1), mask)
        return self.tail(out.movedim(1, self.axis).to(x.dtype))


class Misfit(Exception):
    """Why a module is no norm."""


Line = tuple[Tensor, Tensor]  # slope and constant, (C,) each


class Fit(NamedTuple):
    """How a formula explains an output, and the part of it that stays unexplained."""

    formula: Formula
    line: Line
    residual: float


def recognise_norm(module: nn.Module, call: Call) -> Norm:
    """The norm that a module is. Raises Misfit with the reason if it is none."""
    fits, failures = list[tuple[Trial, Fit]](), list[Exception]()
    for is_last in call.layouts:
        try:
            trial = Trial(module, call, is_last)
            fits.append((trial, trial.fit()))
        except Exception as failure:  # of foreign code, any kind: the channels are elsewhere
            failures.append(failure)
    if not fits:
        raise failures[0]
    fitting = [(trial, fit) for trial, fit in fits if fit.residual < FITS]
    if len(fitting) == 1:
        ((trial, fit),) = fitting
        return trial.settle(fit)
    if fitting:
        both = " and ".join(str(fit.formula) for _, fit in fitting)
        raise Misfit(f"{both} are the same on its input, so its channels are not known")
    _, nearest = min(fits, key=lambda pair: pair[1].residual)
    raise Misfit(
        "its output is no affine map of a normalized input: the nearest, "
        f"{nearest.formula}, is off by {100 * nearest.residual:.2g} %"
    )


class Trial:
    """A module on random inputs (N, C, *), turned to its layout, in float64 on the CPU.

    The channels are as many as in the network, the samples and positions are not: if the channels
    are on another axis, most modules raise.

    Attributes:
        core: without the children that hold no tensors, which are its tail.
        drawn: the core with parameters, and buffers that do not move, from U(0.5, 1.5), since many
            start at 0.
        mask: (N, *), false for up to half of the positions, at the end of a sample; or None.
    """

    def __init__(self, module: nn.Module, call: Call, is_last: bool) -> None:
        self.call, self.is_last = call, is_last
        self.core = copied(module).cpu().double()
        tail = {n: child for n, child in self.core.named_children() if not state_of(child)}
        self.tail = tuple(n for n, child in tail.items() if not isinstance(child, nn.Identity))
        for name in tail:
            setattr(self.core, name, nn.Identity())

        _, *axes = call.shape
        self.num_features = axes.pop(-1 if is_last else 0)
        positions = [NUM_POSITIONS + (size == NUM_POSITIONS) for size in axes]
        self.shape = NUM_SAMPLES, self.num_features, *positions
        self.x = [LARGE * draw(self.shape, seed) for seed in (1, 2)]
        from_end = torch.arange(math.prod(positions)).flip(0)
        gone = torch.arange(NUM_SAMPLES).clamp(max=len(from_end) // 2)
        mask = from_end >= gone[:, None]
        self.mask = mask.view(NUM_SAMPLES, *positions) if call.mask else None

        moved = copy.deepcopy(self.core).train()
        self._call(moved, self.x[0])
        self.drawn = copy.deepcopy(self.core)
        generator = torch.Generator().manual_seed(0)
        for name, value in state_of(self.drawn).items():
            if value.is_floating_point() and torch.equal(value, state_of(moved)[name]):
                value.data.uniform_(0.5, 1.5, generator=generator)

    def run(self, module: nn.Module, x: Tensor, training: bool) -> Tensor:
        """The output of a copy, with fixed draws."""
        return self._call(copy.deepcopy(module).train(training), x)

    def rows(self, x: Tensor) -> Tensor:
        """The real values of an input or output by channel, (C, M)."""
        rows = x.movedim(1, 0).flatten(1)
        return rows if self.mask is None else rows[:, self.mask.flatten()]

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        axis = -1 if self.is_last else 1
        shown = x.clone().movedim(1, axis).contiguous()
        more = (self.mask,) if self.call.mask == "position" else ()
        keywords = {"mask": self.mask} if self.call.mask == "keyword" else {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return module(shown, *more, **keywords).movedim(axis, 1)

    def _normal(self, formula: Formula, x: Tensor, eps: float = 0.0) -> Tensor:
        norm = formula.build(self.num_features, eps=eps, affine=False)
        return norm(x, self.mask)

    def _line(self, x: Tensor, y: Tensor) -> Line:
        """The line that explains y by x, by least squares."""
        x, y = self.rows(x), self.rows(y)
        centred = x - x.mean(dim=1, keepdim=True)
        slope = (centred * y).sum(dim=1) / centred.square().sum(dim=1).clamp_min(1e-30)
        return slope, y.mean(dim=1) - slope * x.mean(dim=1)

    def _unexplained(self, line: Line, x: Tensor, y: Tensor) -> float:
        """The part of y that a line leaves."""
        x, y = self.rows(x), self.rows(y)
        slope, constant = (value[:, None] for value in line)
        error = (y - slope * x - constant).norm() / y.norm()
        return float(error.nan_to_num(torch.inf))

    # --- Which norm it is

    def fit(self) -> Fit:
        """The first formula that explains its outputs in training, or else the nearest."""
        first, second = (self.run(self.drawn, x, True) for x in self.x)
        fits: list[Fit] = []
        for formula in self._formulas():
            try:
                normal = [self._normal(formula, x) for x in self.x]
            except UserError:  # this shape leaves one value to pool
                continue
            line = self._line(normal[0], first)
            fits.append(Fit(formula, line, self._unexplained(line, normal[1], second)))
            if fits[-1].residual < FITS:
                break
        return min(fits, key=lambda fit: fit.residual)

    def _formulas(self) -> Iterator[Formula]:
        for pool in ("layer", "rms", "batch", "frozen"):
            yield Formula(pool, self.is_last)
        for num_groups in range(1, self.num_features + 1):
            if self.num_features % num_groups == 0:
                yield Formula("group", self.is_last, num_groups)

    def settle(self, fit: Fit) -> Norm:
        """Adds what evaluation and small inputs tell."""
        formula, line, _ = fit
        slope, constant = line
        evaluated = self.run(self.drawn, self.x[1], False)
        residual = self._unexplained(line, self._normal(formula, self.x[1]), evaluated)
        averages = residual > FITS
        if formula.pool == "frozen":
            moments, eps = self._moments(line)
        else:
            moments, eps = (), self._eps(formula, line)
        is_affine = bool((slope - 1).abs().max() + constant.abs().max() > EQUALS)
        settings: dict[str, Any] = {"affine": is_affine, "eps": eps}
        if averages:
            settings |= self._momentum(line)
        return Norm(formula, self.num_features, settings, self.call, self.tail, averages, moments)

    def _eps(self, formula: Formula, line: Line) -> float:
        """From an input of a small variance v, which is divided by sqrt(v + eps)."""
        x = SMALL * self._normal(formula, self.x[0])
        slope, _ = self._line(x, self.run(self.drawn, x, True))
        return rounded((line[0] / slope).square() - SMALL**2)

    def _momentum(self, line: Line) -> dict[str, float]:
        """The weight of a batch in the running mean, if it is the same in two steps."""
        module, means = copy.deepcopy(self.drawn), list[Tensor]()
        for _ in range(3):
            means.append(self._running(module, line)[0])
            self._call(module.train(), self.x[0])
        batch = self.rows(self.x[0]).mean(dim=1)
        weights = torch.stack([(new - old) / (batch - old) for old, new in pairwise(means)])
        momentum = float(weights.median())
        is_fixed = bool((weights - momentum).abs().max() < 1e-3)
        return {"momentum": round(momentum, 6)} if is_fixed else {}

    def _running(self, module: nn.Module, line: Line) -> tuple[Tensor, Tensor]:
        """Mean and variance + eps (C,) by which a module evaluates that trains by this line."""
        gain, shift = line
        slope, constant = self._line(self.x[0], self.run(module, self.x[0], False))
        return (shift - constant) / slope, (gain / slope).square()

    def _moments(self, line: Line) -> tuple[tuple[str, ...], float]:
        """The names of the tensors that are mean and variance, and eps.

        A mean larger by 1 subtracts the slope. A variance v larger by 1 divides the squared slope
        by 1 + 1 / (v + eps).
        """
        slope, constant = line
        mean, var, eps = "", "", 0.0
        for name, value in state_of(self.drawn).items():
            if value.numel() != len(slope):
                continue
            module = copy.deepcopy(self.drawn)
            state_of(module)[name].data += 1
            smaller, lower = self._line(self.x[0], self.run(module, self.x[0], True))
            found = 1 / ((slope / smaller).square() - 1) - value.flatten()
            if is_close(constant - slope, lower, EQUALS):
                mean = name
            elif found.min() > -EQUALS and found.max() - found.min() < EQUALS:
                var, eps = name, rounded(found)
        if not mean or not var:
            raise Misfit("it is an affine map of its input, without moments")
        return (mean, var), eps

    # --- The values of the module itself

    def values(self, norm: Norm) -> Values:
        """Gain and shift, and running or fixed moments if it has some."""
        eps, own, x = norm.settings["eps"], state_of(self.core), self.x[0]
        normal = x if norm.moments else self._normal(norm.formula, x, eps)
        gain, shift = self._line(normal, self.run(self.core, x, True))
        # Else a row of zeros, as of a padded token, would not stay zero.
        shift[shift.abs() < ROUNDING] = 0
        if norm.moments:
            mean, var = (own[name].detach().flatten() for name in norm.moments)
            gain, shift = gain * (var + eps).sqrt(), shift + gain * mean
            return {"weight": gain, "bias": shift, "running_mean": mean, "running_var": var}
        values = {"weight": gain, "bias": shift}
        if norm.averages:  # of the drawn module, since a gain of 0 would hide them
            line = self._line(normal, self.run(self.drawn, x, True))
            mean, var = self._running(self.drawn, line)
            values |= {"running_mean": mean, "running_var": var - eps}
        return values


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random values with another mean and scale along each axis."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randn, generator=generator, dtype=torch.double)
    x = random(shape)
    for axis, length in enumerate(shape):
        mean, scale = random(2, length)
        last = x.transpose(axis, -1)
        x = (last * (0.5 + scale.abs()) + mean).transpose(axis, -1)
    return x


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def rounded(eps: Tensor) -> float:
    """The median of measured values, to three digits."""
    return float(f"{max(float(eps.median()), LEAST_EPS):.3g}")


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() <= tolerance * one.norm())
