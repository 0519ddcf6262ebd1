"""Questions about foreign code, as it will train: copies, parameters, inputs, gradients, draws."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normexp.batching.replicas import model_arguments
from normexp.checks.network import MANY_SAMPLES, BuiltNetwork
from normexp.checks.probe import (
    COARSE_TOLERANCE,
    MODES,
    TOLERANCE,
    Probe,
    all_in_float64,
    fixed_draws,
    in_float64,
    moves,
    normal,
)
from normexp.checks.sites import EnteredSite, name_some

STEP = 1e-5  # of a difference in float64
BEND, FAR = 0.05, 0.01  # relative: outputs that bend more are left out; error of a slope


def _foreign_sites(network: BuiltNetwork) -> Iterator[EnteredSite]:
    """Sites of foreign norms, at the samples of the probes and at more than 8.

    One for each class and number of positions: width and values do not matter here.
    """
    known = set()
    for site in network.stages:
        content = type(site.module.site.norm), site.shape[2], id(site) in map(id, network.sites)
        if site.is_foreign and content not in known:
            known.add(content)
            yield site
            crowded = site.crowded(MANY_SAMPLES)
            if crowded is not None:
                yield crowded


def _first_of_sites(
    network: BuiltNetwork, ask: Callable[[EnteredSite], str | None]
) -> tuple[str, str] | None:
    """The names of the first foreign site with a fault, and the fault."""
    for site in _foreign_sites(network):
        with site.naming_errors():
            fault = ask(site)
        if fault:
            return name_some(site.names), fault
    return None


def runs_in_float32_alone(network: BuiltNetwork) -> str | None:
    """Can foreign code be computed in float64, where weak dependences show?"""
    sites = [site for site in network.sites if site.is_foreign]
    names = [
        name
        for site in sites
        if in_float64(site.module, site.values()) is None
        for name in site.names
    ]
    inputs = model_arguments(network.short)
    if not names and network.has_foreign_model and in_float64(network.exposed, *inputs) is None:
        names = ["the model"]
    if not names:
        return None
    least = TOLERANCE if names == ["the model"] else COARSE_TOLERANCE
    return (
        f"{name_some(names)} cannot be computed in float64, so dependences weaker than {least:g} "
        "of the largest value are not seen"
    )


# ---------------------------------------------------------------- inputs


def input_written(network: BuiltNetwork) -> str | None:
    """Does a norm leave its input as it is?"""
    fault = _first_of_sites(network, _writes_input)
    return fault and (
        f"the norm at {fault[0]} writes to its input in place {fault[1]}, which other layers read; "
        "let it work on x.clone()"
    )


@torch.no_grad()
def _writes_input(site: EnteredSite) -> str | None:
    for training in MODES:
        module, (maps,) = site.to_save()
        x = site.module.as_shown(maps).contiguous()  # as a network lays it out
        before = x.clone()
        with fixed_draws():
            site.set_mode(module, training).get_submodule("site")(x)
        if not torch.equal(x, before):
            return "in training" if training else "in evaluation"
    return None


# ---------------------------------------------------------------- gradients


def input_gradient_is_missing(network: BuiltNetwork) -> str | None:
    """Does a gradient reach what comes before a norm?"""
    fault = network.once(_wrong_slopes)
    if fault is None or not fault[1].startswith("no"):
        return None
    return (
        f"no gradient reaches the input of the norm at {fault[0]}, though its output depends on "
        "it: layers before it are not trained; remove the detach"
    )


def input_gradient_is_wrong(network: BuiltNetwork) -> str | None:
    """Is the gradient of a norm's input the slope of its output?"""
    fault = network.once(_wrong_slopes)
    if fault is None or fault[1].startswith("no"):
        return None
    return (
        f"the gradient of the input of the norm at {fault[0]} differs from the slope of its "
        "output; this is right only if its backward, or a detached statistic, is meant to differ"
    )


def _wrong_slopes(network: BuiltNetwork) -> tuple[str, str] | None:
    return _first_of_sites(network, _wrong_slope)


def _wrong_slope(site: EnteredSite) -> str | None:
    """ "no gradient" or "wrong" for the input in training; None if right, or not in float64."""
    module, inputs = site.to_save()
    wide = in_float64(module, *inputs)
    if wide is None:
        return None
    probe = Probe(wide[0], *wide[1])
    x, direction = probe.inputs[0], normal(site.shape, 4)
    above, middle, below = (
        probe.observe(x + by * STEP * direction).output for by in (1.0, 0.0, -1.0)
    )
    # Left out: outputs with a corner within the step, or rounded to steps of their own.
    bend, moved = (above + below - 2 * middle).abs(), (above - below).abs()
    straight = (bend <= BEND * moved + 1e-12).to(x.dtype)
    if straight.mean() < 0.5:
        return None
    weights = normal(site.shape, 7) * straight
    x = x.clone().requires_grad_()
    with fixed_draws(), torch.enable_grad(), all_in_float64():
        out = wide[0](x)
        slopes = [torch.zeros_like(x)]
        if out.requires_grad:
            slopes = torch.autograd.grad(out, x, weights, materialize_grads=True)
    expected = float(((above - below) * weights).sum() / (2 * STEP))
    (slope,) = slopes
    size = max(abs(expected), float((moved * weights.abs()).sum() / (2 * STEP)))
    if abs(expected - float((slope * direction).sum())) <= FAR * size:
        return None
    return "wrong" if slope.any() else "no gradient"


# ---------------------------------------------------------------- parameters


def parameters_outside(network: BuiltNetwork) -> str | None:
    """Is every tensor that takes a gradient a parameter of the network?"""
    model = copy.deepcopy(network.exposed).train()
    with fixed_draws(), torch.enable_grad():
        output = model(*model_arguments(network.short))
    known = {id(parameter) for parameter in model.parameters()}
    outside = [leaf for leaf in _leaves_of(output) if id(leaf) not in known]
    if not outside:
        return None
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in outside[:3])
    return (
        f"the network uses {len(outside)} tensors that require a gradient but are no parameters of "
        f"it, of shape {shapes}: they are not trained, or belong to the original of a copy; "
        "hold them as nn.Parameter, nn.ParameterList or nn.ModuleList in attributes of the module"
    )


def _leaves_of(output: Tensor) -> list[Tensor]:
    """The leaves that a backward of `output` would give a gradient."""
    stack, known, leaves = [output.grad_fn], set(), []
    while stack:
        node = stack.pop()
        if node is None or node in known:
            continue
        known.add(node)
        leaf = getattr(node, "variable", None)  # of an accumulation of gradients
        if leaf is not None:
            leaves.append(leaf)
        stack += [following for following, _ in node.next_functions]
    return leaves


def freezes_parameters(network: BuiltNetwork) -> str | None:
    """Does a forward leave `requires_grad` of parameters alone?"""
    model = copy.deepcopy(network.network).train()  # other questions have run `exposed` already
    before = [name for name, p in model.named_parameters() if p.requires_grad]
    with fixed_draws():
        model(*model_arguments(network.short))
    frozen = [name for name in before if not model.get_parameter(name).requires_grad]
    return f"{name_some(frozen)} is not trained: a forward freezes it" if frozen else None


# ---------------------------------------------------------------- copies


def copies_differ(network: BuiltNetwork) -> str | None:
    """Is a deep copy the same network, and does it leave the original alone?"""
    original = network.network
    copied = copy.deepcopy(original)
    with torch.no_grad():
        for index, tensor in enumerate(_floating(copied)):
            tensor += 0.1 * normal(tensor.shape, index).abs().to(tensor.dtype)
    twin, state = copy.deepcopy(copied), copied.state_dict()
    unlike = [
        name
        for name, value in twin.state_dict().items()
        if isinstance(value, Tensor) and moves(state[name], value)
    ]
    if unlike:
        return f"a deep copy of the network has another {name_some(unlike)}; remove __deepcopy__"
    model = copy.deepcopy(original).train()
    outside = _tensors_outside(model)
    before = [tensor.detach().clone() for tensor in outside]
    with fixed_draws(), torch.enable_grad():
        model(*model_arguments(network.short)).sum().backward()
    if not any(moves(*pair) for pair in zip(before, outside, strict=True)):
        return None
    return (
        "a forward of the network changes tensors outside of it: a hook or function made in "
        "__init__ holds `self` or a tensor of the original, also in copies; let hooks use the "
        "module that they are given, and methods use self"
    )


def _tensors_outside(network: nn.Module) -> list[Tensor]:
    """Tensors that functions in attributes hold, hooks included, and that the network does not."""
    inside = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    outside: dict[int, Tensor] = {}
    for module in network.modules():
        for function in _functions_in(list(vars(module).values())):
            cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
            for held in (*cells, getattr(function, "__self__", None)):
                if isinstance(held, nn.Module):
                    tensors = [*held.parameters(), *held.buffers()]
                else:
                    tensors = [held] if isinstance(held, Tensor) else []
                outside |= {id(tensor): tensor for tensor in tensors if id(tensor) not in inside}
    return list(outside.values())


def _functions_in(values: list[Any]) -> Iterator[Any]:
    """Functions and methods among the values, also in dicts and lists."""
    for value in values:
        if isinstance(value, dict):
            yield from _functions_in(list(value.values()))
        elif isinstance(value, list | tuple):
            yield from _functions_in(list(value))
        elif isinstance(value, FunctionType | MethodType):
            yield value


def _floating(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in _tensors(module).values() if tensor.is_floating_point()]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, detached, by name."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


# ---------------------------------------------------------------- random states


def seeds_draws(network: BuiltNetwork) -> str | None:
    """Does a forward leave the seeds of global random generators alone?"""
    model = copy.deepcopy(network.exposed).train()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        ends = [_states_after(model, network, seed) for seed in (1, 2)]
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    seeded = [name for name, end in ends[0].items() if end == ends[1][name]]
    if not seeded:
        return None
    return (
        f"a forward seeds the global random generator of {' and '.join(seeded)}, so others that "
        "draw from it repeat their numbers; use a generator of its own"
    )


def _states_after(model: nn.Module, network: BuiltNetwork, seed: int) -> dict[str, Any]:
    """The global random states after a training forward that began at `seed`."""
    random.seed(seed)
    np.random.seed(seed)
    with fixed_draws(seed), torch.no_grad():
        model(*model_arguments(network.short))
        torch_state = torch.get_rng_state().tolist()
    numpy: Any = np.random.get_state()
    return {
        "torch": torch_state,
        "Python": random.getstate(),
        "NumPy": [numpy[1].tolist(), *numpy[2:]],
    }
