"""Recognises the norms of a network by what they compute, whatever their names.

A copy of the network runs once in training mode. Torch's own norms are known by their exact type.
Every other module that is called with one tensor, or with x and a mask (N, *), and returns its
shape is tried, the innermost first; models/formula.py says what a norm is. What computes more is
left as it is: an activation inside its forward, a second input, another scale.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from normexp.batching.copies import copied
from normexp.errors import UserError, one_line
from normexp.models.formula import (
    EQUALS,
    Call,
    DescribedNorm,
    Formula,
    Misfit,
    Norm,
    Trial,
    Values,
    draw,
    is_close,
    recognise_norm,
    state_of,
)

TORCHS = {  # torch's own norms and their formulas
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), "batch"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "group"),
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
}
# The tensors of a norm by role, and their initial values.
COUNT = "num_batches_tracked"
STARTS = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, COUNT: 0}
TYPICAL = 3.0  # inputs, as in networks
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Left:
    """Why a module is left as it is.

    Attributes:
        resembles: it may be a norm, so that a message names it.
        is_called: with a tensor first, whose shape it returns.
    """

    class_name: str
    reason: str
    resembles: bool = True
    is_called: bool = True


@dataclass(frozen=True)
class Recognition:
    """The norms of a network by path, and the other modules that were tried."""

    norms: dict[str, Norm]
    left: dict[str, Left]


class Seen(NamedTuple):
    """A call of a module in a forward; `call` is None if it has more arguments than a norm's."""

    call: Call | None
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


def recognise(
    network: nn.Module, args: tuple[Any, ...] | None, keywords: Mapping[str, Any] = NOTHING
) -> Recognition:
    """Finds the norms among the modules that a forward of a copy of `network` calls.

    Args:
        args, keywords: of the forward; without them only torch's own norms are recognised.

    Raises:
        UserError: the forward fails.
    """
    seen = None if args is None else _record_calls(copied(network), args, keywords)
    norms: dict[str, Norm] = {}
    left: dict[str, Left] = {}
    tried: dict[str, Norm | Left] = {}
    modules = dict(network.named_modules())
    weights = [f"{path}." for path, one in modules.items() if isinstance(one, ParametrizationList)]
    del modules[""]  # the network itself has no place in which another module could be put
    for path, module in reversed(modules.items()):  # children come before their parents
        named = [*norms, *(name for name, one in left.items() if one.resembles)]
        is_container = any(name.startswith(f"{path}.") for name in named)
        if is_container or path.startswith(tuple(weights)):  # which compute a weight
            continue
        found = _judge(module, None if seen is None else seen.get(path, []), tried)
        if isinstance(found, Norm):
            norms[path] = found
        elif found is not None:
            left[path] = found
    return Recognition({path: norms[path] for path in modules if path in norms}, left)


def values_of(module: nn.Module, norm: Norm) -> Values:
    """Of torch's own norms read, of others measured."""
    if norm.call is not None:
        return Trial(module, norm.call, norm.formula.is_last).values(norm)
    values = {name: getattr(module, name, None) for name in STARTS}
    return {name: value for name, value in values.items() if value is not None}


# --- The forward ----------------------------------------------------------------------------------


def _record_calls(
    network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, list[Seen]]:
    """The calls of each module that returns the shape of its first tensor."""
    seen: defaultdict[str, list[Seen]] = defaultdict(list)

    def watch(
        path: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Any
    ) -> None:
        x = next(iter((*args, *keywords.values())), None)
        if not (isinstance(x, Tensor) and isinstance(out, Tensor) and x.is_floating_point()):
            return
        if x.ndim > 1 and (out.shape, out.dtype) == (x.shape, x.dtype):
            seen[path].append(Seen(_call_of_norm(args, keywords), args, keywords))

    of_torch = {path for path, module in network.named_modules() if _is_torchs(module)}
    for path, module in network.named_modules():
        module.register_forward_hook(partial(watch, path), with_kwargs=True)
    for training in (True, False):
        run_network(network.train(training), args, keywords)
        if of_torch <= seen.keys():
            break  # else a layer was dropped at random
    return seen


def _call_of_norm(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call | None:
    """How a module is called with x alone, or with x and a mask (N, *); None: with more."""
    x, *more = (*args, *keywords.values())
    more = [value for value in more if value is not None]
    if not keywords.keys() <= {"x", "mask"} or len(more) > 1:
        return None
    if not more:
        return Call(x.shape, (False, True)[: x.ndim - 1])
    (mask,) = more
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != x.ndim - 1:
        return None
    how = "keyword" if "mask" in keywords else "position"
    return Call(x.shape, (mask.shape == x.shape[:-1],), how)


def run_network(network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """A forward with fixed draws. Raises UserError if it fails."""
    devices = [*{p.device for p in network.parameters() if p.is_cuda}]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices), torch.no_grad():
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        try:
            return network(*copied(args), **copied(dict(keywords)))
        except UserError:
            raise
        except Exception as error:  # of foreign code, any kind
            raise UserError(
                f"a forward of the model {type(network).__name__} fails: {one_line(error)}"
            ) from error
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


# --- A module -------------------------------------------------------------------------------------


def _judge(
    module: nn.Module, seen: list[Seen] | None, tried: dict[str, Norm | Left]
) -> Norm | Left | None:
    """What a module is, from its calls; None if it cannot be a norm."""
    if _is_torchs(module) and (seen is None or (seen and all(one.call for one in seen))):
        return _read_torchs(module)
    if not seen:
        reason = "without inputs it cannot be tried" if seen is None else "it is never called"
        return Left(type(module).__name__, reason, is_called=False) if _is_named(module) else None
    of_torch = type(module).__module__.startswith("torch.nn.modules.")
    if isinstance(module, torch.jit.ScriptModule) or (of_torch and not _is_torchs(module)):
        return None
    plain = bool | int | float | str | tuple
    settings = [item for item in vars(module).items() if isinstance(item[1], plain)]
    shapes = [(name, value.shape) for name, value in state_of(module).items()]
    calls = tuple(dict.fromkeys(one.call for one in seen))
    key = repr((id(type(module)), module, settings, shapes, calls))
    if key not in tried:
        tried[key] = _try(module, seen)
    found = tried[key]
    return _compare(module, found) if isinstance(found, Norm) else found


def _is_named(module: nn.Module) -> bool:
    """Its class is called a norm, which counts for messages alone."""
    holds_more = any(state_of(child) for child in module.children())
    return "norm" in type(module).__name__.lower() and not holds_more


def _is_torchs(module: nn.Module) -> bool:
    """True for a norm of torch that nobody has changed."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) in TORCHS and not changed


def _read_torchs(module: Any) -> Norm | Left:
    shape = getattr(module, "normalized_shape", ())
    if len(shape) > 1:
        reason = "it normalizes several axes; a site normalizes one axis of channels"
        return Left(type(module).__name__, reason)
    counts = (getattr(module, name, None) for name in ("num_features", "num_channels"))
    num_features = next(filter(None, (*counts, *shape)))
    pool = TORCHS[type(module)]
    groups = getattr(module, "num_groups", num_features) if pool == "group" else 1
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    settings: dict[str, Any] = {"affine": module.weight is not None, "eps": float(eps)}
    if hasattr(module, "momentum"):
        settings["momentum"] = module.momentum
    return Norm(Formula(pool, bool(shape), groups), num_features, settings)


def _try(module: nn.Module, seen: list[Seen]) -> Norm | Left:
    """The norm that fits the calls of every shape."""
    calls = dict.fromkeys(one.call for one in seen)
    try:
        if None in calls:
            by_keyword = not seen[0].args and len(seen[0].keywords) == 1
            way = "given its input by keyword" if by_keyword else "called with a second input"
            raise Misfit(f"it is {way}")
        found = [recognise_norm(module, call) for call in calls if call]
        # On rows (N, C) the last axis is the first one after the samples.
        maps = [norm for norm in found if norm.call and len(norm.call.shape) > 2]
        if len({norm.formula.is_last for norm in maps}) > 1:
            raise Misfit("its channels are first in some calls and last in others")
        return (maps or found)[0]
    except Misfit as misfit:
        reason = str(misfit)
    except Exception as error:  # of foreign code, any kind
        reason = f"trying it fails: {one_line(error)}"
    resembles = _is_named(module) or _ignores_scale(module, seen[0])
    return Left(type(module).__name__, reason, resembles)


def _ignores_scale(module: nn.Module, seen: Seen) -> bool:
    """True if another scale of the first argument gives the same output."""

    def run(size: float) -> Tensor:
        args, keywords = copied((seen.args, dict(seen.keywords)))
        (args or list(keywords.values()))[0].mul_(size)
        return run_network(copied(module).train(), args, keywords)

    try:
        return is_close(run(100.0), run(400.0), 1e-3) and bool(run(100.0).any())
    except Exception:  # of foreign code, any kind
        return False


def _compare(module: nn.Module, norm: Norm) -> Norm | Left:
    """The norm, if at its own values the module equals its description and tail in both modes."""
    assert norm.call is not None
    trial = Trial(module, norm.call, norm.formula.is_last)
    described = DescribedNorm(norm, trial.values(norm), module)
    own, x = copied(module).cpu().double(), TYPICAL * draw(trial.shape, 3)
    for training in (True, False):
        expected, out = (trial.rows(trial.run(one, x, training)) for one in (own, described))
        if not is_close(expected, out, EQUALS):
            mode = "training" if training else "evaluation"
            reason = f"it is {norm.formula}, and does something besides in {mode}"
            return Left(type(module).__name__, reason)
    return norm
