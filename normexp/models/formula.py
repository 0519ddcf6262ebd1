"""Finds what a module computes if it is a norm, from its outputs alone.

With all of its parameters drawn, a norm has in training, for each channel,

    out = gain * n(x) + shift,    n(x) = (x - mean) / sqrt(var + eps),

with moments over one of a few sets of values. Evaluation uses the same, or the affine map of
running moments, which moved in training. A norm whose moments are buffers is an affine map in both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normexp.batching.copies import copied
from normexp.norms.base import centre, measure, measure_mean, zero_padding
from normexp.norms.site import InPlaceOfNorm

FITS = 1e-4  # of an output: what a formula may leave unexplained
EQUALS = 1e-5  # of an output: between a module, or a network, and its description
EXACT = 1e-6  # rounding of a norm that computes in float32
LARGE, TYPICAL, SMALL = 100.0, 3.0, 0.01  # inputs: large against eps, as in networks, near eps
LEAST_EPS = 1e-12  # of a norm that has none: a row of zeros gives no NaN
FEW_SAMPLES, FEW_ROWS = 5, 8  # of an input, where the module takes fewer than the network gives


@dataclass(frozen=True)
class Formula:
    """Over which values of x (N, C, *), or (N, *, C) if `is_last`, the moments are taken.

    Attributes:
        pool: `batch`, all values of a channel; `group`, a run of C / num_groups channels of a
            sample; `layer`, the channels at a position; `rms`, the same without centring;
            `frozen`, none: the moments are buffers.
    """

    pool: Literal["batch", "group", "layer", "rms", "frozen"]
    is_last: bool
    num_groups: int = 1

    def __str__(self) -> str:
        groups = f" of {self.num_groups} groups" if self.pool == "group" else ""
        return f"{self.pool} norm{groups}, channels {'last' if self.is_last else 'first'}"

    def maps(self, x: Tensor) -> Tensor:
        """x as (N, C, P)."""
        x = x.movedim(-1, 1) if self.is_last else x
        return x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)

    def like_input(self, maps: Tensor, x: Tensor) -> Tensor:
        """Maps (N, C, P) in the shape of x."""
        if self.is_last:
            return maps.reshape(x.movedim(-1, 1).shape).movedim(1, -1)
        return maps.reshape(x.shape)

    def normalize(self, maps: Tensor, eps: float, real: Tensor | None = None) -> Tensor:
        """n(x) of maps (N, C, P); only positions that are real (N, 1, P) count."""
        maps = zero_padding(maps, real)
        shown, dims = maps, (0, 2) if self.pool == "batch" else (1,)
        if self.pool == "group":
            shown, dims = maps.unflatten(1, (self.num_groups, -1)), (2, 3)
            real = None if real is None else real.unsqueeze(1)
        if self.pool == "rms":
            square, _ = measure_mean(shown.square(), real, dims)
            return shown * torch.rsqrt(square + eps)
        mean, var, _ = measure(shown, real, dims)
        return (centre(shown, mean, real) * torch.rsqrt(var + eps)).reshape(maps.shape)


class Values(NamedTuple):
    """Gain and shift, running mean and variance (C,), and batches so far; None: it has none."""

    gain: Tensor | None
    shift: Tensor | None
    mean: Tensor | None = None
    var: Tensor | None = None
    count: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """How a module is called: with x of this shape, and with a mask by position or keyword.

    Attributes:
        mask_is_last: the mask has the shape of x without its last axis, not its second.
    """

    shape: torch.Size
    mask: Literal["position", "keyword"] | None = None
    mask_is_last: bool = False


@dataclass(frozen=True)
class Norm:
    """A module that was recognised.

    Attributes:
        settings: eps, momentum and affine, as far as it has them.
        call: an input that it gets; None for torch's own norms, which are not measured.
        tail: names of its children that follow the norm: dropout and activation.
        averages: evaluation uses running moments.
        has_shift: its shift may differ from 0.
        moments: the buffers that are mean and variance of a frozen norm.
    """

    formula: Formula
    num_features: int
    settings: dict[str, Any]
    call: Call | None = None
    tail: tuple[str, ...] = ()
    averages: bool = False
    has_shift: bool = True
    moments: Mapping[str, str] = field(default_factory=dict)


class DescribedNorm(InPlaceOfNorm):
    """Computes what was recognised of a module, at values that were found, and its tail."""

    gain: Tensor
    shift: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, norm: Norm, values: Values, module: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        ones = torch.ones(norm.num_features, dtype=torch.double)
        for name, value, default in zip(Values._fields, values, (1, 0, 0, 1, 0), strict=True):
            value = default * ones if value is None else value.detach().double()
            self.register_buffer(name, value.view(-1, 1))
        self.tail = nn.Sequential(*(copied(module.get_submodule(n)) for n in norm.tail))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        formula, eps = self.norm.formula, self.norm.settings["eps"]
        maps = formula.maps(x.double())
        real = None if mask is None else mask.reshape(len(x), 1, -1)
        if formula.pool == "frozen" or (self.norm.averages and not self.training):
            normalized = (maps - self.mean) * torch.rsqrt(self.var + eps)
        else:
            normalized = formula.normalize(maps, eps, real)
        out = zero_padding(normalized * self.gain + self.shift, real)
        return self.tail(formula.like_input(out, x).to(x.dtype))


class Misfit(Exception):
    """Why a module is no norm.

    Attributes:
        resembles: its output does not depend on the scale of its input.
    """

    def __init__(self, reason: str, *, resembles: bool = True) -> None:
        super().__init__(reason)
        self.resembles = resembles


class Trial:
    """A module on random inputs, in float64 on the CPU.

    Rows are the real values of an input or output by channel, (C, M).

    Attributes:
        core: without the children that hold no tensors, which are its tail.
        drawn: the core with parameters, and buffers that do not move, from U(0.5, 1.5), since many
            start at 0.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.call = call
        self.core = copied(module).cpu().double()
        tail = [name for name, child in self.core.named_children() if not state_of(child)]
        self.tail = tuple(n for n in tail if not isinstance(module.get_submodule(n), nn.Identity))
        for name in tail:
            setattr(self.core, name, nn.Identity())
        self.shape = self._accepted_shape()
        self.x = self.draw(1), self.draw(2)
        before, after = state_of(self.core), copy.deepcopy(self.core).train()
        self._call(after, self.x[0])
        moved = {n for n, value in state_of(after).items() if not torch.equal(value, before[n])}
        self.counts = [before[name] for name in moved if not before[name].ndim]
        self.moves = bool(moved)
        self.drawn = copy.deepcopy(self.core)
        generator = torch.Generator().manual_seed(0)
        for name, value in state_of(self.drawn).items():
            if name not in moved and value.is_floating_point():
                value.data.uniform_(0.5, 1.5, generator=generator)

    def _accepted_shape(self) -> torch.Size:
        """A smaller shape, with the same first and last channels, if the module takes it."""
        shape = self.call.shape
        rows = [min(size, FEW_ROWS) for size in shape[2:-1]]
        self.shape = torch.Size([FEW_SAMPLES, *shape[1:2], *rows, *shape[2:][-1:]])
        try:
            for training in (True, False):
                self.run(self.core, self.draw(1), training)
        except Exception:  # of foreign code: it takes inputs of one shape
            return shape
        return self.shape

    def draw(self, seed: int, size: float = LARGE) -> Tensor:
        """Random values with another mean and scale along each axis."""
        options: dict[str, Any] = {"dtype": torch.double}
        options["generator"] = torch.Generator().manual_seed(seed)
        x = torch.randn(self.shape, **options)
        for axis, length in enumerate(self.shape):
            along = [1] * len(self.shape)
            along[axis] = length
            x = x * (0.5 + torch.rand(along, **options)) + 0.5 * torch.randn(along, **options)
        return size * x

    @property
    def mask(self) -> Tensor | None:
        """False for one more position at the end of each further sample, up to half of them."""
        if self.call.mask is None:
            return None
        shape = [*self.shape]
        del shape[-1 if self.call.mask_is_last else 1]
        mask = torch.ones(shape, dtype=torch.bool)
        for index, row in enumerate(mask.view(len(mask), -1)):
            row[len(row) - min(index, len(row) // 2) :] = False
        return mask

    @property
    def real(self) -> Tensor | None:
        """The mask as (N, 1, P)."""
        return None if self.mask is None else self.mask.reshape(len(self.mask), 1, -1)

    def run(self, module: nn.Module, x: Tensor, training: bool) -> Tensor:
        """The output of a copy, with fixed draws."""
        return self._call(copy.deepcopy(module).train(training), x)

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        more = (self.mask,) if self.call.mask == "position" else ()
        keywords = {"mask": self.mask} if self.call.mask == "keyword" else {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return module(x.clone(), *more, **keywords)

    def rows(self, formula: Formula, x: Tensor) -> Tensor:
        by_channel = formula.maps(x).movedim(1, 0)
        return by_channel.flatten(1) if self.real is None else by_channel[:, self.real[:, 0]]

    def normal(self, formula: Formula, x: Tensor, eps: float = 0.0) -> Tensor:
        """The rows of n(x)."""
        normalized = formula.normalize(formula.maps(x), eps, self.real)
        return self.rows(formula, formula.like_input(normalized, x))

    # --- Which norm it is

    def fit(self) -> Norm:
        """The norm that explains its outputs. Raises Misfit with the reason if none does."""
        y, other = (self.run(self.drawn, x, True) for x in self.x)
        larger = self.run(self.drawn, 4 * self.x[0], True)
        if is_close(y, larger, 1e-3) and not is_close(y, other, 1e-3):
            return self._fit_moments(y, other)
        frozen = [Formula("frozen", is_last) for is_last in self._layouts()]
        fitting = [norm for formula in frozen if (norm := self._fit_frozen(formula))]
        if not fitting:
            raise Misfit("its output follows the scale of its input", resembles=False)
        return fitting[0]

    def _layouts(self) -> tuple[bool, ...]:
        """Whether the channels may be the first axis after the samples, and the last."""
        if self.call.mask is not None:
            return (self.call.mask_is_last,)
        return (False, True) if len(self.shape) > 2 else (False,)

    def _formulas(self) -> Iterator[Formula]:
        for is_last in self._layouts():
            yield from (Formula(pool, is_last) for pool in ("layer", "rms", "batch"))
            _, channels, positions = Formula("layer", is_last).maps(self.x[0]).shape
            for groups in range(1, channels + 1):
                if channels % groups == 0 and channels // groups * positions > 1:
                    yield Formula("group", is_last, groups)

    def _fit_moments(self, y: Tensor, other: Tensor) -> Norm:
        """Of formulas that are the same on this shape, along one axis, the first counts."""
        fitting: dict[bool, Norm] = {}
        nearest: list[tuple[float, str]] = []
        for formula in self._formulas():
            if formula.is_last in fitting:
                continue
            line = fit_line(self.normal(formula, self.x[0]), self.rows(formula, y))
            normal = self.normal(formula, self.x[1])
            residual = unexplained(normal, self.rows(formula, other), *line)
            nearest.append((residual, str(formula)))
            if residual < FITS:
                fitting[formula.is_last] = self._settle(formula, *line)
        if not fitting:
            residual, formula = min(nearest)
            raise Misfit(
                f"its output is no affine map of a normalized input: the nearest, {formula}, "
                f"is off by {100 * residual:.2g} %"
            )
        if len(fitting) > 1:
            fixed = [is_last for is_last in fitting if not self._takes_more_channels(is_last)]
            if len(fixed) == 1:
                return fitting[fixed[0]]
            both = " and ".join(str(norm.formula) for norm in fitting.values())
            raise Misfit(f"{both} are the same on its input, so its channels are not known")
        return next(iter(fitting.values()))

    def _takes_more_channels(self, is_last: bool) -> bool:
        shape = [*self.shape]
        shape[-1 if is_last else 1] += 1
        try:
            self.run(self.core, torch.ones(shape, dtype=torch.double), True)
            return True
        except Exception:  # of foreign code, any kind
            return False

    def _settle(self, formula: Formula, gain: Tensor, shift: Tensor) -> Norm:
        """Adds what evaluation and small inputs tell."""
        has_shift = bool(shift.abs().max() > EQUALS)
        affine = has_shift or bool((gain - 1).abs().max() > EQUALS)
        settings: dict[str, Any] = {"affine": affine, "eps": self._eps(formula, gain, shift)}
        norm = Norm(formula, len(gain), settings, self.call, self.tail, False, has_shift)
        outputs = [self.rows(formula, self.run(self.drawn, x, False)) for x in self.x]
        if unexplained(self.normal(formula, self.x[1]), outputs[1], gain, shift) < FITS:
            return norm
        first, second = (self.rows(formula, x) for x in self.x)
        line = fit_line(first, outputs[0])
        if not self.moves or unexplained(second, outputs[1], *line) > FITS:
            raise Misfit(f"in training it is {formula}, in evaluation something else")
        settings |= self._momentum(formula, gain, shift)
        return Norm(formula, len(gain), settings, self.call, self.tail, True, has_shift)

    def _eps(self, formula: Formula, gain: Tensor, shift: Tensor) -> float:
        """From the ratio sqrt((v + eps) / v) by which small inputs shrink."""
        x = self.draw(1, SMALL)
        normal = self.normal(formula, x)
        output = self.rows(formula, self.run(self.drawn, x, True)) - shift[:, None]
        shrunk, by_one = gain[:, None] * normal / output, normal / self.normal(formula, x, 1.0)
        eps = (shrunk.square() - 1) / (by_one.square() - 1)
        return float(f"{max(float(eps.median()), LEAST_EPS):.3g}")

    def _momentum(self, formula: Formula, gain: Tensor, shift: Tensor) -> dict[str, Any]:
        """The weight of a batch in the running mean; None if all weigh alike, {} if not known."""
        module, shares = copy.deepcopy(self.drawn).train(), list[Tensor]()
        batch = self.rows(formula, self.x[0]).mean(dim=1)
        for _ in range(2):
            before, _ = self._running(formula, module, gain, shift)
            self._call(module.train(), self.x[0])
            after, _ = self._running(formula, module, gain, shift)
            shares.append((after - before) / (batch - before))
        first, second = (float(share.median()) for share in shares)
        if any(not is_close(share.median().expand_as(share), share, 1e-3) for share in shares):
            return {}
        if abs(first - second) < 1e-3:
            return {"momentum": round(first, 6)}
        return {"momentum": None} if abs(first - 1) + abs(second - 0.5) < 1e-3 else {}

    def _running(
        self, formula: Formula, module: nn.Module, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance + eps (C,) with which a module of this gain and shift evaluates."""
        slope, constant = self._line(formula, module, False)
        return (shift - constant) / slope, (gain / slope).square()

    def _line(self, formula: Formula, module: nn.Module, training: bool) -> tuple[Tensor, Tensor]:
        """The affine map of x that a module is on the first input."""
        y = self.run(module, self.x[0], training)
        return fit_line(self.rows(formula, self.x[0]), self.rows(formula, y))

    def _fit_frozen(self, formula: Formula) -> Norm | None:
        """A norm whose moments are buffers in both modes.

        Four times the variance halves the output, and a mean larger by 1 subtracts the slope.
        """
        slope, constant = self._line(formula, self.drawn, True)
        x, outputs = self.x[1], [self.run(self.drawn, self.x[1], mode) for mode in (True, False)]
        rows = [(self.rows(formula, x), self.rows(formula, y)) for y in outputs]
        if max(unexplained(*pair, slope, constant) for pair in rows) > FITS:
            return None
        moments, eps = dict[str, str](), 0.0
        for name, value in self.drawn.named_buffers():
            if value.numel() != len(slope):
                continue
            lines = []
            for changed in (4 * value, value + 1):
                module = copy.deepcopy(self.drawn)
                module.get_buffer(name).copy_(changed)
                lines.append(self._line(formula, module, True))
            square = (lines[0][0] / slope).square()  # (v + eps) / (4 v + eps)
            found = value.flatten() * (4 * square - 1) / (1 - square)
            if bool((found > 0).all()) and is_close(found.median().expand_as(found), found, 0.1):
                moments["var"], eps = name, float(f"{float(found.median()):.3g}")
            elif is_close(constant - slope, lines[1][1], FITS):
                moments["mean"] = name
        settings = {"affine": True, "eps": eps}
        norm = Norm(formula, len(slope), settings, self.call, self.tail, moments=moments)
        return norm if "var" in moments else None

    # --- The values of the module itself

    def values(self, norm: Norm) -> Values:
        """Measured, and replaced by a tensor of the module, or 1 + it, where that is the value."""
        formula, eps = norm.formula, norm.settings["eps"]
        if formula.pool == "frozen":
            slope, constant = self._line(formula, self.core, True)
            var = self.core.get_buffer(norm.moments["var"]).flatten()
            mean = torch.zeros_like(var)
            if "mean" in norm.moments:
                mean = self.core.get_buffer(norm.moments["mean"]).flatten()
            values = Values(slope * (var + eps).sqrt(), constant + slope * mean, mean, var)
        else:
            gain, shift = self._affine(norm, self.core)
            has_gain = norm.settings["affine"]
            values = Values(gain if has_gain else None, shift if norm.has_shift else None)
        if norm.averages:  # of the drawn module, since a gain of 0 would hide them
            mean, var = self._running(formula, self.drawn, *self._affine(norm, self.drawn))
            values = values._replace(mean=mean, var=var - eps)
        count = self.counts[0] if self.counts else None
        return Values(*map(self._exact, values))._replace(count=count)

    def _affine(self, norm: Norm, module: nn.Module) -> tuple[Tensor, Tensor]:
        x, eps = self.x[0], norm.settings["eps"]
        y = self.rows(norm.formula, self.run(module, x, True))
        return fit_line(self.normal(norm.formula, x, eps), y)

    def _exact(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        for own in state_of(self.core).values():
            if own.numel() not in (1, len(value)):
                continue
            own = own.flatten().expand_as(value)
            for known in (own, 1 + own):
                if bool((known - value).abs().max() < EXACT):
                    return known
        return value


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def fit_line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and constant (C,) of rows y = slope * x + constant, by least squares."""
    centred = x - x.mean(dim=1, keepdim=True)
    slope = (centred * y).sum(dim=1) / centred.square().sum(dim=1).clamp_min(1e-30)
    return slope, y.mean(dim=1) - slope * x.mean(dim=1)


def unexplained(x: Tensor, y: Tensor, slope: Tensor, constant: Tensor) -> float:
    """The part of y that a line leaves."""
    error = (y - slope[:, None] * x - constant[:, None]).norm() / y.norm()
    return float(error.nan_to_num(torch.inf))


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() <= tolerance * one.norm())
