"""Questions that compute one result in two ways: precision, gradients, compiler, vmap, splits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.batching.replicas import Batch, InTurn, Stacked
from normexp.checks.asking import Answer, Reply, measured, mode_name, show, skipped
from normexp.checks.lone_norm import LoneNorm, NormCase, Shape, values
from normexp.checks.probe import (
    EVERYWHERE,
    REFUSALS,
    TOLERANCE,
    Probe,
    change,
    changes,
    fixed_draws,
    moved_state,
    moves,
    normal,
)
from normexp.checks.sites import name_some
from normexp.errors import UserError, first_line
from normexp.norms.contract import State
from normexp.norms.site import Site
from normexp.norms.state import is_sequential, merge_state, read_state, write_state

DRAWS = "draws random numbers, different ones in each dtype"

# ---------------------------------------------------------------- half precision

HALF_MEAN = 30.0  # squares in bfloat16 then keep no digit of a variance of 1
HALF_TOLERANCE = 0.03  # half precision may round the output, 2^-8 in bfloat16, not the statistics
# A norm that always returns half precision: steps of the input at this mean, which bfloat16 and
# float16 round to 2 and 0.25, must move outputs evenly.
STAIRS_MEAN, STAIRS_STEP, NUM_STAIRS, UNEVEN = 300.0, 0.05, 8, 0.06


def keeps_digits_in_half(case: NormCase) -> Reply:
    """Do bfloat16 inputs at mean 30 give the outputs of float64, up to rounding?

    Parameters stay in float32, as in mixed precision, if the norm supports that.
    """
    if case.lone.draws:
        return skipped(DRAWS)
    if case.lone.computes_in_half:
        return _climbs_evenly(case)
    x = (HALF_MEAN + case.values()).to(torch.bfloat16)
    try:
        try:
            out = case.build()(x)
        except RuntimeError:  # the kernel needs one dtype for all tensors
            out = case.build(torch.bfloat16)(x)
    except NotImplementedError:
        return skipped("this device lacks bfloat16")
    moved = change(case.build(torch.float64)(x.double()), out)
    if moved <= HALF_TOLERANCE:
        return None
    return (
        f"off by {moved:.2g} of the largest output at mean 30; compute statistics in float32, as "
        "of x.float(), and return x.dtype"
    )


@torch.no_grad()
def _climbs_evenly(case: NormCase) -> Reply:
    """Do equal steps of a float64 input move outputs equally, up to the outputs' own rounding?"""
    x, norm = STAIRS_MEAN + case.values(torch.float64), case.build(torch.float64)
    step = STAIRS_STEP * case.values(torch.float64, 1)
    outs = torch.stack([norm(x + index * step) for index in range(NUM_STAIRS)])
    if not outs.isfinite().all():
        return f"float64 inputs at mean {STAIRS_MEAN:g} overflow, as if computed in half precision"
    uneven = outs.diff(n=2, dim=0).abs().amax() / outs.abs().amax().clamp(min=1e-6)
    if uneven > UNEVEN:
        return f"float64 inputs at mean {STAIRS_MEAN:g} round, as if computed in half precision"
    return Answer(detail="the output is rounded to half precision")


# ---------------------------------------------------------------- slope

CORNER = 0.05  # moves parameters off values at which a gate may be clamped
SETTLING_STEPS = 128  # longer than the warm-up of norms whose backward moves state
BEND = 0.05  # share of an output's change over the step; outputs that bend more are left out
# Step of the difference, relative and absolute tolerance: for float64, and for norms that always
# compute in float32.
FINE, COARSE = (1e-6, 1e-3, 1e-6), (1e-3, 1e-2, 1e-2)


def gradient_is_right(case: NormCase, training: bool) -> Reply:
    """Does autograd agree with differences, for the input and every parameter?"""
    if case.lone.computes_in_half:
        return skipped("computes in half precision, too coarse for differences")
    norm = case.trained().train(training)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.where(parameter == 0, CORNER, (1 - CORNER) * parameter))
    steps = SETTLING_STEPS if training and _backward_moves_state(norm, case) else 0
    for seed in range(steps):
        weights = case.values(torch.float64, seed=seed + 1)
        (norm(case.values(torch.float64, seed).requires_grad_()) * weights).sum().backward()
    if find_wrong_slope(norm, case, *FINE) is None:
        return None
    wrong = find_wrong_slope(norm, case, *COARSE)
    if wrong is not None:
        after = f" after {steps} steps" if steps else ""
        return f"gradient of {wrong} is not the slope of the output{after}"
    return Answer(detail=f"only to 1 %, as the norm computes below float64, {show(case.shape)}")


def _backward_moves_state(norm: nn.Module, case: NormCase) -> bool:
    """True if a backward changes buffers, as in norms with statistics of gradients."""
    probe = Probe(norm, case.values(torch.float64))
    states = (probe.observe(upstream=upstream).state for upstream in (None, EVERYWHERE))
    return moved_state(*states) is not None


def find_wrong_slope(
    norm: nn.Module, case: NormCase, step: float, relative: float, absolute: float
) -> str | None:
    """The input or parameter whose gradient is not the slope along a random direction, or None.

    The norm is in float64; every forward starts from the same state and random draws.
    """
    named = {n: p.detach().clone() for n, p in norm.named_parameters() if p.requires_grad}
    start = read_state(norm)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        state = {name: value.clone() for name, value in start.items()}
        tensors = {**dict(zip(named, given, strict=True)), **state}
        return functional_call(norm, tensors, (x,))

    inputs = [t.requires_grad_() for t in (case.values(torch.float64), *named.values())]
    out = run(*inputs)
    for index, name in enumerate(["the input", *named]):
        direction = values(tuple(inputs[index].shape), torch.float64, seed=4)
        with torch.no_grad():
            above, below = (
                run(*inputs[:index], inputs[index] + by * direction, *inputs[index + 1 :])
                for by in (step, -step)
            )
        # Outputs with a corner within the step, as of relu, have no slope to compare.
        bend, change = (above + below - 2 * out.detach()).abs(), (above - below).abs()
        weights = case.values(torch.float64, 3) * (bend <= BEND * change + step * absolute)
        (gradient,) = torch.autograd.grad(
            out, inputs[index], weights, retain_graph=True, materialize_grads=True
        )
        slope = float(((above - below) * weights).sum() / (2 * step))
        error = abs(slope - float((gradient * direction).sum()))
        if not error <= absolute + relative * max(float(gradient.norm()), abs(slope)):
            return name
    return None


# ---------------------------------------------------------------- loss of digits

# The error of float32 against float64 on the same inputs, relative to the largest output. Rounding
# the input alone costs 6e-4 of a deviation of 1.
FAR_MEAN, FAR_TOLERANCE = 1e4, 0.05
ERROR_QUANTILE = 0.75  # not the maximum: a channel of few, close values keeps few digits
CONSTANT = 3.5  # its sums and means are exact, so a variance is 0


def keeps_digits_far_from_zero(case: NormCase) -> Reply:
    """Does float32 give the outputs of float64, up to rounding?"""
    if case.lone.draws:
        return skipped(DRAWS)
    x = FAR_MEAN + case.values()
    out = case.build()(x)
    if not out.isfinite().all():
        return "not finite"
    exact = case.build(torch.float64)(x.double())
    error = float(changes(exact, out).flatten().quantile(ERROR_QUANTILE))
    return f"off by {error:.2g} of the largest output" if error > FAR_TOLERANCE else None


def is_finite_on(
    transform: Callable[[Tensor], Tensor], case: NormCase, training: bool
) -> str | None:
    """Are outputs, gradients and running state finite?"""
    probe = case.probe(training, torch.float32)
    step = probe.observe(transform(probe.inputs[0]), upstream=EVERYWHERE)
    results = {"output": step.output}
    if step.input_gradient is not None:
        results["gradient of the input"] = step.input_gradient
    results |= {f"gradient of {name}": g for name, g in step.parameter_gradients.items()}
    results |= {f"running state {name}": value for name, value in step.state.items()}
    names = [name for name, values in results.items() if not values.isfinite().all()]
    if not names:
        return None
    return (
        f"{name_some(names)} not finite; bound what it divides by, or takes a root, power or "
        "logarithm of, as with eps or clamp"
    )


def one_sample(norm: LoneNorm) -> list[Shape]:
    return [(1, *shape[1:]) for shape in norm.shapes]


def one_position(norm: LoneNorm) -> list[Shape]:
    shapes = {(*shape[:2], *[1] * len(shape[2:])) for shape in norm.with_dims(3, 4, 5)}
    return sorted(shapes, key=len)


def no_sample(norm: LoneNorm) -> list[Shape]:
    return [(0, *norm.shapes[0][1:])]


@torch.no_grad()
def handles_few_values(case: NormCase, training: bool) -> Reply:
    """Is so small an input refused, or its output finite and, in training, not constant?"""
    norm = case.build().train(training)
    try:
        out, other = norm(case.values()), norm(case.values(seed=1))
    except REFUSALS as error:
        return measured(
            "refused", f"{mode_name(training)}, {show(case.shape)}: {first_line(error)}"
        )
    if out.shape != case.shape:
        return f"an output of {show(out.shape)}"
    if not all(t.isfinite().all() for t in (out, *norm.buffers())):
        return "not finite"
    if training and out.numel() and not moves(out, other, tolerance=1e-6):
        return "every input has one output"
    return None


# ---------------------------------------------------------------- compiler

EXACT = 1e-6  # of inputs in float64; a norm may compute in float32
OUTPUT_SCALE, MIN_GRADIENT = 1e-2, 1e-3  # smaller outputs, and gradients or state, count as these
PARTS, PART_SIZE = 4, 2


def compiles(case: NormCase, training: bool) -> str | None:
    """Does torch.compile trace forward and backward as one graph, with the same outputs?

    Without code generation, because only tracing is tested.
    """
    norm, twin = (case.trained(torch.float32).train(training) for _ in range(2))
    torch.compiler.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.default_generator.manual_seed(0)
    try:
        out = compiled(case.values().requires_grad_())
        out.sum().backward()
    except Exception as error:  # dynamo and foreign code may raise anything
        return _reason(error)
    finally:
        torch.compiler.reset()
    torch.default_generator.manual_seed(0)
    moved = change(norm(case.values()), out)
    return f"compiled outputs differ by {moved:.2g}" if moved > TOLERANCE else None


def _reason(error: Exception) -> str:
    """The line of dynamo's long message that explains the graph break."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("Explanation:")]
    return (named or lines or [type(error).__name__])[0].removeprefix("Explanation: ")


# ---------------------------------------------------------------- replicas and parts of a step


def stacks(case: NormCase) -> Reply:
    """Do two replicas under vmap get the outputs, gradients and state of each alone?"""
    if case.lone.draws:
        return skipped("draws random numbers, so each seed trains by itself")
    if not case.lone.takes_float64:
        return skipped("asks in float64, in which the norm fails")
    sites = [_site(case) for _ in range(2)]
    for seed, site in enumerate(sites):
        with fixed_draws(seed + 1), torch.no_grad():
            for parameter in site.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    x = torch.stack([case.values(torch.float64, seed) for seed in (3, 4)])
    return find_stacking_fault(sites, {"inputs": x.requires_grad_()}, tolerance=EXACT)


def find_stacking_fault(
    networks: Sequence[nn.Module],
    batch: Batch,
    *,
    with_backward: bool = True,
    tolerance: float = TOLERANCE,
) -> str | None:
    """Says why these networks cannot run under vmap; None if they train as each alone does.

    Args:
        batch: of each network, (S, N, ...).
        with_backward: gradients and state are compared as well as outputs.
    """
    steps = []
    for form in (InTurn, Stacked):
        try:  # the first form must not move what the second begins from, which copies by itself
            replicas = form([*map(copy.deepcopy, networks)] if form is InTurn else [*networks])
            steps.append(_training_step(replicas, batch, with_backward=with_backward))
        except (
            Exception
        ) as error:  # vmap and foreign code may raise anything; the fallback is exact
            return first_line(error)
        try:
            parameters = {id(p): p for tree in replicas.trees for p in tree.parameters()}
            copy.deepcopy(replicas, parameters)  # which are as they were
        except Exception:  # a tensor of vmap, or foreign code
            return "a module keeps a tensor of its forward outside its buffers"
    alone, stacked = steps
    moved = _first_moved(alone, stacked, tolerance)
    return f"{moved} differs under vmap" if moved else None


def splits(case: NormCase) -> Reply:
    """Do ghost groups of one forward get the outputs, gradients and state of micro-batches?"""
    if is_sequential(case.build()):
        return measured("refused", "declares its state sequential")
    batch = {"inputs": case.values(torch.float64)[None].requires_grad_()}
    accumulated = _training_step(InTurn([_site(case)]), batch, PARTS)
    ghost = _training_step(InTurn([_site(case, PART_SIZE)]), batch)
    moved = _first_moved(accumulated, ghost, EXACT)
    return f"{moved} differs, {PARTS} groups of {PART_SIZE}" if moved else None


def state_of_split(case: NormCase) -> Answer:
    """How far is the state after a split step from the state after the same step unsplit?"""
    whole = _site(case)
    if not list(whole.buffers()) or is_sequential(whole):
        return skipped("has no buffers" if not list(whole.buffers()) else "sequential state")
    batch = {"inputs": case.values(torch.float64)[None]}
    after, ghost = (_training_step(InTurn([s]), batch) for s in (whole, _site(case, PART_SIZE)))
    far = max(change(after[name], ghost[name]) for name, _ in whole.named_buffers())
    detail = f"{PARTS} parts of {PART_SIZE}"
    return measured("exact" if far < EXACT else float(f"{far:.2g}"), detail)


def batch_to_split(norm: LoneNorm) -> list[Shape]:
    """The smallest batch of PART_SIZE, with positions if the norm takes any, PARTS times."""
    small = [shape for shape in norm.shapes if shape[0] == PART_SIZE]
    small = [shape for shape in small if len(shape) > 2] or small
    return [(PARTS * PART_SIZE, *shape[1:]) for shape in small[:1]]


def _site(case: NormCase, norm_batch_size: int | None = None) -> Site:
    return Site(case.trained(), "map", norm_batch_size)


def _training_step(
    replicas: InTurn | Stacked, batch: Batch, num_parts: int = 1, *, with_backward: bool = True
) -> State:
    """Outputs and, with a backward, gradients and final state of a step in equal parts, by name.

    Every result is (S, ...). Inputs that require a gradient have theirs among the results.
    """
    inputs = batch["inputs"]
    inputs.grad = None
    start, outputs, ends = read_state(replicas), [], []
    with fixed_draws(), torch.set_grad_enabled(with_backward):
        for index in range(num_parts):
            write_state(replicas, start)
            part = {name: value.chunk(num_parts, 1)[index] for name, value in batch.items()}
            outputs.append(replicas.measure(part, lambda output, _: output))
            if outputs[-1].requires_grad:
                weights = normal((*inputs.shape[:2], *outputs[-1].shape[2:]), 1)
                weights = weights.chunk(num_parts, 1)[index].to(outputs[-1].dtype)
                (outputs[-1] * weights).sum().backward()
            ends.append(read_state(replicas))
    if num_parts > 1:
        shares = [1 / num_parts] * num_parts
        write_state(replicas, merge_state(replicas, start, ends, shares))
    results = {"the output": torch.cat(outputs, 1).detach()}
    if not with_backward:
        return results
    if inputs.grad is not None:
        results["the gradient of the input"] = inputs.grad
    of_trees = []
    for tree in replicas.trees:
        slopes = {f"the gradient of {name}": p.grad for name, p in tree.named_parameters()}
        of_trees.append({n: g for n, g in slopes.items() if g is not None} | read_state(tree))
    if replicas.is_stacked:
        return results | of_trees[0]
    return results | {name: torch.stack([t[name] for t in of_trees]) for name in of_trees[0]}


def _first_moved(before: State, after: State, tolerance: float) -> str | None:
    """The first result that differs or is missing; values are compared on their usual scales."""
    for name, value in before.items():
        scale = OUTPUT_SCALE if name == "the output" else MIN_GRADIENT
        if name not in after or moves(value, after[name], scale=scale, tolerance=tolerance):
            return name
    return None


# ---------------------------------------------------------------- autocast and memory


def takes_autocast(case: NormCase) -> str | None:
    """Are outputs behind a linear layer under autocast finite, and close to float32's?"""
    norm = case.build()
    layer = nn.Linear(case.shape[1], case.shape[1])
    x = case.values().movedim(1, -1)
    with torch.no_grad():
        plain = case.build()(layer(x).movedim(-1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(layer(x).movedim(-1, 1))
    out.float().sum().backward()
    # The median: where two samples are close, their difference keeps few digits.
    scale = plain.square().mean().sqrt().clamp(min=1e-6)
    moved = float((out.float() - plain).detach().abs().median() / scale)
    moved = 0.0 if case.lone.draws else moved  # other draws in each dtype
    gradients = [p.grad for p in norm.parameters() if p.grad is not None]
    if not all(t.isfinite().all() for t in (out, *gradients)) or moved > HALF_TOLERANCE:
        return f"off by {moved:.2g} of the output's size"
    return None


CHANNELS = 64
# Samples and positions: maps, texts, features.
KEPT_AT = ((32, 16, 16), (32, 64), (1024,))


def bytes_kept(lone: LoneNorm) -> Answer:
    """How many bytes, without parameters, does a training forward keep for its backward?

    Each storage counts once; the input counts if the norm keeps it.
    """
    fitting = [step for step in KEPT_AT if lone.with_dims(len(step) + 1)]
    if not fitting:
        return skipped("takes no features, texts or maps")
    norm, shape = _for_memory(fitting[0], lone)
    x = values(shape).requires_grad_()
    total = kept_for_backward(norm, x)
    return measured(total, f"{total / (x.numel() * 4):.2g} x the input, {show(shape)} float32")


def kept_for_backward(module: nn.Module, *inputs: Tensor) -> int:
    """Bytes, without parameters and buffers, that a forward keeps for its backward.

    Each storage counts once; an input counts if the module keeps it.
    """
    of_module = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # keeps addresses from being reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_module:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return sum(kept.values())


def _for_memory(step: Shape, lone: LoneNorm) -> tuple[nn.Module, Shape]:
    """The norm at 64 channels, or at its own number if 64 are refused, and its input's shape."""
    shape = (step[0], CHANNELS, *step[1:])
    try:
        return lone.at(shape).build(), shape
    except UserError:
        shape = (step[0], lone.num_features, *step[1:])
        return lone.at(shape).build(), shape
