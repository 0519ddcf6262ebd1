"""The probe engine: finds which inputs can change an output.

Holds fixed what the module may read, changes everything else, and compares outputs, gradients of
inputs and parameters, and running state. Works on any module that maps `x`, or `x` and a mask, to
one tensor: a norm, a site or a whole network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from normexp.norms.contract import State
from normexp.norms.state import read_state

TOLERANCE = 1e-4  # relative; float32 rounding moves outputs by less
# In float64 a change counts if it is larger than FINE_TOLERANCE (COARSE_TOLERANCE for modules that
# compute in less inside), and than ABOVE_ROUNDING times the change after a step of SMALL_STEP:
# a dependence, however weak, shrinks with the step of the input; rounding does not.
FINE_TOLERANCE, COARSE_TOLERANCE = 1e-11, 1e-6
ABOVE_ROUNDING, SMALL_STEP = 32.0, 1e-6
LARGE_CHANGE = 0.1  # relative; never rounding
TINY_STEP, FINE_CHANGE = 1e-12, 1e-9  # the step moves outputs by less if all is in float64
MIN_SCALE = 1e-6  # values below are compared on this scale
MODES = (True, False)  # training and evaluation
MAX_CUTS = 64  # of one sequence
CUTS_WITH_GRADIENTS = 3
MANY_STEPS = 10**6  # added to a counter, to pass any warm-up
PERIOD = 64  # training forwards that are followed in search of one that differs
KNOWN_PACKAGES = {"normexp", "torch", "torchvision", "timm"}
CONTAINERS = (dict, list, set)
REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError)  # of an input that is too small
EVERYWHERE = torch.ones(1, dtype=torch.bool)  # an upstream gradient


@dataclass(frozen=True)
class Observation:
    """The results of one forward, and of its backward if there was one.

    Attributes:
        parameter_gradients: empty without a backward.
        drew: true if the forward used torch's global random state, as nn.Dropout does.
    """

    output: Tensor
    state: State
    drew: bool
    input_gradient: Tensor | None = None
    parameter_gradients: State = field(default_factory=dict)

    @property
    def gradients(self) -> list[Tensor]:
        """Of the input, if it takes one, and of the parameters."""
        of_input = [] if self.input_gradient is None else [self.input_gradient]
        return [*of_input, *self.parameter_gradients.values()]

    def of_samples(self, keep: Tensor) -> Observation:
        """The observation restricted to the samples `keep` (N,)."""
        gradient = None if self.input_gradient is None else self.input_gradient[keep]
        return replace(self, output=self.output[keep], input_gradient=gradient)


class Snapshot:
    """The parameters, buffers and attributes of a module, to return to after forwards.

    Writes values back in place, which is much faster than a copy of the module. Restores lists,
    sets and dicts, but neither other objects in attributes nor state outside of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(part, _copied(_attributes(part))) for part in module.modules()]
        tensors = {id(t): t for _, kept in self._attributes for t in _tensors_in(kept)}
        self._tensors = [(t, t.detach().clone()) for t in tensors.values() if not is_lazy(t)]

    def restore(self) -> None:
        for module, attributes in self._attributes:
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(_copied(attributes))
        for tensor, value in self._tensors:
            tensor.detach().copy_(value)

    @property
    def has_moved(self) -> bool:
        """True if a tensor or another attribute is not as it was."""
        if not all(torch.equal(tensor, value) for tensor, value in self._tensors):
            return True
        return not all(_is_same(_attributes(part), kept) for part, kept in self._attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if "hook" not in name}


def _copied(value: Any) -> Any:
    """Copies nested dicts, lists and sets; other members are shared."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({name: _copied(v) for name, v in value.items() if type(v) in CONTAINERS})
        return copied
    return type(value)(map(_copied, value)) if type(value) in CONTAINERS else value


def _is_same(value: Any, other: Any) -> bool:
    """True for equal tensors, plain values and containers of these; other objects are not read."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(value[n], other[n]) for n in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return isinstance(value, bool | int | float | str | set) and value == other


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in CONTAINERS:
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member)


class Probe:
    """Runs a module repeatedly from the same parameters, state and random state; then restores it.

    Args:
        module: in the mode to examine. The axes along which values are held or changed must lead
            its input and its output: samples and positions, or samples and channels of (N, C, *).
        inputs: x, and the mask if there is one.
        vocab_size: for a module with token inputs.
        ways: number of random replacements to try for each mask.
        position_axis: the axis of positions in x and in the output, if there is one.
        max_cuts: of one sequence into before and after.
        seed: of the random numbers that the module draws from torch's global generator.
        is_sensitive: reports changes down to rounding; always so in float64.
    """

    def __init__(
        self,
        module: nn.Module,
        *inputs: Tensor,
        vocab_size: int | None = None,
        ways: int = 2,
        position_axis: int = 2,
        max_cuts: int = MAX_CUTS,
        seed: int = 0,
        is_sensitive: bool = False,
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.vocab_size = vocab_size
        self.ways = ways
        self.position_axis = position_axis
        self.max_cuts = max_cuts
        self.seed = seed
        self.is_sensitive = is_sensitive or self.is_double
        self._start = Snapshot(self.module)

    def observe(
        self, *inputs: Tensor, upstream: Tensor | None = None, only: Tensor | None = None
    ) -> Observation:
        """One forward and, given `upstream`, one backward.

        Args:
            inputs: x and maybe a mask, in place of the probe's own.
            upstream: a mask over leading axes of the output; multiplies random upstream gradients.
            only: boolean (N,), runs only these samples.
        """
        inputs = inputs or self.inputs
        num_samples = len(inputs[0])
        x, *mask = inputs if only is None else (tensor[only] for tensor in inputs)
        takes_gradient = upstream is not None and x.is_floating_point()
        # A copy, as a norm may write into its input.
        x = x.detach().clone().requires_grad_(takes_gradient)
        try:
            with (
                fixed_draws(self.seed),
                torch.set_grad_enabled(upstream is not None),
                all_in_float64() if self.is_double else nullcontext(),
            ):
                start = torch.get_rng_state()
                out = self.module(x, *mask)
                drew = not torch.equal(start, torch.get_rng_state())
                input_gradient, slopes = None, {}
                if upstream is not None and out.requires_grad:
                    weights = _cached_normal((num_samples, *out.shape[1:]), 7) * fit(upstream, out)
                    weights = weights if only is None else weights[only]
                    input_gradient, slopes = self._backward(out, x, weights.to(out.dtype))
            state = read_state(self.module)
            return Observation(out.detach().clone(), state, drew, input_gradient, slopes)
        finally:
            self._start.restore()

    def _backward(self, out: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor | None, State]:
        """Gradients of the input, if it takes one, and of the parameters."""
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        wanted = [*([x] if x.requires_grad else []), *named.values()]
        if not wanted:
            return None, {}
        slopes = torch.autograd.grad(
            out, wanted, weights, allow_unused=True, materialize_grads=True
        )
        of_input = slopes[0] if x.requires_grad else None
        return of_input, dict(zip(named, slopes[len(slopes) - len(named) :], strict=True))

    def influence(
        self, keep: Tensor, *, before: Observation, state: bool = False, first_way: int = 0
    ) -> str | None:
        """Names what changes in the kept region if everything else changes; None if nothing does.

        Args:
            keep: boolean, broadcast to the leading axes of input and output: the region held fixed
                in the input and compared in the output.
            before: the observation of the inputs. Its gradients, if any (with `keep` as upstream),
                are compared too: those of kept inputs and of parameters.
            state: also compare buffers, which must then depend only on kept inputs.
        """
        x, *mask = self.inputs
        upstream = keep if before.gradients else None
        for way in range(first_way, first_way + self.ways):
            changed = torch.where(fit(keep, x), x, self.replacement(x, way))
            after = self.observe(changed, *mask, upstream=upstream)
            moved = {
                name: far
                for name, far in distances(before, after, keep, state=state).items()
                if far > self.tolerance
            }
            if not moved:
                continue
            if not self.is_sensitive or self.vocab_size is not None:
                return next(iter(moved))
            step = 1 + SMALL_STEP * _cached_normal(x.shape)
            near = torch.where(fit(keep, x), x, (changed * step).to(x.dtype))
            rounding = distances(
                after, self.observe(near, *mask, upstream=upstream), keep, state=state
            )
            for name, far in moved.items():
                if far > min(ABOVE_ROUNDING * rounding.get(name, 0.0), LARGE_CHANGE):
                    return name
        return None

    @property
    def has_moved(self) -> bool:
        """True if a tensor or number in the module is not as it was when the probe was made."""
        return self._start.has_moved

    @cached_property
    def is_double(self) -> bool:
        """True if input and parameters are in float64."""
        floating = [*self.inputs, *self.module.parameters()]
        floating = [tensor for tensor in floating if tensor.is_floating_point()]
        return bool(floating) and all(tensor.dtype == torch.float64 for tensor in floating)

    @cached_property
    def tolerance(self) -> float:
        """The relative change above which a result counts as changed, for inputs of one shape."""
        if not self.is_sensitive:
            return TOLERANCE
        if self.is_double and self._is_fine:
            return FINE_TOLERANCE
        return TOLERANCE if self.vocab_size is not None else COARSE_TOLERANCE

    @cached_property
    def tolerance_across_shapes(self) -> float:
        """As `tolerance`, for inputs of two shapes, whose sums may be in another order."""
        return FINE_CHANGE if self.is_double and self._is_fine else TOLERANCE

    @cached_property
    def _is_fine(self) -> bool:
        """True if a tiny step of the input, or else of the parameters, moves outputs as little."""
        x, *mask = self.inputs
        before = self.observe().output
        if x.is_floating_point():
            after = self.observe(x * (1 + TINY_STEP * _cached_normal(x.shape)), *mask).output
        else:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter *= 1 + TINY_STEP * _cached_normal(parameter.shape)
            after = self.observe().output
        return 0 < change(before, after) < FINE_CHANGE

    def replacement(self, x: Tensor, way: int) -> Tensor:
        """Random values of the dtype of `x`, different everywhere; large and moderate in turn.

        Large values are about sqrt(n) for n values, so a mean over m <= n of them moves by more
        than sqrt(n) / m.
        """
        if self.vocab_size is not None:
            return (x + torch.randint(1, self.vocab_size, x.shape, generator=source(way))) % (
                self.vocab_size
            )
        size = math.sqrt(x.numel()) if way % 2 == 0 else 3.0
        return (1 + size * _cached_normal(x.shape, way + 1)).to(x.dtype)

    def reads_across(
        self, axis: int, *, gradients: bool = False, state: bool = False
    ) -> str | None:
        """Names a result at one index of an axis that depends on another; tests all pairs.

        Args:
            axis: 0 samples, 1 channels, 2 all positions of (N, C, *) together.
        """
        shape = self.inputs[0].shape
        sizes = shape[axis : axis + 1] if axis < 2 else shape[2:]
        everything = torch.ones([1] * axis + [1] * len(sizes), dtype=torch.bool)
        whole = self.observe(upstream=everything if gradients else None)
        for index, hold in enumerate(holds(sizes.numel())):
            keep = hold.view(*[1] * axis, *sizes)
            before = self.observe(upstream=keep) if gradients else whole
            moved = self.influence(keep, before=before, state=state, first_way=index % 4)
            # Upstream gradients of the others must not reach the gradient of a kept input.
            others = replace(whole, parameter_gradients={})
            tolerance = self.tolerance_across_shapes  # sums of fewer terms may round otherwise
            moved = moved or difference(before, others, keep, tolerance=tolerance)
            if moved is not None:
                return moved
        return None

    def reads_samples(self, *, gradients: bool) -> str | None:
        """Names a result that depends on the content or number of other samples.

        Compares outputs and state, and `gradients` if asked to: those of a training.
        """
        moved = self.reads_across(0, gradients=gradients, state=True)
        return moved or self._reads_number(gradients=gradients)

    def _reads_number(self, *, gradients: bool) -> str | None:
        """Names what differs when half of the samples run without the others."""
        num_samples = len(self.inputs[0])
        if num_samples < 2:
            return None
        keep = holds(num_samples)[0]
        upstream = keep if gradients else None
        before = self.observe(upstream=upstream)
        if before.drew:  # the draws depend on the number of samples
            return None
        try:
            alone = self.observe(upstream=upstream, only=keep)
        except Exception:  # foreign code: refuses so few samples
            return None
        tolerance = self.tolerance_across_shapes
        return difference(before.of_samples(keep), alone, keep[keep], tolerance=tolerance)

    def reads_later(self) -> int | None:
        """A position such that changes from there on move an earlier result; None if none do.

        Compares outputs and, if sensitive, at the likeliest cuts gradients of a loss on the earlier
        outputs: however small a gate is, its gradient shows what would pass.
        """
        length, plain = self.inputs[0].shape[self.position_axis], self.observe()
        for index, cut in enumerate(cuts(length)[: self.max_cuts]):
            keep = along(torch.arange(length) < cut, self.position_axis)
            with_gradients = self.is_sensitive and index < CUTS_WITH_GRADIENTS
            before = self.observe(upstream=keep) if with_gradients else plain
            if self.influence(keep, before=before, first_way=index % 4) is not None:
                return cut
        return None

    def reads_padding(self, num_more: int) -> bool:
        """True if the content or amount of padding moves real outputs, a gradient or the state.

        The inputs are (N, C, P) and a mask (N, P).

        Args:
            num_more: positions of padding that are appended to ask about its amount.
        """
        x, mask = self.inputs
        real, length = mask.unsqueeze(1), mask.shape[1]
        before = self.observe(upstream=real if self.module.training or self.is_sensitive else None)
        if self.influence(real, before=before, state=True):
            return True
        more = self.replacement(x.new_empty(*x.shape[:2], num_more), 0)
        longer = functional.pad(mask, (0, num_more), value=False)
        try:
            after = self.observe(torch.cat([x, more], 2), longer)
        except Exception:  # foreign code: a norm for one length
            return False
        after = replace(after, output=after.output[:, :, :length])
        plain = self.observe()  # a backward may move state as well
        tolerance = self.tolerance_across_shapes
        return difference(plain, after, real, state=True, tolerance=tolerance) is not None


def is_foreign(*modules: nn.Module) -> bool:
    """True if the class of any of these is neither ours nor of a library that we know well."""
    roots = {type(module).__module__.partition(".")[0] for module in modules}
    return not roots <= KNOWN_PACKAGES


def in_float64(
    module: nn.Module, *inputs: Tensor, upstream: Tensor | None = EVERYWHERE
) -> tuple[nn.Module, tuple[Tensor, ...]] | None:
    """A copy and inputs in float64; None if the module cannot compute so.

    Args:
        upstream: None if the caller needs no backward.
    """
    wide = widened(copy.deepcopy(module))
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    try:
        for mode in MODES:
            Probe(wide.train(mode), *inputs).observe(upstream=upstream)
    except Exception:  # foreign code: a kernel of one dtype
        return None
    return wide.train(module.training), inputs


def widened(module: nn.Module) -> nn.Module:
    """The module itself in float64, with the tensors that it holds as plain attributes."""
    internal = vars(nn.Module())
    for part in module.double().modules():
        for name, value in _attributes(part).items():
            if name not in internal:
                vars(part)[name] = _in_float64(value)
    return module


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            return value
        return value.detach().double().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {name: _in_float64(member) for name, member in value.items()}
    return [_in_float64(member) for member in value] if type(value) is list else value


class _CastsToFloat64(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **named)


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Makes code compute in float64 that casts to float32, or makes tensors of the default dtype.

    What it depends on stays the same, and shows without the rounding of float32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _CastsToFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def after_many_steps(module: nn.Module, *inputs: Tensor) -> nn.Module | None:
    """A copy whose counters stand as after MANY_STEPS training forwards; None if it acts the same.

    A counter is a buffer that a training forward moves, such as the number of steps or a gate that
    closes: of one value, or of integers that move alike. The move is extrapolated. None also if
    the norm cannot run so late.
    """
    if not any(_may_count(buffer) for buffer in module.buffers()):
        return None
    early = copy.deepcopy(module).train()
    start = read_state(early)
    with fixed_draws(), torch.no_grad():
        early(*inputs)
        late, counts = copy.deepcopy(early), False
        for name, counter in late.named_buffers():
            if name in start and _may_count(counter):
                step = counter - start[name]
                if step.any() and bool((step == step.flatten()[0]).all()):
                    counter += MANY_STEPS * step
                    counts = True
        if not counts:
            return None
    for mode in MODES:
        before = Probe(early.train(mode), *inputs).observe(upstream=EVERYWHERE)
        try:
            after = Probe(late.train(mode), *inputs).observe(upstream=EVERYWHERE)
        except Exception:  # foreign code: a table for fewer steps
            return None
        if difference(before, after, EVERYWHERE) is not None:
            return late
    return None


def _may_count(buffer: Tensor) -> bool:
    if is_lazy(buffer) or buffer.dtype == torch.bool or not buffer.numel():
        return False
    return buffer.numel() == 1 or not (buffer.is_floating_point() or buffer.is_complex())


def phases(module: nn.Module, *inputs: Tensor) -> list[nn.Module]:
    """Copies before training forwards that mix samples or positions, if the first does not.

    Follows PERIOD forwards on inputs (N, C, P) for as long as each changes the module: the first
    that lets other samples move an output, and the first that lets other positions.
    """
    follower, opened = copy.deepcopy(module).train(), list[nn.Module]()
    sizes = {0: len(inputs[0]), 2: inputs[0].shape[2] if inputs[0].ndim > 2 else 1}
    keeps = [along(holds(size)[0], axis) for axis, size in sizes.items() if size > 1]
    for step in range(PERIOD):
        probe = Probe(follower, *inputs, ways=1, is_sensitive=True)
        before = probe.observe()
        open_now = [probe.influence(keep, before=before) is not None for keep in keeps]
        keeps = [keep for keep, is_open in zip(keeps, open_now, strict=True) if not is_open]
        if step and any(open_now):
            opened.append(copy.deepcopy(follower))
        with fixed_draws(), torch.no_grad(), all_in_float64() if probe.is_double else nullcontext():
            follower(*inputs)
        if not keeps or not probe.has_moved:
            break
    return opened


def holds(count: int) -> list[Tensor]:
    """Boolean masks (count,): for any two indices, one mask holds the first and not the second.

    As few as possible: each index is held by another half of the masks (Sperner's theorem).
    """
    num_masks = next(m for m in range(count + 1) if math.comb(m, m // 2) >= count)
    holders = islice(combinations(range(num_masks), num_masks // 2), count)
    held = torch.zeros(num_masks, count, dtype=torch.bool)
    for index, chosen in enumerate(holders):
        held[list(chosen), index] = True
    return list(held)


def cuts(length: int) -> list[int]:
    """Positions that cut a sequence into before and after, likely ones first; at most MAX_CUTS."""
    likely = [length // 2, length - 1, 1, length // 3, 2, 3, 2 * length // 3, length - 2]
    spread = range(1, length, max(1, math.ceil(length / MAX_CUTS)))
    return [cut for cut in dict.fromkeys([*likely, *spread]) if 0 < cut < length][:MAX_CUTS]


def along(keep: Tensor, axis: int) -> Tensor:
    """A mask over one axis, with the axes before it."""
    return keep.view(*[1] * axis, -1)


def fit(keep: Tensor, values: Tensor) -> Tensor:
    """A mask over leading axes, with the axes that follow."""
    return keep.view(*keep.shape, *[1] * (values.ndim - keep.ndim))


def _select(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(fit(keep, values), values, 0)


def difference(
    before: Observation,
    after: Observation,
    keep: Tensor,
    *,
    state: bool = False,
    tolerance: float = TOLERANCE,
) -> str | None:
    """The name of a difference between two observations; None if there is none."""
    far = distances(before, after, keep, state=state)
    return next((name for name, distance in far.items() if distance > tolerance), None)


def distances(
    before: Observation, after: Observation, keep: Tensor, *, state: bool = False
) -> dict[str, float]:
    """How far results moved, by name, see `changes`.

    Outputs and input gradients are compared where `keep` is true; gradients only if both have them.
    """
    far = {"output": change(_select(before.output, keep), _select(after.output, keep))}
    inputs = before.input_gradient, after.input_gradient
    if None not in inputs:
        pair = [_select(gradient, keep) for gradient in inputs if gradient is not None]
        far["gradient of the input"] = change(*pair)
    # Rounding errors scale with the largest of all parameter gradients.
    scale = max(map(_largest, before.parameter_gradients.values()), default=0.0)
    for name, slope in before.parameter_gradients.items():
        if name in after.parameter_gradients:
            far[f"gradient of {name}"] = change(slope, after.parameter_gradients[name], scale=scale)
    if state:
        for name, old in before.state.items():
            far[name] = change(old, after.state[name]) if name in after.state else math.inf
    return far


def moved_state(before: State, after: State) -> str | None:
    """The name of a buffer that differs."""
    names = (n for n, old in before.items() if n not in after or moves(old, after[n]))
    return next(names, None)


def moves(
    before: Tensor, after: Tensor, *, scale: float = 0.0, tolerance: float = TOLERANCE
) -> bool:
    """True if any value differs by more than rounding, see `changes`."""
    return change(before, after, scale=scale) > tolerance


def differ(
    before: Sequence[Tensor], after: Sequence[Tensor], *, tolerance: float = TOLERANCE
) -> bool:
    """True if any tensor moves."""
    pairs = zip(before, after, strict=False)
    return len(before) != len(after) or any(moves(*pair, tolerance=tolerance) for pair in pairs)


def change(before: Tensor, after: Tensor, *, scale: float = 0.0) -> float:
    """The largest of `changes`; infinity for another shape."""
    if before.shape != after.shape:
        return math.inf
    if before.dtype == after.dtype and torch.equal(before, after):  # nearly always
        return 0.0
    if not before.numel():
        return 0.0
    if before.dtype == after.dtype and before.is_floating_point():
        apart = _largest_finite(after.detach() - before.detach())
        if apart is not None:  # in few passes over many parameters
            return apart / max(_largest(before), scale, MIN_SCALE)
    return float(changes(before, after, scale=scale).amax())


def changes(before: Tensor, after: Tensor, *, scale: float = 0.0) -> Tensor:
    """The change of each value in units of the largest value before, or of `scale` if larger.

    NaN equals NaN, and is infinitely far from a number.
    """
    before, after = before.detach().double(), after.detach().double()
    apart = (after - before).abs() / max(_largest(before), scale, MIN_SCALE)
    same = (before == after) | (before.isnan() & after.isnan())
    return apart.nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)


def _largest(values: Tensor) -> float:
    """The largest size of a finite value; 0 without one."""
    if not values.numel():
        return 0.0
    largest = _largest_finite(values) if values.is_floating_point() else None
    if largest is not None:
        return largest
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).amax())


def _largest_finite(values: Tensor) -> float | None:
    """The largest size of any value; None if one is not finite."""
    least, most = map(float, torch.aminmax(values.detach()))
    largest = max(-least, most)
    return largest if math.isfinite(largest) else None


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for one seed, drawn in float64 for every dtype."""
    return torch.randn(tuple(shape), generator=source(seed), dtype=torch.float64)


_cached_normal = lru_cache(maxsize=64)(normal)  # of tensors that nobody writes to


@contextmanager
def fixed_draws(seed: int = 0) -> Iterator[None]:
    """Seeds the CPU's global random state inside the block, then restores it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
