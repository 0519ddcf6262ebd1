"""Weight decay by owner, one learning rate per replica, and which optimizers train a stack."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from training_cases import assert_same_state, build_module, train

from normexp.batching.replicas import stack_networks
from normexp.batching.sizes import Sizes
from normexp.norms.factory import NormFactory
from normexp.training.optim import parameter_groups, stacking_obstacle_of


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


class LayerWise(torch.optim.SGD):
    """Steps of one length per parameter."""

    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step()


class OneLength(torch.optim.SGD):
    """Steps of one length over all parameters."""

    def step(self, closure=None):  # noqa: ARG002
        own = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(own, 0.1)
        return super().step()


class RateSquared(torch.optim.SGD):
    """Not linear in the learning rate, so one optimizer cannot train at several."""

    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= group["lr"]
        return super().step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_that_acts_on_each_value_trains_a_stack(name: str):
    assert stacking_obstacle_of(OPTIMIZERS[name]) is None


@pytest.mark.parametrize(
    "optimizer", [LayerWise, OneLength, RateSquared, torch.optim.Adafactor, torch.optim.Muon]
)
def test_optimizer_that_looks_at_other_values_does_not(optimizer):
    assert stacking_obstacle_of(optimizer) is not None
