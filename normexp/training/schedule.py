"""The learning rate of each step: a shape by name, a user's function, or a scheduler of torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from normexp.errors import UserError

SHAPES = ("constant", "cosine", "linear", "wsd", "one_cycle")
Scheduler = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a training: a factor on `lr`, or whatever a scheduler sets.

    Attributes:
        factor: of the step, counted from 0; None if a scheduler sets the rate.
        build: makes that scheduler, which steps after each optimizer step, or at each validation
            if it looks at a metric.
        monitor: that metric.
    """

    total_steps: int
    factor: Callable[[int], float] | None = None
    build: Scheduler | None = None
    monitor: str | None = None


def named_schedule(kind: str, warmup: float, total_steps: int) -> Schedule:
    """Linear warm-up over the first `warmup` (a share of the steps), then, as u goes from 0 to 1:

    constant    1
    cosine      (1 + cos(pi u)) / 2 (arXiv:1608.03983)
    linear      1 - u
    wsd         1, then linear to 0 over the last fifth of all steps (arXiv:2404.06395)
    one_cycle   cosine down to 1e-4; its warm-up begins at 1/25 (arXiv:1708.07120)
    """
    if kind not in SHAPES:
        raise UserError(f"optim.schedule={kind} is unknown; try {', '.join(SHAPES)}")
    if not 0 <= warmup < 1:
        raise UserError(f"optim.warmup={warmup} must be in [0, 1), a share of the steps; try 0.1")
    warmup_steps = round(warmup * total_steps)
    rest = max(1, total_steps - warmup_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            risen = (step + 1) / warmup_steps
            return 1 / 25 + (1 - 1 / 25) * risen if kind == "one_cycle" else risen
        if kind == "wsd":
            return min(1.0, (total_steps - step) / (0.2 * total_steps))
        if kind == "constant":
            return 1.0
        if kind == "linear":
            return 1 - (step - warmup_steps) / rest
        cosine = (1 + math.cos(math.pi * (step - warmup_steps) / rest)) / 2
        return max(cosine, 1e-4) if kind == "one_cycle" else cosine

    return Schedule(total_steps, factor)


def own_schedule(
    make: Callable[..., Any], target: Any, total_steps: int, monitor: str | None, name: str
) -> Schedule:
    """The schedule of a user's function of (step, total_steps), or of a scheduler class.

    Args:
        make: `target` with its knobs.
        monitor: for a scheduler whose `step` takes `metrics`; val/loss if None.
        name: of the target, for messages.

    Raises:
        Whatever a trial of it raises, and UserError for a factor that is not a number from 0 on.
    """
    if not (isinstance(target, type) and issubclass(target, LRScheduler)):
        if monitor is not None:
            raise UserError(f"schedule.monitor={monitor}: a function looks at no metric; drop it")
        for step in {*range(0, total_steps, max(1, total_steps // 100)), total_steps - 1}:
            _check_factor(name, make(step, total_steps), step, total_steps)
        return Schedule(total_steps, lambda step: float(make(step, total_steps)))
    looks = "metrics" in inspect.signature(target.step).parameters
    if monitor is not None and not looks:
        raise UserError(f"schedule.monitor={monitor}: this scheduler looks at no metric; drop it")
    trial = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make(trial)
    if not looks:
        trial.step()
        scheduler.step()
    return Schedule(total_steps, build=make, monitor=(monitor or "val/loss") if looks else None)


def _check_factor(name: str, factor: Any, step: int, total_steps: int) -> None:
    try:
        holds = math.isfinite(factor) and factor >= 0
    except (TypeError, ValueError, RuntimeError):  # of a tensor, for one
        holds = False
    if not holds:
        raise UserError(
            f"{name} returns {factor!r} at step {step} of {total_steps}; return a factor on lr, "
            "a number from 0 on"
        )
