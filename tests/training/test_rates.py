"""Replicas of one stack at learning rates of their own train as each would alone at its rate."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from training_cases import build_task, state_of, stopped_and_resumed, train

from normexp.batching.sizes import Sizes
from normexp.training.module import TrainingTask
from normexp.training.optim import ReplicaRates

SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True)
OPTIMIZERS = {
    "sgd": SGD,
    "sgd_plain": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, fused=True),
    "nadam": partial(torch.optim.NAdam, decoupled_weight_decay=True),
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "adadelta": torch.optim.Adadelta,
}
LR, SCALES = 0.02, (1.0, 0.25, 0.03)


def at_rates(scales: tuple[float, ...], **options) -> TrainingTask:
    task = build_task(lr=LR, max_grad_norm=1.0, sizes=Sizes(8, 4, 2), **options)
    task.recipe = dataclasses.replace(task.recipe, lr_scales=scales)
    return task


def at_rate(lr: float, seed: int, optimizer=SGD) -> TrainingTask:
    sizes = Sizes(8, 4, 2)
    return build_task(seeds=(seed,), lr=lr, max_grad_norm=1.0, sizes=sizes, optimizer=optimizer)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in_turn"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sgd", "adamw") else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_replica_at_its_own_rate_equals_a_run_alone_at_that_rate(tmp_path: Path, name, stacked):
    optimizer = OPTIMIZERS[name]
    options = {"seeds": (3, 3, 4), "stacked": stacked, "optimizer": optimizer}
    stack = train(at_rates(SCALES, **options), tmp_path / "a.ckpt")
    for index, (seed, scale) in enumerate(zip((3, 3, 4), SCALES, strict=True)):
        alone = build_task(
            seeds=(seed,),
            lr=LR * scale,
            max_grad_norm=1.0,
            sizes=Sizes(8, 4, 2),
            optimizer=optimizer,
        )
        train(alone, tmp_path / "b.ckpt")
        for key, value in state_of(alone).items():
            found = state_of(stack, index)[key]
            torch.testing.assert_close(found, value, rtol=0, atol=1e-9, msg=key)


def test_replica_at_the_common_rate_is_the_run_alone_to_the_bit(tmp_path: Path):
    scaled = train(at_rates((1.0, 0.5), seeds=(0, 1)), tmp_path / "a.ckpt", precision="32-true")
    plain = build_task(seeds=(0, 1), lr=LR, max_grad_norm=1.0, sizes=Sizes(8, 4, 2))
    train(plain, tmp_path / "b.ckpt", precision="32-true")
    for key, value in state_of(plain).items():
        assert torch.equal(value, state_of(scaled)[key]), key


def test_resumed_stack_at_several_rates_equals_an_undisturbed_one(tmp_path: Path, monkeypatch):
    def build() -> TrainingTask:
        return at_rates((0.5, 1.0), seeds=(0, 0), stacked=True, max_chunk=2)

    whole = train(build(), tmp_path / "whole.ckpt", precision="32-true")
    resumed = stopped_and_resumed(build, 3, tmp_path / "last.ckpt", monkeypatch)
    for replica in (0, 1):
        for key, value in state_of(whole, replica).items():
            assert torch.equal(value, state_of(resumed, replica)[key]), key


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 1.5), (0.0, 1.0)])
def test_scales_of_the_wrong_number_or_range_are_refused(scales: tuple[float, ...]):
    with pytest.raises(ValueError, match="scales in"):
        ReplicaRates(build_task(seeds=(0, 1)).replicas, scales)
