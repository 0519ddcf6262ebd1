"""Cost: what a norm holds, what it keeps for its backward, how long it takes."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import Tensor, nn

from normexp.checks.card import Checks, Finding, measured, skipped
from normexp.checks.subject import Shape, Subject, show, values
from normexp.errors import UserError

CHANNELS = 64
# Samples and positions: features, texts, maps.
TIMED = ((1024,), (32, 64), (32, 16, 16))
REFERENCES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
WARM_UP = 3
REPEATS = 21
MOST_SECONDS = 1.5  # of one shape


def count_parameters(subject: Subject) -> Finding:
    shape = _shape(TIMED[-1], subject)
    return measured(sum(p.numel() for p in subject.norm(shape).parameters()), _of(shape))


def count_buffers(subject: Subject) -> Finding:
    shape = _shape(TIMED[-1], subject)
    return measured(sum(b.numel() for b in subject.norm(shape).buffers()), _of(shape))


def _of(shape: Shape) -> str:
    return f"numbers, {shape[1]} channels"


def _shape(step: Shape, subject: Subject) -> Shape:
    """(N, C, *) with 64 channels, or with as many as the norm was given where that is refused."""
    shape = (step[0], CHANNELS, *step[1:])
    try:
        subject.norm(shape)
    except UserError:
        return (step[0], subject.num_features, *step[1:])
    return shape


def bytes_saved(subject: Subject) -> Finding:
    """Memory that a training forward holds until its backward, its own parameters left out.

    Storages count once however often they are saved; the input is among them where it is kept.
    """
    fitting = [step for step in TIMED if subject.with_dims(len(step) + 1)]
    if not fitting:
        return skipped("takes no features, texts or maps")
    shape = _shape(fitting[-1], subject)
    norm, x = subject.norm(shape), values(shape).requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in (*norm.parameters(), *norm.buffers())}
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # so that no address is used again

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


def relative_time(step: Shape, backward: bool, subject: Subject) -> Finding:
    """Median over alternating repeats of this norm's time over torch's batch norm's."""
    if not subject.with_dims(len(step) + 1):
        return skipped(f"takes no {len(step) + 1}-D input")
    shape = _shape(step, subject)
    norms = (subject.norm(shape), REFERENCES[len(shape)](shape[1]))
    x = values(shape).requires_grad_()
    ratios, own = [], []
    start = time.perf_counter()
    for repeat in range(WARM_UP + REPEATS):
        times = [_seconds(norm, x, backward) for norm in norms]
        if repeat >= WARM_UP:
            ratios.append(times[0] / times[1])
            own.append(times[0])
        if time.perf_counter() - start > MOST_SECONDS and ratios:
            break
    threads = torch.get_num_threads()
    detail = f"{1e3 * statistics.median(own):.2g} ms, {show(shape)}, threads: {threads}"
    return measured(float(f"{statistics.median(ratios):.2g}"), detail)


def _seconds(norm: nn.Module, x: Tensor, backward: bool) -> float:
    """Of the forward, or of the backward alone; in float32 and training mode."""
    start = time.perf_counter()
    out = norm(x)
    if backward:
        gradient = torch.ones_like(out)
        start = time.perf_counter()
        out.backward(gradient)
    return time.perf_counter() - start


COST: Checks = {
    "parameters": count_parameters,
    "buffers": count_buffers,
    "bytes saved for backward": bytes_saved,
    **{
        f"{direction} vs batch norm, {kind}": partial(relative_time, step, direction == "backward")
        for step, kind in zip(TIMED, ("features", "texts", "maps"), strict=True)
        for direction in ("forward", "backward")
    },
}
