"""Pairs of trainings that end in the same weights and running state: a table.

Stacked and alone, accumulated and in ghost sub-batches, in chunks of any size, at a rate of its own
and alone at that rate, by a function and by a scheduler of torch, with every shipped norm.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from train_cases import takes_maps
from training_cases import (
    assert_same_state,
    build_module,
    convnet,
    group_norm,
    image_data,
    resnet20,
    rows_of,
    text_data,
    text_encoder,
    train,
)
from wild_norms import StrangerNorm

from normexp.norms.build import build_norm
from normexp.norms.factory import NormFactory
from normexp.norms.sample import InstanceNorm, RMSNorm
from normexp.training.checks.network import probe_batch
from normexp.training.checks.wiring import cannot_stack
from normexp.training.config.compose import compose_config
from normexp.training.config.sizes import Sizes
from normexp.training.config.slots import Slots
from normexp.training.schedule import own_schedule

slow = pytest.mark.slow
NUM_TRAIN = 24
FULL, ACCUMULATED, BOTH = Sizes(8), Sizes(8, 2), Sizes(8, 4, 2)
STACK, TURNS = {"seeds": (3, 4, 5), "stacked": True}, {"seeds": (3, 4, 5)}
TRACKING = partial(InstanceNorm, track_running_stats=True)
ALONE = {"seeds": (4,)}  # replica 1 of both
FORMS = {"in_turn": TURNS, "stacked": STACK}
SGD = {"optimizer": partial(torch.optim.SGD, momentum=0.9, fused=True)}
ADAMW = {"optimizer": partial(torch.optim.AdamW, fused=True), "lr": 0.003}
TEXT = {"model": text_encoder, "data": text_data()}
DROPOUT = {"model": partial(text_encoder, dropout=0.3), "data": text_data()}


def pair(name: str, common: dict, first: dict, second: dict, marks: Any = (), **check: Any) -> Any:
    """A row: choices of both trainings, of each, the tolerance, the replicas that are compared."""
    return pytest.param(common, first, second, check, id=name, marks=marks)


# A step in parts --------------------------------------------------------------------------------


def with_slots(model: Any, **slots: Any) -> dict[str, Any]:
    def build(norm: NormFactory) -> nn.Module:
        size = norm.norm_batch_size
        own = Slots(**slots)
        return model(NormFactory(norm.make, view=norm.view, slots=own, norm_batch_size=size))

    return {"model": build}


SPLIT_ALIKE = {
    "resnet20-slots": with_slots(resnet20, conv="weight_standardized", residual_scale=0.0),
    "convnet-slots": with_slots(convnet, act="tlu", conv="scaled_weight_standardized"),
    "text-slots": TEXT | with_slots(text_encoder, placement="peri", qk_norm=True),
    # A last batch of 6, in parts of 4 and 2; the stranger's state is merged by their shares.
    "ragged": {"data": image_data(46), "drop_last": False, "make_norm": StrangerNorm},
    "ragged_text": TEXT | {"data": text_data(22), "drop_last": False},
}
WITHIN_SAMPLES = {
    "group": {"make_norm": group_norm},
    "rms": {"make_norm": partial(RMSNorm, eps=1e-5)},
    "instance_averages": {"make_norm": TRACKING},
    "group_with_dropout": DROPOUT | {"make_norm": group_norm},
}
IN_PARTS = [
    *(
        pair(name, own | {"lr": 0.01}, {"sizes": Sizes(8, 4)}, {"sizes": Sizes(8, None, 4)})
        for name, own in SPLIT_ALIKE.items()
    ),
    pair("parts_of_ghosts", {"lr": 0.01}, {"sizes": BOTH}, {"sizes": ACCUMULATED}),
    *(
        pair(f"{name}-{split}", own, {}, {"sizes": sizes})
        for name, own in WITHIN_SAMPLES.items()
        for split, sizes in (("one_by_one", Sizes(8, 1)), ("both", BOTH))
    ),
]

# A stack ----------------------------------------------------------------------------------------

CLIPPED = {"max_grad_norm": 1.0}
STACKED = [
    pair(name, CLIPPED | own, STACK, ALONE, atol=1e-9, replica=1)
    for name, own in {
        "full": {},
        "instance_averages": {"sizes": BOTH, "make_norm": TRACKING},
        "accumulated_ghost_adamw": {"sizes": BOTH, **ADAMW},
        "dropout": {"sizes": BOTH, **DROPOUT},
    }.items()
]
RATES = {"lr_scales": (1.0, 0.25, 0.03), "lr": 0.02}
TO_THE_BIT = {"atol": 0, "precision": "32-true", "same_rows": True, "replica": 1, "other": 1}
OWN_RATE = [  # the rule of other optimizers is in test_recipe.py
    *(
        pair(
            f"adamw-{form}",
            {"optimizer": ADAMW["optimizer"], "sizes": BOTH, "max_grad_norm": 1.0},
            seeds | RATES,
            ALONE | {"lr": 0.02 * 0.25},
            atol=1e-9,
            replica=1,
        )
        for form, seeds in FORMS.items()
    ),
    pair("common_rate", TURNS, {"lr_scales": (0.5, 1.0, 0.1)}, {}, **TO_THE_BIT),
]

# Other ways to say the same ---------------------------------------------------------------------


def halved(step: int, total_steps: int, every: int = 3) -> float:
    assert total_steps == 10
    return 0.5 ** (step // every)


StepLR = lr_scheduler.StepLR
STEP_LR = own_schedule(partial(StepLR, step_size=3, gamma=0.5), StepLR, 10, None, "step")
FUNCTION = own_schedule(halved, halved, 10, None, "halved")
compiling = [slow, pytest.mark.filterwarnings("ignore")]  # of torch's own warnings
SAID_OTHERWISE = [
    *(
        pair(f"chunks-{form}", seeds, {"max_chunk": 1}, {"max_chunk": 32}, **TO_THE_BIT)
        for form, seeds in FORMS.items()
    ),
    pair("schedule", STACK | RATES, {"schedule": FUNCTION}, {"schedule": STEP_LR}),
    *(
        pair(f"compiled-{form}", seeds, {"compile": True}, {}, marks=compiling, atol=1e-9)
        for form, seeds in FORMS.items()
    ),
]


OFTEN = (
    *("convnet-slots", "text-slots", "ragged", "parts_of_ghosts", "rms-both", "full"),
    *("adamw-stacked", "common_rate", "chunks-in_turn", "chunks-stacked"),
)
PAIRS = IN_PARTS + STACKED + OWN_RATE + SAID_OTHERWISE


@pytest.mark.parametrize(
    ("common", "first", "second", "check"),
    [
        one if one.id in OFTEN else pytest.param(*one.values, id=one.id, marks=[*one.marks, slow])
        for one in PAIRS
    ],
)
def test_two_ways_to_train_are_one(tmp_path: Path, device: str, common, first, second, check):
    check = {"atol": 1e-12, "replica": 0, "other": 0, "precision": "64-true"} | check
    runs = []
    for index, own in enumerate((first, second)):
        module = build_module(**{**common, **own})
        checkpoint = tmp_path / f"{index}.ckpt"
        runs.append(train(module, checkpoint, precision=check["precision"], accelerator=device))
    replica, other, atol = check["replica"], check["other"], check["atol"]
    if device == "cuda" and atol:  # whose sums have another order for each shape
        atol = max(atol, 1e-8)
    assert_same_state(*runs, atol, replica=replica, other=other)
    for name, column in runs[1].metrics.items():
        same = pytest.approx(column[other], abs=max(atol, 1e-12) * 100)
        assert runs[0].metrics[name][replica] == same
    if check.get("same_rows"):
        assert rows_of(runs[0], replica) == rows_of(runs[1], other)


# Shipped norms whose state or slots differ. tests/norms asks of each whether it can be stacked.


def choices_of(name: str, sizes: Sizes) -> dict[str, Any]:
    """A convnet on images, or for norms of text alone an encoder with dropout."""
    config, on_maps = compose_config([f"norm={name}"]), takes_maps(name)
    if not on_maps:
        config["norm"]["view"] = "sequence"
    data = image_data(NUM_TRAIN) if on_maps else text_data(NUM_TRAIN)

    def model(_: NormFactory) -> nn.Module:
        norm = build_norm(config, sizes.norm_batch_size, num_positions=data.input_shape[-1])
        return convnet(norm) if on_maps else text_encoder(norm, dropout=0.3)

    obstacle = cannot_stack(model(NormFactory(nn.Identity)), probe_batch(data, 4))
    return {"model": model, "data": data, "sizes": sizes, "stacked": not obstacle}


@pytest.mark.parametrize("name", ["group_ws", "batch_renorm", "batch_per_position"])
def test_replica_of_a_stack_trains_as_the_seed_alone(tmp_path: Path, name: str):
    common = choices_of(name, BOTH) | SGD
    stack = train(build_module(**common, seeds=(3, 4)), tmp_path / "a.ckpt")
    alone = train(build_module(**{**common, "stacked": False}, seeds=(4,)), tmp_path / "b.ckpt")
    assert stack.step == alone.step == NUM_TRAIN // 8 * 2
    assert_same_state(stack, alone, 1e-9, replica=1, other=0)
