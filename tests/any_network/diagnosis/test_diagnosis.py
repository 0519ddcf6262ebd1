"""Networks broken on purpose, and healthy ones, of which a diagnosis says nothing."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import diagnosis_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diagnosis_cases import (
    batches,
    examine,
    kinds,
    network,
    norms_of,
    of_batch_norm,
    replaced,
    trained,
)
from marks import slow_but
from torch import nn

import normexp
from normexp.any_network.diagnosis import Diagnosis, diagnose, measure
from normexp.any_network.trial import differing_values
from normexp.errors import UserError
from normexp.norms.running import RunningMomentsNorm


def frozen():
    model = trained()
    for norm in norms_of(model):
        norm.eval()
        norm.requires_grad_(False)
    return model.eval()


def masked():
    """Infinite values that are no running state, as those of an attention mask."""
    model = trained()
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    return model


HEALTHY: dict[str, Callable[[], Diagnosis]] = {
    "batch": of_batch_norm,
    "masked": lambda: examine(masked()),
    "none": lambda: examine(trained("none")),
    "frozen": lambda: examine(frozen()),
    "group": lambda: examine(trained("group")),
}


@pytest.mark.parametrize("name", slow_but(("masked", "none", "group"), HEALTHY))
def test_nothing_is_found_in_a_healthy_network(name: str):
    diagnosis = HEALTHY[name]()
    assert not diagnosis.findings, str(diagnosis)
    assert "ffect" not in diagnosis.summary and "epends" not in diagnosis.summary


def changed(change, *indices: int):
    """A fault of the trained network at some of its norms."""

    def broken():
        model = trained()
        for index in indices or (1, 4, 7):
            with torch.no_grad():
                change(model[index])
        return model

    return broken


def shift(norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    norm.running_mean += 1


def stale_and_young():
    model = changed(shift)()
    for norm in norms_of(model):
        norm.num_batches_tracked.fill_(40)  # 0.9 ** 40 is 1.5 %: it explains little
    return model


def left_out():
    model = network()
    names = ("running_mean", "running_var", "num_batches_tracked")
    state = {k: v for k, v in trained().state_dict().items() if not k.endswith(names)}
    model.load_state_dict(state, strict=False)
    return model


def averaging(momentum: float, size: int, *indices: int):
    """The trained network with averages of 50 batches."""

    def broken():
        model = changed(lambda norm: norm.reset_running_stats(), *indices)().train()
        for index in indices or (1, 4, 7):
            model[index].momentum = momentum
        for inputs, _ in batches(size, seed=5)[:50]:
            model(inputs)
        return model

    return broken


class Stubborn(nn.BatchNorm2d):
    def train(self, mode: bool = True):
        del mode
        return super().train(True)


def stubborn():
    model = trained()
    model[4].__class__ = Stubborn
    return model


def half_in_training():
    model = trained().eval()
    model[4].train()
    return model


class DropoutForEver(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2)


def random_for_ever():
    model = trained()
    model[6] = DropoutForEver()
    return model


class Parameters(nn.Module):
    """Batch norm called as a function, whose averages are parameters of other names."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None
        self.centre = nn.Parameter(norm.running_mean.clone(), requires_grad=False)
        self.spread = nn.Parameter(norm.running_var.clone(), requires_grad=False)
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x):
        return F.batch_norm(x, self.centre, self.spread, self.weight, self.bias, self.training)


class ByGradMode(nn.Module):
    """Uses and moves batch statistics where gradients are taken, whatever its mode."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.mean, self.var = (make(norm.num_features, 1, 1) for make in (torch.zeros, torch.ones))
        self.affine = nn.Conv2d(norm.num_features, norm.num_features, 1, groups=norm.num_features)
        self.affine.weight.data = norm.weight.data.view(-1, 1, 1, 1)
        self.affine.bias = norm.bias

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.affine((x - self.mean) / (self.var + 1e-5).sqrt())
        mean, var = (
            x.mean((0, 2, 3)).view(-1, 1, 1),
            x.var((0, 2, 3), unbiased=False).view(-1, 1, 1),
        )
        self.mean = 0.8 * self.mean + 0.2 * mean.detach()
        self.var = 0.8 * self.var + 0.2 * var.detach()
        return self.affine((x - mean) / (var + 1e-5).sqrt())


class InverseScale(nn.Module):
    """Keeps 1 / standard deviation, so its evaluation is not that of a variance."""

    scale: torch.Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_var is not None
        self.centre = nn.Parameter(norm.running_mean.view(-1, 1, 1) + 1, requires_grad=False)
        self.scale = norm.running_var.rsqrt().view(-1, 1, 1)
        self.norm = nn.BatchNorm2d(norm.num_features, track_running_stats=False)
        self.norm.load_state_dict(norm.state_dict(), strict=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.mean((0, 2, 3)).view(-1, 1, 1), 0.1)
                self.scale = self.scale.lerp(x.std((0, 2, 3)).pow(-1).view(-1, 1, 1), 0.1)
            return self.norm(x)
        weight, bias = self.norm.weight.view(-1, 1, 1), self.norm.bias.view(-1, 1, 1)
        return (x - self.centre) * self.scale * weight + bias


def with_norm(change, index: int = 4):
    """The trained network with another norm at one place."""

    def broken():
        model = trained()
        model[index] = change(model[index])
        return model

    return broken


def shifted(norm: nn.BatchNorm2d) -> Parameters:
    parameters = Parameters(norm)
    parameters.centre.data += 1
    return parameters


def without_momentum():
    model = changed(shift)()
    for norm in norms_of(model):
        norm.momentum = 0.0
    return model


class Centred(nn.Module):
    """Subtracts the mean of the batch in both modes, and is no norm."""

    def forward(self, x):
        return x - x.mean(0)


class UsedTwice(nn.Module):
    """Its norm sees images, and images of another brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.rest = network()

    def forward(self, x):
        return self.rest(self.norm(x) - self.norm(3 - 2 * x))


def without_averages():
    model = network(partial(nn.BatchNorm2d, track_running_stats=False))
    model.load_state_dict(trained().state_dict(), strict=False)
    return model


def poisoned():
    model = trained().train()
    inputs, _ = batches()[0]
    model(inputs.index_fill(0, torch.tensor([0]), torch.nan))
    return model


class Scaled(nn.Module):
    def forward(self, x):
        return x if self.training else x / 10


def used_twice():
    torch.manual_seed(0)
    return cases.train(UsedTwice())


class Odd(RunningMomentsNorm):
    """Its evaluation is not that of batch norm."""

    def normalize_by_running(self, x, real, affine):
        del real, affine
        return x * self.running_var.mean()


ALL = ("1", "4", "7")
BROKEN = {  # by name: the network, and its findings with their sites
    "stale": (changed(shift), {"stale_averages": ALL}),
    "stale at one": (changed(shift, 4), {"stale_averages": ("4",)}),
    "stale and young": (stale_and_young, {"stale_averages": ALL}),
    "not loaded": (left_out, {"never_updated": ALL}),
    "initial values": (averaging(1e-4, 32), {"initial_values": ALL}),
    "left in training": (stubborn, {"left_in_training": ("4",)}),
    "handed over so": (half_in_training, {"left_in_training": ("4",)}),
    "averages as parameters": (with_norm(shifted), {"stale_averages": ("4",)}),
    "averages in attributes": (with_norm(ByGradMode), {"never_updated": ("4",)}),
    "another kind": (with_norm(InverseScale), {"not_analysed": ("4",)}),
    "momentum 0": (without_momentum, {"stale_averages": ALL}),
    "scripted": (lambda: torch.jit.script(changed(shift)()), {"not_analysed": ALL}),
    "mean of the batch": (
        lambda: nn.Sequential(trained(), Centred()),
        {"depends_on_batch": ("1",)},
    ),
    "used twice": (used_twice, {"used_twice": ("norm",)}),
    "other in evaluation": (lambda: nn.Sequential(trained(), Scaled()), {"rest": ("1",)}),
    "random": (random_for_ever, {"varies_in_evaluation": ()}),
    "without averages": (without_averages, {"depends_on_batch": ALL}),
    "poisoned": (poisoned, {"not_finite": ALL}),
}


OFTEN_BROKEN = (
    *("stale", "not loaded", "initial values", "left in training", "handed over so"),
    *("averages as parameters", "mean of the batch", "other in evaluation", "random", "poisoned"),
)

# One site of several is named alone only where the others are measured well.
TAKES_8_BATCHES = (
    *("stale at one", "averages as parameters", "averages in attributes", "used twice"),
    "mean of the batch",
)


@cache
def of_broken(name: str) -> Diagnosis:
    make, _ = BROKEN[name]
    return examine(make(), max_batches=8 if name in TAKES_8_BATCHES else 4)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", slow_but(OFTEN_BROKEN, BROKEN))
def test_a_network_broken_on_purpose_is_told(name: str):
    _, expected = BROKEN[name]
    diagnosis = of_broken(name)
    sites = {finding.kind: finding.sites for finding in diagnosis.findings}
    assert sites.keys() == expected.keys(), str(diagnosis)
    for kind, paths in expected.items():
        assert set(sites[kind]) == set(paths), str(diagnosis)


def noisy(size: int, *after: nn.Module) -> Diagnosis:
    """Averages of one batch, in 32 channels, where the targets are exact."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, size, 32, generator=draws)
    model = nn.Sequential(nn.BatchNorm1d(32, momentum=1.0, affine=False), *after)
    model(torch.randn(size, 32, generator=draws))
    return diagnose(model, [(x, x) for x in inputs], F.mse_loss)


of_noisy = cache(partial(noisy, 8))


def test_averages_of_one_batch_are_noisy():
    diagnosis = of_noisy()
    assert kinds(diagnosis) == {"noisy_averages"}, str(diagnosis)


class Halves(nn.Module):
    """Normalizes half of its input, and scales the other half down in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scaled = nn.BatchNorm1d(4, affine=False), Scaled()

    def forward(self, x):
        return torch.cat([self.norm(x[:, :4]), self.scaled(x[:, 4:])], dim=1)


def test_two_faults_are_told_the_larger_first_and_cost_the_gap_together():
    """A mean off by 2 standard deviations costs 4 in half of the values, a tenth 0.9 ** 2."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 32, 8, generator=draws)
    pairs = [(x, F.batch_norm(x, None, None, training=True)) for x in inputs]
    model = Halves()
    model.norm.running_mean.fill_(2)
    diagnosis = diagnose(model, pairs, F.mse_loss)
    assert [finding.kind for finding in diagnosis.findings] == ["stale_averages", "rest"]
    costs = [finding.cost.value for finding in diagnosis.findings if finding.cost]
    assert costs == pytest.approx([2, 0.405], abs=0.1)
    assert sum(costs) == pytest.approx(diagnosis.gap.value, abs=0.05)
    assert f"{diagnosis.findings[0].cost}" in diagnosis.summary


def test_faults_that_hide_each_other_are_one_finding():
    """Logits that stale averages spoil cost more at full scale."""
    (finding,) = examine(nn.Sequential(changed(shift, 4)(), Scaled()), max_batches=8).findings
    assert finding.kind == "stale_averages and rest" and set(finding.sites) == {"0.4", "1"}
    assert "recompute_averages" in finding.remedy and "train()" in finding.remedy


class Sum(nn.Module):
    """Adds two norms, of the first and the second half of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.BatchNorm1d(4, affine=False) for _ in range(2))

    def forward(self, x):
        return self.first(x[:, :4]) + self.second(x[:, 4:])


def test_noise_of_averages_that_another_fault_hides_is_no_mistake():
    """Less of a signal has less of its noise, so that precise averages gain nothing before."""
    diagnosis = noisy(16, Scaled())
    assert kinds(diagnosis) == {"rest"}, str(diagnosis)


def test_averages_that_cost_only_beside_broken_ones_are_not_named():
    """Off by 3 and by 0.05, they cost (3 + 0.05)**2: 0.3 by the small one, and 0.0025 alone."""
    model = Sum()
    model.second.running_mean.fill_(3 - 0.05)
    inputs = 3 + torch.randn(16, 32, 8, generator=torch.Generator().manual_seed(0))
    pairs = [(x, copy.deepcopy(model)(x)) for x in inputs]
    (finding,) = diagnose(model, pairs, F.mse_loss).findings
    assert finding.kind == "never_updated" and finding.sites == ("first",)


class Raised(nn.Module):
    def forward(self, x):
        return x if self.training else x + 2


def test_averages_whose_cost_another_fault_hides_are_explained():
    """An offset of 2 less 0.3: without the averages' part the loss is higher, not lower."""
    norm = nn.BatchNorm1d(4, affine=False)
    inputs = torch.randn(16, 32, 4, generator=torch.Generator().manual_seed(0))
    pairs = [(x, F.batch_norm(x, None, None, training=True)) for x in inputs]
    assert norm.running_mean is not None
    norm.running_mean.fill_(0.3)
    (finding,) = diagnose(nn.Sequential(norm, Raised()), pairs, F.mse_loss).findings
    assert finding.kind == "rest and stale_averages"
    assert "do not belong to these weights and inputs" in finding.cause


def test_a_cause_that_costs_nothing_and_a_remedy_that_changes_nothing_are_not_named():
    blind = left_out()  # its averages were never updated, and no output depends on them
    nn.init.zeros_(blind[10].weight)
    assert not examine(blind, max_batches=4).findings
    odd = examine(replaced(partial(Odd, eps=1e-5)), max_batches=4)
    assert odd.not_analysed == ALL and odd.terms["not_analysed"].value > 1
    assert not odd.findings


class Still(Parameters):
    """Its averages never move."""

    def forward(self, x):
        moments = (self.centre, self.spread)
        return F.batch_norm(x, *moments, self.weight, self.bias, self.training, momentum=0.0)


def test_averages_that_no_forward_moves_are_those_of_the_model():
    model, pairs = with_norm(lambda norm: Still(norm))().eval(), batches()[:8]
    plain = sum(F.cross_entropy(model(x), y).item() for x, y in pairs) / 8
    assert examine(model, batches=pairs).evaluation == pytest.approx(plain)


class WithTeacher(nn.Module):
    """Runs a second network in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = trained(), trained()

    def forward(self, x):
        if self.training:
            self.teacher(x)
        return self.student(x)


def test_a_norm_that_runs_in_training_alone_changes_nothing():
    alone = examine(trained(), max_batches=4)
    beside = examine(WithTeacher(), max_batches=4)
    assert beside.terms == alone.terms and not kinds(beside) - kinds(alone)


def test_frozen_weights_do_not_hide_averages_that_move():
    model = changed(shift)()
    model.requires_grad_(False)[9].requires_grad_()
    as_trained, evaluated = (examine(model.train(mode), max_batches=2) for mode in (True, False))
    assert evaluated.to_dict() == as_trained.to_dict() and evaluated.gap.value > 1


def test_the_summary_lists_the_terms_beyond_chance_of_either_sign():
    diagnosis = of_noisy()
    terms = [t for t in diagnosis.terms.values() if abs(t.value) > max(0.02, 4 * t.error)]
    assert len(terms) > 1 and min(t.value for t in terms) < 0
    assert all(str(term) in diagnosis.summary for term in terms)


@pytest.mark.slow
def test_averages_of_a_large_momentum_are_not_stale():
    """At the smallest batches, whose own share matters more."""
    diagnosis = examine(averaging(1.0, 2)(), batches=batches(2), max_batches=64)
    assert "stale_averages" not in kinds(diagnosis)


def untracked():
    """Its norms were told to stop averaging, and keep what they have."""
    model = changed(shift)()
    for norm in norms_of(model):
        norm.track_running_stats = False
    return model


def test_averages_that_training_does_not_move_are_named_with_the_switch():
    for diagnosis, setting, remedy in (
        (of_broken("momentum 0"), "momentum is 0.0", "set momentum=0.1"),
        (examine(untracked(), max_batches=4), "stats is False", "set track_running_stats=True"),
    ):
        (finding,) = diagnosis.findings
        assert setting in finding.cause and remedy in finding.remedy
        assert "recompute_averages(" in finding.remedy


def test_an_evaluation_that_depends_on_the_batch_is_said_with_its_losses():
    model, pairs = nn.Sequential(trained(), Centred()), batches()[:8]
    diagnosis = of_broken("mean of the batch")
    together, one = (
        sum(F.cross_entropy(model.eval()(x[:k]), y[:k]).item() for x, y in pairs) / 8
        for k in (32, 1)
    )
    assert one == pytest.approx(2.302585)  # one sample less its own mean is 0
    cause = diagnosis.findings[0].cause
    assert f"loss 2.3 ± 0 for single samples, {together:.3g}" in cause and cause[1:] in (
        diagnosis.summary
    )
    assert diagnosis.loss_at_size[1].value == pytest.approx(one)


# --- What is left behind, and what is said -------------------------------------------------------


@pytest.mark.parametrize("make", [stubborn, with_norm(Parameters), with_norm(ByGradMode)])
def test_the_model_and_all_random_states_come_back_unchanged(make: Any):
    model = nn.Sequential(make(), nn.Dropout(0.2))
    original = copy.deepcopy(model)
    buffers, before = dict(model.named_buffers()), copy.deepcopy(model.state_dict())
    values = [dict(module.__dict__) for module in model.modules()]
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    pairs: Any = batches()[:4]
    loader = torch.utils.data.DataLoader(pairs, batch_size=None)
    examine(model, batches=loader)
    drawn = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0]) and (drawn[1] == again[1]).all() and drawn[2] == again[2]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert not differing_values(model, original)
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    for was, module in zip(values, model.modules(), strict=True):
        assert was.keys() == vars(module).keys() and was["training"] == module.training
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("options", [{"max_batches": 0}, {"tolerance": -0.1}])
def test_options_out_of_range_are_refused(options: dict[str, float]):
    (key,) = options
    with pytest.raises(UserError, match=f"{key}=.*: must be"):
        normexp.diagnose(trained(), batches(), F.cross_entropy, **options)


def test_a_diagnosis_is_plain_data():
    content = json.loads(json.dumps(of_broken("poisoned").to_dict(), allow_nan=False))
    assert content["findings"][0]["kind"] == "not_finite"
    assert content["evaluation"] is None


@pytest.mark.parametrize(("patience", "says"), [(-1, True), (100, False)])
def test_a_long_diagnosis_says_how_far_it_is(patience: int, says: bool, monkeypatch, capsys):
    monkeypatch.setattr(measure, "PATIENCE", patience)
    examine(trained(), batches=batches()[:2])
    first, *_ = [*capsys.readouterr().err.splitlines(), ""]
    assert first == ("diagnose: 1 passes over the batches" if says else "")


def test_what_a_norm_does_not_count_is_a_dash():
    row = str(of_broken("averages as parameters")).splitlines()[-3]
    assert row.split()[:4] == ["4", "-", "-", "-"]
