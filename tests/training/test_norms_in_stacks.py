"""Every shipped norm: a replica of a stack trains as the same seed alone, in float64 to 1e-9."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import open_dict
from torch import nn
from training_cases import (
    SGD,
    assert_same_state,
    build_module,
    convnet,
    image_data,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.build import build_norm
from normexp.checks.integrity import cannot_stack
from normexp.checks.sites import probe_batch
from normexp.config.compose import compose_config
from normexp.config.help import group_choices
from normexp.norms.factory import NormFactory
from normexp.training.module import TrainingModule

FAST = ("batch", "group_ws", "batch_renorm", "power", "batch_per_position")
NORMS = [name for name in group_choices("norm") if name != "custom"]
SPLITS = [Sizes(8), Sizes(8, 2), Sizes(8, None, 2), Sizes(8, 4, 2)]
OPTIMIZERS = {"sgd": (SGD, 0.05), "adamw": (partial(torch.optim.AdamW, fused=True), 0.003)}


def takes_maps(name: str) -> bool:
    return "per_position" not in name and not name.startswith("causal_")


def build(
    name: str,
    seeds: tuple[int, ...],
    sizes: Sizes,
    optimizer: str = "sgd",
    *,
    num_train: int,
    stacked: bool = False,
) -> TrainingModule:
    """A convnet on images, or for norms of text alone an encoder with dropout."""
    config = compose_config([f"norm={name}"])
    if not takes_maps(name):
        with open_dict(config):
            config.norm.view = "sequence"
    data = image_data(num_train) if takes_maps(name) else text_data(num_train)

    def model(plain: NormFactory) -> nn.Module:
        del plain
        norm = build_norm(config, sizes, data)
        return convnet(norm) if takes_maps(name) else text_encoder(norm, dropout=0.3)

    if stacked and cannot_stack(model(NormFactory(nn.Identity)), probe_batch(data, 4)):
        stacked = False
    make, lr = OPTIMIZERS[optimizer]
    return build_module(
        model=model, data=data, seeds=seeds, stacked=stacked, sizes=sizes, optimizer=make, lr=lr
    )


def assert_replica_equals_the_run_alone(tmp_path: Path, *arguments, num_train: int) -> None:
    name, *rest = arguments
    stack = build(name, (3, 4), *rest, num_train=num_train, stacked=True)
    alone = build(name, (4,), *rest, num_train=num_train)
    for index, module in enumerate((stack, alone)):
        train(module, tmp_path / f"{index}.ckpt")
    assert stack.step == alone.step == num_train // 8 * 2
    assert_same_state(stack, alone, 1e-9, replica=1, other=0)


def splits_of(name: str) -> list[Sizes]:
    """All, or the whole batch alone for a norm whose state sees samples one after another."""
    norm = build_norm(compose_config([f"norm={name}"]), Sizes(8), image_data()).make(8)
    return SPLITS[:1] if getattr(norm, "sequential_state", False) else SPLITS


@pytest.mark.parametrize("name", FAST)
def test_replica_of_a_stack_trains_as_the_seed_alone(tmp_path: Path, name: str):
    assert_replica_equals_the_run_alone(tmp_path, name, splits_of(name)[-1], num_train=24)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NORMS)
def test_replica_trains_as_the_seed_alone_under_every_split(tmp_path: Path, name: str, optimizer):
    for sizes in splits_of(name):
        assert_replica_equals_the_run_alone(tmp_path, name, sizes, optimizer, num_train=80)
