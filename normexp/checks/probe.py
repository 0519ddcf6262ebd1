"""The one probe engine: what can change this output?

Hold fixed what may legitimately be read, change everything else, and compare outputs, gradients
and running state. The engine works on any module that maps `x`, or `x` and a mask, to one tensor:
a lone norm, a site or a whole network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normexp.norms.state import State, read_state

TOLERANCE = 1e-4  # relative; float32 rounding moves outputs by less
SMALLEST_SCALE = 1e-6  # values below are compared on this scale


@dataclass(frozen=True)
class Observation:
    """What one forward and one backward leave behind; gradients are empty where none were taken."""

    output: Tensor
    input_gradient: Tensor | None
    parameter_gradients: State
    state: State

    def of_samples(self, keep: Tensor) -> Observation:
        """What it holds of some samples."""
        gradient = self.input_gradient
        own = None if gradient is None else gradient[keep]
        return Observation(self.output[keep], own, self.parameter_gradients, self.state)


class Probe:
    """Runs a module again and again from one state and one random state; never changes it.

    Args:
        module: in the mode to be examined. Axes that are held or changed come first in its input
            and its output alike: samples and positions, or channels of (N, C, *).
        vocab_size: of a module whose inputs are tokens.
        ways: how many random replacements are tried at each hold.
    """

    def __init__(self, module: nn.Module, *, vocab_size: int | None = None, ways: int = 2) -> None:
        self.module = module
        self.vocab_size = vocab_size
        self.ways = ways
        self._replacements: dict[tuple[torch.Size, int], Tensor] = {}

    def fresh(self) -> nn.Module:
        """A copy in the original state; it shares the parameters, which are never written."""
        return copy.deepcopy(self.module, {id(p): p for p in self.module.parameters()})

    def observe(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        upstream: Tensor | None = None,
        only: Tensor | None = None,
    ) -> Observation:
        """One forward and, given `upstream`, one backward.

        Args:
            upstream: leading axes of the output; random upstream gradients are multiplied by it.
            only: boolean (N,), the samples to run without the others.
        """
        module, num_samples = self.fresh(), len(x)
        if only is not None:
            x, mask = x[only], None if mask is None else mask[only]
        x = x.detach().requires_grad_(upstream is not None and x.is_floating_point())
        with fixed_draws(), torch.set_grad_enabled(upstream is not None):
            out = module(x) if mask is None else module(x, mask)
            if upstream is None or not out.requires_grad:
                return Observation(out.detach(), None, {}, read_state(module))
            weights = normal((num_samples, *out.shape[1:]), seed=7) * fit(upstream, out)
            weights = (weights if only is None else weights[only]).to(out.dtype)
            named = {n: p for n, p in module.named_parameters() if p.requires_grad}
            wanted = [*([x] if x.requires_grad else []), *named.values()]
            found = torch.autograd.grad(
                out, wanted, weights, allow_unused=True, materialize_grads=True
            )
        own = found[: len(wanted) - len(named)]
        slopes = dict(zip(named, found[len(own) :], strict=True))
        return Observation(out.detach(), own[0] if own else None, slopes, read_state(module))

    def influence(
        self,
        x: Tensor,
        keep: Tensor,
        mask: Tensor | None = None,
        *,
        gradients: bool = False,
        state: bool = False,
        before: Observation | None = None,
    ) -> str | None:
        """What of the kept region follows a change of everything else; None if nothing does.

        Args:
            keep: boolean, broadcast to the leading axes of input and output: what is held fixed
                in the input and compared in the output.
            gradients: also compare the gradient of kept inputs, and the gradients of parameters
                when only kept outputs have an upstream gradient.
            state: also compare buffers, which then may depend on kept inputs alone.
            before: the observation of `x`, for a caller that has it; without gradients only.
        """
        upstream = keep if gradients else None
        before = before or self.observe(x, mask, upstream=upstream)
        for way in range(self.ways):
            changed = torch.where(fit(keep, x), x, self.replacement(x, way))
            after = self.observe(changed, mask, upstream=upstream)
            moved = difference(before, after, keep, state=state)
            if moved is not None:
                return moved
        if before.input_gradient is None:
            return None
        # Upstream gradients of the others may not reach a kept input either.
        after = self.observe(x, mask, upstream=torch.ones_like(keep))
        return difference(replace(before, parameter_gradients={}), after, keep, state=False)

    def replacement(self, x: Tensor, way: int) -> Tensor:
        """Random values of the kind of `x`, everywhere different; large ones and moderate ones.

        A large value moves every statistic that contains it: about the root of the number of
        values, since a mean over m <= n of them then moves by more than sqrt(n) / m.
        """
        if self.vocab_size is not None:
            low = torch.randint(1, self.vocab_size, x.shape, generator=source(way))
            return (x + (low if way else 1)) % self.vocab_size
        if (x.shape, way) not in self._replacements:
            size = math.sqrt(x.numel()) if way % 2 == 0 else 3.0
            drawn = 1 + size * normal(x.shape, seed=way + 1).to(x.dtype)
            self._replacements[x.shape, way] = drawn
        return self._replacements[x.shape, way]

    def reads_across(
        self,
        x: Tensor,
        axis: int,
        mask: Tensor | None = None,
        *,
        gradients: bool = False,
        state: bool = False,
    ) -> str | None:
        """What of one index of an axis follows the values at others, over every pair of indices."""
        keeps = [along(keep, axis) for keep in holds(x.shape[axis])]
        before = None if gradients else self.observe(x, mask)
        for keep in keeps:
            moved = self.influence(x, keep, mask, gradients=gradients, state=state, before=before)
            if moved is not None:
                return moved
        return None

    def reads_samples(self, x: Tensor, mask: Tensor | None = None, *, training: bool) -> str | None:
        """What of a sample follows other samples: their content, or how many there are.

        In training outputs, gradients and state; in evaluation nobody takes gradients.
        """
        moved = self.reads_across(x, 0, mask, gradients=training, state=True)
        if moved is not None or len(x) < 2 or self.draws(x, mask):
            return moved
        half = holds(len(x))[0]
        upstream = half if training else None
        whole = self.observe(x, mask, upstream=upstream)
        try:
            part = self.observe(x, mask, upstream=upstream, only=half)
        except Exception:  # of foreign code: refuses so few samples
            return None
        return difference(whole.of_samples(half), part, half[half], state=False)

    def reads_later(self, x: Tensor, axis: int, mask: Tensor | None = None) -> int | None:
        """A position from which on a change moves an earlier output; None if there is none."""
        length, before = x.shape[axis], self.observe(x, mask)
        for cut in cuts(length):
            keep = along(torch.arange(length) < cut, axis)
            if self.influence(x, keep, mask, before=before) is not None:
                return cut
        return None

    def draws(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Whether a forward uses torch's global random state, as nn.Dropout does."""
        module = self.fresh()
        with fixed_draws(), torch.no_grad():
            before = torch.get_rng_state()
            _ = module(x) if mask is None else module(x, mask)
            return not torch.equal(before, torch.get_rng_state())


def holds(count: int) -> list[Tensor]:
    """Boolean masks (count,): for any two indices, one mask holds the first and not the second."""
    index = torch.arange(count)
    bits = range(max(count - 1, 0).bit_length())
    ones = [(index >> bit) & 1 == 1 for bit in bits]
    return [mask for one in ones for mask in (one, ~one)]


def cuts(length: int) -> list[int]:
    """Positions that cut a sequence into before and after: all, or a spread of a long one."""
    if length <= 9:
        return list(range(1, length))
    return [length // 2, length - 1, 1, length // 3, 2, 3, 2 * length // 3, length - 2]


def along(keep: Tensor, axis: int) -> Tensor:
    """A mask over one axis, with the axes before it."""
    return keep.view(*[1] * axis, -1)


def fit(keep: Tensor, values: Tensor) -> Tensor:
    """A mask over leading axes, with the axes that follow."""
    return keep.view(*keep.shape, *[1] * (values.ndim - keep.ndim))


def select(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(fit(keep, values), values, 0)


def difference(before: Observation, after: Observation, keep: Tensor, *, state: bool) -> str | None:
    """The name of what differs between two observations, looking at kept outputs and inputs."""
    if moves(select(before.output, keep), select(after.output, keep)):
        return "output"
    inputs = before.input_gradient, after.input_gradient
    if None not in inputs and moves(*(select(g, keep) for g in inputs if g is not None)):
        return "gradient of the input"
    slopes = before.parameter_gradients
    pairs = {n: (g, after.parameter_gradients[n]) for n, g in slopes.items()}
    unequal = {name: pair for name, pair in pairs.items() if not torch.equal(*pair)}
    if unequal:  # rounding is to be compared with the largest of all
        scale = max(float(slope.abs().amax()) for slope in slopes.values() if slope.numel())
        for name, pair in unequal.items():
            if moves(*pair, scale=scale):
                return f"gradient of {name}"
    return moved_state(before.state, after.state) if state else None


def moved_state(before: State, after: State) -> str | None:
    """The name of a buffer that differs."""
    for name, value in before.items():
        if name not in after or moves(value.double(), after[name].double()):
            return name
    return None


def moves(before: Tensor, after: Tensor, *, scale: float = 0.0) -> bool:
    """Whether any value differs by more than rounding; NaN equals NaN."""
    if torch.equal(before, after):
        return False
    return bool(moved_places(before, after, scale=scale).any())


def moved_places(
    before: Tensor, after: Tensor, *, scale: float = 0.0, tolerance: float = TOLERANCE
) -> Tensor:
    """Where two tensors differ by more than rounding, relative to the largest value or `scale`."""
    if not before.numel():
        return torch.zeros_like(before, dtype=torch.bool)
    before, after = torch.broadcast_tensors(before, after)
    finite = before[before.isfinite()]
    largest = float(finite.abs().amax()) if finite.numel() else 0.0
    bound = tolerance * max(largest, scale, SMALLEST_SCALE)
    same = (before == after) | (before.isnan() & after.isnan()) | ((after - before).abs() <= bound)
    return ~same


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], *, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for one seed, drawn in float64 for every dtype."""
    return torch.randn(tuple(shape), generator=source(seed), dtype=torch.float64)


@contextmanager
def fixed_draws() -> Iterator[None]:
    """The global random state of the CPU at a fixed seed while inside, then as it was."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(before)
