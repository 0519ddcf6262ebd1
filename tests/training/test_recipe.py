"""Length, learning rates, weight decay, and which optimizers can train a stack."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from training_cases import SETTINGS, image_data, recipe_for

from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.site import norm_parameters
from normexp.training.batching.replicas import Stacked
from normexp.training.config.compose import compose_config
from normexp.training.config.groups import shipped_defaults
from normexp.training.config.lr_rule import scale_learning_rate
from normexp.training.config.sizes import Sizes
from normexp.training.config.validate import read_settings
from normexp.training.optimizer import (
    ELEMENTWISE,
    OwnRates,
    can_train_a_stack,
    parameter_groups,
)
from normexp.training.recipe import count_steps, count_steps_per_epoch, momentum_of_half_life
from normexp.training.schedule import Schedule, build_schedule, own_schedule


def rates(schedule: Schedule) -> list[float]:
    """The rate of each step for an `lr` of one."""
    optimizer, found = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), []
    scheduler = schedule.build(optimizer)
    for _ in range(schedule.total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def shipped_rates(name: str, warmup: float, num_steps: int) -> list[float]:
    values = {**(shipped_defaults("schedule", name) or {}), "warmup": warmup}
    return rates(build_schedule(values, num_steps))


def test_schedules_follow_their_formulas():
    assert shipped_rates("constant", 0.2, 20) == pytest.approx([0.25, 0.5, 0.75, *[1] * 17])
    cosine = [(1 + math.cos(math.pi * k / 20)) / 2 for k in range(20)]
    assert shipped_rates("cosine", 0.0, 20) == pytest.approx(cosine)
    one_cycle = shipped_rates("one_cycle", 0.25, 20)
    assert one_cycle[0] == pytest.approx(1 / 25 + 24 / 25 / 5)
    assert max(one_cycle) == one_cycle[4] == one_cycle[5] == pytest.approx(1.0)
    assert 1e-4 <= one_cycle[-1] < 0.02
    linear = [0.5, 1, *(1 - k / 8 for k in range(8))]
    assert shipped_rates("linear", 0.2, 10) == pytest.approx(linear)
    wsd = [0.5, 1, *[1.0] * 15, 0.75, 0.5, 0.25]
    assert shipped_rates("wsd", 0.1, 20) == pytest.approx(wsd)


@pytest.mark.parametrize(
    ("rule", "lr", "momentum"),
    [
        ("linear", 0.4, 0.9),
        ("sqrt", 0.2, 0.9),
        # lr / (batch_size * (1 - m)) is a sample's total effect, m^(1 / batch_size) its decay.
        ("momentum_aware", 0.1 * 4 * (1 - 0.9**4) / (1 - 0.9), 0.9**4),
    ],
)
def test_rule_at_four_times_the_base_batch(rule: str, lr: float, momentum: float):
    sizes = {"batch_size": 128, "base_batch_size": 32}
    assert scale_learning_rate(rule, lr=0.1, momentum=0.9, **sizes) == pytest.approx((lr, momentum))
    if rule == "momentum_aware":
        with pytest.raises(UserError, match=r"needs optim\.momentum"):
            scale_learning_rate(rule, lr=0.1, momentum=None, **sizes)


def test_half_life_halves_the_past_at_every_batch_size():
    for batch_size in (2, 10, 100):
        momentum = momentum_of_half_life(100, batch_size)
        assert (1 - momentum) ** (100 / batch_size) == pytest.approx(0.5)


def test_length_in_epochs_steps_or_samples():
    def count(steps: int | None, samples: int | None, num_train=320, drop_last=True) -> int:
        budget = {"epochs": 3, "steps": steps, "samples": samples, "drop_last": drop_last}
        return count_steps(SETTINGS.model_copy(update=budget), num_train)

    assert [count_steps_per_epoch(70, 32, drop_last=drop) for drop in (True, False)] == [2, 3]
    assert [count(None, None), count(7, None), count(None, 100)] == [30, 7, 3]
    # Two epochs of 70 samples in batches of 32, 32 and 6 are six steps.
    assert count(None, 140, num_train=70, drop_last=False) == 6
    with pytest.raises(UserError, match="batch_size=80 is more than the 70 training samples"):
        count_steps_per_epoch(70, 80, drop_last=True)
    with pytest.raises(UserError, match="samples=20 is less than one batch_size=32"):
        count(None, 20)


def test_a_norm_that_mixes_no_samples_has_no_statistics_of_batches():
    kinds = {"evaluate_with": ["running", "precise", "own_share", "batch"]}
    mixing = recipe_for(image_data(), Sizes(8, None, 4), **kinds)
    assert (mixing.statistics, mixing.evaluation_batch_sizes) == (kinds["evaluate_with"], [4])
    other = dataclasses.replace(mixing, mixes_samples=False)
    assert (other.statistics, other.evaluation_batch_sizes) == (["running", "precise"], [])


@pytest.mark.parametrize("value", [None, math.nan, -0.1, "half", torch.ones(2)])
def test_factor_that_is_no_number_is_refused(value: object):
    def own(step: int, total_steps: int) -> object:
        return value if step == total_steps - 1 else 1.0

    with pytest.raises(UserError, match="^mine returns .* at step 99 of 100"):
        own_schedule(own, own, 100, None, "mine")


def test_monitor_of_what_looks_at_no_metric_is_refused():
    for target in (math.exp, lr_scheduler.StepLR):
        with pytest.raises(UserError, match="^schedule.monitor=val/loss: "):
            own_schedule(target, target, 10, "val/loss", "mine")


# The optimizer of a stack -------------------------------------------------------------------------


class TableNorm(nn.Module):
    """A norm whose affine parameters have three dimensions: a rule by ndim would miss them."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, 2, 2))
        self.bias = nn.Parameter(torch.zeros(num_features))


@pytest.mark.parametrize(("norm_decay", "decay_bias"), [(None, False), (0.3, False), (None, True)])
@pytest.mark.parametrize("stacked", [False, True])
def test_weight_decay_goes_by_owner_and_name_and_not_by_dimensions(norm_decay, decay_bias, stacked):
    def build() -> nn.Module:
        parts = {"norm1": NormFactory(TableNorm)(3), "head": nn.Linear(3, 2)}
        return nn.ModuleDict(parts | {"attention": nn.MultiheadAttention(2, 1)})

    model = Stacked([build(), build()]).trees[0] if stacked else build()
    groups = parameter_groups(model, weight_decay=0.1, norm_decay=norm_decay, decay_bias=decay_bias)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        kept = not decay_bias and name.endswith("bias")
        expected = norm_decay or 0.0 if "norm" in name else 0.0 if kept else 0.1
        assert decays[id(parameter)] == expected, name


def test_what_is_left_out_of_weight_decay_has_its_group_without_any():
    """Recorded checkpoints have two groups."""
    model = nn.Sequential(nn.Linear(3, 3), NormFactory(TableNorm)(3))
    groups = parameter_groups(model, weight_decay=0.0, decay_bias=False)
    assert [len(group["params"]) for group in groups] == [1, 3]


@pytest.mark.parametrize(("typed", "decay"), [("false", 0.0), ("true", 0.2), ("0.7", 0.7)])
def test_norms_decay_not_at_all_as_all_weights_or_by_a_number_of_their_own(typed, decay):
    words = ["trainer=cpu", "optim.weight_decay=0.2", f"optim.decay_norm={typed}"]
    optim = read_settings(compose_config(words)).optim
    network = nn.Sequential(nn.Linear(3, 3), NormFactory(TableNorm)(3))
    recipe = recipe_for(image_data(4), Sizes(2), optim=optim)
    groups = recipe.build_optimizer(network).param_groups
    assert groups[0]["weight_decay"] == 0.2
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {decays[id(p)] for p in norm_parameters(network)} == {decay}


def test_an_optimizer_that_acts_on_each_value_trains_a_stack_as_each_run_alone():
    """At a rate for each replica; a foreign class, also a subclass, is trained run by run."""
    for make in (partial(torch.optim.SGD, momentum=0.9, nesterov=True), *ELEMENTWISE):
        noise = torch.Generator().manual_seed(0)
        alone = [nn.ParameterList([torch.randn(3, 4, generator=noise).double()]) for _ in range(2)]
        stack, scales = Stacked(list(alone)), (1.0, 0.5)
        optimizers = [make(stack.parameters(), lr=0.1)]
        own_rates = OwnRates(stack, scales)
        optimizers += [make(n.parameters(), lr=0.1 * s) for n, s in zip(alone, scales, strict=True)]
        assert can_train_a_stack(optimizers[0])
        for _ in range(5):
            gradient = torch.randn(2, 3, 4, generator=noise).double()
            next(stack.parameters()).grad = gradient.clone()
            own_rates.step(optimizers[0])
            for network, own, optimizer in zip(alone, gradient, optimizers[1:], strict=True):
                network[0].grad = own.clone()
                optimizer.step()
        together = next(stack.parameters())
        for index, network in enumerate(alone):
            torch.testing.assert_close(together[index], network[0], rtol=1e-9, atol=1e-12)
    assert not can_train_a_stack(type("Own", (torch.optim.SGD,), {})(alone[0].parameters(), lr=0.1))
    assert not can_train_a_stack(torch.optim.Adafactor(alone[0].parameters()))
