"""Recognises the norms of a network by what they compute, whatever their names.

A copy of the network runs once. Every module that returns the shape of its input is a candidate,
the innermost first. Torch's own norms are known by their exact type; formula.py measures
others. A module that computes more than a norm is left alone: an activation inside its forward, a
second input, another scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from normexp.any_network.description import CallForm, Formula, Misfit, NormDescription, tensors_of
from normexp.any_network.formula import describe_norm, is_close
from normexp.any_network.trial import Inputs, run_network
from normexp.errors import one_line
from normexp.norms.site import Site
from normexp.training.batching.copies import copied

TORCH_NORMS = {  # their formulas by class
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), "batch"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "group"),
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
}
NORM_FUNCTIONS = (
    functional.batch_norm,
    functional.group_norm,
    functional.instance_norm,
    functional.layer_norm,
    functional.rms_norm,
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Cache = dict[str, NormDescription | Misfit]


@dataclass(frozen=True)
class LeftAlone:
    """A module that is no norm, or not known to be one.

    Attributes:
        resembles_norm: messages name it, what contains it is no norm, and norm=as_built puts a
            site around it.
        is_called: with a tensor whose shape it returns.
    """

    class_name: str
    reason: str
    resembles_norm: bool
    is_called: bool


@dataclass(frozen=True)
class Recognition:
    """The norms of a network, and the other candidates, by path."""

    norms: dict[str, NormDescription]
    left_alone: dict[str, LeftAlone]


class Call(NamedTuple):
    """A call of a module in a forward.

    Attributes:
        keeps_shape: it returned a tensor of the shape of its first argument (N, ...).
        dtype: of what it returned, None if that was no tensor.
    """

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    keeps_shape: bool
    dtype: torch.dtype | None


def recognise(network: nn.Module, inputs: Inputs | None) -> Recognition:
    """Finds the norms among the modules that a forward of a copy of `network` calls.

    Args:
        inputs: of the forward; without them only torch's own norms are recognised.

    Raises:
        UserError: the forward fails.
    """
    calls, functions = None, {}
    if inputs is not None:
        calls, functions = _record_calls(copied(network), inputs)
    modules = dict(network.named_modules())
    parts = _parts(modules.values())
    named: set[nn.Module] = set()  # norms, and what resembles one
    norms: dict[str, NormDescription] = {}
    left_alone: dict[str, LeftAlone] = {}
    cache: Cache = {}
    del modules[""]  # the network itself has no place in which another module could be put
    for path, module in reversed(modules.items()):  # children come before their parents
        if module in parts or not named.isdisjoint(module.modules()):
            continue  # the rest of a module that contains a norm is kept
        found = _judge(module, None if calls is None else calls.get(path, []), cache)
        if isinstance(found, NormDescription):
            norms[path] = found
        else:
            left_alone[path] = found
        if path in norms or left_alone[path].resembles_norm:
            named.add(module)
    classes = {type(modules[path]) for path in norms}
    for path, other in left_alone.items():
        if type(modules[path]) in classes:  # called in another way
            left_alone[path] = replace(other, resembles_norm=True)
    of_norms = {part for module in named for part in module.modules()}
    for path, function in functions.items():
        module = network.get_submodule(path)
        if module not in of_norms | parts and not isinstance(module, nn.Conv2d):  # of a weight
            left_alone[path] = LeftAlone(class_name_of(module), f"it calls {function}", True, False)
    return Recognition({path: norms[path] for path in modules if path in norms}, left_alone)


def _parts(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules inside of what computes a weight, and inside of what is one norm."""
    parts: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, ParametrizationList):
            parts.update(module.modules())
        elif isinstance(module, (Site, *TORCH_NORMS)):
            parts.update(set(module.modules()) - {module})
    return parts


# --- The forward ----------------------------------------------------------------------------------


class _WatchedFunctions(TorchFunctionMode):
    """Notes which of NORM_FUNCTIONS is called, in `called` by the path of the running module."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []  # paths, the innermost last
        self.called: dict[str, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in NORM_FUNCTIONS and self.running:
            self.called[self.running[-1]] = func.__name__
        return func(*args, **(kwargs or {}))


def _record_calls(
    network: nn.Module, inputs: Inputs
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """The calls of each module, and the module's calls of NORM_FUNCTIONS.

    TorchScript's cannot be watched.
    """
    calls: defaultdict[str, list[Call]] = defaultdict(list)
    functions = _WatchedFunctions()

    def enter(path: str, _: nn.Module, __: Any) -> None:
        functions.running.append(path)

    def record(
        path: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Any
    ) -> None:
        functions.running.pop()
        x = next(iter((*args, *keywords.values())), None)
        keeps_shape = (
            isinstance(x, Tensor)
            and isinstance(out, Tensor)
            and x.is_floating_point()
            and x.ndim > 1
            and out.shape == x.shape
        )
        calls[path].append(Call(args, keywords, keeps_shape, getattr(out, "dtype", None)))

    torch_norms = set()
    for path, module in network.named_modules():
        if type(module) in TORCH_NORMS:
            torch_norms.add(path)
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(partial(enter, path))
            leave = partial(record, path)
            module.register_forward_hook(leave, with_kwargs=True, always_call=True)
    with functions:
        run_network(network.train(), inputs)
        if not torch_norms <= calls.keys():  # training may drop layers at random
            run_network(network.eval(), inputs)
    return calls, functions.called


def _form_of(call: Call) -> CallForm:
    """The form of a call with x alone, or with x and a mask (N, *). Raises Misfit for any other."""
    if not call.keeps_shape:
        raise Misfit("it does not map a batch (N, ...) to the same shape")
    x, *others = (*call.args, *call.keywords.values())
    given: list[Any] = [value for value in others if value is not None]
    if call.keywords.keys() <= {"x", "mask"}:
        if not given:
            return CallForm(x.shape, (False,) if x.ndim == 2 else (False, True))
        mask = given[0]
        is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == x.ndim - 1
        if is_mask and len(given) == 1:
            way = "keyword" if "mask" in call.keywords else "position"
            return CallForm(x.shape, (mask.shape == x.shape[:-1],), way)
    elif not others:
        raise Misfit("it is given its input by keyword")
    raise Misfit("it is called with a second input")


# --- A module -------------------------------------------------------------------------------------


def _judge(
    module: nn.Module, calls: list[Call] | None, cache: Cache
) -> NormDescription | LeftAlone:
    """What a module is, from its calls in a forward; `calls` is None if there was none."""
    is_called = bool(calls) and all(call.keeps_shape for call in calls)
    try:
        return _describe(module, calls, cache)
    except Misfit as misfit:
        resembles = _has_name_of_norm(module)
        if calls and is_called and not _is_of_torch(module):
            resembles = resembles or _ignores_scale(module, calls[0])
        return LeftAlone(class_name_of(module), str(misfit), resembles, is_called)


def _describe(module: nn.Module, calls: list[Call] | None, cache: Cache) -> NormDescription:
    """The norm that a module is in all of its calls. Raises Misfit.

    Args:
        cache: what was found for equal modules, by their class, settings, shapes and calls.
    """
    is_torch_norm = type(module) in TORCH_NORMS
    if isinstance(module, torch.jit.ScriptModule):
        raise Misfit("it is TorchScript")
    if calls is None and not is_torch_norm:
        raise Misfit("without inputs it cannot be tried")
    if calls == []:
        raise Misfit("it is never called")
    if _is_of_torch(module) and not is_torch_norm:
        raise Misfit("torch has it, and it is no norm")
    forms = tuple(dict.fromkeys(_form_of(call) for call in calls or ()))
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise Misfit("it has a hook, which a new norm would not call")
    if is_torch_norm and "forward" not in vars(module):
        return _read_torch_norm(module)
    for call in calls or ():
        x = next(iter((*call.args, *call.keywords.values())))
        if call.dtype != x.dtype:  # torch's own norms do so under autocast alone
            raise Misfit(f"it returns {call.dtype} for {x.dtype}")
    settings = [item for item in vars(module).items() if not item[0].startswith("_")]
    shapes = [(name, tensor.shape) for name, tensor in tensors_of(module).items()]
    key = repr((id(type(module)), module, settings, shapes, forms))
    if key not in cache:
        cache[key] = _measure(module, forms)
    found = cache[key]
    if isinstance(found, Misfit):
        raise found
    return found


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def class_name_of(module: nn.Module) -> str:
    """The name of the module's class, which TorchScript hides."""
    return getattr(module, "original_name", type(module).__name__)


def _has_name_of_norm(module: nn.Module) -> bool:
    """True for a site, or if its class is called a norm, which counts for messages alone."""
    is_container = any(tensors_of(child) for child in module.children())
    has_name = "norm" in class_name_of(module).lower() and not is_container
    return has_name or isinstance(module, Site)


def _read_torch_norm(module: Any) -> NormDescription:
    name = TORCH_NORMS[type(module)]
    shape = getattr(module, "normalized_shape", None)
    if shape is not None and len(shape) > 1:
        raise Misfit("it normalizes several axes; a site normalizes one axis of channels")
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
    if name == "batch" and module.running_mean is None:
        settings["track_running_stats"] = False
    roles: dict[str, tuple[str, ...]] = {}
    for role in ("weight", "bias"):
        if getattr(module, role, None) is not None:
            roles[role] = (role,)
    if roles and "bias" not in roles:
        settings["has_bias"] = False
    formula = Formula(name, shape is not None, num_groups)
    tracks = getattr(module, "track_running_stats", True)
    holds = name == "batch" and module.running_mean is not None and not tracks
    return NormDescription(formula, num_features, settings, roles, holds_averages=holds)


def _measure(module: nn.Module, forms: Sequence[CallForm]) -> NormDescription | Misfit:
    """The norm that fits all forms in which a module is called, or why none does."""
    try:
        descriptions = [describe_norm(module, form) for form in forms]
    except Misfit as misfit:
        return misfit
    except Exception as error:  # foreign code may raise anything
        return Misfit(f"trying it fails: {one_line(error)}")
    # On rows (N, C) the last axis is the first one after the samples.
    of_maps = [
        found for found, form in zip(descriptions, forms, strict=True) if len(form.shape) > 2
    ]
    if len({found.formula.is_last for found in of_maps}) > 1:
        return Misfit("its channels are first in some calls and last in others")
    return (of_maps or descriptions)[0]


def _ignores_scale(module: nn.Module, call: Call) -> bool:
    """True if another scale of the first argument gives the same output.

    A sigmoid does so too where it is saturated, and then depends on signs alone.
    """

    def run(change: Callable[[Tensor], Tensor]) -> Tensor:
        args, keywords = copied((call.args, dict(call.keywords)))
        x = (*args, *keywords.values())[0]
        x.copy_(100 * change(x))
        return run_network(copied(module).train(), Inputs(args, keywords))

    try:
        output = run(lambda x: x)
        is_saturated = is_close(output, run(torch.sign), 1e-3)
        return is_close(output, run(lambda x: 4 * x), 1e-3) and not is_saturated
    except Exception:  # foreign code may raise anything
        return False
