"""Compatibility: a norm under torch.compile, vmap, splits and autocast, against the plain norm."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, InTurn, Stacked
from normexp.checks.subject import (
    Answer,
    Check,
    Finding,
    Shape,
    Subject,
    measured,
    relative_change,
    show,
    skipped,
    values,
)
from normexp.errors import UserError, first_line
from normexp.norms.site import Site
from normexp.norms.state import State, merge_state, read_state, write_state

EXACT = 1e-6  # of inputs in float64; a norm may compute in float32
CLOSE = 1e-4  # of float32
HALF = 0.03  # of bfloat16, which has 8 bits
PARTS, PART_SIZE = 4, 2


def compiles(training: bool, subject: Subject) -> Answer:
    """Does torch.compile trace forward and backward as one graph, with the same outputs?

    Without code generation, because only tracing is tested.
    """
    shape = subject.largest
    norm, own = subject.trained(shape).train(training), subject.trained(shape).train(training)
    torch.compiler.reset()
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.default_generator.manual_seed(0)
    try:
        out = compiled(values(shape).requires_grad_())
        out.sum().backward()
    except Exception as error:  # dynamo and foreign code may raise anything
        return f"{_reason(error)}, {show(shape)}"
    finally:
        torch.compiler.reset()
    torch.default_generator.manual_seed(0)
    change = relative_change(norm(values(shape)).detach(), out.detach())
    if change > CLOSE:
        return f"compiled outputs differ by {change:.2g}, {show(shape)}"
    return None


def _reason(error: Exception) -> str:
    """The line of dynamo's long message that names the graph break."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("Explanation:")]
    return (named or lines or [type(error).__name__])[0].removeprefix("Explanation: ")


def stacks(subject: Subject) -> Answer:
    """Have two replicas under vmap the outputs, gradients and state of each alone?"""
    for shape in subject.shapes:
        networks = [_shaken(subject, shape, seed) for seed in (1, 2)]
        pair: Batch = {"inputs": torch.stack([values(shape, torch.float64, s) for s in (3, 4)])}
        alone, stacked = InTurn(networks), None
        try:
            stacked = Stacked(networks)
            found = [_measure_replicas(replicas, pair) for replicas in (alone, stacked)]
        except Exception as error:  # vmap and foreign code may raise anything
            return f"{first_line(error)}, {show(shape)}"
        for name, before in found[0].items():
            if relative_change(before, found[1][name]) > EXACT:
                return f"{name} differs under vmap, {show(shape)}"
    return None


def _shaken(subject: Subject, shape: Shape, seed: int) -> nn.Module:
    norm = subject.trained(shape, torch.float64)
    torch.default_generator.manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return norm


def _measure_replicas(replicas: InTurn | Stacked, batch: Batch) -> State:
    """Outputs, and of every replica the gradients and the state after one training forward."""

    def outputs(output: Tensor, _: Batch) -> State:
        return {"output": output}

    found = replicas.measure(batch, outputs)
    if found["output"].requires_grad:
        (found["output"] * values(tuple(found["output"].shape), torch.float64, 5)).sum().backward()
    trees = replicas.trees
    names = [name for name, _ in trees[0].named_parameters()]
    for name in names:
        gradients = [tree.get_parameter(name).grad for tree in trees]
        kept = [gradient for gradient in gradients if gradient is not None]
        if kept:
            found[f"the gradient of {name}"] = kept[0] if len(trees) == 1 else torch.stack(kept)
    for name, _ in trees[0].named_buffers():
        buffers = [tree.get_buffer(name) for tree in trees]
        found[name] = buffers[0] if len(trees) == 1 else torch.stack(buffers)
    return found


def splits(subject: Subject) -> Answer:
    """Have ghost groups of one forward the outputs, gradients and state of micro-batches?"""
    shape = _to_split(subject)
    if shape is None:
        return skipped(f"takes no batch of {PART_SIZE}")
    if _is_sequential(subject.norm(shape)):
        return measured("refused", "declares its state sequential")
    ghost, parts = _split_both_ways(subject, shape)
    for name, before in parts.items():
        if relative_change(before, ghost[name]) > EXACT:
            return f"{name} differs, {PARTS} groups of {show((PART_SIZE, *shape[1:]))}"
    return None


def state_of_split(subject: Subject) -> Finding:
    """How far is the state after a split step from that of the same step unsplit?"""
    shape = _to_split(subject)
    if shape is None:
        return skipped(f"takes no batch of {PART_SIZE}")
    whole = subject.trained(shape, torch.float64)
    if not list(whole.buffers()) or _is_sequential(whole):
        return skipped("has no buffers" if not list(whole.buffers()) else "sequential state")
    ghost, _ = _split_both_ways(subject, shape)
    _backward(whole(values(shape, torch.float64).requires_grad_()), values(shape, torch.float64, 1))
    after = read_state(whole)
    change = max(relative_change(value.double(), ghost[n].double()) for n, value in after.items())
    detail = f"{PARTS} parts of {PART_SIZE}"
    return measured("exact" if change < EXACT else float(f"{change:.2g}"), detail)


def _to_split(subject: Subject) -> Shape | None:
    fitting = [shape for shape in subject.shapes if shape[0] == PART_SIZE and len(shape) > 2]
    fitting = fitting or [shape for shape in subject.shapes if shape[0] == PART_SIZE]
    return (PARTS * PART_SIZE, *fitting[0][1:]) if fitting else None


def _is_sequential(norm: nn.Module) -> bool:
    return any(getattr(module, "sequential_state", False) for module in norm.modules())


def _split_both_ways(subject: Subject, shape: Shape) -> tuple[State, State]:
    """Outputs, gradients and buffers after a ghost forward, and after accumulated parts."""
    x, weights = values(shape, torch.float64), values(shape, torch.float64, 1)
    norms = [subject.trained(shape, torch.float64) for _ in range(2)]
    torch.default_generator.manual_seed(0)
    ghost, given = Site(norms[0], "map", PART_SIZE), x.clone().requires_grad_()
    out = ghost.train()(given)
    _backward(out, weights)
    found = [_leave(norms[0], out, given)]
    torch.default_generator.manual_seed(0)
    plain, given = Site(norms[1], "map", None).train(), x.clone().requires_grad_()
    start, ends, outs = read_state(norms[1]), [], []
    for first in range(0, len(x), PART_SIZE):
        part = slice(first, first + PART_SIZE)
        outs.append(plain(given[part]))
        _backward(outs[-1], weights[part])
        ends.append(read_state(norms[1]))
        write_state(norms[1], start)
    write_state(norms[1], merge_state(norms[1], start, ends, [1 / PARTS] * PARTS))
    found.append(_leave(norms[1], torch.cat(outs), given))
    return found[0], found[1]


def _backward(out: Tensor, weights: Tensor) -> None:
    if out.requires_grad:
        (out * weights).sum().backward()


def _leave(norm: nn.Module, out: Tensor, x: Tensor) -> State:
    gradients = {f"the gradient of {n}": p.grad for n, p in norm.named_parameters()}
    gradients["the gradient of the input"] = x.grad
    found = {name: g for name, g in gradients.items() if g is not None}
    return {"the output": out.detach(), **found, **read_state(norm)}


def takes_autocast(subject: Subject) -> Answer:
    """Are outputs behind a linear layer under autocast finite, and near those of float32?"""
    for shape in subject.shapes:
        norm = subject.norm(shape)
        layer = nn.Linear(shape[1], shape[1])
        x = values(shape).movedim(1, -1)
        with torch.no_grad():
            plain = subject.norm(shape)(layer(x).movedim(-1, 1))
        with torch.autocast("cpu", torch.bfloat16):
            out = norm(layer(x).movedim(-1, 1))
        out.float().sum().backward()
        # Two samples hold few digits where their difference is small; so the median counts.
        scale = plain.square().mean().sqrt().clamp(min=1e-6)
        change = float((out.float() - plain).detach().abs().median() / scale)
        change = 0.0 if subject.draws else change  # other draws in each dtype
        gradients = [p.grad for p in norm.parameters() if p.grad is not None]
        if not all(t.isfinite().all() for t in (out, *gradients)) or change > HALF:
            return f"off by {change:.2g} of the output's size, {show(shape)}"
    return None


CHANNELS = 64
# Samples and positions: features, texts, maps.
KEPT_AT = ((1024,), (32, 64), (32, 16, 16))


def bytes_kept(subject: Subject) -> Finding:
    """How much memory does a training forward keep for its backward, without parameters?

    Each storage counts once; the input counts if it is kept.
    """
    fitting = [step for step in KEPT_AT if subject.with_dims(len(step) + 1)]
    if not fitting:
        return skipped("takes no features, texts or maps")
    shape = _shape_to_keep(fitting[-1], subject)
    norm, x = subject.norm(shape), values(shape).requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in (*norm.parameters(), *norm.buffers())}
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # keeps addresses from being reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    total = sum(kept.values())
    return measured(total, f"{total / (x.numel() * 4):.2g} x the input, {show(shape)} float32")


def _shape_to_keep(step: Shape, subject: Subject) -> Shape:
    """(N, C, *) with 64 channels, or with the norm's own number if 64 are refused."""
    shape = (step[0], CHANNELS, *step[1:])
    try:
        subject.norm(shape)
    except UserError:
        return (step[0], subject.num_features, *step[1:])
    return shape


COMPATIBILITY = (
    Check("torch.compile in training", partial(compiles, True)),
    Check("torch.compile in evaluation", partial(compiles, False)),
    Check("replicas under vmap", stacks),
    Check("ghost = accumulated", splits),
    Check("state of a split step", state_of_split),
    Check("autocast to bfloat16", takes_autocast),
)
COST = (Check("bytes kept for backward", bytes_kept),)
