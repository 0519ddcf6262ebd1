"""The learning rate of each step: shapes, functions and torch's schedulers, also resumed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler
from training_cases import (
    assert_same_state,
    build_module,
    rows_of,
    stopped_and_resumed,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.training.module import TrainingModule
from normexp.training.schedule import named_schedule, own_schedule

STEPS = 10


def factors(kind: str, warmup: float, total: int = 20) -> list[float]:
    factor = named_schedule(kind, warmup, total).factor
    assert factor is not None
    return [factor(step) for step in range(total)]


def test_schedules_follow_their_formulas():
    assert factors("constant", 0.2) == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 17])
    cosine = [(1 + math.cos(math.pi * k / 20)) / 2 for k in range(20)]
    assert factors("cosine", 0.0) == pytest.approx(cosine)
    one_cycle = factors("one_cycle", 0.25)
    assert one_cycle[0] == pytest.approx(1 / 25 + 24 / 25 / 5)
    assert max(one_cycle) == one_cycle[4] == one_cycle[5] == pytest.approx(1.0)
    assert 1e-4 <= one_cycle[-1] < 0.02
    assert factors("linear", 0.2, 10) == pytest.approx([0.5, 1, *(1 - k / 8 for k in range(8))])
    assert factors("wsd", 0.1, 20) == pytest.approx([0.5, 1, *[1.0] * 15, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("kind", "warmup", "message"),
    [("triangle", 0.1, r"optim\.schedule=triangle"), ("cosine", 1.0, r"optim\.warmup=1\.0")],
)
def test_schedule_refuses(kind: str, warmup: float, message: str):
    with pytest.raises(UserError, match=message):
        named_schedule(kind, warmup, 10)


def halved(step: int, total_steps: int, every: int = 3) -> float:
    assert total_steps == STEPS
    return 0.5 ** (step // every)


FUNCTION = own_schedule(halved, halved, STEPS, None, "halved")
STEP_LR = own_schedule(
    partial(lr_scheduler.StepLR, step_size=3, gamma=0.5), lr_scheduler.StepLR, STEPS, None, "step"
)
# Nothing improves by 10, so each validation but the first halves the rate.
PLATEAU = own_schedule(
    partial(
        lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=10.0, threshold_mode="abs"
    ),
    lr_scheduler.ReduceLROnPlateau,
    STEPS,
    "val/loss",
    "plateau",
)


@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
def test_function_and_scheduler_of_one_shape_train_alike(tmp_path: Path, stacked: bool):
    common = {"seeds": (0, 1), "stacked": stacked, "sizes": Sizes(8, 4), "lr_scales": (1.0, 0.5)}
    runs = [build_module(schedule=s, **common) for s in (FUNCTION, STEP_LR, None)]
    for index, run in enumerate(runs):
        train(run, tmp_path / f"{index}.ckpt")
    assert_same_state(runs[0], runs[1], 1e-12, replica=1)
    with pytest.raises(AssertionError):
        assert_same_state(runs[0], runs[2], 1e-3, replica=1)


@pytest.mark.parametrize("schedule", [STEP_LR, PLATEAU], ids=["step", "plateau"])
def test_resumed_scheduler_goes_on_to_the_bit(tmp_path: Path, schedule):
    def build() -> TrainingModule:
        return build_module(schedule=schedule, max_chunk=2)

    whole = train(build(), tmp_path / "whole.ckpt", precision="32-true")
    for stop_at in (4, 5, 7):
        resumed = stopped_and_resumed(build, stop_at, tmp_path / f"{stop_at}.ckpt", "32-true")
        assert_same_state(whole, resumed, 0)
        assert rows_of(resumed) == rows_of(whole)


def test_scheduler_that_looks_at_a_metric_steps_at_each_validation(tmp_path: Path):
    module = train(build_module(schedule=PLATEAU), tmp_path / "a.ckpt")
    optimizer = module.trainer.optimizers[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 2)  # of two validations


@pytest.mark.parametrize("value", [None, math.nan, -0.1, "half", torch.ones(2)])
def test_factor_that_is_no_number_is_refused(value: object):
    def own(step: int, total_steps: int) -> object:
        return value if step == total_steps - 1 else 1.0

    with pytest.raises(UserError, match="^mine returns .* at step 99 of 100"):
        own_schedule(own, own, 100, None, "mine")


def test_monitor_of_what_looks_at_no_metric_is_refused():
    for target in (halved, lr_scheduler.StepLR):
        with pytest.raises(UserError, match="^schedule.monitor=val/loss: "):
            own_schedule(target, target, STEPS, "val/loss", "mine")
