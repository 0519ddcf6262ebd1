"""The probe engine: finds which inputs can change an output.

Holds fixed what a module may read, changes everything else, and compares outputs, gradients of
inputs and parameters, and running state. Works on any module that maps `x`, or `x` and a mask, to
one tensor: a norm, a site or a whole network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, islice

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from normexp.norms.contract import State
from normexp.norms.site import read_state

TOLERANCE = 1e-4  # relative; float32 rounding moves results by less
MIN_SCALE = 1e-6  # values below are compared on this scale
MODES = (True, False)  # training and evaluation
MAX_CUTS = 64  # of one sequence
MOST_CACHED = 10**6  # numbers; more are drawn anew, since the cache keeps them in memory
EXTRA_POSITIONS = 3  # of padding, appended to ask about its amount
EVERYWHERE = torch.ones(1, dtype=torch.bool)  # an upstream gradient
INPUT = "the input"


@dataclass(frozen=True)
class Observation:
    """The results of one forward, and of its backward if there was one.

    Attributes:
        state: the buffers after the forward.
        drew: true if the forward used torch's global random state, as nn.Dropout does.
        gradients: of the input if it takes one, and of the parameters, by name.
    """

    output: Tensor
    state: State
    drew: bool
    gradients: State


@dataclass(frozen=True)
class Probe:
    """Runs a module repeatedly from the same parameters, buffers and random state.

    The module keeps its own tensors: each forward gets copies of them.

    Attributes:
        module: in the mode to examine. The axes along which values are held or changed must lead
            its input and its output: samples and positions, or samples and channels of (N, C, *).
        inputs: x, and the mask if there is one.
        vocab_size: for a module with token inputs.
        position_axis: the axis of positions in x and in the output, if there is one.
        max_cuts: of one sequence into before and after.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    vocab_size: int | None = None
    position_axis: int = 2
    max_cuts: int = MAX_CUTS

    def observe(self, *inputs: Tensor, upstream: Tensor | None = None) -> Observation:
        """Runs one forward and, given `upstream`, one backward.

        Args:
            inputs: x and maybe a mask, in place of the probe's own.
            upstream: a mask over leading axes of the output; multiplies random upstream gradients.
        """
        has_backward = upstream is not None
        x, *mask = inputs or self.inputs
        x = x.detach().clone().requires_grad_(has_backward and x.is_floating_point())
        state = read_state(self.module)
        parameters = {
            name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }
        tensors = parameters | state
        gradients: State = {}
        with fixed_draws(), torch.set_grad_enabled(has_backward):
            start = torch.get_rng_state()
            copy_of_x = x.clone()  # which the module may change in place
            out = functional_call(self.module, tensors, (copy_of_x, *mask))
            drew = not torch.equal(start, torch.get_rng_state())
            if has_backward and out.requires_grad:
                leaves = {INPUT: x} | parameters
                leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
                weights = cached_normal(out.shape, 7) * fit(upstream, out)
                slopes = torch.autograd.grad(
                    out,
                    [*leaves.values()],
                    weights.to(out.dtype),
                    allow_unused=True,
                    materialize_grads=True,
                )
                gradients = dict(zip(leaves, slopes, strict=True))
        state = {name: tensors[name].detach() for name in state}  # as the forward leaves it
        return Observation(out.detach(), state, drew, gradients)

    def influence(
        self, keep: Tensor, *, before: Observation, state: bool = False, way: int = 0
    ) -> str | None:
        """Names what changes in the kept region if everything else changes; None if nothing does.

        Args:
            keep: boolean, broadcast to the leading axes of input and output: the region held fixed
                in the input and compared in the output.
            before: the observation of the inputs. If it has gradients, with `keep` as upstream,
                those of kept inputs and of parameters are compared too.
            state: also compare buffers, which must then depend only on kept inputs.
            way: selects a random replacement, see `replacement`.
        """
        x, *mask = self.inputs
        changed = torch.where(fit(keep, x), x, self.replacement(x, way))
        after = self.observe(changed, *mask, upstream=keep if before.gradients else None)
        return difference(before, after, keep, state=state)

    def replacement(self, x: Tensor, way: int) -> Tensor:
        """Random values of the dtype of `x`, different everywhere; large and moderate in turn.

        Large values are about sqrt(n) for n values, so a mean over m <= n of them moves by more
        than sqrt(n) / m.
        """
        if self.vocab_size is not None:
            draws = torch.Generator().manual_seed(way)
            step = torch.randint(1, self.vocab_size, x.shape, generator=draws)
            return (x + step) % self.vocab_size
        size = math.sqrt(x.numel()) if way % 2 == 0 else 3.0
        draw = cached_normal if x.numel() <= MOST_CACHED else normal
        return (1 + size * draw(x.shape, way + 1)).to(x.dtype)

    def reads_across(
        self,
        axis: int,
        *,
        gradients: bool = False,
        state: bool = False,
        all_pairs: bool = True,
    ) -> str | None:
        """Names a result at one index of an axis that depends on another.

        Args:
            axis: 0 samples, 1 channels, 2 all positions of (N, C, *) together.
            all_pairs: each index is held against each other; else the first against all others.
        """
        shape = self.inputs[0].shape
        sizes = shape[axis : axis + 1] if axis < 2 else shape[2:]
        whole = self.observe(upstream=EVERYWHERE if gradients else None)
        # Parameters sum over all samples, so only the gradient of the input is comparable.
        of_input = {name: g for name, g in whole.gradients.items() if name == INPUT}
        with_all_upstream = replace(whole, gradients=of_input)
        count = sizes.numel()
        for index, hold in enumerate(holds(count) if all_pairs else [torch.arange(count) < 1]):
            keep = hold.view(*[1] * axis, *sizes)
            before = self.observe(upstream=keep) if gradients else whole
            moved = self.influence(keep, before=before, state=state, way=index % 4)
            # Upstream gradients of the others must not reach the gradient of a kept input.
            moved = moved or difference(before, with_all_upstream, keep)
            if moved:
                return moved
        return None

    def reads_later(self) -> bool:
        """True if changes from some position on move an earlier output."""
        length = self.inputs[0].shape[self.position_axis]
        before = self.observe()
        for index, cut in enumerate(cuts(length, self.max_cuts)):
            keep = (torch.arange(length) < cut).view(*[1] * self.position_axis, -1)
            if self.influence(keep, before=before, way=index % 4):
                return True
        return False

    def reads_padding(self) -> bool:
        """True if the content or amount of padding moves real outputs, a gradient or the state.

        The inputs are (N, C, P) and a mask (N, P).
        """
        x, mask = self.inputs
        real = mask.unsqueeze(1)
        length = mask.shape[1]
        before = self.observe(upstream=real if self.module.training else None)
        if self.influence(real, before=before, state=True):
            return True
        more = self.replacement(x.new_empty(*x.shape[:2], EXTRA_POSITIONS), 0)
        longer = functional.pad(mask, (0, EXTRA_POSITIONS), value=False)
        try:
            after = self.observe(torch.cat([x, more], 2), longer)
        except Exception:  # foreign code: a norm for one length
            return False
        after = replace(after, output=after.output[:, :, :length])
        before = self.observe()  # without a backward, which may move state as well
        return difference(before, after, real, state=True) is not None


def holds(count: int) -> list[Tensor]:
    """Boolean masks (count,): for any two indices, one mask holds the first and not the second.

    As few as possible: each index is held by another half of the masks (Sperner's theorem).
    """
    num_masks = next(m for m in range(count + 1) if math.comb(m, m // 2) >= count)
    halves = combinations(range(num_masks), num_masks // 2)
    masks = torch.zeros(num_masks, count, dtype=torch.bool)
    for index, half in enumerate(islice(halves, count)):
        masks[list(half), index] = True
    return list(masks)


def cuts(length: int, most: int) -> range:
    """At most `most` positions, spread evenly, that cut a sequence into before and after."""
    return range(1, length, max(1, math.ceil(length / most)))


def fit(keep: Tensor, values: Tensor) -> Tensor:
    """A mask over leading axes, with the axes that follow."""
    return keep.view(*keep.shape, *[1] * (values.ndim - keep.ndim))


def difference(
    before: Observation, after: Observation, keep: Tensor, *, state: bool = False
) -> str | None:
    """The name of a result that differs between two observations; None if none does.

    Outputs and input gradients are compared where `keep` is true; gradients only if both have them.
    """

    def kept(values: Tensor) -> Tensor:
        return torch.where(fit(keep, values), values, 0)

    if moves(kept(before.output), kept(after.output)):
        return "output"
    # Rounding errors scale with the largest of all parameter gradients.
    slopes = [slope for name, slope in before.gradients.items() if name != INPUT]
    scale = max(map(_largest, slopes), default=0.0)
    for name in [name for name in before.gradients if name in after.gradients]:
        old, new = before.gradients[name], after.gradients[name]
        size = change(kept(old), kept(new)) if name == INPUT else change(old, new, scale=scale)
        if size > TOLERANCE:
            return f"gradient of {name}"
    if state:
        for name, value in before.state.items():
            if moves(value, after.state[name]):
                return name
    return None


def moves(before: Tensor, after: Tensor) -> bool:
    """True if any value differs by more than rounding, see `change`."""
    return change(before, after) > TOLERANCE


def change(before: Tensor, after: Tensor, *, scale: float = 0.0) -> float:
    """The largest change, in units of the largest value before, or of `scale` if larger.

    NaN equals NaN, and is infinitely far from a number, as is another shape.
    """
    if before.shape != after.shape:
        return math.inf
    if not before.numel() or torch.equal(before, after):  # nearly always
        return 0.0
    before, after = before.detach().double(), after.detach().double()
    sizes = (after - before).abs() / max(_largest(before), scale, MIN_SCALE)
    same = (before == after) | (before.isnan() & after.isnan())
    return float(sizes.nan_to_num(math.inf, math.inf).masked_fill(same, 0.0).amax())


def _largest(values: Tensor) -> float:
    """The largest absolute value that is finite; 0 if there is none."""
    sizes = values.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(sizes.amax()) if values.numel() else 0.0


def normal(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for one seed, drawn in float64 for every dtype."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=draws, dtype=torch.float64)


cached_normal = lru_cache(maxsize=64)(normal)  # its results must not be written to


@contextmanager
def fixed_draws(seed: int = 0) -> Iterator[None]:
    """Seeds the CPU's global random state inside the block, then restores it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
