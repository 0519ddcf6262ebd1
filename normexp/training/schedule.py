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


# --- The shipped schedules: the factor on `lr` at a step -----------------------------------------
# In each, the factor first rises linearly over the share `warmup` of all steps. Then u goes from 0
# to 1.


def constant(step: int, total_steps: int, warmup: float) -> float:
    """1."""
    num_warm = round(warmup * total_steps)
    return (step + 1) / num_warm if step < num_warm else 1.0


def linear(step: int, total_steps: int, warmup: float) -> float:
    """1 - u."""
    num_warm = round(warmup * total_steps)
    if step < num_warm:
        return (step + 1) / num_warm
    return 1 - (step - num_warm) / (total_steps - num_warm)


def cosine(step: int, total_steps: int, warmup: float) -> float:
    """(1 + cos(pi u)) / 2 (arXiv:1608.03983)."""
    num_warm = round(warmup * total_steps)
    if step < num_warm:
        return (step + 1) / num_warm
    return (1 + math.cos(math.pi * (step - num_warm) / (total_steps - num_warm))) / 2


def one_cycle(step: int, total_steps: int, warmup: float) -> float:
    """As `cosine`, but down to 1e-4, and its warm-up begins at 1/25 (arXiv:1708.07120)."""
    factor = cosine(step, total_steps, warmup)
    if step < round(warmup * total_steps):
        return 1 / 25 + (1 - 1 / 25) * factor
    return max(factor, 1e-4)


def wsd(step: int, total_steps: int, warmup: float) -> float:
    """1, then linear to 0 over the last fifth of all steps (arXiv:2404.06395)."""
    factor = constant(step, total_steps, warmup)
    if step < round(warmup * total_steps):
        return factor
    return min(factor, (total_steps - step) / (0.2 * total_steps))


# --- Any schedule ---------------------------------------------------------------------------------


def own_schedule(
    make: Callable[..., Any], target: Any, total_steps: int, monitor: str | None, name: str
) -> Schedule:
    """The schedule of a function of (step, total_steps), or of a scheduler class.

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


def build_schedule(values: Mapping[str, Any], num_steps: int) -> Schedule:
    """The schedule that the values of `schedule` name.

    Raises:
        UserError: a knob that it does not take, or an error of its own code.
    """
    values = dict(values)
    monitor = values.pop("monitor", None)
    target = read_target(values, "schedule")
    if isinstance(target.call.func, type):  # a function gets step and total by position
        target = target.filled_in({"total_steps": num_steps})
    target.require(1 if isinstance(target.call.func, type) else 2)
    with target.explaining_errors():
        return own_schedule(target.call, target.call.func, num_steps, monitor, target.name)
