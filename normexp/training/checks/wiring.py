"""Does every norm of a network matter, is all its state saved, can it be split and stacked?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.any_network.trial import differing_values
from normexp.errors import UserError, one_line
from normexp.norms.contract import State
from normexp.norms.site import is_sequential as declares_order
from normexp.norms.site import named_sites, read_state
from normexp.training.batching.copies import copied
from normexp.training.batching.replicas import Batch, InTurn, Loss, Stacked, model_arguments
from normexp.training.checks.network import BuiltNetwork, EnteredSite, names_where
from normexp.training.checks.probe import (
    EVERYWHERE,
    Probe,
    change,
    fixed_draws,
    moves,
    normal,
)
from normexp.training.criterion import criterion_of
from normexp.words import name_some


def check_sites(network: BuiltNetwork) -> list[str]:
    """Notes norms that have no effect on the loss, and their parameters that get no gradient.

    Raises:
        UserError: no norm has an effect; the backward of the loss fails, or reaches tensors that
            are no parameters.
    """
    model = copied(network.exposed).train()
    sites = dict(named_sites(model))
    if not sites:
        raise UserError(
            "the model has no norm site, so `norm` has no effect; build each norm with the "
            "argument `norm` that the model receives, as self.norm1 = norm(width)"
        )
    reached, outside = _backward(model, network.short, criterion_of(network.data).loss)
    idle = [name for name in sites if name not in reached]
    if not reached:
        raise UserError(
            f"the norm at {name_some(idle)} has no effect on the model's output, so every norm "
            "would give the same numbers; use what the norm returns"
        )
    notes: list[str] = []
    if idle:
        notes.append(f"the norm at {name_some(idle)} has no effect on the model's output")
    if outside:
        raise UserError(
            f"the network uses {len(outside)} tensors that require a gradient but are no "
            f"parameters of it, of shape {', '.join(map(str, outside[:3]))}: they are not trained; "
            "hold them as nn.Parameter, nn.ParameterList or nn.ModuleList in attributes of the "
            "module"
        )
    untrained: list[str] = []
    for site_name, site in sites.items():
        for name, parameter in site.named_parameters():
            if site_name in reached and parameter.requires_grad and parameter.grad is None:
                untrained.append(f"{site_name}.{name}")
    if untrained:
        notes.append(f"no gradient reaches {name_some(untrained)} of the norm: it is not trained")
    return notes


def _backward(
    model: nn.Module, batch: Batch, measure_loss: Loss
) -> tuple[set[str], list[tuple[int, ...]]]:
    """Takes the gradients of the loss of a batch.

    Returns:
        The sites that the loss depends on, and the shapes of tensors that get a gradient and are
        no parameters.
    """
    added: list[tuple[str, Tensor]] = []  # zeros that each call of a site adds to its output

    def add_zeros(name: str, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        zeros = torch.zeros_like(output, requires_grad=True)
        added.append((name, zeros))
        return output + zeros

    for name, site in named_sites(model):
        site.register_forward_hook(partial(add_zeros, name))
    with fixed_draws(), torch.enable_grad():
        output = model(*model_arguments(batch))  # (N, classes) or (B, T, V)
        inside = {id(tensor) for tensor in model.parameters()}
        inside |= {id(zeros) for _, zeros in added}
        outside = [tuple(leaf.shape) for leaf in _leaves_of(output) if id(leaf) not in inside]
        loss = measure_loss(output, batch)
        try:
            loss.backward()
        except Exception as error:  # of foreign code, any kind
            raise UserError(f"the backward pass fails: {one_line(error)}") from error
    reached = {name for name, zeros in added if zeros.grad is not None and zeros.grad.any()}
    return reached, outside


def _leaves_of(output: Tensor) -> list[Tensor]:
    """The leaves that a backward of `output` would give a gradient."""
    stack = [output.grad_fn]
    seen: set[Any] = set()
    leaves: list[Tensor] = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if leaf is not None:
            leaves.append(leaf)
    return leaves


def note_other_norms(network: BuiltNetwork) -> list[str]:
    """Notes modules that are called norms and lie outside of all sites."""
    in_sites = {module for _, site in named_sites(network.exposed) for module in site.modules()}
    others: list[str] = []
    for path, module in network.exposed.named_modules():
        kind = type(module).__name__
        is_named_norm = "norm" in kind.lower() and not kind.startswith("_")  # torch's weight norms
        if is_named_norm and in_sites.isdisjoint(module.modules()):
            others.append(f"{path} ({kind})")
    if not others:
        return []
    return [
        f"the model has norms that `norm` does not replace: {name_some(others)}; build them with "
        "the argument `norm`, else they stay the same for every norm that you compare"
    ]


# ---------------------------------------------------------------- state that is not saved

STATE_STEPS = 3  # training steps in which hidden state may show


def check_state(network: BuiltNetwork) -> None:
    """Raises UserError if a training restored from a checkpoint would not go on as before."""
    remedy = (
        "a resumed run would differ; keep state in persistent buffers, made in __init__ with "
        "self.register_buffer(...), and draw with torch's functions"
    )
    for site in network.sites:
        probe = site.probe(training=True)
        with site.naming_errors():
            fault = state_not_saved(probe.module, probe.inputs)
        if fault:
            fault = fault.replace("site.norm.", "")  # the path inside SiteOnMaps
            raise UserError(f"the norm at {name_some(site.names)} {fault}; {remedy}")
    fault = state_not_saved(network.exposed.train(), model_arguments(network.short))
    if fault:
        raise UserError(f"the model {fault}; {remedy}")


def state_not_saved(module: nn.Module, inputs: tuple[Tensor, ...]) -> str | None:
    """Says which state outside of the state_dict moves outputs or gradients; None if none does.

    Compares the trained module with a copy restored from its state_dict, in both modes.
    """
    trained, restored = copied(module), copied(module)
    with fixed_draws():
        for step in range(STATE_STEPS):
            _run(trained, inputs, step)
        saved = trained.state_dict()
        restored.load_state_dict(saved)
        before = _run(restored, inputs, STATE_STEPS)
        after = _run(trained, inputs, STATE_STEPS)
    if not any(moves(*pair) for pair in zip(before, after, strict=True)):
        return None
    lacking = [name for name in differing_values(trained, module) if name not in saved]
    named = name_some(lacking) or "an attribute, or random numbers that torch does not seed"
    return f"keeps state that its state_dict lacks: {named}"


def _run(module: nn.Module, inputs: tuple[Tensor, ...], step: int) -> list[Tensor]:
    """Outputs of an evaluation, of a training step with its gradients, and of an evaluation."""
    torch.default_generator.manual_seed(step)
    x, *mask = inputs
    x = x * (1 + 0.2 * step) + 0.1 * step if x.is_floating_point() else x.roll(step, -1)
    results: list[Tensor] = []
    for training in (False, True, False):
        module.train(training).zero_grad()
        with torch.set_grad_enabled(training):
            out = module(x, *mask)
        results.append(out.detach().clone())
        if out.requires_grad:
            (out * normal(out.shape).to(out.dtype)).sum().backward()
            results += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return results


# ---------------------------------------------------------------- parts and replicas

OUTPUT_SCALE, MIN_GRADIENT = 1e-2, 1e-3  # smaller outputs, and gradients or state, count as these
STACKING_TOLERANCE = 1e-3  # of the largest gradient, in float32


def check_split(network: BuiltNetwork) -> None:
    """Raises UserError if a step in parts would have to merge sequential state."""
    sizes = network.sizes
    in_order = all(site.running_from == "sequence" for _, site in named_sites(network.network))
    if sizes.norm == sizes.batch_size or in_order:
        return
    where = names_where(network.sites, is_sequential)
    if where:
        key = "norm_batch_size" if sizes.norm < sizes.micro else "micro_batch_size"
        raise UserError(
            f"{key}={getattr(sizes, key)} splits a step of {sizes.batch_size} samples, and the "
            f"state of the norm at {where} is sequential, as declared or because "
            f"its forward writes parameters; try {key}=null, or on one device "
            "norm.running_from=sequence"
        )


def is_sequential(site: EnteredSite) -> bool:
    """True if the norm declares sequential state, or writes parameters in its forward."""
    probe = site.probe(training=True)
    with fixed_draws(), torch.no_grad():
        before = [parameter.clone() for parameter in probe.module.parameters()]
        probe.module(*probe.inputs)
        writes = not all(map(torch.equal, before, probe.module.parameters()))
    return writes or declares_order(probe.module)


def cannot_stack(network: nn.Module, batch: Batch) -> str | None:
    """Says why replicas cannot run under vmap; None if two of them train as each alone does.

    Compares in float64 if the network can compute so, as gradients of few samples lose digits.
    """
    wide = copied(network).train().double()
    inputs = batch["inputs"].double() if batch["inputs"].is_floating_point() else batch["inputs"]
    try:
        Probe(wide, model_arguments({**batch, "inputs": inputs})).observe(upstream=EVERYWHERE)
    except Exception:  # foreign code: a kernel of one dtype
        wide, inputs = copied(network).train(), batch["inputs"]
    batch = {**batch, "inputs": inputs}
    of_two = {name: torch.stack([value, value]) for name, value in batch.items()}
    return find_stacking_fault([wide, copied(wide)], of_two, tolerance=STACKING_TOLERANCE)


def find_stacking_fault(
    networks: Sequence[nn.Module], batch: Batch, *, tolerance: float
) -> str | None:
    """Says why these networks cannot run under vmap; None if they train as each alone does.

    Moves the parameters of each by another amount.

    Args:
        batch: of each network, (S, N, ...).
    """
    with torch.no_grad():
        for seed, network in enumerate(networks):
            for index, parameter in enumerate(network.parameters()):
                parameter += 0.1 * normal(parameter.shape, 100 * seed + index).to(parameter.dtype)
    steps: list[State] = []
    for form in (InTurn, Stacked):
        try:  # foreign code and vmap may raise anything; training in turn is exact
            replicas = form([copied(network) for network in networks])
            steps.append(_training_step(replicas, batch))
        except Exception as error:
            return one_line(error)
        try:
            shared = {id(parameter): parameter for parameter in replicas.parameters()}
            copy.deepcopy(replicas, shared)
        except Exception:  # a tensor of vmap, or foreign code
            return "a module keeps a tensor of its forward outside its buffers"
    in_turn, stacked = steps
    name = _first_difference(in_turn, stacked, tolerance)
    return f"{name} differs under vmap" if name else None


def _training_step(replicas: InTurn | Stacked, batch: Batch) -> State:
    """Outputs, gradients and final state of a step, by name.

    Every result is (S, ...). Inputs that require a gradient have theirs among the results.
    """
    inputs = batch["inputs"]
    inputs.grad = None
    with fixed_draws(), torch.enable_grad():
        copies = {**batch, "inputs": inputs.clone()}  # which a network may change in place
        output = replicas.measure(copies, lambda output, _: output)
        if output.requires_grad:
            (output * normal(output.shape, 1).to(output.dtype)).sum().backward()
    results = {"the output": output.detach()}
    if inputs.grad is not None:
        results["the gradient of the input"] = inputs.grad
    of_trees: list[State] = []
    for tree in replicas.trees:
        of_tree: State = {}
        for name, parameter in tree.named_parameters():
            if parameter.grad is not None:
                of_tree[f"the gradient of {name}"] = parameter.grad
        of_trees.append(of_tree | read_state(tree))
    if replicas.is_stacked:
        return results | of_trees[0]
    return results | {name: torch.stack([t[name] for t in of_trees]) for name in of_trees[0]}


def _first_difference(before: State, after: State, tolerance: float) -> str | None:
    """The first result that differs or is missing.

    Outputs and state are compared on their usual scales, gradients on that of the largest.
    """
    gradients = {name: value for name, value in before.items() if "gradient of" in name}
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0)
    for name, value in before.items():
        scale = OUTPUT_SCALE if name == "the output" else MIN_GRADIENT
        if name in gradients:
            scale = max(scale, largest)
        if name not in after or change(value, after[name], scale=scale) > tolerance:
            return name
    return None
