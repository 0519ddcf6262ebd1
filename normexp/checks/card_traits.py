"""Traits: what an output depends on, found by moving one thing and looking."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normexp.checks.card import Checks, Finding, measured, skipped
from normexp.checks.padding import site_reads_padding
from normexp.checks.sites import ProbedSite, moved_places, outlier
from normexp.checks.subject import Shape, Subject, show, values
from normexp.norms.site import Site, takes_mask

PADDED = (4, 5)  # samples and positions
REAL = (5, 3, 2, 4)  # positions of each sample that are real


def in_modes(subject: Subject, shows: Callable[[Shape, bool], bool | None]) -> Finding:
    """`yes`, `no`, `in training` or `in evaluation`, with the smallest input that shows it.

    Args:
        shows: whether an input of a shape shows the trait in training (true) or evaluation; None
            where that cannot be seen on it.
    """
    seen: dict[bool, Shape | None] = {}
    looked = False
    for training in (True, False):
        seen[training] = None
        for shape in subject.shapes:
            answer = shows(shape, training)
            looked = looked or answer is not None
            if answer:
                seen[training] = shape
                break
    if not looked:
        return skipped("no input that it takes could show it")
    return _phrase(seen[True], seen[False])


def _phrase(in_training: Shape | None, in_evaluation: Shape | None) -> Finding:
    if in_training and in_evaluation:
        return measured("yes", show(in_training))
    if in_training:
        return measured("in training", show(in_training))
    if in_evaluation:
        return measured("in evaluation", show(in_evaluation))
    return measured("no")


def moved_by_one_value(subject: Subject, shape: Shape, training: bool) -> Tensor:
    """The outputs (N, C, P) that an outlier in the first value moves."""
    x = values(shape)
    changed = x.clone()
    changed.view(-1)[0] += outlier(x)
    before, after = (_run(subject, shape, training, given) for given in (x, changed))
    return moved_places(before, after).reshape(*shape[:2], -1)


def _run(subject: Subject, shape: Shape, training: bool, x: Tensor) -> Tensor:
    with torch.no_grad():
        return subject.trained(shape).train(training)(x)


def mixes_samples(subject: Subject) -> Finding:
    def shows(shape: Shape, training: bool) -> bool:
        return bool(moved_by_one_value(subject, shape, training)[1:].any())

    return in_modes(subject, shows)


def pools_channels(subject: Subject) -> Finding:
    def shows(shape: Shape, training: bool) -> bool:
        return bool(moved_by_one_value(subject, shape, training)[:, 1:].any())

    return in_modes(subject, shows)


def pools_positions(subject: Subject) -> Finding:
    def shows(shape: Shape, training: bool) -> bool | None:
        if len(shape) == 2:
            return None
        return bool(moved_by_one_value(subject, shape, training)[0, :, 1:].any())

    return in_modes(subject, shows)


def leaks_future(subject: Subject) -> Finding:
    """Whether a later position of (N, C, T) moves an earlier output."""

    def shows(shape: Shape, training: bool) -> bool | None:
        if len(shape) != 3:
            return None
        x = values(shape)
        changed = x.clone()
        changed[:, 0, -1:] += outlier(x)  # one channel, so that no sum over them cancels
        changed[:, 1:, -1:] *= 3
        before, after = (_run(subject, shape, training, given) for given in (x, changed))
        return bool(moved_places(before, after)[:, :, :-1].any())

    return in_modes(subject, shows)


def reads_padding(subject: Subject) -> Finding:
    """Whether content or amount of what a mask leaves out moves real outputs or the state."""
    shape = (PADDED[0], subject.num_features, PADDED[1])
    if shape not in subject.shapes:
        return skipped("takes no texts (N, C, T)")
    norm = subject.trained(shape)
    if not takes_mask(norm):
        return measured("takes no mask", "a site shows it the real positions alone")
    mask = torch.arange(PADDED[1]) < torch.tensor(REAL)[:, None]
    site = Site(norm, "sequence", None)  # (B, T, C)
    probed = ProbedSite("norm", site, torch.Size((*PADDED, subject.num_features)), mask)
    reads = {training: site_reads_padding(probed, training=training) for training in (True, False)}
    return _phrase(shape if reads[True] else None, shape if reads[False] else None)


def has_running_state(subject: Subject) -> Finding:
    """The buffers that a training forward changes."""
    norm = subject.norm(subject.largest)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with torch.no_grad():
        norm(1 + 2 * values(subject.largest))
    changed = [
        name
        for name, buffer in norm.named_buffers()
        if name not in before or not torch.equal(buffer, before[name])
    ]
    return measured("yes", ", ".join(changed)) if changed else measured("no")


DEPENDS_ON: Checks = {
    "mixes samples": mixes_samples,
    "pools channels": pools_channels,
    "pools positions": pools_positions,
    "leaks the future": leaks_future,
    "reads padding": reads_padding,
    "running state": has_running_state,
}
