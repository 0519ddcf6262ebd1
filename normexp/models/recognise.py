"""Recognises the norms of a network by what they compute, whatever their names.

A copy of the network runs once in training mode. Torch's own norms are known by their exact type.
Every other module that is called with one tensor, or with x and a mask (N, *), and returns its
shape is tried, the innermost first. It is a norm if in training, with all of its parameters drawn,

    out = gain * n(x) + shift,    n(x) = (x - mean) / sqrt(var + eps),

with a gain and a shift for each channel, and moments over one of a few sets of values. Evaluation
must use the same, or the affine map of running moments. A dropout and an activation that it holds
as modules follow as its tail. At its own values it must equal this description. What computes more
is left as it is: an activation inside its forward, a second input, another scale.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from normexp.errors import UserError, first_line
from normexp.norms.base import centre, measure, measure_mean, zero_padding
from normexp.records.provenance import source_line_of

CHANNELS_FIRST = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm)
TORCH_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

NOTHING: Mapping[str, Any] = {}
FITS = 1e-4  # of an output, which a formula may leave unexplained
EQUALS = 1e-5  # of an output, between a module or network and its description
LARGE, TYPICAL, SMALL = 100.0, 3.0, 0.01  # inputs: large against eps, as in networks, and near eps
EXACT = 1e-6  # rounding of a norm that computes in float32
LEAST_EPS = 1e-12  # of a norm that has none: a row of zeros gives no NaN
FEW_SAMPLES, FEW_ROWS = 5, 8  # of an input to fit, where the module takes fewer than it is given


# --- What a norm computes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """Over which values of x (N, C, *), or (N, *, C) if `is_last`, the moments are taken.

    Attributes:
        pool: `batch`, all values of a channel; `group`, a run of C / num_groups channels of a
            sample; `layer`, the channels at a position; `rms`, the same without centring;
            `frozen`: the moments are buffers in both modes.
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

    def unmaps(self, maps: Tensor, like: Tensor) -> Tensor:
        """(N, C, P) in the shape of x."""
        shape = like.movedim(-1, 1).shape if self.is_last else like.shape
        maps = maps.reshape(shape)
        return maps.movedim(1, -1) if self.is_last else maps

    def normalize(self, maps: Tensor, eps: float, real: Tensor | None = None) -> Tensor:
        """n(x) of maps (N, C, P); only positions that are real (N, 1, P) count."""
        maps = zero_padding(maps, real)
        if self.pool == "group":
            shown, dims = maps.unflatten(1, (self.num_groups, -1)), (2, 3)
            real = None if real is None else real.unsqueeze(1)
        else:
            shown, dims = maps, (0, 2) if self.pool == "batch" else (1,)
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
        tail: names of its children that follow the norm: dropout and activation.
        call: an input that it gets; None for torch's own norms.
        averages: evaluation uses running moments.
        has_shift: its shift may differ from 0.
        moments: the buffers that are mean and variance of a frozen norm.
    """

    formula: Formula
    num_features: int
    settings: dict[str, Any]
    tail: tuple[str, ...] = ()
    call: Call | None = None
    averages: bool = False
    has_shift: bool = True
    moments: Mapping[str, str] = field(default_factory=dict)

    @property
    def eps(self) -> float:
        return self.settings.get("eps", 0.0)

    def values(self, module: nn.Module) -> Values:
        """Of the module itself; of one that is not torch's, measured."""
        if self.call is None:
            return Values(*(getattr(module, name, None) for name in TORCH_NAMES))
        return _Trial(module, self.call).values(self)


class DescribedNorm(nn.Module):
    """Computes what was recognised of a module, at values that were found, and its tail."""

    def __init__(self, norm: Norm, values: Values, module: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        ones = torch.ones(norm.num_features, dtype=torch.double)
        for name, value, default in zip(Values._fields[:4], values, (1, 0, 0, 1), strict=False):
            value = default * ones if value is None else value.detach().double()
            self.register_buffer(name, value.view(-1, 1))
        self.tail = nn.Sequential(*(copy.deepcopy(module.get_submodule(n)) for n in norm.tail))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        formula, eps = self.norm.formula, self.norm.eps
        maps = formula.maps(x.double())
        real = None if mask is None else mask.flatten(1).view(len(x), 1, -1)
        if formula.pool == "frozen" or (self.norm.averages and not self.training):
            normalized = (maps - self.mean) * torch.rsqrt(self.var + eps)
        else:
            normalized = formula.normalize(maps, eps, real)
        out = zero_padding(normalized * self.gain + self.shift, real)
        return self.tail(formula.unmaps(out, x).to(x.dtype))


# --- The network ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """Why a module is left as it is.

    Attributes:
        class_name: of the module.
        resembles: it may be a norm, so that a message should name it.
        is_called: with a tensor first, whose shape it returns.
    """

    class_name: str
    reason: str
    resembles: bool
    is_called: bool = True


@dataclass(frozen=True)
class Recognition:
    """The norms of a network by path, and the other modules that were tried."""

    norms: dict[str, Norm]
    left: dict[str, Left]


class _Seen(NamedTuple):
    """A call of a module in a forward, with its arguments if they are more than a norm's."""

    call: Call
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    has_more: bool


def recognise(
    network: nn.Module, args: tuple[Any, ...] | None, keywords: Mapping[str, Any] = NOTHING
) -> Recognition:
    """Finds the norms among the modules that a forward of a copy of `network` calls.

    Args:
        args, keywords: of the forward; without them only torch's own norms are recognised.

    Raises:
        UserError: the forward fails.
    """
    seen = None if args is None else _record_calls(copy.deepcopy(network), args, keywords)
    norms: dict[str, Norm] = {}
    left: dict[str, Left] = {}
    tried: dict[Any, Norm | Left] = {}
    modules = dict(network.named_modules())
    hidden = [f"{path}." for path, one in modules.items() if isinstance(one, ParametrizationList)]
    for path, module in reversed(modules.items()):  # children come before their parents
        named = [*norms, *(name for name, one in left.items() if one.resembles)]
        if any(name.startswith(f"{path}." if path else "") for name in named):
            continue  # a container of a norm
        if path.startswith(tuple(hidden)):
            continue  # it computes a weight
        if seen is None:
            found = _judge_unseen(module)
        else:
            found = _judge(module, seen.get(path, []), tried)
        if isinstance(found, Norm):
            norms[path] = found
        elif found is not None:
            left[path] = found
    return Recognition({path: norms[path] for path in modules if path in norms}, left)


def _record_calls(
    network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, list[_Seen]]:
    """The calls of each module that returns the shape of its first tensor."""
    seen: defaultdict[str, list[_Seen]] = defaultdict(list)

    def watch(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Any) -> None:
            given = [*args, *keywords.values()]
            x = given[0] if given else None
            if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim < 2:
                return
            if not x.is_floating_point() or (out.shape, out.dtype) != (x.shape, x.dtype):
                return
            more = [value for value in given[1:] if value is not None]
            is_masked = len(more) == 1 and isinstance(more[0], Tensor)
            is_masked = is_masked and more[0].dtype == torch.bool and more[0].ndim == x.ndim - 1
            names = list(keywords)[0 if args else 1 :]  # besides x
            has_more = bool(more and not is_masked) or any(name != "mask" for name in names)
            call = Call(x.shape)
            if is_masked:
                how = "keyword" if "mask" in keywords else "position"
                call = Call(x.shape, how, more[0].shape == x.shape[:-1])
            kept = (args, dict(keywords)) if has_more else ((), {})
            seen[path].append(_Seen(call, *kept, has_more))

        return hook

    for path, module in network.named_modules():
        module.register_forward_hook(watch(path), with_kwargs=True)
    for training in (True, False):
        run_network(network.train(training), args, keywords)
        if all(path in seen for path, one in network.named_modules() if _is_torchs(one)):
            break  # else a layer was dropped at random
    return seen


def run_network(network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """A forward with fixed draws. Raises UserError if it fails."""
    devices = [*{p.device for p in network.parameters() if p.is_cuda}]
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        try:
            return network(*copy.deepcopy(args), **copy.deepcopy(keywords))
        except UserError:
            raise
        except Exception as error:  # of foreign code, any kind
            raise UserError(
                f"a forward of the model {type(network).__name__} fails: {type(error).__name__}: "
                f"{first_line(error)}{source_line_of(error)}"
            ) from error


def _judge(
    module: nn.Module, seen: list[_Seen], tried: dict[Any, Norm | Left]
) -> Norm | Left | None:
    """What a module is, from its calls; None if it cannot be a norm."""
    name = type(module).__name__
    holds_more = any(_state(child) for child in module.children())
    named = "norm" in name.lower() and not holds_more  # for messages alone
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if _is_torchs(module):
        return _read_torchs(module) if seen else Left(name, "it is never called", True, False)
    if not seen:
        return Left(name, "it is never called", True, False) if named else None
    if type(module).__module__.startswith("torch.nn.modules."):
        return Left(name, "torch's own class of another kind", False)
    if more := [one for one in seen if one.has_more]:
        resembles = named or _ignores_scale_of(module, more[0])
        return Left(name, "it is called with a second input", resembles)
    plain = [v for v in vars(module).items() if isinstance(v[1], bool | int | float | str | tuple)]
    shapes = [(key, value.shape) for key, value in _state(module).items()]
    calls = tuple(dict.fromkeys(one.call for one in seen))
    key = repr((type(module), id(type(module)), module, plain, shapes, calls))
    if key not in tried:
        tried[key] = _try_calls(module, calls)
    found = tried[key]
    if isinstance(found, Norm):
        found = _compare(module, found)
    return replace(found, resembles=found.resembles or named) if isinstance(found, Left) else found


def _judge_unseen(module: nn.Module) -> Norm | Left | None:
    name = type(module).__name__
    if _is_torchs(module):
        return _read_torchs(module)
    reason = "without inputs it cannot be tried"
    return Left(name, reason, True) if "norm" in name.lower() else None


def _is_torchs(module: nn.Module) -> bool:
    """True for one of torch's norms as it comes."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) in (*CHANNELS_FIRST, *CHANNELS_LAST) and not changed


def _read_torchs(module: Any) -> Norm | Left:
    is_last = type(module) in CHANNELS_LAST
    if is_last and len(module.normalized_shape) > 1:
        reason = "it normalizes several axes; a site normalizes one axis of channels"
        return Left(type(module).__name__, reason, True)
    sizes = [getattr(module, name, None) for name in ("num_features", "num_channels")]
    num_features = next((n for n in sizes if n), None) or module.normalized_shape[0]
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    settings: dict[str, Any] = {"affine": module.weight is not None, "eps": float(eps)}
    if hasattr(module, "momentum"):
        settings["momentum"] = module.momentum
    if isinstance(module, nn.GroupNorm):
        formula = Formula("group", False, module.num_groups)
    elif is_last:
        formula = Formula("rms" if isinstance(module, nn.RMSNorm) else "layer", True)
    elif "Instance" in type(module).__name__:
        formula = Formula("group", False, num_features)
    else:
        formula = Formula("batch", False)
    return Norm(formula, num_features, settings)


# --- A module -------------------------------------------------------------------------------------


class _Misfit(Exception):
    """Why a module is no norm.

    Attributes:
        resembles: its output does not depend on the scale of its input.
    """

    def __init__(self, reason: str, resembles: bool = True) -> None:
        super().__init__(reason)
        self.resembles = resembles


def _try_calls(module: nn.Module, calls: tuple[Call, ...]) -> Norm | Left:
    """The norm that fits the calls of every shape."""
    name = type(module).__name__
    try:
        found = [_Trial(module, call).fit() for call in calls]
        # On rows (N, C) the last axis is the first one after the samples.
        places = {norm.formula.is_last for norm in found if len(norm.call.shape) > 2}
        if len(places) > 1:
            raise _Misfit("its channels are first in some calls and last in others")
        return max(found, key=lambda norm: len(norm.call.shape))
    except _Misfit as misfit:
        return Left(name, str(misfit), misfit.resembles)
    except Exception as error:  # of foreign code, any kind
        reason = f"trying it fails: {type(error).__name__}: {first_line(error)}"
        return Left(name, reason + source_line_of(error), False)


def _compare(module: nn.Module, norm: Norm) -> Norm | Left:
    """The norm, if at its own values the module equals its description and tail in both modes."""
    assert norm.call is not None
    trial = _Trial(module, norm.call)
    described = DescribedNorm(norm, trial.values(norm), module).double().cpu()
    own, x = copy.deepcopy(module).double().cpu(), trial.draw(3, TYPICAL)
    for training in (True, False):
        pair = (trial.run(one, x, training) for one in (own, described))
        expected, out = (_rows(norm.formula.maps(y), trial.real) for y in pair)
        if not is_close(expected, out, EQUALS):
            reason = f"it is {norm.formula}, and does something besides"
            return Left(type(module).__name__, reason, True)
    return norm


class _Trial:
    """A module on random inputs, in float64 on the CPU.

    Attributes:
        core: without the children that hold no tensors, which are its tail.
        drawn: the core with parameters, and buffers that do not move, from U(0.5, 1.5), since many
            start at 0.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.call = call
        self.core = copy.deepcopy(module).double().cpu()
        tail = [name for name, child in self.core.named_children() if not _state(child)]
        self.tail = tuple(
            n for n in tail if not isinstance(self.core.get_submodule(n), nn.Identity)
        )
        for name in tail:
            setattr(self.core, name, nn.Identity())
        self.shape = self._accepted_shape()
        self.x = self.draw(1), self.draw(2)
        self.drawn = copy.deepcopy(self.core)
        self.moved = self._moved()
        generator = torch.Generator().manual_seed(0)
        for name, value in _state(self.drawn).items():
            if name not in self.moved and value.is_floating_point():
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
        num_samples, *positions = self.shape
        del positions[-1 if self.call.mask_is_last else 0]
        mask = torch.ones(num_samples, *positions, dtype=torch.bool)
        rows = mask.view(num_samples, -1)
        for index, row in enumerate(rows):
            row[len(row) - min(index, len(row) // 2) :] = False
        return mask

    @property
    def real(self) -> Tensor | None:
        """The mask as (N, 1, P)."""
        return None if self.mask is None else self.mask.view(self.shape[0], 1, -1)

    def run(self, module: nn.Module, x: Tensor, training: bool) -> Tensor:
        """The output of a copy, with fixed draws."""
        return self._call(copy.deepcopy(module).train(training), x)

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        more = () if self.call.mask != "position" else (self.mask,)
        keywords = {"mask": self.mask} if self.call.mask == "keyword" else {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return module(x.clone(), *more, **keywords)

    def _moved(self) -> set[str]:
        """Names of parameters and buffers that a training forward changes."""
        before, after = _state(self.core), copy.deepcopy(self.core).train()
        self._call(after, self.x[0])
        return {n for n, value in _state(after).items() if not torch.equal(value, before[n])}

    # --- Which norm it is

    def fit(self) -> Norm:
        """The norm that explains its outputs. Raises _Misfit with the reason if none does."""
        y, other = (self.run(self.drawn, x, True) for x in self.x)
        larger = self.run(self.drawn, 4 * self.x[0], True)
        if is_close(y, larger, 1e-3) and not is_close(y, other, 1e-3):
            return self._fit_moments((y, other))
        if any(value.is_floating_point() for value in self.drawn.buffers()):
            return self._fit_frozen()
        raise _Misfit("its output follows the scale of its input", resembles=False)

    @property
    def layouts(self) -> tuple[bool, ...]:
        """Whether the channels may be the first axis after the samples, and the last."""
        if self.call.mask is not None:
            return (self.call.mask_is_last,)
        return (False, True) if len(self.shape) > 2 else (False,)

    def _formulas(self) -> Iterator[Formula]:
        """Those that this shape tells apart; of equal ones along the same axis, the first counts."""
        for is_last in self.layouts:
            _, channels, positions = Formula("layer", is_last).maps(self.x[0]).shape
            yield from (Formula(pool, is_last) for pool in ("layer", "rms", "batch"))
            for groups in range(1, channels + 1):
                if channels % groups == 0 and channels // groups * positions > 1:
                    yield Formula("group", is_last, groups)

    def _fit_moments(self, outputs: tuple[Tensor, Tensor]) -> Norm:
        fitting: dict[bool, tuple[Formula, Tensor, Tensor]] = {}
        nearest: list[tuple[float, str]] = []
        for formula in self._formulas():
            pairs = [
                (formula.normalize(formula.maps(x), 0.0, self.real), formula.maps(y))
                for x, y in zip(self.x, outputs, strict=True)
            ]
            gain, shift = self._regress(*pairs[0])
            residual = max(self._residual(*pair, gain, shift) for pair in pairs)
            nearest.append((residual, str(formula)))
            if residual < FITS:
                fitting.setdefault(formula.is_last, (formula, gain, shift))
        if not fitting:
            residual, formula = min(nearest)
            raise _Misfit(
                f"its output is no affine map of a normalized input: the nearest, {formula}, "
                f"is off by {100 * residual:.2g} %"
            )
        if len(fitting) > 1:
            both = " and ".join(str(formula) for formula, _, _ in fitting.values())
            raise _Misfit(f"{both} are the same on its input, so its channels are not known")
        ((formula, gain, shift),) = fitting.values()
        return self._settle(formula, gain, shift)

    def _settle(self, formula: Formula, gain: Tensor, shift: Tensor) -> Norm:
        """Adds what evaluation and smaller inputs tell."""
        has_shift = bool(shift.abs().max() > EQUALS)
        affine = has_shift or bool((gain - 1).abs().max() > EQUALS)
        settings: dict[str, Any] = {"affine": affine, "eps": self._eps(formula, gain, shift)}
        rest: dict[str, Any] = {"num_features": len(gain), "tail": self.tail, "call": self.call}
        rest["has_shift"] = has_shift
        outputs = [formula.maps(self.run(self.drawn, x, False)) for x in self.x]
        maps = [formula.maps(x) for x in self.x]
        normalized = [formula.normalize(one, 0.0, self.real) for one in maps]
        residuals = [
            self._residual(*pair, gain, shift) for pair in zip(normalized, outputs, strict=True)
        ]
        if max(residuals) < FITS:
            return Norm(formula, settings=settings, **rest)
        line = self._regress(maps[0], outputs[0])
        if not self.moved or self._residual(maps[1], outputs[1], *line) > FITS:
            raise _Misfit(f"in training it is {formula}, in evaluation something else")
        norm = Norm(formula, settings=settings, averages=True, **rest)
        momentum = self._momentum(norm, gain, shift)
        if momentum != "unknown":
            settings["momentum"] = momentum
        return norm

    def _eps(self, formula: Formula, gain: Tensor, shift: Tensor) -> float:
        """From the shrinking of small inputs: y = gain sqrt(v / (v + eps)) n + shift."""
        x = self.draw(1, SMALL)
        maps, y = formula.maps(x), formula.maps(self.run(self.drawn, x, True))
        without = gain.view(-1, 1) * formula.normalize(maps, 0.0, self.real)
        with_one = gain.view(-1, 1) * formula.normalize(maps, 1.0, self.real)
        least = without.abs() > 0.1 * without.abs().mean()
        if self.real is not None:
            least &= self.real
        variances = 1 / ((without / with_one).square() - 1)  # v, from sqrt((v + 1) / v)
        ratio = without / (y - shift.view(-1, 1))
        return float(
            f"{max(float((variances * (ratio.square() - 1))[least].median()), LEAST_EPS):.3g}"
        )

    def _momentum(self, norm: Norm, gain: Tensor, shift: Tensor) -> float | None | str:
        """The weight of a batch in the running mean; None: all batches weigh alike."""
        module, weights = copy.deepcopy(self.drawn), list[Tensor]()
        batch = norm.formula.maps(self.x[0])
        batch = _rows(batch, self.real).mean(dim=1)
        before, _ = self._running(norm, module, gain, shift)
        for _ in range(2):
            self._call(module.train(), self.x[0])
            after, _ = self._running(norm, module, gain, shift)
            weights.append((after - before) / (batch - before))
            before = after
        first, second = (float(weight.median()) for weight in weights)
        if max(float((weight - weight.median()).abs().max()) for weight in weights) > 1e-3:
            return "unknown"
        if abs(first - second) < 1e-3:
            return round(first, 6)
        return None if abs(first - 1) < 1e-3 and abs(second - 0.5) < 1e-3 else "unknown"

    def _running(
        self, norm: Norm, module: nn.Module, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The moments (C,) with which a module with this gain and shift evaluates."""
        y = norm.formula.maps(self.run(module, self.x[0], False))
        slope, constant = self._regress(norm.formula.maps(self.x[0]), y)
        return (shift - constant) / slope, (gain / slope).square() - norm.eps

    def _fit_frozen(self) -> Norm:
        """A norm whose moments are buffers in both modes. Raises _Misfit if it is none.

        The variance is the buffer v of which 4 v halves the output; the mean m, that of which m + 1
        subtracts the slope.
        """
        nothing = _Misfit("its output follows the scale of its input", resembles=False)
        for is_last in self.layouts:
            formula = Formula("frozen", is_last)
            slope, constant = self._line(formula, self.drawn, True)
            maps = formula.maps(self.x[1])
            outputs = [
                formula.maps(self.run(self.drawn, self.x[1], mode)) for mode in (True, False)
            ]
            if max(self._residual(maps, y, slope, constant) for y in outputs) < FITS:
                break
        else:
            raise nothing
        moments: dict[str, str] = {}
        eps = 0.0
        for name, value in self.drawn.named_buffers():
            if value.numel() != len(slope):
                continue
            for role in ("mean", "var"):
                changed = copy.deepcopy(self.drawn)
                buffer = changed.get_buffer(name)
                buffer.copy_(4 * buffer if role == "var" else buffer + 1)
                other, moved = self._line(formula, changed, True)
                square = (other / slope).square()
                found = value.flatten() * (4 * square - 1) / (1 - square)
                if role == "mean" and is_close(constant - slope, moved, FITS):
                    moments["mean"] = name
                if role == "var" and is_close(found, found.median(), 0.1) and found.min() > 0:
                    moments["var"], eps = name, float(f"{float(found.median()):.3g}")
        if "var" not in moments:
            raise nothing
        settings = {"affine": True, "eps": eps}
        rest = {"tail": self.tail, "call": self.call, "moments": moments}
        return Norm(formula, len(slope), settings, **rest)

    # --- The values of the module itself

    def values(self, norm: Norm) -> Values:
        """Measured in float64, and replaced by a tensor of the module, or 1 + it, if that is it."""
        if norm.formula.pool == "frozen":
            values = self._frozen_values(norm)
        else:
            gain, shift = self._affine(norm, self.core)
            moments = (None, None)
            if norm.averages:  # of the drawn module, since a gain of 0 would hide them
                moments = self._running(norm, self.drawn, *self._affine(norm, self.drawn))
            has_affine = norm.settings["affine"]
            values = Values(
                gain if has_affine else None, shift if norm.has_shift else None, *moments
            )
        counts = [v for n, v in _state(self.core).items() if n in self.moved and not v.ndim]
        return Values(*map(self._exact, values))._replace(count=counts[0] if counts else None)

    def _exact(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        for own in _state(self.core).values():
            own = own.flatten().expand_as(value) if own.numel() in (1, len(value)) else None
            for known in () if own is None else (own, 1 + own):
                if bool((known - value).abs().max() < EXACT):
                    return known
        return value

    def _affine(self, norm: Norm, module: nn.Module) -> tuple[Tensor, Tensor]:
        x, formula = self.x[0], norm.formula
        normalized = formula.normalize(formula.maps(x), norm.eps, self.real)
        return self._regress(normalized, formula.maps(self.run(module, x, True)))

    def _frozen_values(self, norm: Norm) -> Values:
        slope, constant = self._line(norm.formula, self.core, True)
        var = self.core.get_buffer(norm.moments["var"]).flatten()
        mean = torch.zeros_like(var)
        if "mean" in norm.moments:
            mean = self.core.get_buffer(norm.moments["mean"]).flatten()
        return Values(slope * (var + norm.eps).sqrt(), constant + slope * mean, mean, var)

    # --- Lines y = slope * x + constant by channel

    def _line(self, formula: Formula, module: nn.Module, training: bool) -> tuple[Tensor, Tensor]:
        y = formula.maps(self.run(module, self.x[0], training))
        return self._regress(formula.maps(self.x[0]), y)

    def _regress(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and constant (C,) of maps (N, C, P), by least squares."""
        x, y = _rows(x, self.real), _rows(y, self.real)
        centred = x - x.mean(dim=1, keepdim=True)
        slope = (centred * y).sum(dim=1) / centred.square().sum(dim=1).clamp_min(1e-30)
        return slope, y.mean(dim=1) - slope * x.mean(dim=1)

    def _residual(self, x: Tensor, y: Tensor, slope: Tensor, constant: Tensor) -> float:
        x, y = _rows(x, self.real), _rows(y, self.real)
        error = (y - slope[:, None] * x - constant[:, None]).norm() / y.norm()
        return float(error.nan_to_num(torch.inf))


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _rows(maps: Tensor, real: Tensor | None) -> Tensor:
    """The real values (C, M) of maps (N, C, P)."""
    by_channel = maps.movedim(1, 0)
    return by_channel.flatten(1) if real is None else by_channel[:, real.squeeze(1)]


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() <= tolerance * one.norm())


def _ignores_scale_of(module: nn.Module, seen: _Seen) -> bool:
    """True if another scale of the first argument gives the same output."""

    def run(size: float) -> Tensor:
        args, keywords = copy.deepcopy((seen.args, seen.keywords))
        (args or list(keywords.values()))[0].mul_(size)
        return run_network(copy.deepcopy(module).train(), args, keywords)

    try:
        return is_close(run(100.0), run(400.0), 1e-3) and bool(run(100.0).any())
    except Exception:  # of foreign code, any kind
        return False
