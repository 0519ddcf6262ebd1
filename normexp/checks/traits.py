"""The traits of a norm by itself: what it reads and ignores, and how it can be trained."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.replicas import InTurn
from normexp.checks.network import EnteredSite, SiteOnMaps
from normexp.checks.norm import Answer, LoneNorm, NormCase, Reply, Shape, measured, show, skipped
from normexp.checks.probe import Probe, kept_for_backward, moves
from normexp.checks.reading import reads_padding
from normexp.checks.wiring import find_stacking_fault, first_difference, training_step
from normexp.norms.adapt import EPS_NAMES
from normexp.norms.site import Site, is_sequential, takes_mask

PADDED = (4, 5)  # samples and positions
REAL = (5, 3, 2, 4)  # positions of each sample that are real
SCALES = tuple(partial(operator.mul, factor) for factor in (4.0, 0.3))
SHIFTS = tuple(partial(operator.add, by) for by in (3.0, -20.0))
TINY_EPS = 1e-12
EXACT = 1e-6  # of inputs in float64; a norm may compute in float32
PARTS, PART_SIZE = 4, 2
# Samples and positions of maps, texts, features.
KEPT_AT = ((32, 16, 16), (32, 64), (1024,))


def texts(norm: LoneNorm) -> list[Shape]:
    return norm.with_dims(3)


def with_positions(norm: LoneNorm) -> list[Shape]:
    return norm.with_dims(3, 4, 5)


def mixes_samples(case: NormCase, training: bool) -> Reply:
    """Do other samples move an output, a gradient or a running state?"""
    return case.probe(training).reads_samples(gradients=training)


def pools_channels(case: NormCase, training: bool) -> Reply:
    """Do other channels move an output or a gradient?"""
    return case.probe(training).reads_across(1, gradients=training)


def pools_positions(case: NormCase, training: bool) -> Reply:
    """Do other positions move an output or a gradient?"""
    return case.probe(training).reads_across(2, gradients=training)


def reads_future(case: NormCase, training: bool) -> Reply:
    """Do later positions of a text (N, C, T) move an earlier output?"""
    return "output" if case.probe(training).reads_later() is not None else None


def padded_text(norm: LoneNorm) -> list[Shape]:
    shape = (PADDED[0], norm.num_features, PADDED[1])
    return [shape] if shape in norm.shapes else []


def reads_masked(case: NormCase, training: bool) -> Reply:
    """Does the content or amount of masked positions move real outputs or the state?"""
    norm = case.trained(torch.float32)
    if not takes_mask(norm):
        return skipped("its forward has no argument `mask`; it is given the real positions only")
    mask = torch.arange(PADDED[1]) < torch.tensor(REAL)[:, None]
    module = SiteOnMaps(Site(norm, "sequence", None), torch.Size(PADDED[1:]))
    site = EnteredSite(["norm"], module, torch.Size(case.shape), mask)
    return "output" if reads_padding(site, training) else None


def changes_output(
    changes: tuple[Callable[[Tensor], Tensor], ...], case: NormCase, training: bool
) -> Reply:
    """Is the output the same after such a change of the input, with a tiny eps?"""
    knobs: dict[str, Any] = {case.lone.eps_name: TINY_EPS} if case.lone.eps_name else {}
    norm = case.trained(**knobs).train(training)
    for module in norm.modules():  # also of norms whose signature has no eps
        for name in EPS_NAMES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, TINY_EPS)
    x = case.values(torch.float64)
    probe = Probe(norm, (x,))
    first = probe.observe().output
    changed = any(moves(first, probe.observe(change(x)).output) for change in changes)
    return "output" if changed else None


def has_running_state(case: NormCase) -> Answer:
    """Does a training forward change buffers?"""
    probe = Probe(case.build(), (1 + 2 * case.values(),))
    before, after = dict(probe.module.named_buffers()), probe.observe().state
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    return measured("yes", ", ".join(changed)) if changed else measured("no")


def bytes_kept(norm: LoneNorm) -> Answer:
    """How many bytes, without parameters, does a training forward keep for its backward?

    Each storage counts once; the input counts if the norm keeps it.
    """
    fitting = [step for step in KEPT_AT if norm.with_dims(len(step) + 1)]
    if not fitting:
        return skipped("takes no features, texts or maps")
    case = norm.at((fitting[0][0], norm.num_features, *fitting[0][1:]))
    x = case.values().requires_grad_()
    total = kept_for_backward(case.build(), x)
    return measured(total, f"{total / (x.numel() * 4):.2g} x the input, {show(x.shape)} float32")


# ---------------------------------------------------------------- how it can be trained


def stacks(case: NormCase) -> Reply:
    """Do two replicas under vmap get the outputs, gradients and state of each alone?"""
    if case.lone.draws:
        return skipped("draws random numbers, so each seed trains by itself")
    sites: list[nn.Module] = [_site(case) for _ in range(2)]
    x = torch.stack([case.values(torch.float64, seed) for seed in (3, 4)])
    return find_stacking_fault(sites, {"inputs": x.requires_grad_()}, tolerance=EXACT)


def splits(case: NormCase) -> Reply:
    """Do ghost groups of one forward get the outputs, gradients and state of micro-batches?"""
    if is_sequential(case.build()):
        return measured("refused", "declares its state sequential")
    batch = {"inputs": case.values(torch.float64)[None].requires_grad_()}
    accumulated = training_step(InTurn([_site(case)]), batch, PARTS)
    ghost = training_step(InTurn([_site(case, PART_SIZE)]), batch)
    moved = first_difference(accumulated, ghost, EXACT)
    return f"{moved} differs, {PARTS} groups of {PART_SIZE}" if moved else None


def batch_to_split(norm: LoneNorm) -> list[Shape]:
    """The smallest batch with positions, if the norm takes any, in PARTS parts."""
    small = [shape for shape in norm.shapes if len(shape) > 2] or list(norm.shapes)
    return [(PARTS * PART_SIZE, *shape[1:]) for shape in small[:1]]


def _site(case: NormCase, norm_batch_size: int | None = None) -> Site:
    return Site(case.trained(), "map", norm_batch_size)
