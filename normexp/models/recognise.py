"""Recognises the norms of a network by what they compute, whatever their names.

A copy of the network runs once. Every module that returns the shape of its input is a candidate,
the innermost first. Torch's own norms are known by their exact type; models/formula.py measures
others. A module that computes more than a norm is left alone: an activation inside its forward, a
second input, another scale.
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
    TOLERANCE,
    CallForm,
    DescribedNorm,
    Formula,
    Measurement,
    Misfit,
    NormDescription,
    describe_norm,
    draw,
    is_close,
    tensors_of,
)

TORCH_NORMS = {  # their formulas by class
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), "batch"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "group"),
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
}
TYPICAL = 3.0  # standard deviation of inputs as in networks
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class LeftAlone:
    """A module that is no norm, or not known to be one.

    Attributes:
        resembles_norm: messages name it.
        is_called: with a tensor whose shape it returns.
    """

    class_name: str
    reason: str
    resembles_norm: bool = True
    is_called: bool = True


@dataclass(frozen=True)
class Recognition:
    """The norms of a network, and the other candidates, by path."""

    norms: dict[str, NormDescription]
    left_alone: dict[str, LeftAlone]


class Call(NamedTuple):
    """A call of a module in a forward; `form` is None if it has other arguments than a norm."""

    form: CallForm | None
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
    calls = None if args is None else _record_calls(copied(network), args, keywords)
    modules = dict(network.named_modules())
    weights: set[nn.Module] = set()
    for module in modules.values():
        if isinstance(module, ParametrizationList):
            weights.update(module.modules())
    named: set[nn.Module] = set()
    norms: dict[str, NormDescription] = {}
    left_alone: dict[str, LeftAlone] = {}
    cache: dict[str, NormDescription | LeftAlone] = {}
    del modules[""]  # the network itself has no place in which another module could be put
    for path, module in reversed(modules.items()):  # children come before their parents
        if module in weights or not named.isdisjoint(module.modules()):
            continue  # it computes a weight, or contains a norm
        found = _judge(module, None if calls is None else calls.get(path, []), cache)
        if isinstance(found, NormDescription):
            norms[path] = found
            named.add(module)
        elif found is not None:
            left_alone[path] = found
            if found.resembles_norm:
                named.add(module)
    return Recognition({path: norms[path] for path in modules if path in norms}, left_alone)


# --- The forward ----------------------------------------------------------------------------------


def _record_calls(
    network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, list[Call]]:
    """The calls of each module that returns the shape of its first tensor."""
    calls: defaultdict[str, list[Call]] = defaultdict(list)

    def record(
        path: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Any
    ) -> None:
        x = next(iter((*args, *keywords.values())), None)
        if not (isinstance(x, Tensor) and isinstance(out, Tensor) and x.is_floating_point()):
            return
        if x.ndim > 1 and (out.shape, out.dtype) == (x.shape, x.dtype):
            calls[path].append(Call(_form_of(args, keywords), args, keywords))

    torch_norms = set()
    for path, module in network.named_modules():
        if _is_torch_norm(module):
            torch_norms.add(path)
        module.register_forward_hook(partial(record, path), with_kwargs=True)
    run_network(network.train(), args, keywords)
    if not torch_norms <= calls.keys():  # training may drop layers at random
        run_network(network.eval(), args, keywords)
    return calls


def _form_of(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> CallForm | None:
    """The form of a call with x alone, or with x and a mask (N, *); None for any other."""
    x, *others = (*args, *keywords.values())
    others = [value for value in others if value is not None]
    if not keywords.keys() <= {"x", "mask"} or len(others) > 1:
        return None
    if not others:
        return CallForm(x.shape, (False,) if x.ndim == 2 else (False, True))
    (mask,) = others
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != x.ndim - 1:
        return None
    way = "keyword" if "mask" in keywords else "position"
    return CallForm(x.shape, (mask.shape == x.shape[:-1],), way)


def run_network(network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """A forward with fixed draws. Raises UserError if it fails."""
    devices = [*{p.device for p in network.parameters() if p.is_cuda}]
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            return network(*copied(args), **copied(dict(keywords)))
        except UserError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise UserError(
                f"a forward of the model {type(network).__name__} fails: {one_line(error)}"
            ) from error
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


# --- A module -------------------------------------------------------------------------------------


def _judge(
    module: nn.Module, calls: list[Call] | None, cache: dict[str, NormDescription | LeftAlone]
) -> NormDescription | LeftAlone | None:
    """What a module is, from its calls; None if it cannot be a norm.

    Args:
        calls: None if no forward was run.
        cache: what was found for equal modules, by their class, settings, shapes and calls.
    """
    is_torch_norm = _is_torch_norm(module)
    if is_torch_norm and (calls is None or (calls and all(call.form for call in calls))):
        return _read_torch_norm(module)
    if not calls:
        reason = "without inputs it cannot be tried" if calls is None else "it is never called"
        resembles = _has_name_of_norm(module)
        return LeftAlone(type(module).__name__, reason, is_called=False) if resembles else None
    of_torch = type(module).__module__.startswith("torch.nn.modules.")
    if isinstance(module, torch.jit.ScriptModule) or (of_torch and not is_torch_norm):
        return None
    plain = bool | int | float | str | tuple
    settings = [item for item in vars(module).items() if isinstance(item[1], plain)]
    shapes = [(name, tensor.shape) for name, tensor in tensors_of(module).items()]
    forms = tuple(dict.fromkeys(call.form for call in calls))
    key = repr((id(type(module)), module, settings, shapes, forms))
    if key not in cache:
        cache[key] = _describe(module, calls)
    found = cache[key]
    if isinstance(found, LeftAlone):
        return found
    return _compare(module, found)


def _has_name_of_norm(module: nn.Module) -> bool:
    """True if its class is called a norm, which counts for messages alone."""
    is_container = any(tensors_of(child) for child in module.children())
    return "norm" in type(module).__name__.lower() and not is_container


def _is_torch_norm(module: nn.Module) -> bool:
    """True for a norm of torch that nobody has changed."""
    is_changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) in TORCH_NORMS and not is_changed


def _read_torch_norm(module: Any) -> NormDescription | LeftAlone:
    name = TORCH_NORMS[type(module)]
    shape = getattr(module, "normalized_shape", None)
    if shape is not None and len(shape) > 1:
        reason = "it normalizes several axes; a site normalizes one axis of channels"
        return LeftAlone(type(module).__name__, reason)
    if shape is not None:
        num_features = shape[0]
    elif isinstance(module, nn.GroupNorm):
        num_features = module.num_channels
    else:
        num_features = module.num_features
    num_groups = 1
    if name == "group":  # an instance norm has a group for each channel
        num_groups = getattr(module, "num_groups", num_features)
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    settings: dict[str, Any] = {"affine": module.weight is not None, "eps": float(eps)}
    if hasattr(module, "momentum"):
        settings["momentum"] = module.momentum
    return NormDescription(Formula(name, shape is not None, num_groups), num_features, settings)


def _describe(module: nn.Module, calls: list[Call]) -> NormDescription | LeftAlone:
    """The norm that fits all calls."""
    try:
        return _describe_calls(module, calls)
    except Misfit as misfit:
        reason = str(misfit)
    except Exception as error:  # foreign code may raise anything
        reason = f"trying it fails: {one_line(error)}"
    resembles = _has_name_of_norm(module) or _ignores_scale(module, calls[0])
    return LeftAlone(type(module).__name__, reason, resembles)


def _describe_calls(module: nn.Module, calls: list[Call]) -> NormDescription:
    descriptions: dict[CallForm, NormDescription] = {}
    for form, args, keywords in calls:
        if form is None:
            by_keyword = not args and len(keywords) == 1
            way = "given its input by keyword" if by_keyword else "called with a second input"
            raise Misfit(f"it is {way}")
        if form not in descriptions:
            descriptions[form] = describe_norm(module, form)
    # On rows (N, C) the last axis is the first one after the samples.
    of_maps = [found for form, found in descriptions.items() if len(form.shape) > 2]
    if len({found.formula.is_last for found in of_maps}) > 1:
        raise Misfit("its channels are first in some calls and last in others")
    return (of_maps or [*descriptions.values()])[0]


def _ignores_scale(module: nn.Module, call: Call) -> bool:
    """True if another scale of the first argument gives the same output."""

    def run(scale: float) -> Tensor:
        args, keywords = copied((call.args, dict(call.keywords)))
        x = (*args, *keywords.values())[0]
        x.mul_(scale)
        return run_network(copied(module).train(), args, keywords)

    try:
        output = run(100.0)
        return is_close(output, run(400.0), 1e-3) and bool(output.any())
    except Exception:  # foreign code may raise anything
        return False


def _compare(module: nn.Module, norm: NormDescription) -> NormDescription | LeftAlone:
    """The description, if the module computes it, at its own values and in both modes."""
    assert norm.form is not None
    measurement = Measurement(module, norm.form, norm.formula.is_last)
    described = DescribedNorm(norm, module)
    module = copied(module).cpu().double()
    x = TYPICAL * draw(measurement.shape, 3)
    for training in (True, False):
        expected = measurement.run(module, x, training)
        if not is_close(expected, measurement.run(described, x, training), TOLERANCE):
            mode = "training" if training else "evaluation"
            reason = f"it is {norm.formula}, and does something besides in {mode}"
            return LeftAlone(type(module).__name__, reason)
    return norm
