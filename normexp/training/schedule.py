"""The learning rate over a training."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from normexp.errors import UserError
from normexp.training.config.target import read_target


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a training, as a scheduler of torch sets it.

    Attributes:
        build: makes the scheduler, which steps after each optimizer step, or at each validation if
            it monitors a metric.
        follows_lr: at every step the rate is proportional to `lr`; not known of schedulers that
            are not ours, such as OneCycleLR with its `max_lr`.
        monitor: the name of that metric.
        mode: min or max, which way the scheduler takes it to improve; None if it does not say.
        name: of the class of the scheduler.
    """

    total_steps: int
    build: Callable[[Optimizer], LRScheduler]
    follows_lr: bool = False
    monitor: str | None = None
    mode: str | None = None
    name: str | None = None


def schedule_by_factor(factor: Callable[[int], float], total_steps: int) -> Schedule:
    """The schedule whose rate at a step, counted from 0, is `lr` times a factor."""

    def build(optimizer: Optimizer) -> LRScheduler:
        # After the last step the scheduler asks for the rate of one more.
        return LambdaLR(optimizer, lambda step: factor(min(step, total_steps - 1)))

    return Schedule(total_steps, build, follows_lr=True)


def named_schedule(kind: str, warmup: float, total_steps: int) -> Schedule:
    """Linear warm-up over the first `warmup` (a share of the steps), then, as u goes from 0 to 1:

    constant    1
    cosine      (1 + cos(pi u)) / 2 (arXiv:1608.03983)
    linear      1 - u
    wsd         1, then linear to 0 over the last fifth of all steps (arXiv:2404.06395)
    one_cycle   cosine down to 1e-4; its warm-up begins at 1/25 (arXiv:1708.07120)
    """
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

    return schedule_by_factor(factor, total_steps)


def own_schedule(
    make: Callable[..., Any], target: Any, total_steps: int, monitor: str | None, name: str
) -> Schedule:
    """The schedule of a user's function of (step, total_steps), or of a scheduler class.

    Args:
        make: `target` with its knobs.
        monitor: for a scheduler whose `step` takes `metrics`; val/loss if None.
        name: of the target, for messages.

    Raises:
        UserError: a factor that is not a number from 0 on. Errors of its own code pass through.
    """
    is_scheduler = isinstance(target, type) and issubclass(target, LRScheduler)
    takes_metric = is_scheduler and "metrics" in inspect.signature(target.step).parameters
    if monitor is not None and not takes_metric:
        raise UserError(f"schedule.monitor={monitor}: this schedule uses no metric; drop the key")
    if not is_scheduler:
        for step in {*range(0, total_steps, max(1, total_steps // 100)), total_steps - 1}:
            factor = make(step, total_steps)
            if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
                raise UserError(
                    f"{name} returns {factor!r} at step {step} of {total_steps}; return a number, "
                    "0 or more: the factor on lr"
                )
        return schedule_by_factor(lambda step: float(make(step, total_steps)), total_steps)
    trial = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make(trial)
    if not takes_metric:
        trial.step()
        scheduler.step()
    watched = (monitor or "val/loss") if takes_metric else None
    mode = getattr(scheduler, "mode", None)
    return Schedule(total_steps, make, monitor=watched, mode=mode, name=target.__name__)


def build_schedule(
    values: Mapping[str, Any] | None, num_steps: int, *, shape: str, warmup: float
) -> Schedule:
    """The schedule that `schedule` names; without one, a shape by name.

    Args:
        values: of the group `schedule`.
        shape, warmup: of the group `optim`.

    Raises:
        UserError: a knob that it does not take, or an error of its own code.
    """
    if values is None:
        return named_schedule(shape, warmup, num_steps)
    values = dict(values)
    monitor = values.pop("monitor", None)
    target = read_target(values, "schedule")
    if isinstance(target.call.func, type):  # a function gets step and total by position
        target = target.filled_in({"total_steps": num_steps})
    target.require(1 if isinstance(target.call.func, type) else 2)
    with target.explaining_errors():
        return own_schedule(target.call, target.call.func, num_steps, monitor, target.name)
