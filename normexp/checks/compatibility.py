"""Compatibility: a norm under torch.compile, vmap, splits and autocast, against the plain norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.batching.replicas import InTurn, Stacked
from normexp.checks.probe import change, moves
from normexp.checks.subject import (
    Answer,
    Check,
    Line,
    Shape,
    Subject,
    every,
    largest,
    measured,
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


def compiles(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Does torch.compile trace forward and backward as one graph, with the same outputs?

    Without code generation, because only tracing is tested.
    """
    norm, own = (subject.trained(shape, torch.float32).train(training) for _ in range(2))
    torch.compiler.reset()
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.default_generator.manual_seed(0)
    try:
        out = compiled(values(shape).requires_grad_())
        out.sum().backward()
    except Exception as error:  # dynamo and foreign code may raise anything
        return _reason(error)
    finally:
        torch.compiler.reset()
    torch.default_generator.manual_seed(0)
    moved = change(norm(values(shape)), out)
    return f"compiled outputs differ by {moved:.2g}" if moved > CLOSE else None


def _reason(error: Exception) -> str:
    """The line of dynamo's long message that names the graph break."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("Explanation:")]
    return (named or lines or [type(error).__name__])[0].removeprefix("Explanation: ")


# ---------------------------------------------------------------- replicas and parts of a step


def stacks(subject: Subject, shape: Shape) -> str | None:
    """Have two replicas under vmap the outputs, gradients and state of each alone?"""
    sites = []
    for seed in (1, 2):
        sites.append(_site(subject, shape))
        torch.default_generator.manual_seed(seed)
        with torch.no_grad():
            for parameter in sites[-1].parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    x = torch.stack([values(shape, torch.float64, seed) for seed in (3, 4)])
    try:
        both = InTurn(sites), Stacked(sites)  # which copies them
        alone, stacked = (_step(replicas, x) for replicas in both)
    except Exception as error:  # vmap and foreign code may raise anything
        return first_line(error)
    moved = _first_moved(alone, stacked)
    return f"{moved} differs under vmap" if moved else None


def splits(subject: Subject, shape: Shape) -> Answer:
    """Have ghost groups of one forward the outputs, gradients and state of micro-batches?"""
    if _is_sequential(subject.norm(shape)):
        return measured("refused", "declares its state sequential")
    x = values(shape, torch.float64)[None]
    accumulated = _step(InTurn([_site(subject, shape)]), x, PARTS)
    ghost = _step(InTurn([_site(subject, shape, PART_SIZE)]), x)
    moved = _first_moved(accumulated, ghost)
    return f"{moved} differs, {PARTS} groups of {PART_SIZE}" if moved else None


def state_of_split(subject: Subject, shape: Shape) -> Line:
    """How far is the state after a split step from that of the same step unsplit?"""
    whole = _site(subject, shape)
    if not list(whole.buffers()) or _is_sequential(whole):
        return skipped("has no buffers" if not list(whole.buffers()) else "sequential state")
    x = values(shape, torch.float64)[None]
    after, ghost = (_step(InTurn([s]), x) for s in (whole, _site(subject, shape, PART_SIZE)))
    far = max(change(after[name], ghost[name]) for name, _ in whole.norm.named_buffers())
    detail = f"{PARTS} parts of {PART_SIZE}"
    return measured("exact" if far < EXACT else float(f"{far:.2g}"), detail)


def batch_to_split(subject: Subject) -> list[Shape]:
    """The smallest batch of PART_SIZE, with positions if the norm takes any, PARTS times."""
    small = [shape for shape in subject.shapes if shape[0] == PART_SIZE]
    small = [shape for shape in small if len(shape) > 2] or small
    return [(PARTS * PART_SIZE, *shape[1:]) for shape in small[:1]]


def _is_sequential(norm: nn.Module) -> bool:
    return any(getattr(module, "sequential_state", False) for module in norm.modules())


def _site(subject: Subject, shape: Shape, norm_batch_size: int | None = None) -> Site:
    site = Site(subject.trained(shape), "map", norm_batch_size)
    torch.default_generator.manual_seed(0)  # the draws of the step
    return site


def _step(replicas: InTurn | Stacked, x: Tensor, num_parts: int = 1) -> State:
    """What a training step in equal parts computes and leaves, each (S, ...), by name.

    Args:
        x: (S, N, C, *).
    """
    x = x.clone().requires_grad_()
    weights = values(tuple(x.shape), torch.float64, 1)
    start, outs, ends = read_state(replicas), [], []
    for part, own in zip(x.chunk(num_parts, 1), weights.chunk(num_parts, 1), strict=True):
        write_state(replicas, start)
        outs.append(replicas.measure({"inputs": part}, lambda output, _: output))
        if outs[-1].requires_grad:
            (outs[-1] * own).sum().backward()
        ends.append(read_state(replicas))
    if num_parts > 1:
        shares = [1 / num_parts] * num_parts
        write_state(replicas, merge_state(replicas, start, ends, shares))
    left = []
    for tree in replicas.trees:
        norm = tree.get_submodule("norm")
        gradients = {f"the gradient of {n}": p.grad for n, p in norm.named_parameters()}
        left.append({n: g for n, g in gradients.items() if g is not None} | read_state(norm))
    if not replicas.is_stacked:
        left = [{name: torch.stack([own[name] for own in left]) for name in left[0]}]
    slope = {} if x.grad is None else {"the gradient of the input": x.grad}
    return {"the output": torch.cat(outs, 1), **slope, **left[0]}


def _first_moved(before: State, after: State) -> str | None:
    names = (n for n in before if moves(before[n], after[n], tolerance=EXACT))
    return next(names, None)


# ---------------------------------------------------------------- autocast and memory


def takes_autocast(subject: Subject, shape: Shape) -> str | None:
    """Are outputs behind a linear layer under autocast finite, and near those of float32?"""
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
    moved = float((out.float() - plain).detach().abs().median() / scale)
    moved = 0.0 if subject.draws else moved  # other draws in each dtype
    gradients = [p.grad for p in norm.parameters() if p.grad is not None]
    if not all(t.isfinite().all() for t in (out, *gradients)) or moved > HALF:
        return f"off by {moved:.2g} of the output's size"
    return None


CHANNELS = 64
# Samples and positions: maps, texts, features.
KEPT_AT = ((32, 16, 16), (32, 64), (1024,))


def bytes_kept(subject: Subject) -> Line:
    """How much memory does a training forward keep for its backward, without parameters?

    Each storage counts once; the input counts if it is kept.
    """
    fitting = [step for step in KEPT_AT if subject.with_dims(len(step) + 1)]
    if not fitting:
        return skipped("takes no features, texts or maps")
    norm, shape = _for_memory(fitting[0], subject)
    x = values(shape).requires_grad_()
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


def _for_memory(step: Shape, subject: Subject) -> tuple[nn.Module, Shape]:
    """The norm at 64 channels, or at its own number if 64 are refused, and its input's shape."""
    shape = (step[0], CHANNELS, *step[1:])
    try:
        return subject.norm(shape), shape
    except UserError:
        shape = (step[0], subject.num_features, *step[1:])
        return subject.norm(shape), shape


COMPATIBILITY = (
    Check("torch.compile in training", compiles, largest, (True,)),
    Check("torch.compile in evaluation", compiles, largest, (False,)),
    Check("replicas under vmap", stacks, every),
    Check("ghost = accumulated", splits, batch_to_split),
    Check("state of a split step", state_of_split, batch_to_split),
    Check("autocast to bfloat16", takes_autocast, every),
)
COST = (Check("bytes kept for backward", bytes_kept),)
