"""Adapts norms from outside this package to (N, C, *) -> same, built from a number of features.

Arguments. The number of features goes to the argument that is named for it, else to the only
required one. eps has one value for all norms, unless the user sets that of this one.

Layout. Channels first and last are tried on small inputs of 2 to 5 dimensions, whose sizes all
differ. The layout that fits is logged; if none does, the norm is refused with what each input
raised. `norm.layout=first` or `norm.layout=last` tries that one alone.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.errors import UserError, one_line, source_line_of
from normexp.norms.contract import Mask

logger = logging.getLogger(__name__)

Build = Callable[[int], nn.Module]

# Argument names for the number of features, the least ambiguous first.
FEATURE_NAMES = (
    *("num_features", "num_channels", "n_features", "n_channels", "channels", "features"),
    *("normalized_shape", "normalized_dim", "hidden_size", "hidden_dim", "d_model", "embed_dim"),
    *("in_features", "in_channels", "width", "dim"),
)
AMBIGUOUS_NAMES = ("width", "dim")  # if they have a default, it may be an axis or a window
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

PROBED_DIMS = (2, 3, 4, 5)


def foreign_factory(
    make: Callable[..., Any],
    *,
    target: str,
    eps: float,
    layout: Literal["first", "last"] | None = None,
) -> Build:
    """Returns a function that builds a foreign norm as (N, C, *) -> same.

    Args:
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        target: its name, for messages.
        eps: passed if the signature has one and the user has not set it.
        layout: where its channels are; None: found when the first norm is built.

    Raises:
        UserError: as `adapt`; when the first norm is built, as `find_layout`.
    """
    if layout not in (None, "first", "last"):
        raise UserError(f"norm.layout={layout}: must be first or last")
    build = adapt(make, target=target, eps=eps)
    found: Layout | None = None

    def norm(num_features: int) -> nn.Module:
        nonlocal found
        if found is None:
            needed = [name for name in _required_by_forward(build(num_features)) if name != "mask"]
            if needed:
                raise UserError(
                    f"norm._target_={target}: its forward needs {needed[0]} besides x; a norm "
                    "receives x, and mask if it has one: give it a default"
                )
            found = find_layout(build, num_features, target=target, layout=layout)
            logger.info("norm._target_=%s takes %s", target, found)
        return found.present(build(num_features))

    return norm


def adapt(make: Callable[..., Any], *, target: str, eps: float | None) -> Build:
    """Returns `make` as a function of the number of features alone.

    Raises:
        UserError: a required argument that is not set; when called, an error of the constructor, or
            a result that is not an nn.Module.
    """
    eps_names = [p.name for p in _free_arguments(make) if p.name in EPS_NAMES]
    if eps is not None and eps_names:
        make = partial(make, **{eps_names[0]: eps})
    free = _free_arguments(make)
    named = [p for name in FEATURE_NAMES for p in free if p.name == name]
    required = [p for p in free if _is_required(p)]
    candidates = [  # for the number of features, the least ambiguous first
        *(p for p in named if _is_required(p)),
        *required,
        *(p for p in named if p.name not in AMBIGUOUS_NAMES),
        *(p for p in free if p.kind is p.VAR_POSITIONAL),
    ]
    feature = candidates[0] if candidates else None
    missing = [p.name for p in required if p is not feature]
    if missing:
        raise UserError(
            f"norm._target_={target} needs the argument {missing[0]}; set norm.{missing[0]}=..."
        )

    def construct(num_features: int) -> nn.Module:
        try:
            if feature is None:
                norm = make()
            elif feature.kind in (feature.POSITIONAL_ONLY, feature.VAR_POSITIONAL):
                norm = make(num_features)
            else:
                norm = make(**{feature.name: num_features})
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"norm._target_={target} cannot be built for {num_features} features: "
                f"{one_line(error)}"
            ) from error
        if not isinstance(norm, nn.Module):
            kind = type(norm).__name__
            raise UserError(f"norm._target_={target} made a {kind}, not an nn.Module")
        if isinstance(norm, torch.jit.ScriptModule):
            raise UserError(f"norm._target_={target} is TorchScript; name the class that it is of")
        return norm

    return construct


def _free_arguments(make: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the arguments of a class, a function or a partial that are not bound yet."""
    call = make if isinstance(make, partial) else partial(make)
    if getattr(call.func, "__init__", None) is nn.Module.__init__:
        return []  # takes no arguments, despite its signature
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # written in C, without a signature: assume one positional argument
        return [inspect.Parameter("num_features", inspect.Parameter.POSITIONAL_ONLY)]
    return [p for p in parameters if p.name not in call.keywords]


def _required_by_forward(norm: nn.Module) -> list[str]:
    """Returns the arguments of the norm's forward after x that have no default."""
    parameters = list(inspect.signature(norm.forward).parameters.values())[1:]
    return [p.name for p in parameters if _is_required(p)]


def _is_required(argument: inspect.Parameter) -> bool:
    return argument.default is argument.empty and argument.kind not in VARIADIC


@dataclass(frozen=True)
class Layout:
    """Where a norm expects its channels, and which numbers of dimensions it accepts."""

    channels_last: bool
    num_dims: tuple[int, ...]

    def __str__(self) -> str:
        where = "last" if self.channels_last else "first"
        return f"channels {where}, {', '.join(f'{n}-D' for n in self.num_dims)} inputs"

    def present(self, norm: nn.Module) -> nn.Module:
        """Returns `norm` as (N, C, *) -> (N, C, *), wrapped only if necessary."""
        fits = not self.channels_last and self.num_dims == PROBED_DIMS
        if fits and "mask" not in _required_by_forward(norm):
            return norm
        return LayoutAdapter(norm, self)

    def mask(self, x: Tensor) -> Tensor:
        """Returns a mask for x in this layout, true everywhere."""
        channel = x.select(-1 if self.channels_last else 1, 0)
        return torch.ones_like(channel, dtype=torch.bool)


class LayoutAdapter(nn.Module):
    """Adapts a norm of another layout, or for some numbers of dimensions, to (N, C, *) -> same.

    Adds missing position axes with size 1 and joins surplus ones. A norm that accepts only 2-D
    inputs sees each position as a sample.
    """

    adds_level = "norm"

    def __init__(self, norm: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.norm = norm
        self.layout = layout
        self.needs_mask = "mask" in _required_by_forward(norm)

    def extra_repr(self) -> str:
        return str(self.layout)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        """(N, C, *) -> same; mask (N, *), for a norm that takes one."""
        if not self.layout.channels_last:
            return self._fit_and_apply(x, mask, first_position=2)
        return self._fit_and_apply(x.movedim(1, -1), mask, first_position=1).movedim(-1, 1)

    def _fit_and_apply(self, x: Tensor, mask: Mask, first_position: int) -> Tensor:
        num_dims = min((n for n in self.layout.num_dims if n >= x.ndim), default=None)
        most = self.layout.num_dims[-1]
        if num_dims is not None:
            ones = [1] * (num_dims - x.ndim)
            fitted = x.reshape([*x.shape[:first_position], *ones, *x.shape[first_position:]])
        elif most == 2:
            fitted = x.flatten(0, -2)  # (N, *, C) -> (N * positions, C)
        else:
            fitted = x.flatten(first_position, first_position + x.ndim - most)
        if mask is None and not self.needs_mask:
            return self.norm(fitted).reshape(x.shape)
        all_real = self.layout.mask(fitted)
        mask = all_real if mask is None else mask.reshape(all_real.shape)
        return self.norm(fitted, mask=mask).reshape(x.shape)


def find_layout(
    build: Build, num_features: int, *, target: str, layout: Literal["first", "last"] | None = None
) -> Layout:
    """Returns the layout of a norm, tried on fresh copies; the random state is left unchanged.

    If both layouts fit, channels are first, unless the norm pools the last of four axes alone.

    Args:
        layout: where its channels are, if the user says it.

    Raises:
        UserError: no input is accepted.
    """
    first, last = list[int](), list[int]()  # numbers of dimensions that fit, by layout
    problems: dict[str, str] = {}  # by the line of code that fails
    breach: UserError | None = None  # of the contract, which another layout may not mend
    with torch.random.fork_rng(devices=[]):
        for order, fitting in (("first", first), ("last", last)):
            if layout not in (None, order):
                continue
            for num_dims in PROBED_DIMS:
                x = _input(num_dims, num_features).movedim(1, -1 if order == "last" else 1)
                try:
                    _try(build, num_features, x, Layout(order == "last", (num_dims,)), target)
                    fitting.append(num_dims)
                except UserError as error:
                    breach = breach or error
                except Exception as error:  # foreign code may raise anything
                    line = source_line_of(error) or type(error).__name__
                    problem = f"on an input of shape {tuple(x.shape)}: {one_line(error)}"
                    problems.setdefault(line, problem)
        channels_last = bool(last) and first in ([], [2])
        if 4 in first and 4 in last:
            channels_last = _pools_last_axis_alone(build(num_features), _input(4, num_features))
        if channels_last and 4 in last and layout is None:
            _refuse_wrong_axis(build(num_features), num_features, target)
    if not first and not last:
        raise breach or UserError(
            f"norm._target_={target} does not fit {'; '.join(problems.values())}; "
            "norm.layout=first or norm.layout=last says where its channels are"
        )
    return Layout(channels_last, tuple(last if channels_last else first))


def _pools_last_axis_alone(norm: nn.Module, x: Tensor) -> bool:
    """True if a value of x (four axes) moves others along the last axis, but along no other."""
    changed = x.clone()
    changed[0, 0, 0, 0] += 1
    moved = norm(x) != norm(changed)
    moves_others = moved[0, 1:, 0, 0].any() or moved[0, 0, 1:, 0].any()
    return bool(moved[0, 0, 0, 1:].any()) and not bool(moves_others)


def _refuse_wrong_axis(norm: nn.Module, num_features: int, target: str) -> None:
    """Refuses a norm whose channels come last by its parameters alone.

    Any other norm treats the position axes alike: swapping both swaps its outputs.

    Raises:
        UserError: names the parameters.
    """
    x = _input(4, num_features).movedim(1, -1)  # (N, H, W, C)
    as_last = Layout(channels_last=True, num_dims=(4,))

    def run(x: Tensor, seed: int) -> Tensor:
        torch.default_generator.manual_seed(seed)
        return as_last.present(copy.deepcopy(norm))(x.movedim(-1, 1)).detach().movedim(1, -1)

    out, swapped = run(x, 0), run(x.transpose(1, 2), 0).transpose(1, 2)
    draws = not torch.equal(out, run(x, 1))
    if draws or torch.allclose(out, swapped, rtol=1e-3, atol=1e-3):
        return
    tensors = (*norm.named_parameters(), *norm.named_buffers())
    names = [name for name, tensor in tensors if tensor.shape == (num_features,)]
    raise UserError(
        f"norm._target_={target} has {' and '.join(names) or 'a tensor'} of shape "
        f"({num_features},) along the last axis of its input, while its statistics take axis 1 for "
        "the channels; view it as (-1, 1, 1) on maps (N, C, H, W), or set norm.layout=last if the "
        "channels do come last"
    )


def _input(num_dims: int, num_features: int) -> Tensor:
    """Returns a random input (N, C, *) whose sizes differ."""
    sizes = [size for size in (4, 5, 6, 7, 8) if size != num_features][: num_dims - 1]
    sizes.insert(1, num_features)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def _try(build: Build, num_features: int, x: Tensor, layout: Layout, target: str) -> None:
    """Runs a fresh norm in training and in evaluation.

    Raises what the norm raises, TypeError if it does not keep the shape of its input, and UserError
    if it breaks the contract of a norm otherwise. Warnings are errors: torch warns when it reads
    (N, C) as one sample without a batch axis.
    """
    torch.default_generator.manual_seed(0)
    norm = copy.deepcopy(build(num_features)).train()
    before = _shapes(norm)
    mask = {"mask": layout.mask(x)} if "mask" in _required_by_forward(norm) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out = norm(x, **mask)
        norm.eval()(1 + 2 * x.flip(0), **mask)
    key = f"norm._target_={target}"
    if not isinstance(out, Tensor):
        raise UserError(f"{key} returns a {type(out).__name__}, must return one tensor")
    if out.shape != x.shape:
        raise TypeError(f"it returns {tuple(out.shape)}")
    if out.dtype != x.dtype:
        raise UserError(f"{key} returns {out.dtype} for {x.dtype}; let it end with out.to(x.dtype)")
    if _shapes(norm) != before:
        raise UserError(
            f"{key} creates or reshapes parameters or buffers in its forward; make them in "
            "__init__, from its number of features"
        )


def _shapes(norm: nn.Module) -> dict[str, torch.Size]:
    tensors = (*norm.named_parameters(), *norm.named_buffers())
    return {name: tensor.shape for name, tensor in tensors}
