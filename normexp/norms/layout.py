"""Finds the layout of a norm from outside this package, and presents it as (N, C, *) -> same.

A fresh norm tries every layout, in training and evaluation, each on an input whose sizes all
differ. It takes those that return the same shape without a warning. If it takes none, it is refused
with the problem of the layout at which it came furthest.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from normexp.errors import UserError, first_line

Build = Callable[[int], nn.Module]

PROBED_DIMS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Layout:
    """Where a norm expects its channels, and which numbers of dimensions it accepts."""

    channels_last: bool
    num_dims: tuple[int, ...]

    def __str__(self) -> str:
        where = "last" if self.channels_last else "first"
        return f"channels {where}, {' '.join(f'{n}-D' for n in self.num_dims)} inputs"

    def present(self, norm: nn.Module) -> nn.Module:
        """Returns `norm` as (N, C, *) -> (N, C, *), wrapped only if necessary."""
        fits = not self.channels_last and self.num_dims == PROBED_DIMS
        return norm if fits else Presented(norm, self)


class Presented(nn.Module):
    """Wraps a norm of another layout, or with limited numbers of dimensions, as (N, C, *) -> same.

    Adds missing position axes with size 1 and joins surplus ones; a norm that accepts only 2-D
    inputs sees each position as a sample.
    """

    def __init__(self, norm: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.norm = norm
        self.layout = layout

    def extra_repr(self) -> str:
        return str(self.layout)

    def forward(self, x: Tensor) -> Tensor:
        if not self.layout.channels_last:
            return self._fit_and_apply(x, first_position=2)
        return self._fit_and_apply(x.movedim(1, -1), first_position=1).movedim(-1, 1)

    def _fit_and_apply(self, x: Tensor, first_position: int) -> Tensor:
        accepted = self.layout.num_dims
        larger = [n for n in accepted if n >= x.ndim]
        if larger:
            ones = [1] * (larger[0] - x.ndim)
            shape = [*x.shape[:first_position], *ones, *x.shape[first_position:]]
            shown = x.reshape(shape)
        elif accepted[-1] == 2:
            shown = x.flatten(0, -2)  # (N, *, C) -> (N * positions, C)
        else:
            surplus = x.ndim - accepted[-1]
            shown = x.flatten(first_position, first_position + surplus)
        return self.norm(shown).reshape(x.shape)


class CallCounter(TorchFunctionMode):
    """Counts calls of torch's functions while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.calls += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Trial:
    """What came of showing a fresh norm one input.

    Attributes:
        problem: None if the norm takes the input.
        reached: how far it came, to compare layouts: whether the result, if any, has as many
            dimensions as the input, how many of torch's functions ran, the lines where it failed.
    """

    num_dims: int
    channels_last: bool
    problem: str | None
    reached: tuple[bool, int, tuple[int, ...]]
    reshapes: bool = False


def find_layout(build: Build, num_features: int, *, target: str) -> Layout:
    """Returns how the norm takes its input.

    If both layouts are accepted, channels are first, unless a 4-D input shows that the norm pools
    the last axis alone. The global random state is left unchanged.

    Raises:
        UserError: no input is accepted; or a fault that no other layout mends: no tensor or another
            dtype comes back, two forwards in evaluation differ, a parameter is created in the first
            forward, evaluation depends on state that is not saved.
    """
    probe = Probe(build, num_features, target)
    with torch.random.fork_rng(devices=[]):
        # torch warns when it reads (N, C) as one sample without a batch axis, so a warning counts
        # as a refusal, unless the norm warns at every input.
        trials = probe.try_layouts("error")
        if all(trial.problem for trial in trials):
            trials = probe.try_layouts("ignore")
        taken = [trial for trial in trials if trial.problem is None]
        reshaped = [trial for trial in trials if trial.reshapes]
        if not taken or (reshaped and {trial.num_dims for trial in taken} == {2}):
            best = max(reshaped if taken else trials, key=lambda trial: trial.reached)
            raise UserError(f"norm._target_={target} does not fit: it {best.problem}")
        first = tuple(trial.num_dims for trial in taken if not trial.channels_last)
        last = tuple(trial.num_dims for trial in taken if trial.channels_last)
        channels_last = first in ((), (2,))
        if 4 in first and 4 in last:
            channels_last = probe.pools_last_axis_alone()
    return Layout(channels_last, last if channels_last else first)


@dataclass(frozen=True)
class Probe:
    """Shows fresh norms small inputs; each norm starts from the same values and draws."""

    build: Build
    num_features: int
    target: str

    def fresh(self) -> nn.Module:
        """Returns a norm in training mode; a copy, as `build` may hand out one module twice."""
        torch.default_generator.manual_seed(0)
        norm = self.build(self.num_features)
        if not any(map(is_lazy, norm.parameters())):  # a lazy norm, refused later, has no copy
            norm = copy.deepcopy(norm)
        return norm.train()

    def input(self, num_dims: int, *, channels_last: bool, times: int = 1) -> Tensor:
        """Returns a random input with distinct sizes, with `times` as many channels."""
        sizes = [size for size in (4, 5, 6, 7, 8) if size != self.num_features][: num_dims - 1]
        sizes.insert(len(sizes) if channels_last else 1, times * self.num_features)
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))

    def try_layouts(self, on_warning: Literal["error", "ignore"]) -> list[Trial]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter(on_warning, UserWarning)
            return [self.try_layout(n, last) for n in PROBED_DIMS for last in (False, True)]

    def try_layout(self, num_dims: int, channels_last: bool) -> Trial:
        """Runs a norm in training, then in evaluation on another input."""
        norm, x = self.fresh(), self.input(num_dims, channels_last=channels_last)
        other = 1 + 2 * x.flip(0)
        parameters = dict(norm.named_parameters())
        self.refuse_late([name for name, p in parameters.items() if is_lazy(p)])
        shapes = shapes_of_buffers(norm)
        out, again, problem, lines = None, [], None, ()
        with CallCounter() as counter:
            try:
                out = norm(x)
                again = [norm.eval()(other) for _ in range(2)]
            except Exception as error:  # of foreign code, any kind
                problem = f"fails on an input of shape {tuple(x.shape)}: {first_line(error)}"
                lines = tuple(line for _, line in walk_tb(error.__traceback__))
        self.refuse_late([n for n, p in norm.named_parameters() if p is not parameters.get(n)])
        reshapes, keeps_dims = False, True
        if problem is None:
            if not isinstance(out, Tensor):
                self.refuse(f"returns a {type(out).__name__}, not a tensor")
            reshapes, keeps_dims = out.shape != x.shape, out.ndim == x.ndim
            if reshapes:
                problem = f"changes the shape, {tuple(x.shape)} to {tuple(out.shape)}"
            elif shapes_of_buffers(norm) != shapes:
                problem = f"changes the shape of its buffers on an input of shape {tuple(x.shape)}"
            else:
                self.refuse_faults(norm, out.dtype, other, again)
        reached = (keeps_dims, counter.calls, lines)
        return Trial(num_dims, channels_last, problem, reached, reshapes)

    def pools_last_axis_alone(self) -> bool:
        """True if a value of a 4-D input influences others along the last axis alone."""
        x = self.input(4, channels_last=False)
        moved = x.clone()
        moved[0, 0, 0, 0] += 1
        changed = self.fresh()(x) != self.fresh()(moved)
        others = changed[0, 1:, 0, 0].any() or changed[0, 0, 1:, 0].any()
        return bool(changed[0, 0, 0, 1:].any()) and not bool(others)

    def refuse_late(self, names: list[str]) -> None:
        if names:
            self.refuse(
                f"creates its parameter {names[0]} in its first forward, "
                "too late for the optimizer; create it in __init__"
            )

    def refuse_faults(
        self, norm: nn.Module, dtype: torch.dtype, x: Tensor, again: list[Tensor]
    ) -> None:
        """Refuses what would otherwise show up far from its cause.

        Args:
            norm: after a training forward, which returned values of `dtype`.
            again: two results for `x` in evaluation mode.
        """
        if dtype != x.dtype:
            self.refuse(
                f"returns {dtype} for an input of {x.dtype}; end its forward with .to(x.dtype)"
            )
        if not torch.allclose(*again, rtol=0, atol=0, equal_nan=True):
            self.refuse("is not deterministic: in evaluation mode two forwards of one input differ")
        twin = self.fresh().eval()
        twin.load_state_dict(norm.state_dict())
        kept = unlike_attributes(norm, twin)
        if not torch.allclose(twin(x), again[0], rtol=1e-4, atol=1e-6, equal_nan=True):
            kept += sorted(set(dict(norm.named_buffers())) - set(norm.state_dict()))
            self.refuse(
                f"keeps state that its state_dict lacks: {', '.join(kept) or 'an attribute'}; "
                "evaluation depends on it, but saved weights would not contain it; make it a "
                "persistent buffer in __init__, with self.register_buffer(...)"
            )

    def refuse(self, fault: str) -> NoReturn:
        raise UserError(f"norm._target_={self.target} {fault}")


def shapes_of_buffers(norm: nn.Module) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in norm.named_buffers()}


def unlike_attributes(norm: nn.Module, other: nn.Module) -> list[str]:
    """Returns the paths of plain attributes, tensors or numbers, that differ between two norms."""

    def differ(one: Any, two: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            return not torch.equal(one, two)
        if isinstance(one, Tensor) or isinstance(two, Tensor):
            return True  # the state may have been a number at first
        return isinstance(one, int | float) and one != two

    internal = vars(nn.Module())
    twins = dict(other.named_modules())
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in norm.named_modules()
        for name, value in vars(module).items()
        if name not in internal and differ(value, vars(twins[path]).get(name))
    ]
