"""Questions about a network's parts: does every norm matter, is state saved, can it be stacked?"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.agreement import find_stacking_fault
from normexp.checks.network import BuiltNetwork, Case, places_where
from normexp.checks.probe import (
    MANY_STEPS,
    Probe,
    Snapshot,
    all_in_float64,
    differ,
    fixed_draws,
    in_float64,
    is_foreign,
    moves,
    normal,
)
from normexp.checks.sites import EnteredSite, explain, name_some
from normexp.errors import UserError
from normexp.norms.site import Site, named_sites
from normexp.norms.state import is_sequential as declares_order

NETWORK_STEPS, NORM_STEPS = 1, 20  # training steps in which hidden state may show
ROUNDING = 1e-9  # relative; float64 rounding moves outputs of norms by less


@dataclass(frozen=True)
class Wiring:
    """What one backward of the loss reaches.

    Attributes:
        sites: all, by name.
        idle: the sites whose output the loss does not depend on.
        untrained: parameters of other sites that require a gradient and get none.
        shared: groups of sites that hold the same module or parameter.
    """

    sites: list[str]
    idle: list[str]
    untrained: list[str]
    shared: list[list[str]]


def wiring_of(network: BuiltNetwork) -> Wiring:
    """Raises UserError if the backward pass fails."""
    model = copy.deepcopy(network.exposed).train()
    sites = dict(named_sites(model))
    idle = _sites_without_effect(model, sites, network.short) if sites else []
    untrained = [
        f"{name}.{parameter_name}"
        for name, site in sites.items()
        for parameter_name, parameter in site.named_parameters()
        if parameter.requires_grad and parameter.grad is None and name not in idle
    ]
    return Wiring(list(sites), idle, untrained, _shared_by_sites(sites))


def lacks_sites(network: BuiltNetwork) -> str | None:
    """Has the model a site for the norm?"""
    if network.once(wiring_of).sites:
        return None
    return (
        "the model has no norm site, so `norm` has no effect; build each norm with the "
        "argument `norm` that the model receives, as self.norm1 = norm(width)"
    )


def no_site_matters(network: BuiltNetwork) -> str | None:
    """Does any norm have an effect on the loss?"""
    wiring = network.once(wiring_of)
    if len(wiring.idle) < len(wiring.sites):
        return None
    return (
        f"the norm at {name_some(wiring.idle)} has no effect on the model's output, so every norm "
        "would give the same numbers; use what the norm returns"
    )


def idle_sites(network: BuiltNetwork) -> str | None:
    """Does every norm have an effect on the loss?"""
    idle = network.once(wiring_of).idle
    return f"the norm at {name_some(idle)} has no effect on the model's output" if idle else None


def untrained_parameters(network: BuiltNetwork) -> str | None:
    """Does a gradient reach every parameter of the norms?"""
    names = network.once(wiring_of).untrained
    return (
        f"no gradient reaches {name_some(names)} of the norm: it is not trained" if names else None
    )


def other_norms(network: BuiltNetwork) -> str | None:
    """Is every norm at a site?"""
    others = norms_outside_sites(network.exposed)
    if not others:
        return None
    return (
        f"the model has norms that `norm` does not replace: {name_some(others)}; build them with "
        "the argument `norm`, or name their classes in model.replace; otherwise they stay the same "
        "for every norm that you compare"
    )


def shared_modules(network: BuiltNetwork) -> str | None:
    """Has every site parameters of its own?"""
    groups = map(name_some, network.once(wiring_of).shared)
    said = [f"{names} share a module or parameter, and train it as one" for names in groups]
    return "; ".join(said) or None


def _sites_without_effect(network: nn.Module, sites: dict[str, Site], batch: Batch) -> list[str]:
    """Names of sites whose output the loss does not depend on; leaves gradients in `network`."""
    added: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add_zeros(name: str, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        zeros = torch.zeros_like(output, requires_grad=True)
        added[name].append(zeros)
        return output + zeros

    for name, site in sites.items():
        site.register_forward_hook(partial(add_zeros, name))
    with fixed_draws(), torch.enable_grad():
        output = network(*model_arguments(batch))  # (N, classes) or (B, T, V)
        loss = functional.cross_entropy(output.flatten(0, -2), batch["targets"].flatten())
        try:
            loss.backward()
        except Exception as error:  # of foreign code, any kind
            raise UserError(f"the backward pass fails: {explain(error)}") from error
    return [
        name
        for name in sites
        if not any(zeros.grad is not None and bool(zeros.grad.any()) for zeros in added[name])
    ]


def norms_outside_sites(network: nn.Module) -> list[str]:
    """`path (class)` of each module outside of sites whose public class has Norm in its name."""
    inside = {id(m) for _, site in named_sites(network) for m in site.modules()}
    around = {id(m) for m in network.modules() if any(isinstance(c, Site) for c in m.modules())}
    return [
        f"{path} ({type(module).__name__})"
        for path, module in network.named_modules()
        if "norm" in type(module).__name__.lower()
        and not type(module).__name__.startswith("_")  # torch's weight norms
        and id(module) not in inside | around
    ]


def _shared_by_sites(sites: dict[str, Site]) -> list[list[str]]:
    """Groups of sites that hold the same module or parameter."""
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for name, site in sites.items():
        for thing in {id(t) for t in (*site.modules(), *site.parameters())}:
            holders[thing].append(name)
    groups = {tuple(names) for names in holders.values() if len(names) > 1}
    return [list(names) for names in sorted(groups)]


# ---------------------------------------------------------------- state that is not saved

PLAIN = (bool, int, float, list, dict, Tensor)  # attributes that may be a state
Inputs = tuple[Tensor, ...]


def unsaved_state(case: Case, steps: int = NORM_STEPS) -> str | None:
    """Does a norm restored from its state_dict go on as the original?"""
    return find_unsaved_state(*case.to_save(), steps)


def state_that_checkpoints_lack(network: BuiltNetwork) -> str | None:
    """Does a training restored from a checkpoint go on as before?"""
    for site in network.sites:
        with site.naming_errors():
            fault = unsaved_state(site)
        if fault:
            fault = fault.replace("site.norm.", "")  # the path in the probe's wrapper
            return f"the norm at {name_some(site.names)} {fault}; {REMEDY}"
    fault = unsaved_state(network.whole(network.short), NETWORK_STEPS)
    return f"the model {fault}; {REMEDY}" if fault else None


REMEDY = (
    "a resumed run would differ; keep state in persistent buffers, made in __init__ with "
    "self.register_buffer(...), and draw with torch's functions"
)


def find_unsaved_state(module: nn.Module, inputs: Inputs, steps: int) -> str | None:
    """Says which state outside of the state_dict moves outputs or gradients; None if none does.

    Compares the trained module with a copy restored from its state_dict, in both modes. State
    outside of the module shows when equal copies are trained before and after a third one.
    Counters that differ are also set to a large value: they may matter only after a warm-up.
    """
    trained, twin, third, restored = (copy.deepcopy(module) for _ in range(4))
    with fixed_draws():
        first = _run(trained, inputs, steps)
        _run(third, tuple(_other(x) for x in inputs), steps)
        if differ(first, _run(twin, inputs, steps)):
            return "keeps state outside of the module, or draws numbers that torch does not seed"
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.is_floating_point():
                    parameter += 0.1 * torch.randn_like(parameter)
        restored.load_state_dict(trained.state_dict())
        unlike = _unlike_attributes(trained, restored)
        unsaved = sorted(dict(trained.named_buffers()).keys() - trained.state_dict().keys())
        named = name_some([*unlike, *unsaved]) or "an attribute"
        later = copy.deepcopy(trained) if unlike else trained
        before = _run(restored, inputs, 1)
        if differ(_run(trained, inputs, 1), before):
            return f"keeps state that its state_dict lacks: {named}"
        for path in unlike:
            owner, _, name = path.rpartition(".")
            setattr(later.get_submodule(owner), name, _advanced(attrgetter(path)(later)))
        if unlike and differ(_run(later, inputs, 1), before):
            return f"keeps a counter that its state_dict lacks: {named}"
    return None


def _unlike_attributes(module: nn.Module, other: nn.Module) -> list[str]:
    """The paths of plain attributes, tensors or numbers, that differ between two modules."""

    def are_unlike(value: Any, other: Any) -> bool:
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            return not torch.equal(value, other)
        return isinstance(value, PLAIN) and repr(value) != repr(other)

    internal = vars(nn.Module())
    twins = dict(other.named_modules())
    return [
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in internal and are_unlike(value, vars(twins[path]).get(name))
    ]


def _run(module: nn.Module, inputs: Inputs, steps: int) -> list[Tensor]:
    """Outputs of an evaluation, of training steps with gradients, and of another evaluation."""
    torch.default_generator.manual_seed(0)
    seen = []
    for step in range(-1, steps + 1):
        module.train(0 <= step < steps).zero_grad()
        given = tuple(_other(x, step) if index == 0 else x for index, x in enumerate(inputs))
        with torch.set_grad_enabled(module.training):
            out = module(*given)
        seen.append(out.detach().clone())
        if out.requires_grad:
            (out * normal(out.shape, seed=step).to(out.dtype)).sum().backward()
            # Not cloned: zero_grad lets the next backward allocate new ones.
            seen += [p.grad for p in module.parameters() if p.grad is not None]
    return seen


def _other(x: Tensor, step: int = 5) -> Tensor:
    """Another input; a mask stays as it is."""
    if x.dtype == torch.bool:
        return x
    return x * (1 + 0.2 * step) + 0.1 * step if x.is_floating_point() else x.roll(step, -1)


def _advanced(value: Any) -> Any:
    """Adds MANY_STEPS to a number, or to every number in a list or dict."""
    if isinstance(value, list):
        return [_advanced(member) for member in value]
    if isinstance(value, dict):
        return {key: _advanced(member) for key, member in value.items()}
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return value + MANY_STEPS
    return value


# ---------------------------------------------------------------- random numbers and inputs


def draws_for_itself(network: BuiltNetwork) -> bool:
    """Does a module use torch's global random state?"""
    (probe,) = network.whole(network.short).probes(training=True)
    return probe.observe().drew


def draws_in_evaluation(network: BuiltNetwork) -> str | None:
    """Do random numbers, which no seed fixes here, move outputs in evaluation?"""
    model = network.exposed.eval()
    outputs, start = [], Snapshot(model)
    with fixed_draws(), torch.no_grad():
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            outputs.append(model(*model_arguments(network.short)).clone())
            start.restore()  # a norm may move its state in evaluation too
    if not moves(*outputs):
        return None
    return (
        "the model draws random numbers in evaluation, so its metrics cannot be repeated; draw "
        "only where self.training is true, as nn.Dropout does"
    )


def every_output_is_the_same(network: BuiltNetwork) -> str | None:
    """Do different samples have different outputs?"""
    inputs = network.short["inputs"].clone()
    if len(inputs) < 2:
        return None
    floating = inputs.is_floating_point()
    inputs[0] = 3 * inputs[0].flip(-1) + 1 if floating else inputs[0].roll(1, dims=-1)
    model = copy.deepcopy(network.exposed)
    for _, site in named_sites(model):
        site.register_forward_hook(_standardized)
    given = model_arguments({**network.short, "inputs": inputs})
    wide, given = in_float64(model, *given, upstream=None) or (model, given)
    output = Probe(wide.train(), *given).observe().output
    if moves(output[:1].expand_as(output), output, scale=1e-2):
        return None
    return (
        "with this norm the model's output is the same for every input, for example because it "
        "averages positions after a norm that centres them; try norm=layer"
    )


def _standardized(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """The output of a site with mean 0 and variance 1, unless it is constant up to rounding.

    Fixed statistics of other inputs would shrink what the network tells from its inputs.
    """
    spread = output.std() if output.dtype == torch.float64 else 0
    if not spread > ROUNDING * max(output.abs().max(), 1):
        return output
    return (output - output.mean()) / spread


# ---------------------------------------------------------------- optimizer


def check_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for a parameter that requires a gradient but is in no group.

    Args:
        optimizer: built for the parameters of this network.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in network.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise UserError(
            f"parameter {name_some(missing)} requires a gradient but is not in the optimizer; "
            "try another optim, or set requires_grad=False on what is not to be trained"
        )


# ---------------------------------------------------------------- parts and replicas


def splits_sequential_state(network: BuiltNetwork) -> str | None:
    """Can the states of the parts of a step be merged?

    The parts all begin from the same state; a sequential state cannot be merged.
    """
    sizes = network.sizes
    if sizes.norm == sizes.batch_size:
        return None
    sequential = places_where(lambda site, _: is_sequential(site), network.sites, training=True)
    names = [name for site in sequential for name in site.names]
    if not names:
        return None
    key = "norm_batch_size" if sizes.norm < sizes.micro else "micro_batch_size"
    return (
        f"{key}={getattr(sizes, key)} splits a step of {sizes.batch_size} samples, and the "
        f"state of the norm at {name_some(names)} is sequential, as declared or because "
        f"its forward writes parameters; try {key}=null"
    )


def is_sequential(site: EnteredSite) -> bool:
    """True if the norm declares that its state is, or writes parameters in its forward."""
    if declares_order(site.module):
        return True
    module, inputs = site.to_save()
    with fixed_draws(), torch.no_grad():
        before = [parameter.clone() for parameter in module.parameters()]
        module(*inputs)
        return not all(map(torch.equal, before, module.parameters()))


def state_of_several_uses(network: BuiltNetwork) -> str | None:
    """Do several uses of a norm in one forward share running state?"""
    uses = Counter(name for site in network.sites for name in site.names if site.has_state)
    several = [name for name, count in uses.items() if count > 1]
    if not several:
        return None
    return (
        f"the model uses {name_some(several)} more than once in a forward, with one running state: "
        "precise statistics are those of the last use, and in accumulated steps the running "
        "variance leaves out how uses differ between parts"
    )


def stacking_obstacle(network: BuiltNetwork) -> str | None:
    """Why can replicas not run under vmap?"""
    if network.once(draws_for_itself):
        return "a module draws its own random numbers"
    return cannot_stack(network.network, network.short)


def cannot_stack(network: nn.Module, batch: Batch) -> str | None:
    """Says why replicas cannot run under vmap; None if they can and agree with each alone.

    Foreign code is asked with three replicas of different parameters, inputs and state, in float64
    if it computes so; gradients and state are compared as well as outputs.
    """
    foreign = is_foreign(*network.modules())
    wide = in_float64(network, *model_arguments(batch)) if foreign else None
    module, (inputs, *_) = wide or (network, (batch["inputs"],))
    networks = [copy.deepcopy(module).train() for _ in range(3 if foreign else 2)]
    batches = {n: torch.stack([v] * len(networks)) for n, v in {**batch, "inputs": inputs}.items()}
    if foreign:
        for seed, replica in enumerate(networks):
            _shift(replica, batches["inputs"][seed], seed)
    with all_in_float64() if wide else nullcontext():
        return find_stacking_fault(networks, batches, with_backward=foreign)


@torch.no_grad()
def _shift(network: nn.Module, inputs: Tensor, seed: int) -> None:
    """Moves parameters, averages and inputs, for each seed by other amounts."""
    for index, parameter in enumerate(network.parameters()):
        step = 0.1 * normal(parameter.shape, 100 * seed + index)
        parameter += step.to(parameter.dtype)
    for buffer in network.buffers():
        if buffer.is_floating_point():
            buffer *= 1 + 0.1 * seed
    inputs.copy_(_other(inputs, seed))
