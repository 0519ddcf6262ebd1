"""Schedules, weight decay by owner, and one learning rate per replica."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from training_cases import assert_same_state, build_module, train

from normexp.batching.replicas import stack_networks
from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.training.optim import parameter_groups
from normexp.training.schedule import named_schedule


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


class TableNorm(nn.Module):
    """A norm whose affine parameters have three dimensions: a rule by ndim would miss them."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, 2, 2))
        self.bias = nn.Parameter(torch.zeros(num_features))


@pytest.mark.parametrize("decay_norm", [False, True])
@pytest.mark.parametrize("decay_bias", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_weight_decay_goes_by_owner_and_name_and_not_by_dimensions(
    decay_norm: bool, decay_bias: bool, stacked: bool
):
    def build() -> nn.Module:
        parts = {"norm1": NormFactory(TableNorm)(3), "head": nn.Linear(3, 2)}
        return nn.ModuleDict(parts | {"attention": nn.MultiheadAttention(2, 1)})

    model = stack_networks([build(), build()]) if stacked else build()
    groups = parameter_groups(model, weight_decay=0.1, decay_norm=decay_norm, decay_bias=decay_bias)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    of_norm, of_bias = 0.1 * decay_norm, 0.1 * decay_bias
    expected = {
        "norm1.norm.weight": of_norm,
        "norm1.norm.bias": of_norm,
        "head.weight": 0.1,
        "head.bias": of_bias,
        "attention.in_proj_weight": 0.1,
        "attention.in_proj_bias": of_bias,
        "attention.out_proj.weight": 0.1,
        "attention.out_proj.bias": of_bias,
    }
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == expected


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd_plain": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "nadam": partial(torch.optim.NAdam, decoupled_weight_decay=True),
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "adadelta": torch.optim.Adadelta,
}
COMMON = {"max_grad_norm": 1.0, "sizes": Sizes(8, 4, 2)}


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in_turn"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sgd", "adamw") else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_replica_at_its_own_rate_equals_a_run_alone_at_that_rate(tmp_path: Path, name, stacked):
    choices = {"optimizer": OPTIMIZERS[name], **COMMON}
    seeds, scales = (3, 3, 4), (1.0, 0.25, 0.03)
    stack = build_module(seeds=seeds, lr=0.02, lr_scales=scales, stacked=stacked, **choices)
    train(stack, tmp_path / "stack.ckpt")
    for index, (seed, scale) in enumerate(zip(seeds, scales, strict=True)):
        alone = build_module(seeds=(seed,), lr=0.02 * scale, **choices)
        train(alone, tmp_path / "alone.ckpt")
        assert_same_state(stack, alone, 1e-9, replica=index, other=0)


def test_replica_at_the_common_rate_is_the_run_alone_to_the_bit(tmp_path: Path):
    runs = [build_module(seeds=(0, 1), lr_scales=s, **COMMON) for s in ((1.0, 0.5), None)]
    for index, run in enumerate(runs):
        train(run, tmp_path / f"{index}.ckpt", precision="32-true")
    assert_same_state(*runs, 0)
