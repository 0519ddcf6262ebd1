"""Describes the norm that a module computes, from its outputs on random inputs.

A norm normalizes its input and maps each channel to a line; dropout and activation may follow:

    output = tail(gain * normalize(x) + shift)        gain and shift (C,)

`normalize` is one of FORMULAS, which are shipped norms without gain and shift. `FormulaTrial` finds

    the formula     the one whose line, fitted to one input, explains the output for another
    its settings    eps from the output for a small input, momentum from the averages of two steps
    its values      gain, shift and running moments, fitted to the module as it is

A batch norm may evaluate by running moments instead, and a frozen norm does so in training too:
both then map x itself to a line, which gives mean and variance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normexp.any_network.description import (
    COUNT,
    INITIAL_VALUES,
    CallForm,
    Formula,
    Misfit,
    NormDescription,
    tensors_of,
)
from normexp.errors import UserError
from normexp.norms.contract import State
from normexp.training.batching.copies import copied

MAX_RESIDUAL = 1e-4  # largest part of an output that the right formula leaves unexplained
TOLERANCE = 1e-5  # largest difference, as a part of the output, between equal computations
LARGE, SMALL = 100.0, 0.01  # standard deviations of inputs: far above eps, and close to it
ROUNDING = 1e-6  # a smaller shift is rounding of a norm that computes in float32
MIN_EPS = 1e-12  # for a norm without eps, so that a row of zeros gives no NaN
NUM_SAMPLES, NUM_POSITIONS = 4, 5  # of an input; positions along each axis


def describe_norm(module: nn.Module, form: CallForm) -> NormDescription:
    """The norm that a module computes. Raises Misfit with the reason if it is none."""
    fits: dict[FormulaTrial, Fit] = {}
    failures: list[Exception] = []
    for is_last in form.layouts:
        try:
            trial = FormulaTrial(module, form, is_last)
            fits[trial] = trial.fit()
        except Exception as failure:  # a module whose channels are elsewhere may raise anything
            failures.append(failure)
    if not fits and form.dtype == torch.double:  # many cast to float32 in their forward
        return describe_norm(module, replace(form, dtype=torch.float))
    if not fits:
        raise failures[0]
    nearest = min(fits, key=lambda trial: fits[trial].residual)
    fit = fits[nearest]
    if fit.residual >= MAX_RESIDUAL:
        raise Misfit(
            "its output is no affine map of a normalized input: the nearest, "
            f"{fit.formula}, is off by {100 * fit.residual:.2g} %"
        )
    if all(other.residual < MAX_RESIDUAL for other in fits.values()) and len(fits) > 1:
        both = " and ".join(str(other.formula) for other in fits.values())
        raise Misfit(f"{both} are the same on its input, so its channels are not known")
    return nearest.describe(fit)


def values_of_norm(module: nn.Module, description: NormDescription) -> State:
    """The tensors of a module that are INITIAL_VALUES in a new norm, read or measured."""
    if description.form is not None:
        trial = FormulaTrial(module, description.form, description.formula.is_last)
        values = trial.values(description)
        counters = [t for name, t in tensors_of(module).items() if name.rpartition(".")[2] == COUNT]
        if len(counters) == 1:
            values[COUNT] = counters[0]
        return values
    tensors = {name: getattr(module, name, None) for name in INITIAL_VALUES}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class Line(NamedTuple):
    """y = slope * x + constant in each channel; both (C,)."""

    slope: Tensor
    constant: Tensor

    @classmethod
    def fitted(cls, x: Tensor, y: Tensor) -> Line:
        """The line of least squares; x and y (C, M)."""
        centred = x - x.mean(dim=1, keepdim=True)
        slope = (centred * y).sum(dim=1) / centred.square().sum(dim=1).clamp_min(1e-30)
        return cls(slope, y.mean(dim=1) - slope * x.mean(dim=1))

    def residual(self, x: Tensor, y: Tensor) -> float:
        """The part of y (C, M) that the line does not explain, 0 to 1."""
        error = y - self.slope[:, None] * x - self.constant[:, None]
        return float((error.norm() / y.norm()).nan_to_num(torch.inf))


class Fit(NamedTuple):
    """A formula, the line from its normalized input to the output, and what stays unexplained."""

    formula: Formula
    line: Line
    residual: float


class FormulaTrial:
    """Runs copies of a module on random inputs (N, C, *), turned to its layout.

    The inputs have as many channels as in the network, but other numbers of samples and positions:
    most modules raise if their channels are on another axis.

    Attributes:
        core: the module without its tail, which are the children that hold no tensors.
        drawn: the core with random parameters, since many start at 0 or 1, and random buffers,
            except those that training moves.
        x, other_x: inputs of large variance.
        mask: (N, *), false for some positions at the end of a sample; None if it takes none.
    """

    def __init__(self, module: nn.Module, form: CallForm, is_last: bool) -> None:
        self.form = form
        self.axis = -1 if is_last else 1
        self.is_last = is_last
        self.core = copied(module).cpu().to(form.dtype)
        tail = {n: child for n, child in self.core.named_children() if not tensors_of(child)}
        self.tail = tuple(n for n, child in tail.items() if not isinstance(child, nn.Identity))
        for name in tail:
            setattr(self.core, name, nn.Identity())
        self.num_features = form.shape[self.axis]
        axes = form.shape[1:-1] if is_last else form.shape[2:]
        positions = [NUM_POSITIONS + (size == NUM_POSITIONS) for size in axes]
        self.shape = NUM_SAMPLES, self.num_features, *positions
        self.x = LARGE * draw(self.shape, 1)
        self.other_x = LARGE * draw(self.shape, 2)
        self.mask = draw_mask(positions) if form.mask else None
        self.drawn = self._with_random_tensors()

    def _with_random_tensors(self) -> nn.Module:
        trained = copy.deepcopy(self.core).train()
        self._call(trained, self.x)
        drawn = copy.deepcopy(self.core)
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors_of(drawn).items():
            if tensor.is_floating_point() and torch.equal(tensor, tensors_of(trained)[name]):
                tensor.data.uniform_(0.5, 1.5, generator=generator)
        return drawn

    def run(self, module: nn.Module, x: Tensor, training: bool) -> Tensor:
        """The output of a copy with fixed draws, by channel (C, M)."""
        return self.by_channel(self._call(copy.deepcopy(module).train(training), x))

    def by_channel(self, x: Tensor) -> Tensor:
        """The real values of an input or output (N, C, *) as (C, M)."""
        rows = x.movedim(1, 0).flatten(1)
        return rows if self.mask is None else rows[:, self.mask.flatten()]

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        turned = x.to(self.form.dtype, copy=True).movedim(1, self.axis)
        args: list[Any] = [turned.contiguous()]
        keywords = {}
        if self.form.mask == "position":
            args.append(self.mask)
        elif self.form.mask == "keyword":
            keywords["mask"] = self.mask
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return module(*args, **keywords).movedim(self.axis, 1).double()

    def _normalize(self, formula: Formula, x: Tensor, eps: float = 0.0) -> Tensor:
        bare = {"eps": eps, "affine": False, "track_running_stats": False}
        return formula.build(self.num_features, **bare)(x, self.mask)

    def _line_of(self, module: nn.Module, *, training: bool) -> Line:
        """The line from x itself to the output of a module that computes no moments."""
        return Line.fitted(self.by_channel(self.x), self.run(module, self.x, training))

    def fit(self) -> Fit:
        """The first formula that explains the outputs in training, or else the nearest."""
        output = self.run(self.drawn, self.x, True)
        other_output = self.run(self.drawn, self.other_x, True)
        fits: list[Fit] = []
        for formula in self._formulas():
            try:
                normal = self.by_channel(self._normalize(formula, self.x))
                other_normal = self.by_channel(self._normalize(formula, self.other_x))
            except UserError:  # this shape leaves one value to normalize
                continue
            line = Line.fitted(normal, output)
            residual = line.residual(other_normal, other_output)
            fits.append(Fit(formula, line, residual))
            if residual < MAX_RESIDUAL:
                break
        return min(fits, key=lambda fit: fit.residual)

    def _formulas(self) -> Iterator[Formula]:
        for name in ("layer", "rms", "batch", "frozen"):
            yield Formula(name, self.is_last)
        for num_groups in range(1, self.num_features + 1):
            if self.num_features % num_groups == 0:
                yield Formula("group", self.is_last, num_groups)

    def describe(self, fit: Fit) -> NormDescription:
        """The description of a module that a formula fits in training."""
        formula, line, _ = fit
        moments: tuple[str, ...] = ()
        if formula.name == "frozen":
            moments, eps = self._find_moments(line)
        else:
            eps = self._measure_eps(formula, line)
        is_affine = bool((line.slope - 1).abs().max() + line.constant.abs().max() > TOLERANCE)
        if formula.name == "rms" and is_affine and not tensors_of(self.core):
            raise Misfit("it scales to a fixed length, which is no gain that could be trained")
        roles = self._roles(formula, line, moments)
        settings: dict[str, Any] = {"affine": is_affine, "eps": eps}
        if roles and "bias" not in roles:
            settings["has_bias"] = False
        normal = self.by_channel(self._normalize(formula, self.other_x))
        evaluated = self.run(self.drawn, self.other_x, False)
        has_averages = line.residual(normal, evaluated) > MAX_RESIDUAL
        if formula.name == "batch" and not has_averages:
            settings["track_running_stats"] = False
        if has_averages:
            settings |= self._measure_averages(line, settings["eps"])
        if self._is_zero_centered(line, roles.get("weight", ())):
            settings["zero_centered"] = True
        holds = settings.get("momentum") == 0
        if holds:
            del settings["momentum"]
        return NormDescription(
            formula,
            self.num_features,
            settings,
            roles,
            self.form,
            self.tail,
            has_averages,
            holds_averages=holds,
            moments=moments,
        )

    def _roles(
        self, formula: Formula, line: Line, moments: tuple[str, ...]
    ) -> dict[str, tuple[str, ...]]:
        """The tensors that move the slope of the line, and those that move its constant alone."""
        normal = self.by_channel(self._normalize(formula, self.x))
        found: dict[str, tuple[str, ...]] = {}
        for name, tensor in tensors_of(self.drawn).items():
            if not tensor.is_floating_point() or name in moments:
                continue
            module = copy.deepcopy(self.drawn)
            tensors_of(module)[name].data += 0.5
            moved = Line.fitted(normal, self.run(module, self.x, True))
            scale = float(line.slope.norm())
            for role, before, after in zip(("weight", "bias"), line, moved, strict=True):
                if float((after - before).norm()) > TOLERANCE * scale:
                    found[role] = (*found.get(role, ()), name)
                    break
        return found

    def _measure_eps(self, formula: Formula, line: Line) -> float:
        """Measures eps on an input of a small variance v, whose slope is gain / sqrt(v + eps)."""
        x = SMALL * self._normalize(formula, self.x)
        small = Line.fitted(self.by_channel(x), self.run(self.drawn, x, True))
        return rounded((line.slope / small.slope).square() - SMALL**2)

    def _is_zero_centered(self, line: Line, gains: tuple[str, ...]) -> bool:
        """True if the gain is 1 + a parameter."""
        if len(gains) != 1 or "." in gains[0]:
            return False
        weight = tensors_of(self.drawn)[gains[0]].flatten().double()
        return len(weight) == len(line.slope) and is_close(line.slope, 1 + weight, TOLERANCE)

    def _measure_averages(self, line: Line, eps: float) -> dict[str, Any]:
        """The weight of a batch in the running mean; empty if two steps have different weights.

        With it, whether the running variance averages the biased one.
        """
        module = copy.deepcopy(self.drawn)
        moments: list[tuple[Tensor, Tensor]] = []
        for _ in range(3):
            moments.append(self._running_moments(module, line))
            self._call(module.train(), self.x)
        batch = self.by_channel(self.x)
        weights = torch.stack(
            [(new - old) / (batch.mean(dim=1) - old) for (old, _), (new, _) in pairwise(moments)]
        )
        momentum = float(weights.median())
        if (weights - momentum).abs().max() > 1e-3 or not -1e-6 < momentum < 1 + 1e-6:
            return {}
        averages: dict[str, Any] = {"momentum": abs(round(momentum, 6))}
        (_, before), (_, after), _ = moments
        biased = (1 - momentum) * before + momentum * (batch.var(dim=1, correction=0) + eps)
        if is_close(after, biased, TOLERANCE):
            averages["unbiased_running_var"] = False
        return averages

    def _running_moments(self, module: nn.Module, line: Line) -> tuple[Tensor, Tensor]:
        """Mean and variance + eps (C,) from gain * (x - mean) / sqrt(var + eps) + shift.

        Args:
            line: gain and shift, which are those of training.
        """
        gain, shift = line
        slope, constant = self._line_of(module, training=False)
        return (shift - constant) / slope, (gain / slope).square()

    def _find_moments(self, line: Line) -> tuple[tuple[str, str], float]:
        """The names of the tensors that are the mean and variance of a frozen norm, and eps.

        A mean larger by 1 lowers the constant by the slope. A variance v larger by 1 divides the
        squared slope by 1 + 1 / (v + eps).
        """
        mean = var = ""
        eps = 0.0
        for name, tensor in tensors_of(self.drawn).items():
            if tensor.numel() != self.num_features:
                continue
            module = copy.deepcopy(self.drawn)
            tensors_of(module)[name].data += 1
            slope, constant = self._line_of(module, training=True)
            found = 1 / ((line.slope / slope).square() - 1) - tensor.flatten()
            if is_close(line.constant - line.slope, constant, TOLERANCE):
                mean = name
            elif found.min() > -TOLERANCE and found.max() - found.min() < TOLERANCE:
                var = name
                eps = rounded(found)
        if not mean or not var:
            raise Misfit("it is an affine map of its input, without moments")
        return (mean, var), eps

    def values(self, description: NormDescription) -> State:
        """Gain and shift of the module as it is, and its moments if it has some of its own."""
        eps = description.settings["eps"]
        if description.moments:
            tensors = tensors_of(self.core)
            mean, var = (tensors[name].detach().flatten() for name in description.moments)
            slope, constant = self._line_of(self.core, training=True)
            gain, shift = slope * (var + eps).sqrt(), constant + slope * mean
            return {"weight": gain, "bias": shift, "running_mean": mean, "running_var": var}
        normal = self.by_channel(self._normalize(description.formula, self.x, eps))
        gain, shift = Line.fitted(normal, self.run(self.core, self.x, True))
        # A row of zeros, as of a padded token, must stay zero.
        shift[shift.abs() < ROUNDING] = 0
        if not description.has_averages:
            return {"weight": gain, "bias": shift}
        # Measured with random gains, because a gain of 0 would hide the averages.
        line = Line.fitted(normal, self.run(self.drawn, self.x, True))
        mean, var = self._running_moments(self.drawn, line)
        return {"weight": gain, "bias": shift, "running_mean": mean, "running_var": var - eps}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random values with another mean and scale at each index of each axis."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randn, generator=generator, dtype=torch.double)
    x = random(shape)
    for axis, length in enumerate(shape):
        mean, scale = random(2, length)
        last = x.transpose(axis, -1)
        x = (last * (0.5 + scale.abs()) + mean).transpose(axis, -1)
    return x


def draw_mask(positions: list[int]) -> Tensor:
    """A mask (N, *) that hides the last n positions of sample n, at most half of them."""
    from_end = torch.arange(math.prod(positions)).flip(0)
    num_hidden = torch.arange(NUM_SAMPLES).clamp(max=len(from_end) // 2)
    return (from_end >= num_hidden[:, None]).view(NUM_SAMPLES, *positions)


def rounded(eps: Tensor) -> float:
    """The median of measured values, to three digits."""
    return float(f"{max(float(eps.median()), MIN_EPS):.3g}")


def is_close(expected: Tensor, value: Tensor, tolerance: float) -> bool:
    return bool((expected - value).norm() <= tolerance * expected.norm())
