"""Tries whether the norms of a network are what they were recognised as.

Each is put in anew, as the shipped norm that its description names. It is trained alone, beside the
old one, on what the network gives both: the inputs and upstream gradients of one forward and
backward, in which a random weighting of the outputs stands for the loss. After three steps with
weight decay and an evaluation, outputs, gradients, parameters and state must be equal. A norm that
fails is left as it is.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normexp.any_network.carry_over import put_norms
from normexp.any_network.description import NormDescription
from normexp.any_network.recognise import LeftAlone, Recognition, class_name_of
from normexp.any_network.trial import (
    FEW,
    Inputs,
    agree,
    draw_weights,
    largest_value,
    real_outputs,
    run_network,
    seed_all,
    widened,
)
from normexp.errors import UserError, one_line
from normexp.norms.factory import NormFactory
from normexp.norms.site import names_as_built
from normexp.training.batching.copies import copied
from normexp.training.batching.draws import keeping_random_state
from normexp.words import name_some

TOLERANCE, FLOAT_TOLERANCE = 1e-5, 1e-3  # in double precision, and for what computes in float32
SMALL = 1e-6  # values below are compared on this scale
NUM_STEPS, LEARNING_RATE, WEIGHT_DECAY = 3, 0.1, 0.1
MAX_BYTES = 2**30  # of the recorded inputs
TOO_LARGE = f"the inputs of the norms take more than {MAX_BYTES / 2**30:g} GiB"


@dataclass
class RecordedCall:
    """A call of a norm in a training forward.

    Attributes:
        training: the mode of the norm.
        zeros: were added to its output; their gradient is the upstream gradient.
    """

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    training: bool
    zeros: Tensor

    @property
    def upstream(self) -> Tensor:
        """The gradient of the output, scaled to length 1; random where the loss has none."""
        gradient = self.zeros.grad
        if gradient is None or not gradient.any() or not gradient.isfinite().all():
            (gradient,) = draw_weights([self.zeros])
        return gradient / gradient.norm().clamp_min(1e-30)


class _TooLarge(UserError):
    """The inputs of the norms take more than MAX_BYTES."""


def keep_reproduced(
    network: nn.Module, recognition: Recognition, inputs: Inputs
) -> tuple[Recognition, list[str]]:
    """Leaves those norms alone that train otherwise when they are put in anew.

    Returns:
        the recognition without them, and lines for the log.
    """
    if not recognition.norms:
        return recognition, []
    wide, wide_inputs, is_wide = widened(network, inputs)
    try:
        calls = _record_few_enough(wide, [*recognition.norms], wide_inputs)
    except UserError as error:
        return recognition, [f"whether its own norms train alike is untried: {error}"]
    reasons: dict[str, str] = {}
    known = dict(recognition.norms)
    for path, norm in recognition.norms.items():
        try:
            _own_factory(norm).bare(norm.num_features, **norm.settings)
        except UserError as error:
            reasons[path] = f"it cannot be built: {error}"
            del known[path]
    anew = copied(wide)
    put_norms(anew, known, _own_factory)
    reasons |= _other_sharing(wide, anew, known)
    for path, norm in known.items():
        old, new = wide.get_submodule(path), anew.get_submodule(path)
        reason = _difference(old, new, norm, calls.get(path, []), is_wide)
        if reason and path not in reasons:
            reasons[path] = reason
    left_alone = dict(recognition.left_alone)
    for path, reason in reasons.items():
        name = class_name_of(network.get_submodule(path))
        left_alone[path] = LeftAlone(name, f"put in anew {reason}", True, True)
    norms = {path: norm for path, norm in recognition.norms.items() if path not in reasons}
    return replace(recognition, norms=norms, left_alone=left_alone), []


def _own_factory(norm: NormDescription) -> NormFactory:
    """Builds the norm of a description."""

    def make(num_features: int, **settings: Any) -> nn.Module:
        return norm.formula.build(num_features, **settings | {"has_bias": "bias" in norm.roles})

    return NormFactory(make, view="sequence" if norm.formula.name == "group" else "token")


# --- What the network gives its norms -------------------------------------------------------------


def _record_few_enough(
    network: nn.Module, paths: list[str], inputs: Inputs
) -> dict[str, list[RecordedCall]]:
    """The calls of the norms for a few samples; for two if their inputs exceed MAX_BYTES.

    Raises UserError if the backward fails, or two samples are too many.
    """
    for number in (FEW, 2):
        few = inputs.first(number)
        try:
            return _record(network, paths, few)
        except _TooLarge:
            continue
        except UserError:
            if few is inputs:
                raise
            return _record(network, paths, inputs)  # some inputs cannot be cut
    raise _TooLarge(TOO_LARGE)


def _record(network: nn.Module, paths: list[str], inputs: Inputs) -> dict[str, list[RecordedCall]]:
    network = copied(network).train()
    calls: defaultdict[str, list[RecordedCall]] = defaultdict(list)
    again: defaultdict[str, list[RecordedCall]] = defaultdict(list)  # by gradient checkpointing
    num_bytes = 0
    target = calls

    def record(path: str, norm: nn.Module, args: Any, keywords: Any, out: Any) -> Any:
        nonlocal num_bytes
        zeros = torch.zeros_like(out, requires_grad=True)
        args, keywords = tree_map(_detached, (args, keywords))
        target[path].append(RecordedCall(args, keywords, norm.training, zeros))
        num_bytes += 2 * zeros.nbytes
        if num_bytes > MAX_BYTES:
            raise _TooLarge(TOO_LARGE)
        return out + zeros

    for path in paths:
        network.get_submodule(path).register_forward_hook(partial(record, path), with_kwargs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's own network
        outputs = real_outputs(run_network(network, inputs, with_gradients=True))
        target = again
        _backward(outputs)
    for path, of_path in again.items():
        for call, other in zip(calls[path], reversed(of_path), strict=False):
            if call.zeros.grad is None:
                call.zeros.grad = other.zeros.grad
    return calls


def _backward(outputs: list[Tensor]) -> None:
    outputs = [out for out in outputs if out.requires_grad]
    if not outputs:
        return
    weights = draw_weights(outputs)
    total = torch.stack([(o * w).sum().double() for o, w in zip(outputs, weights, strict=True)])
    try:
        total.sum().backward()
    except UserError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise UserError(f"a backward of the model fails: {one_line(error)}") from error


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# --- The old norm beside the new one --------------------------------------------------------------


def _other_sharing(
    network: nn.Module, anew: nn.Module, norms: Mapping[str, NormDescription]
) -> dict[str, str]:
    """Norms that share parameters with other modules than they do when put in anew."""
    before, after = (_sharing(one, norms) for one in (network, anew))
    changed = {path for group in before ^ after for path in group if path in norms}
    return dict.fromkeys(changed, "it shares its parameters otherwise")


def _sharing(network: nn.Module, norms: Mapping[str, NormDescription]) -> set[frozenset[str]]:
    """The paths of the modules that hold one parameter, for each that several hold."""
    holders: defaultdict[int, set[str]] = defaultdict(set)
    inside: set[nn.Module] = set()
    for path in norms:
        norm = network.get_submodule(path)
        inside.update(norm.modules())
        for parameter in norm.parameters():
            holders[id(parameter)].add(path)
    for path, module in network.named_modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                holders[id(parameter)].add(path)
    return {frozenset(paths) for paths in holders.values() if len(paths) > 1}


def _difference(
    old: nn.Module,
    new: nn.Module,
    norm: NormDescription,
    calls: list[RecordedCall],
    is_wide: bool,
) -> str:
    """How the new norm differs from the old one; "" if it does not, or was never called."""
    if reason := _other_names(old, new, norm):
        return reason
    if not calls:
        return ""
    tolerance = TOLERANCE if is_wide and not _is_narrow(old, calls[0]) else FLOAT_TOLERANCE
    try:
        expected = _trained_alone(old, calls)
        results = _trained_alone(new, calls)
    except Exception as error:  # foreign code may raise anything
        return f"it fails: {one_line(error)}"
    for name, value in expected.items():
        if name in results and not agree(value, results[name], tolerance, SMALL):
            return f"it has another {name}"
    return ""


def _other_names(old: nn.Module, new: nn.Module, norm: NormDescription) -> str:
    """Says which other tensors are saved or trained; names count for torch's classes alone."""
    names = names_as_built(new)
    old_state, new_state = set(old.state_dict()), set(names.values())
    trained = {name for name, p in old.named_parameters() if p.requires_grad}
    new_trained = {names[name] for name, p in new.named_parameters() if p.requires_grad}
    if norm.form is None:
        if old_state != new_state:
            return f"it saves other tensors: {name_some(sorted(old_state ^ new_state))}"
        changed = trained ^ new_trained
    else:
        changed = set() if _trained_sizes(old) == _trained_sizes(new) else trained
    return f"it trains other parameters: {name_some(sorted(changed))}" if changed else ""


def _trained_sizes(module: nn.Module) -> list[int]:
    return sorted(p.numel() for p in module.parameters() if p.requires_grad)


def _is_narrow(module: nn.Module, call: RecordedCall) -> bool:
    """True if a module computes in less than double precision, whatever its input."""

    def run(change: float) -> Tensor:
        x, *others = call.args
        (noise,) = draw_weights([x])
        moved = x + change * largest_value(x) * noise
        return copied(module).train(call.training)(moved, *others, **call.keywords)

    if not call.args:
        return False
    with torch.no_grad(), _fixed_draws(module):
        return torch.equal(run(0.0), run(1e-13))


def _trained_alone(module: nn.Module, calls: list[RecordedCall]) -> dict[str, Tensor]:
    """The state after some steps of training, by its names as built; outputs and gradients."""
    module = copied(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = None
    if parameters:
        optimizer = torch.optim.SGD(parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    outputs: dict[str, Tensor] = {}
    with _fixed_draws(module), torch.enable_grad():
        for step in range(NUM_STEPS):
            module.zero_grad()
            for index, call in enumerate(calls):
                x, out = _run(module.train(call.training), call)
                if out.requires_grad:
                    out.backward(call.upstream.to(out.dtype))
                outputs[f"output in training ({step + 1}, {index + 1})"] = out.detach()
                if x.grad is not None:
                    outputs[f"gradient of its input ({step + 1}, {index + 1})"] = x.grad
            if optimizer is not None:
                optimizer.step()
        for index, call in enumerate(calls):
            _, out = _run(module.eval(), call)
            outputs[f"output in evaluation ({index + 1})"] = out.detach()
    names = names_as_built(module)
    state = {names[name]: value for name, value in module.state_dict().items()}
    return state | outputs


def _run(module: nn.Module, call: RecordedCall) -> tuple[Tensor, Tensor]:
    """The input as a leaf, and the output."""
    args, keywords = tree_map(_detached, (call.args, dict(call.keywords)))
    x = next(leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor))
    x.requires_grad_()
    passed = tree_map(lambda leaf: leaf.clone() if leaf is x else leaf, (args, keywords))
    return x, module(*passed[0], **passed[1])


@contextmanager
def _fixed_draws(module: nn.Module) -> Iterator[None]:
    with keeping_random_state(module):
        seed_all()
        yield
