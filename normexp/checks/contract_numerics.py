"""Contract: gradients, and inputs at which a formula loses its digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

from normexp.checks.card import PASSED, Checks, Finding, failed, measured, skipped
from normexp.checks.contract_shapes import computes_in_half
from normexp.checks.contract_slope import (
    SETTLING_STEPS,
    as_function,
    backward_moves_state,
    find_wrong_slope,
)
from normexp.checks.probing import first_line
from normexp.checks.subject import (
    DRAWS,
    Shape,
    Subject,
    relative_change,
    show,
    values,
)

# Of float32 against float64 on the same inputs, relative to the largest output: rounding of the
# input alone leaves 6e-5 of a deviation of 1 at mean 1e3, and ten times that at 1e4.
TOLERANCES = {1e3: 0.01, 1e4: 0.05}
SCALES = (1e-12, 1e12)
CONSTANT = 3.5  # of which sums and means are exact, so that a variance is 0
CORNER = 0.05
COARSE = {"eps": 1e-3, "atol": 0.01, "rtol": 0.01}  # steps that show in float32
CHECKED_SHAPES = 3  # of the smallest, for the many forwards of a gradient by differences


def gradient_is_right(training: bool, subject: Subject) -> Finding:
    """Autograd agrees with differences in float64, for the input and every parameter.

    Where it does not, larger differences tell a norm that computes in float32 from a wrong one.
    """
    if computes_in_half(subject):
        return skipped("half precision inside leaves no differences to compare with")
    shown = ""
    for shape in subject.shapes[:CHECKED_SHAPES]:
        norm = subject.trained(shape, torch.float64).train(training)
        _move_off_corners(norm)
        if training and backward_moves_state(norm, shape):
            shown = f"in one direction, after {SETTLING_STEPS} steps, as its backward moves state"
            wrong = find_wrong_slope(norm, shape)
            if wrong is not None:
                return failed(f"gradient of {wrong} is not the slope of the output, {shown}")
            continue
        wrong = _find_wrong_gradient(norm, shape)
        if wrong is None:
            continue
        wrong = _find_wrong_gradient(norm, shape, **COARSE)
        if wrong is not None:
            return failed(f"gradient of {wrong} is not the slope of the output, {show(shape)}")
        shown = f"to 1 % alone, as it computes below float64, {show(shape)}"
    return Finding("pass", detail=shown)


def _find_wrong_gradient(norm: nn.Module, shape: Shape, **precision: Any) -> str | None:
    names, run, inputs = as_function(norm, shape)
    try:
        gradcheck(run, inputs, **precision)
    except GradcheckError as error:
        return names[_index_in(str(error))]
    return None


def _move_off_corners(norm: nn.Module) -> None:
    """Parameters a little smaller, zeros a little larger: a gate may start where it is clamped."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.where(parameter == 0, CORNER, (1 - CORNER) * parameter))


def _index_in(message: str) -> int:
    """Which input gradcheck names; the first where it names none."""
    _, found, rest = message.partition("with respect to input ")
    digits = "".join(c for c in rest.split(",")[0] if c.isdigit())
    return int(digits) if found and digits else 0


def keeps_digits_far_from_zero(mean: float, subject: Subject) -> Finding:
    """Training outputs of float32 are finite, and those of float64 up to rounding."""
    if subject.draws:
        return skipped(DRAWS)
    for shape in subject.shapes:
        x = mean + values(shape)
        out = subject.norm(shape)(x).detach()
        if not out.isfinite().all():
            return failed(f"not finite at {show(shape)}")
        change = relative_change(subject.norm(shape, torch.float64)(x.double()).detach(), out)
        if change > TOLERANCES[mean]:
            return failed(f"off by {change:.2g} of the largest output at {show(shape)}")
    return PASSED


def is_finite_on(transform: Callable[[Tensor], Tensor], subject: Subject) -> Finding:
    """Outputs, gradients and running state stay finite in both modes."""
    for shape in subject.shapes:
        for training in (True, False):
            norm = subject.trained(shape).train(training)
            x = transform(values(shape)).requires_grad_()
            out = norm(x)
            if not out.isfinite().all():
                return failed(f"output not finite, {_mode(training)}, {show(shape)}")
            if out.requires_grad:
                out.sum().backward()
            gradients = [t.grad for t in (x, *norm.parameters()) if t.grad is not None]
            if not all(gradient.isfinite().all() for gradient in gradients):
                return failed(f"gradient not finite, {_mode(training)}, {show(shape)}")
            if not all(buffer.isfinite().all() for buffer in norm.buffers()):
                return failed(f"running state not finite, {show(shape)}")
    return PASSED


def takes_one_sample(subject: Subject) -> Finding:
    """A batch of one sample gives finite outputs, or is refused, which only training may."""
    return _on_little([(1, *shape[1:]) for shape in subject.shapes], subject)


def takes_one_position(subject: Subject) -> Finding:
    """Maps of one position give finite outputs that follow the input, or are refused."""
    shapes = {(*shape[:2], *[1] * len(shape[2:])) for shape in subject.shapes if len(shape) > 2}
    if not shapes:
        return skipped("takes no positions")
    return _on_little(sorted(shapes, key=len), subject)


def _on_little(shapes: list[Shape], subject: Subject) -> Finding:
    """On inputs with little to pool: no NaN, and in training no output that forgets its input."""
    refusal = ""
    for shape in shapes:
        norm = subject.norm(shape)
        for training in (True, False):
            norm.train(training)
            x = values(shape)
            try:
                with torch.no_grad():
                    out, other = norm(x), norm(values(shape, seed=1))
            except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
                refusal = refusal or f"{_mode(training)}, {show(shape)}: {first_line(error)}"
                continue
            if out.shape != x.shape:
                return failed(f"{show(shape)} in, {show(tuple(out.shape))} out")
            finite = [out, *(b for b in norm.buffers() if b.is_floating_point())]
            if not all(tensor.isfinite().all() for tensor in finite):
                return failed(f"not finite, {_mode(training)}, {show(shape)}")
            if training and relative_change(out, other) < 1e-6:
                return failed(f"every input has one output, {_mode(training)}, {show(shape)}")
    return measured("refused", refusal) if refusal else PASSED


def takes_empty_batch(subject: Subject) -> Finding:
    """No sample gives no output and leaves the state finite, or is refused."""
    for training in (True, False):
        norm = subject.trained(subject.smallest).train(training)
        x = values((0, *subject.smallest[1:]))
        try:
            with torch.no_grad():
                out = norm(x)
        except Exception as error:  # of foreign code, any kind
            return measured("refused", f"{_mode(training)}: {first_line(error)}")
        if out.shape != x.shape:
            return failed(f"{show(tuple(x.shape))} in, {show(tuple(out.shape))} out")
        if not all(buffer.isfinite().all() for buffer in norm.buffers()):
            return failed(f"running state not finite after {show(tuple(x.shape))}")
    return PASSED


def _mode(training: bool) -> str:
    return "in training" if training else "in evaluation"


NUMERICS: Checks = {
    "gradient in training": partial(gradient_is_right, True),
    "gradient in evaluation": partial(gradient_is_right, False),
    "exact at mean 1e3": partial(keeps_digits_far_from_zero, 1e3),
    "exact at mean 1e4": partial(keeps_digits_far_from_zero, 1e4),
    "finite on constants": partial(is_finite_on, lambda x: torch.full_like(x, CONSTANT)),
    "finite at scale 1e-12": partial(is_finite_on, lambda x: SCALES[0] * x),
    "finite at scale 1e12": partial(is_finite_on, lambda x: SCALES[1] * x),
    "one sample": takes_one_sample,
    "one position": takes_one_position,
    "empty batch": takes_empty_batch,
}
