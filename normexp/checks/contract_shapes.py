"""Contract: what a norm makes of shapes, dtypes and memory formats."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from normexp.checks.card import PASSED, Checks, Finding, failed, measured, skipped
from normexp.checks.probing import first_line
from normexp.checks.subject import (
    DRAWS,
    LADDER,
    Shape,
    Subject,
    relative_change,
    seed_draws,
    shape_at,
    show,
    values,
)
from normexp.norms.adapt import PROBED_DIMS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Half precision may round the output, 2^-8 in bfloat16, but not the statistics.
HALF_TOLERANCE = 0.03
STEP = 1e-6  # which float32 sees at 1, and half precision does not
FAR = 30.0  # a mean at which squares in bfloat16 hold no digit of a variance of 1


def takes_dims(num_dims: int, subject: Subject) -> Finding:
    """A shape is kept or refused, in training and evaluation; as the norm is, unwrapped."""
    refusal = ""
    for step in LADDER:
        if len(step) != num_dims - 1:
            continue
        shape = shape_at(subject.num_features, step)
        out, reason = _apply_bare(subject, shape)
        if out is None:
            refusal = refusal or reason
            continue
        if not isinstance(out, Tensor):
            return failed(f"{show(shape)} in, a {type(out).__name__} out")
        if out.shape != _shown(subject, shape):
            return failed(f"{show(_shown(subject, shape))} in, {show(tuple(out.shape))} out")
        return PASSED
    return measured("refused", refusal)


def _shown(subject: Subject, shape: Shape) -> Shape:
    """The shape in the layout of the norm."""
    return (shape[0], *shape[2:], shape[1]) if subject.layout.channels_last else shape


def _apply_bare(subject: Subject, shape: Shape) -> tuple[object, str]:
    """The output of the last of both modes, or None and the refusal.

    A warning refuses where the layout says that these dimensions are not taken: torch reads (N, C)
    as one sample then.
    """
    x = values(_shown(subject, shape))
    strict = "ignore" if len(shape) in subject.layout.num_dims else "error"
    out: object = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(strict, UserWarning)
        try:
            norm = subject.bare(shape)
            for training in (True, False):
                out = norm.train(training)(x)
                if not isinstance(out, Tensor) or out.shape != x.shape:
                    break
        except Exception as error:  # of foreign code, any kind
            return None, first_line(error)
    return out, ""


def takes_some_input(subject: Subject) -> Finding:
    """At least one shape is mapped to itself."""
    if subject.shapes:
        return PASSED
    found = [takes_dims(num_dims, subject) for num_dims in PROBED_DIMS]
    shown = [finding.detail for finding in found if finding.status == "fail"]
    if shown:
        return failed(f"the shape of every input changes or is refused, as {shown[0]}")
    return failed(f"every input is refused: {found[0].detail}")


def keeps_dtype(subject: Subject) -> Finding:
    """The norm in each dtype returns what it is given."""
    missing = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for training in (True, False):
            norm = subject.norm(subject.smallest, dtype).train(training)
            try:
                out = norm(values(subject.smallest, dtype))
            except NotImplementedError:
                missing.append(name)
                break
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    return failed(f"{name} {show(subject.smallest)}: {first_line(error)}")
                missing.append(name)
                break
            if out.dtype != dtype:
                given = str(out.dtype).removeprefix("torch.")
                return failed(f"{name} in, {given} out, {show(subject.smallest)}")
    return Finding("pass", detail=f"this device lacks {', '.join(missing)}" if missing else "")


def keeps_digits_in_half(subject: Subject) -> Finding:
    """Of bfloat16 inputs at mean 30, training outputs are those of float64 up to rounding.

    Parameters stay in float32, as in mixed precision, where the norm takes that. The outputs of
    float64 have to be its own, and not those of half precision inside.
    """
    if computes_in_half(subject):
        return failed(
            f"float64 inputs {STEP:g} apart have one output, as where it computes in half "
            f"precision, {show(subject.largest)}"
        )
    if subject.draws:
        return skipped(DRAWS)
    for shape in subject.shapes:
        x = (FAR + values(shape)).to(torch.bfloat16)
        try:
            out = _in_bfloat16(subject, x)
        except NotImplementedError:
            return skipped("this device lacks bfloat16")
        wide = subject.norm(shape, torch.float64)(x.double())
        change = relative_change(wide.detach(), out.detach())
        if change > HALF_TOLERANCE:
            return failed(f"off by {change:.2g} of the largest output at mean 30, {show(shape)}")
    return PASSED


def computes_in_half(subject: Subject) -> bool:
    """Whether a small step of a float64 input leaves nearly all outputs that a large one moves."""
    shape = subject.largest
    x, direction = values(shape, torch.float64), values(shape, torch.float64, 1)
    outs = []
    for step in (0.0, STEP, 1.0):
        norm = subject.trained(shape, torch.float64)
        seed_draws()
        with torch.no_grad():
            outs.append(norm(x + step * direction))
    small, large = (int((out != outs[0]).sum()) for out in outs[1:])
    return small < 0.1 * large


def _in_bfloat16(subject: Subject, x: Tensor) -> Tensor:
    shape = tuple(x.shape)
    try:
        return subject.norm(shape)(x)
    except RuntimeError:  # a kernel that wants one dtype for all
        return subject.norm(shape, torch.bfloat16)(x)


def keeps_channels_last(subject: Subject) -> Finding:
    """A channels_last map comes back as one, with the outputs of a contiguous one."""
    shapes = subject.with_dims(4)
    if not shapes or 4 not in subject.layout.num_dims:
        return skipped("takes no 4-D input by itself")
    for shape in shapes:
        x = values(shape)
        out = subject.norm(shape)(x)
        last = subject.norm(shape)(x.contiguous(memory_format=torch.channels_last))
        if not last.is_contiguous(memory_format=torch.channels_last):
            return failed(f"channels_last {show(shape)} in, contiguous out")
        if not subject.draws and relative_change(out.detach(), last.detach()) > 1e-4:
            return failed(f"channels_last {show(shape)} gives other outputs than contiguous")
    return PASSED


def takes_any_strides(subject: Subject) -> Finding:
    """An input that is not contiguous gives what its contiguous copy does, gradient included.

    Outputs are compared where the norm draws nothing: draws go by the order in memory.
    """
    compares = not subject.draws
    for shape in subject.shapes:
        x = values(shape)
        strided = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for training in (True, False):
            out = subject.norm(shape).train(training)(x)
            other = subject.norm(shape).train(training)(strided)
            if compares and relative_change(out.detach(), other.detach()) > 1e-4:
                return failed(f"strides {strided.stride()} of {show(shape)} change the output")
            if other.requires_grad:
                other.sum().backward()
    return PASSED


def leaves_input_alone(subject: Subject) -> Finding:
    """The input tensor holds after the forward what it held before."""
    for shape in subject.shapes:
        for training in (True, False):
            x = values(shape)
            with torch.no_grad():
                subject.norm(shape).train(training)(x)
            if not torch.equal(x, values(shape)):
                return failed(f"the input {show(shape)} is written in place")
    return PASSED


SHAPES: Checks = {
    "an input is taken": takes_some_input,
    **{f"{num_dims}-D inputs": partial(takes_dims, num_dims) for num_dims in PROBED_DIMS},
}
FORMATS: Checks = {
    "dtype kept": keeps_dtype,
    "statistics wide in bfloat16": keeps_digits_in_half,
    "channels_last kept": keeps_channels_last,
    "any strides": takes_any_strides,
    "input unchanged": leaves_input_alone,
}
