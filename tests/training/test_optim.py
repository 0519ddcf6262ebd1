"""Which parameters decay, and which optimizers can train a stack."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from normexp.batching.replicas import stack_networks
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


class RateSquared(torch.optim.SGD):
    """Not linear in the learning rate, so one optimizer cannot train at several."""

    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= group["lr"]
        return super().step()


class OneLength(torch.optim.SGD):
    """Steps of one length over all parameters."""

    def step(self, closure=None):  # noqa: ARG002
        own = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(own, 0.1)
        return super().step()


class Lookahead(torch.optim.SGD):
    """Every ten steps half way back to where it was ten steps before (arXiv:1907.08610)."""

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("slow", [0, parameter.clone()])
        super().step()
        for state, parameter in (
            (self.state[p], p) for g in self.param_groups for p in g["params"]
        ):
            steps, slow = state["slow"][0] + 1, state["slow"][1]
            if steps % 10 == 0:
                slow = parameter.lerp(slow, 0.5)
                parameter.copy_(slow)
            state["slow"] = [steps, slow]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
        torch.optim.SGD,
        partial(torch.optim.AdamW, fused=True),
        torch.optim.Adam,
        partial(torch.optim.NAdam, decoupled_weight_decay=True),
        torch.optim.RAdam,
        torch.optim.Adamax,
        partial(torch.optim.RMSprop, momentum=0.5),
        partial(torch.optim.Adagrad, lr_decay=0.1),
        torch.optim.Adadelta,
    ],
)
def test_optimizer_that_acts_on_each_value_trains_a_stack(optimizer):
    assert stacking_obstacle_of(optimizer) is None


@pytest.mark.parametrize(
    "optimizer",
    [OneLength, RateSquared, Lookahead, torch.optim.Adafactor, torch.optim.Muon],
)
def test_optimizer_that_looks_at_other_values_does_not(optimizer):
    assert stacking_obstacle_of(optimizer) is not None
