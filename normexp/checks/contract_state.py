"""Contract: parameters, buffers, copies and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.checks.card import PASSED, Checks, Finding, failed, skipped
from normexp.checks.subject import Shape, Subject, relative_change, seed_draws, show, values
from normexp.norms.adapt import unlike_attributes

STEPS = 3


def makes_parameters_at_once(subject: Subject) -> Finding:
    """Every parameter is there, and itself, before the first forward: an optimizer has it then."""
    norm = subject.norm(subject.smallest)
    before = dict(norm.named_parameters())
    lazy = [name for name, parameter in before.items() if is_lazy(parameter)]
    norm(values(subject.smallest))
    after = norm.named_parameters()
    made = lazy + [name for name, p in after if p is not before.get(name)]
    if made:
        return failed(f"{made[0]} is made in the forward, too late for an optimizer")
    return PASSED


def reaches_parameters(subject: Subject) -> Finding:
    """One backward gives every parameter a gradient."""
    shape = subject.largest
    norm = subject.trained(shape)
    weights = values(shape, seed=1)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if not parameters:
        return PASSED
    out = norm(values(shape).requires_grad_())
    (out * weights).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    if without:
        return failed(f"no gradient reaches {', '.join(without)}, {show(shape)}")
    return PASSED


def holds_no_graph(subject: Subject) -> Finding:
    """After training steps no tensor that the norm keeps hangs on a graph."""
    norm = subject.norm(subject.smallest)
    for seed in range(STEPS):
        norm(values(subject.smallest, seed=seed).requires_grad_())
    for name, tensor in _kept_tensors(norm):
        if tensor.grad_fn is not None or tensor.requires_grad:
            return failed(
                f"{name} keeps the graph of {STEPS} forwards, {show(subject.smallest)}: "
                "memory grows with every step; detach it"
            )
    return PASSED


def _kept_tensors(norm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that modules keep as plain attributes."""
    yield from norm.named_buffers()
    for path, module in norm.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield f"{path}.{name}".lstrip("."), value


def keeps_buffers(subject: Subject) -> Finding:
    """Forwards change no buffer's name, shape or dtype: DDP broadcasts the list of the start."""
    for shape in subject.shapes:
        norm = subject.norm(shape)
        before = _kinds(norm)
        for training in (True, False):
            norm.train(training)(values(shape))
            after = _kinds(norm)
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    was, now = _describe(before.get(name)), _describe(after.get(name))
                    return failed(f"{name} was {was}, is {now} after a forward of {show(shape)}")
    return PASSED


def _kinds(norm: nn.Module) -> dict[str, tuple[Shape, torch.dtype]]:
    return {name: (tuple(b.shape), b.dtype) for name, b in norm.named_buffers()}


def _describe(kind: tuple[Shape, torch.dtype] | None) -> str:
    if kind is None:
        return "missing"
    return f"{show(kind[0])} {str(kind[1]).removeprefix('torch.')}"


def copies(subject: Subject) -> Finding:
    """deepcopy works before and after training steps, and the copy does the same."""
    shape = subject.smallest
    norm = subject.norm(shape)
    for moment in ("before", "after"):
        try:
            own = copy.deepcopy(norm)
        except Exception as error:
            return failed(f"deepcopy {moment} a training forward: {type(error).__name__}")
        x = values(shape, seed=1)
        if not torch.equal(_redrawn(norm, x), _redrawn(own, x)):
            return failed(f"a deepcopy made {moment} a training forward gives other outputs")
    return PASSED


def _redrawn(norm: nn.Module, x: Tensor) -> Tensor:
    seed_draws()
    return norm(x)


def restores(subject: Subject) -> Finding:
    """A fresh norm that loads the state_dict of a trained one evaluates, and trains on, alike."""
    for shape in subject.shapes:
        norm = subject.norm(shape)
        norm(values(shape))  # lazy parameters have a shape from here on
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
            for seed in range(STEPS):
                norm(1 + 2 * values(shape, seed=seed))
        fresh = subject.norm(shape)
        fresh.load_state_dict(norm.state_dict())
        kept = [f": {name} is no buffer" for name in unlike_attributes(norm, fresh)]
        for mode in ("evaluation", "training", "evaluation"):
            x = values(shape, seed=STEPS)
            outs = [_redrawn(own.train(mode == "training"), x) for own in (norm, fresh)]
            if relative_change(outs[0].detach(), outs[1].detach()) > 1e-5:
                why = "".join(kept[:1])
                return failed(f"other outputs in {mode} after load_state_dict, {show(shape)}{why}")
    return PASSED


def is_deterministic(subject: Subject) -> Finding:
    """In evaluation one input has one output, however often it comes."""
    for shape in subject.shapes:
        norm = subject.trained(shape).eval()
        x = values(shape)
        with torch.no_grad():
            outs = [norm(x), norm(values(shape, seed=1)), norm(x)]
        if not torch.equal(outs[0], outs[2]):
            return failed(f"two forwards in evaluation differ, {show(shape)}")
    return PASSED


def takes_no_part_of_batch_in_evaluation(subject: Subject) -> Finding:
    """In evaluation nothing the norm keeps is changed."""
    norm = subject.trained(subject.smallest).eval()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    if not before:
        return skipped("has no buffers")
    with torch.no_grad():
        norm(values(subject.smallest))
    changed = [name for name, b in norm.named_buffers() if not torch.equal(b, before[name])]
    if changed:
        return failed(f"evaluation changes {changed[0]}, {show(subject.smallest)}")
    return PASSED


STATE: Checks = {
    "parameters made at once": makes_parameters_at_once,
    "gradient for every parameter": reaches_parameters,
    "no graph kept": holds_no_graph,
    "buffers keep shape and dtype": keeps_buffers,
    "deepcopy": copies,
    "state_dict round trip": restores,
    "deterministic in evaluation": is_deterministic,
    "evaluation changes no state": takes_no_part_of_batch_in_evaluation,
}
