"""Which parameters decay, and which optimizers can train a stack."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from normexp.batching.replicas import Stacked
from normexp.norms.factory import NormFactory
from normexp.training.recipe import (
    ELEMENTWISE,
    can_train_a_stack,
    parameter_groups,
    train_at_own_rates,
)


class TableNorm(nn.Module):
    """A norm whose affine parameters have three dimensions: a rule by ndim would miss them."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, 2, 2))
        self.bias = nn.Parameter(torch.zeros(num_features))


@pytest.mark.parametrize(("decay_norm", "decay_bias"), [(False, False), (True, False), (False, 1)])
@pytest.mark.parametrize("stacked", [False, True])
def test_weight_decay_goes_by_owner_and_name_and_not_by_dimensions(decay_norm, decay_bias, stacked):
    def build() -> nn.Module:
        parts = {"norm1": NormFactory(TableNorm)(3), "head": nn.Linear(3, 2)}
        return nn.ModuleDict(parts | {"attention": nn.MultiheadAttention(2, 1)})

    model = Stacked([build(), build()]).trees[0] if stacked else build()
    groups = parameter_groups(model, weight_decay=0.1, decay_norm=decay_norm, decay_bias=decay_bias)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        kept = not decay_norm if "norm" in name else not decay_bias and name.endswith("bias")
        assert decays[id(parameter)] == (0.0 if kept else 0.1), name


def test_an_optimizer_that_acts_on_each_value_trains_a_stack_as_each_run_alone():
    """At a rate for each replica; a foreign class, also a subclass, is trained run by run."""
    for make in (partial(torch.optim.SGD, momentum=0.9, nesterov=True), *ELEMENTWISE):
        noise = torch.Generator().manual_seed(0)
        alone = [nn.ParameterList([torch.randn(3, 4, generator=noise).double()]) for _ in range(2)]
        stack, scales = Stacked(list(alone)), (1.0, 0.5)
        optimizers = [make(stack.parameters(), lr=0.1)]
        train_at_own_rates(optimizers[0], stack, scales)
        optimizers += [make(n.parameters(), lr=0.1 * s) for n, s in zip(alone, scales, strict=True)]
        assert can_train_a_stack(optimizers[0])
        for _ in range(5):
            gradient = torch.randn(2, 3, 4, generator=noise).double()
            next(stack.parameters()).grad = gradient.clone()
            optimizers[0].step()
            for network, own, optimizer in zip(alone, gradient, optimizers[1:], strict=True):
                network[0].grad = own.clone()
                optimizer.step()
        together = next(stack.parameters())
        for index, network in enumerate(alone):
            torch.testing.assert_close(together[index], network[0], rtol=1e-9, atol=1e-12)
    assert not can_train_a_stack(type("Own", (torch.optim.SGD,), {})(alone[0].parameters(), lr=0.1))
    assert not can_train_a_stack(torch.optim.Adafactor(alone[0].parameters()))
