"""Where a norm from the wild wants its channels, found by a probe, and how it is then presented."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.errors import UserError

logger = logging.getLogger(__name__)

Build = Callable[[int], nn.Module]

PROBED_DIMS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Layout:
    """Where a norm wants its channels, and the numbers of dimensions that it takes."""

    channels_last: bool
    num_dims: tuple[int, ...]

    def __str__(self) -> str:
        where = "last" if self.channels_last else "first"
        return f"channels {where}, {' '.join(f'{n}-D' for n in self.num_dims)} inputs"

    def present(self, norm: nn.Module) -> nn.Module:
        """`norm` as (N, C, *) -> (N, C, *), wrapped only where it needs that."""
        fits = not self.channels_last and self.num_dims == PROBED_DIMS
        return norm if fits else Presented(norm, self)


class Presented(nn.Module):
    """A norm of another layout, or of some numbers of dimensions only, as (N, C, *) -> same.

    Missing positions axes are added with size 1, surplus ones joined; a norm of 2-D inputs alone
    sees each position as a sample.
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


def note_lone_tokens(norm: nn.Module) -> None:
    """Logs where a norm that takes positions is shown one at a time, which may be another norm."""
    if isinstance(norm, Presented) and 2 not in norm.layout.num_dims:
        logger.info(
            "%s takes no (N, C), so each token is shown to it as a sequence of one; "
            "norm.view=sequence shows it whole sequences",
            type(norm.norm).__name__,
        )


def first_line(error: Exception) -> str:
    """What an error says, in one line; its type where it says nothing, or a bare key."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{type(error).__name__} {said}" if isinstance(error, KeyError) else said


def find_layout(build: Build, num_features: int, *, target: str) -> Layout:
    """How the norm takes its input, from forwards on small inputs with all sizes distinct.

    Where both layouts are accepted and a 4-D input does not show that the last axis alone is
    pooled, channels come first. The global random state is left as it was.

    Raises:
        UserError: no input is accepted, the shape changes, the output is no tensor, two forwards
            in evaluation differ, or a parameter is made in the first forward.
    """
    probe = _Probe(build, num_features, target)
    with torch.random.fork_rng(devices=[]):
        # A warning tells that torch read (N, C) as one sample without a batch axis; only for a
        # norm that always warns is it no answer.
        for on_warning in ("error", "ignore"):
            first, last, problems = probe.accepted_dims(on_warning)
            if first or last:
                break
        if not first and not last:
            changes = [problem for problem in problems if problem.startswith("changes")]
            raise UserError(f"norm._target_={target} does not fit: it {(changes or problems)[0]}")
        # Of one that takes features alone, maps that come back in another shape are a mistake.
        reshaped = [problem for problem in problems if problem.startswith("changes the shape,")]
        if reshaped and {*first, *last} == {2}:
            raise UserError(f"norm._target_={target} does not fit: it {reshaped[0]}")
        with_positions = set(first) - {2}, set(last) - {2}
        if all(with_positions):
            channels_last = 4 in first and 4 in last and probe.pools_last_axis_alone()
        else:
            channels_last = not with_positions[0]
    return Layout(channels_last, tuple(last if channels_last else first))


@dataclass(frozen=True)
class _Probe:
    """Forwards of fresh norms; each on an input of its own layout and number of dimensions."""

    build: Build
    num_features: int
    target: str

    def fresh(self) -> nn.Module:
        torch.default_generator.manual_seed(0)
        return self.build(self.num_features).train()

    def input(self, num_dims: int, *, channels_last: bool) -> Tensor:
        sizes = [size for size in (4, 5, 6, 7, 8) if size != self.num_features][: num_dims - 1]
        sizes.insert(len(sizes) if channels_last else 1, self.num_features)
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))

    def accepted_dims(self, on_warning: Any) -> tuple[list[int], list[int], list[str]]:
        """The numbers of dimensions accepted channels first and last, and what was wrong."""
        accepted: tuple[list[int], list[int]] = ([], [])
        problems = []
        for num_dims in PROBED_DIMS:
            for channels_last in (False, True):
                x = self.input(num_dims, channels_last=channels_last)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    warnings.simplefilter(on_warning, UserWarning)
                    problem = self.find_problem(x)
                if problem is None:
                    accepted[channels_last].append(num_dims)
                else:
                    problems.append(problem)
        return *accepted, problems

    def find_problem(self, x: Tensor) -> str | None:
        """What keeps a fresh norm from taking `x`; raises what no other input would mend."""
        norm = self.fresh()
        with self._no_new_parameters(norm):
            buffers = {name: buffer.shape for name, buffer in norm.named_buffers()}
            try:
                out = norm(x)
                again = [norm.eval()(x) for _ in range(2)]
            except Exception as error:
                return f"fails on an input of shape {tuple(x.shape)}: {first_line(error)}"
        if not isinstance(out, Tensor):
            raise UserError(
                f"norm._target_={self.target} returns a {type(out).__name__}, not a tensor"
            )
        if out.shape != x.shape:
            return f"changes the shape, {tuple(x.shape)} to {tuple(out.shape)}"
        if buffers != {name: buffer.shape for name, buffer in norm.named_buffers()}:
            return f"changes the shape of its buffers on an input of shape {tuple(x.shape)}"
        if not torch.allclose(again[0], again[1], rtol=0, atol=0, equal_nan=True):
            raise UserError(
                f"norm._target_={self.target} is not deterministic: in evaluation mode two "
                "forwards of one input differ"
            )
        return None

    @contextmanager
    def _no_new_parameters(self, norm: nn.Module) -> Iterator[None]:
        before = dict(norm.named_parameters())
        new = [name for name, parameter in before.items() if is_lazy(parameter)]
        if not new:
            yield
            new = [name for name, p in norm.named_parameters() if p is not before.get(name)]
        if new:
            raise UserError(
                f"norm._target_={self.target} makes its parameter {new[0]} in its first forward, "
                "too late for the optimizer; make it in __init__"
            )

    def pools_last_axis_alone(self) -> bool:
        """Whether on a 4-D input a value moves others along the last axis, along no other one."""
        x = self.input(4, channels_last=False)
        moved = x.clone()
        moved[0, 0, 0, 0] += 1
        changed = self.fresh()(x) != self.fresh()(moved)
        others = changed[0, 1:, 0, 0].any() or changed[0, 0, 1:, 0].any()
        return bool(changed[0, 0, 0, 1:].any()) and not bool(others)
