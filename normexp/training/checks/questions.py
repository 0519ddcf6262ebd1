"""The table of questions about a norm by itself. A card and the contract are selections of it.

A new question is a function and a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from normexp.any_network.trial import differing_values
from normexp.errors import one_line
from normexp.norms.adapt import EPS_NAMES
from normexp.norms.site import Site, read_state, takes_mask
from normexp.training.checks.network import EnteredSite, SiteOnMaps
from normexp.training.checks.norm import LoneNorm, NormCase, Shape, show
from normexp.training.checks.probe import EVERYWHERE, MODES, Probe, change, moves, normal
from normexp.training.checks.question import (
    Answer,
    InputQuestion,
    ModeQuestion,
    NormQuestion,
    Question,
    Reply,
    measured,
    skipped,
)
from normexp.training.checks.wiring import find_stacking_fault, state_not_saved
from normexp.words import name_some

# ---------------------------------------------------------------- the contract

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ON_CONSTANTS = " on a constant input"
CONSTANT = 3.5  # its sums and means are exact, so a variance is 0
HALF_MEAN = 30.0  # squares in bfloat16 then keep no digit of a variance of 1
HALF_TOLERANCE = 0.03  # half precision may round the output, 2^-8 in bfloat16, not the statistics
CORNER = 0.05  # moves parameters off values at which a gate may be clamped
SETTLING_STEPS = 128  # longer than the warm-up of norms whose backward moves state
BEND = 0.05  # share of an output's change over the step; outputs that bend more are left out
# Step of the difference, relative and absolute tolerance: for float64, and for norms that always
# compute in float32.
FINE, COARSE = (1e-6, 1e-3, 1e-6), (1e-3, 1e-2, 1e-2)


def makes_parameters_at_once(norm: LoneNorm) -> Reply:
    case = norm.at(norm.shapes[0] if norm.shapes else (3, norm.num_features))
    module = case.build()
    before = dict(module.named_parameters())
    lazy = [name for name, parameter in before.items() if is_lazy(parameter)]
    with suppress(Exception):  # no input may be taken
        module(case.values())
    made = [name for name, p in module.named_parameters() if p is not before.get(name)]
    late = lazy or made
    return f"{late[0]} is made in the forward, too late for an optimizer" if late else None


def keeps_shape(norm: LoneNorm) -> Reply:
    return norm.problem or None


def keeps_dtype(norm: LoneNorm) -> Reply:
    case = norm.at(norm.shapes[0])
    missing: list[str] = []
    for dtype in DTYPES:
        name = _name_of(dtype)
        try:
            for training in MODES:
                out = case.build(dtype).train(training)(case.values(dtype))
                if out.dtype != dtype:
                    return f"{name} in, {_name_of(out.dtype)} out"
        except Exception as error:  # of foreign code, any kind
            if not isinstance(error, NotImplementedError) and "not implemented" not in str(error):
                return f"{name} {show(case.shape)}: {one_line(error)}"
            missing.append(name)
    return Answer(detail=f"this device lacks {', '.join(missing)}") if missing else None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_finite(case: NormCase) -> Reply:
    probe = Probe(case.build().train(case.training), (case.values(),))
    zeros = torch.zeros_like(case.values())
    inputs = {"": case.values(), ON_CONSTANTS: zeros + CONSTANT, f"{ON_CONSTANTS}, 0": zeros}
    for where, x in inputs.items():
        step = probe.observe(x, upstream=EVERYWHERE)
        results = {"the output": step.output}
        results |= {f"the gradient of {name}": g for name, g in step.gradients.items()}
        results |= {f"running state {name}": value for name, value in step.state.items()}
        names = [name for name, values in results.items() if not values.isfinite().all()]
        if names:
            return (
                f"{name_some(names)} not finite{where}; add eps (or clamp) before it divides or "
                "takes a root, power or logarithm"
            )
    return None


def gradient_is_right(case: NormCase) -> Reply:
    norm = case.trained().train(case.training)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.where(parameter == 0, CORNER, (1 - CORNER) * parameter))
    if case.training and _backward_moves_state(norm, case):
        for seed in range(SETTLING_STEPS):
            x = case.values(torch.float64, seed).requires_grad_()
            (norm(x.clone()) * case.values(torch.float64, seed + 1)).sum().backward()
    if find_wrong_slope(norm, case, *FINE) is None:
        return None
    wrong = find_wrong_slope(norm, case, *COARSE)
    if wrong is not None:
        return f"gradient of {wrong} is not the slope of the output"
    return Answer(detail=f"only to 1 %, as the norm computes below float64, {show(case.shape)}")


def _backward_moves_state(norm: nn.Module, case: NormCase) -> bool:
    probe = Probe(norm, (case.values(torch.float64),))
    before, after = probe.observe().state, probe.observe(upstream=EVERYWHERE).state
    return any(moves(value, after[name]) for name, value in before.items())


def find_wrong_slope(
    norm: nn.Module, case: NormCase, step: float, relative: float, absolute: float
) -> str | None:
    """The input or parameter whose gradient is not the slope along a random direction, or None.

    The norm is in float64; every forward starts from the same state and random draws. torch's
    gradcheck would refuse norms that compute in float32 inside.
    """
    tensors = {"the input": case.values(torch.float64)}
    tensors |= {n: p.detach().clone() for n, p in norm.named_parameters() if p.requires_grad}
    start = read_state(norm)

    def run(tensors: dict[str, Tensor]) -> Tensor:
        torch.default_generator.manual_seed(0)
        state = {name: value.clone() for name, value in start.items()}
        parameters = dict(tensors)
        x = parameters.pop("the input")
        return functional_call(norm, parameters | state, (x.clone(),))

    for tensor in tensors.values():
        tensor.requires_grad_()
    out = run(tensors)
    for name, tensor in tensors.items():
        direction = normal(tensor.shape, seed=4)
        with torch.no_grad():
            above = run(tensors | {name: tensor + step * direction})
            below = run(tensors | {name: tensor - step * direction})
        # Outputs with a corner within the step, as of relu, have no slope to compare.
        bend = (above + below - 2 * out.detach()).abs()
        has_slope = bend <= BEND * (above - below).abs() + step * absolute
        weights = case.values(torch.float64, 3) * has_slope
        (gradient,) = torch.autograd.grad(
            out, tensor, weights, retain_graph=True, materialize_grads=True
        )
        slope = float(((above - below) * weights).sum() / (2 * step))
        error = abs(slope - float((gradient * direction).sum()))
        if not error <= absolute + relative * max(float(gradient.norm()), abs(slope)):
            return name
    return None


def reaches_parameters(case: NormCase) -> Reply:
    norm = case.trained(torch.float32)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if parameters:
        (norm(case.values().requires_grad_().clone()) * case.values(seed=1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    return f"no gradient reaches {', '.join(without)}" if without else None


def saves_state(case: NormCase) -> Reply:
    return state_not_saved(case.build(), (case.values(),))


@torch.no_grad()
def is_deterministic(case: NormCase) -> Reply:
    norm = case.trained(torch.float32).eval()
    first = norm(case.values())
    norm(case.values(seed=1))
    again = norm(case.values())
    return "two forwards of one input differ" if change(first, again) else None


def mixes_as_declared(case: NormCase) -> Reply:
    moved = None if case.lone.may_mix else mixes_samples(case)
    return f"declares mixes_samples = False, and other samples move the {moved}" if moved else None


# ---------------------------------------------------------------- traits: what it reads and ignores

MANY = 128  # samples of a large batch
REAL = (5, 3, 2, 4)  # real positions of each sample of a padded text
TINY_EPS = 1e-12
EXACT = 1e-6  # of inputs in float64; a norm may compute in float32


def mixes_samples(case: NormCase) -> Reply:
    moved = case.probe().reads_across(0, gradients=case.training, state=True)
    if moved:
        return moved
    step = replace(case, shape=(MANY, *case.shape[1:]))  # a norm may split larger batches alone
    moved = step.probe().reads_across(0, all_pairs=False)
    return f"{moved} among {MANY} samples" if moved else None


def pools_channels(case: NormCase) -> Reply:
    return case.probe().reads_across(1, gradients=case.training)


def pools_positions(case: NormCase) -> Reply:
    return case.probe().reads_across(2, gradients=case.training)


def reads_future(case: NormCase) -> Reply:
    return "output" if case.probe().reads_later() else None


def reads_masked(case: NormCase) -> Reply:
    norm = case.trained(torch.float32)
    if not takes_mask(norm):
        return skipped(
            "its forward has no argument `mask`; if it pools positions, padding is removed"
        )
    shape = torch.Size(case.shape)  # (N, C, T)
    mask = torch.arange(shape[2]) < torch.tensor(REAL)[:, None]
    module = SiteOnMaps(Site(norm, "sequence", None), shape[2:])
    site = EnteredSite(["norm"], module, shape, mask)
    return "output" if site.probe(case.training, mask).reads_padding() else None


def reads_scale(case: NormCase) -> Reply:
    x = case.values(torch.float64)
    return _output_moves(case, [4.0 * x, 0.3 * x])


def reads_shift(case: NormCase) -> Reply:
    x = case.values(torch.float64)
    return _output_moves(case, [x + 3.0, x - 20.0])


def _output_moves(case: NormCase, changed_inputs: Sequence[Tensor]) -> Reply:
    """Compares with the output of the unchanged input, with a tiny eps."""
    norm = case.trained().train(case.training)
    for module in norm.modules():
        for name, value in [*vars(module).items()]:
            if name.strip("_") in EPS_NAMES and isinstance(value, float):
                setattr(module, name, TINY_EPS)
    probe = Probe(norm, (case.values(torch.float64),))
    before = probe.observe().output
    changed = any(moves(before, probe.observe(x).output) for x in changed_inputs)
    return "output" if changed else None


def has_running_state(case: NormCase) -> Answer:
    fresh, once, twice = case.build(), case.build(), case.build()
    once(1 + 2 * case.values())
    twice(1 + 2 * case.values(seed=1))
    twice(1 + 2 * case.values())
    saved = fresh.state_dict(keep_vars=True)
    changed = [name for name in differing_values(once, fresh) if name in saved]
    # An attribute that holds values of the last input alone is no state.
    changed += [name for name in differing_values(twice, once) if name not in saved]
    return measured("yes", ", ".join(changed)) if changed else measured("no")


# ---------------------------------------------------------------- how it can be trained


def is_wide_in_half(norm: LoneNorm) -> Answer:
    """Parameters stay in float32, as in mixed precision, if the norm supports that."""
    if norm.draws:
        return skipped("draws random numbers, different ones in each dtype")
    for shape in norm.shapes:
        case = norm.at(shape)
        x = (HALF_MEAN + case.values()).to(torch.bfloat16)
        try:
            try:
                out = case.build()(x)
            except RuntimeError:  # the kernel needs one dtype for all tensors
                out = case.build(torch.bfloat16)(x)
        except NotImplementedError:
            return skipped("this device lacks bfloat16")
        error = change(case.build(torch.float64)(x.double()), out)
        if error > HALF_TOLERANCE:
            return measured(
                "no",
                f"off by {error:.2g} of the largest output, {show(shape)}: train it in float32, or "
                "compute its statistics so, as of x.float(), and return x.dtype",
            )
    return measured("yes")


def stacks(norm: LoneNorm) -> Answer:
    if norm.draws:
        return skipped("draws random numbers, so each seed trains by itself")
    for shape in norm.shapes:
        case = norm.at(shape)
        sites: list[nn.Module] = [Site(case.trained(), "map", None) for _ in range(2)]
        x = torch.stack([case.values(torch.float64, seed) for seed in (3, 4)])
        batch = {"inputs": x.requires_grad_()}
        fault = find_stacking_fault(sites, batch, tolerance=EXACT)
        if fault:
            return measured("no", f"{fault}, {show(case.shape)}")
    return measured("yes")


# ---------------------------------------------------------------- the table


def largest(norm: LoneNorm) -> Sequence[Shape]:
    return norm.shapes[-1:]


def with_positions(norm: LoneNorm) -> Sequence[Shape]:
    return norm.with_dims(3, 4, 5)


def texts(norm: LoneNorm) -> Sequence[Shape]:
    return norm.with_dims(3)


UNCHANGED = "Is the output the same after such a change of the input, with a tiny eps?"
BUILT = "can be built"  # answered by opening the norm
SHAPE_KEPT, FINITE = "shape kept", "finite"
MIXES_SAMPLES, READS_FUTURE = "mixes samples", "reads the future"
WIDE_IN_HALF = "statistics wide in bfloat16"
OF_NORMS: tuple[Question, ...] = (
    NormQuestion(
        "parameters made at once",
        "Does __init__ make every parameter, in time for the optimizer?",
        makes_parameters_at_once,
    ),
    NormQuestion(SHAPE_KEPT, "Is any input mapped to its own shape?", keeps_shape),
    InputQuestion(
        FINITE,
        "Are outputs, gradients and running state finite, on constants and zeros too?",
        is_finite,
        modes=MODES,
    ),
    NormQuestion("dtype kept", "Does the output have the dtype of the input?", keeps_dtype),
    InputQuestion(
        "gradient for every parameter",
        "Does one backward reach every parameter?",
        reaches_parameters,
        shapes=largest,
    ),
    InputQuestion(
        "gradient",
        "Does autograd agree with differences, for the input and every parameter?",
        gradient_is_right,
        modes=MODES,
    ),
    InputQuestion(
        "buffers saved",
        "Does a norm restored from its state_dict go on as the original?",
        saves_state,
    ),
    InputQuestion(
        "deterministic in evaluation",
        "Do two forwards of one input agree in evaluation?",
        is_deterministic,
    ),
    InputQuestion(
        "mixes samples as declared",
        "If it declares mixes_samples = False, do outputs, gradients and state agree?",
        mixes_as_declared,
        modes=MODES,
    ),
    ModeQuestion(
        MIXES_SAMPLES,
        "Do other samples move an output, a gradient or a running state?",
        mixes_samples,
    ),
    ModeQuestion(
        "pools channels", "Do other channels move an output or a gradient?", pools_channels
    ),
    ModeQuestion(
        "pools positions",
        "Do other positions move an output or a gradient?",
        pools_positions,
        shapes=with_positions,
    ),
    ModeQuestion(
        READS_FUTURE,
        "Do later positions of a text (N, C, T) move an earlier output?",
        reads_future,
        shapes=texts,
    ),
    ModeQuestion(
        "reads padding",
        "Does the content or amount of masked positions move real outputs or the state?",
        reads_masked,
        shapes=texts,
    ),
    ModeQuestion("ignores input scale", UNCHANGED, reads_scale, wants_still=True),
    ModeQuestion("ignores input shift", UNCHANGED, reads_shift, wants_still=True),
    InputQuestion(
        "running state",
        "Does a training forward change buffers, parameters, or an attribute that remembers more?",
        has_running_state,
        section="traits",
        shapes=largest,
    ),
    NormQuestion(
        WIDE_IN_HALF,
        "Do bfloat16 inputs at mean 30 give the outputs of float64, up to rounding?",
        is_wide_in_half,
        section="traits",
    ),
    NormQuestion(
        "replicas under vmap",
        "Do two replicas under vmap get the outputs, gradients and state of each alone?",
        stacks,
        section="traits",
    ),
)
CONTRACT = (BUILT, *(question.name for question in OF_NORMS if question.section == "contract"))
