"""What a finding costs is what the gap loses when its remedy is applied by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import slow_but
from torch import Tensor, nn

import normexp
from normexp.any_network.diagnosis import Diagnosis, diagnose
from normexp.errors import UserError

C = 12
Pairs = list[tuple[Tensor, Tensor]]


def draw(*, seed: int = 0, count: int = 16, size: int = 16, positions: int = 0) -> Pairs:
    """Batches of vectors, or of series (N, T, 4), and a class that their mean shows."""
    draws = torch.Generator().manual_seed(seed)
    shape = (size, positions, 4) if positions else (size, 4)
    inputs = 2 * torch.randn(count, *shape, generator=draws) + 1
    if positions:  # those of a sample are alike
        inputs += 4 * torch.randn(count, size, 1, 4, generator=draws)
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    return [(x, ((x.mean(1) if positions else x) @ weights).argmax(1)) for x in inputs]


class Own(nn.Module):
    """A batch norm of one's own, with names of its own."""

    average: Tensor
    square: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("square", torch.ones(width))

    def forward(self, x):
        if not self.training:
            return (x - self.average) * (self.square + 1e-5).rsqrt()
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.average.lerp_(mean, 0.05)
            self.square.lerp_(var, 0.05)
        return (x - mean) * (var + 1e-5).rsqrt()


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, C), norm(C), nn.ReLU(), nn.Linear(C, 3))


def train(model: nn.Module, steps: int = 120, **batches: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for inputs, targets in draw(seed=7, count=steps, **batches):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


def spoiled(model: nn.Module) -> Any:
    """The averages of the model's norm as if its inputs were other ones."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name.endswith(("mean", "average")):
                buffer += 3
    return model


def examine(model: nn.Module, pairs: Pairs | None = None) -> Diagnosis:
    return diagnose(model, draw() if pairs is None else pairs, F.cross_entropy)


def recompute(model: nn.Module) -> nn.Module:
    normexp.recompute_averages(model, draw())
    return model


def replaced(norm: str, model: nn.Module) -> nn.Module:
    return normexp.replace_norms(model, norm, draw()[0][0])


class Turned(nn.Module):
    def forward(self, x):
        return x if self.training else -x


class Stubborn(nn.BatchNorm1d):
    def train(self, mode: bool = True):
        del mode
        return super().train(True)


def in_turn(model: Any) -> Any:
    """Its norm runs on two kinds of inputs."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.BatchNorm1d(4, affine=False)] * 2)
            self.rest = model

        def forward(self, x):
            return self.rest(self.norms[0](x) - self.norms[1](100 - x))

    return Twice()


def apart(model: Any) -> nn.Module:
    model.norms[1] = copy.deepcopy(model.norms[1])
    return recompute(model)


def in_training_mode(path: str, model: nn.Module) -> nn.Module:
    model.eval()
    model.get_submodule(path).train()
    return model


REMEDIES: dict[str, tuple[Callable[[], nn.Module], str, Callable[[nn.Module], nn.Module]]] = {
    "torch's": (lambda: spoiled(train(network())), "stale_averages", recompute),
    "own class": (lambda: spoiled(train(network(Own))), "stale_averages", recompute),
    "batch": (
        lambda: spoiled(replaced("batch", train(network()))),
        "stale_averages",
        recompute,
    ),
    "as_built": (
        lambda: spoiled(replaced("as_built", train(network()))),
        "stale_averages",
        recompute,
    ),
    "eval_norm": (
        lambda: spoiled(train(replaced("eval_norm", network()))),
        "stale_averages",
        recompute,
    ),
    "held": (
        lambda: spoiled(train(network(partial(nn.BatchNorm1d, momentum=0.0)))),
        "stale_averages",
        recompute,
    ),
    "used twice": (lambda: train(in_turn(network())), "used_twice", apart),
    "other in evaluation": (
        lambda: train(nn.Sequential(network(), Turned())),
        "rest",
        partial(in_training_mode, "1"),
    ),
}


@pytest.mark.parametrize("name", slow_but(("own class", "held"), REMEDIES))
def test_the_gap_loses_what_a_finding_costs(name: str):
    make, kind, mend = REMEDIES[name]
    model = make()
    before = examine(model)
    (finding,) = [finding for finding in before.findings if finding.cost]
    assert finding.kind == kind, str(before)
    after = examine(mend(model))
    lost = before.gap.value - after.gap.value
    assert finding.cost is not None and finding.cost.value > 0.1
    assert lost == pytest.approx(finding.cost.value, abs=finding.cost.error)
    assert kind not in {finding.kind for finding in after.findings}, str(after)


def offset(*, seed: int = 0, count: int = 16) -> Pairs:
    """Batches of positions (N, 4, T) near their sample's mean, which training makes less of."""
    draws = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(count, 2, 4, 1, generator=draws)
    inputs = means + torch.randn(count, 2, 4, 32, generator=draws)
    return [(x, F.batch_norm(x, None, None, training=True)) for x in inputs]


@pytest.mark.slow
def test_the_gap_loses_the_own_share_with_eval_norm():
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False))
    pairs = offset(count=64)
    normexp.recompute_averages(model, pairs)
    before = diagnose(model, pairs, F.mse_loss, max_batches=64)
    (finding,) = [finding for finding in before.findings if finding.kind == "own_share"]
    assert "eval_norm" in finding.remedy
    model = normexp.replace_norms(model, "eval_norm", pairs[0][0])
    normexp.recompute_averages(model, pairs)
    after = diagnose(model, pairs, F.mse_loss, max_batches=64)
    lost = before.gap.value - after.gap.value
    assert finding.cost and lost == pytest.approx(finding.cost.value, abs=finding.cost.error)


@pytest.mark.parametrize("norm", ["batch", "eval_norm"])
def test_averages_become_those_of_all_samples(norm: str):
    """Mean and variance of what enters, over all batches; only averages change."""
    model = spoiled(train(replaced(norm, network())))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert normexp.recompute_averages(model, draw()) == ("1",)
    entering = model[0](torch.cat([x for x, _ in draw()]))
    running = model[1].norm
    torch.testing.assert_close(running.running_mean, entering.mean(0))
    torch.testing.assert_close(running.running_var, entering.var(0, unbiased=False))
    if norm == "eval_norm":  # the share of a sample in a batch of 16
        assert running.running_share == pytest.approx(1 / 16)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, state[n])}
    assert all(name.rpartition("running_")[1] or "num_" in name for name in changed)
    assert model.training


def test_dropout_is_off_while_averages_are_recomputed():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    normexp.recompute_averages(model, draw())
    entering = torch.cat([x for x, _ in draw()])
    torch.testing.assert_close(model[1].running_mean, entering.mean(0))


def test_nothing_is_written_that_is_not_finite():
    model, pairs = network(), draw()
    pairs[3][0][0] = torch.nan
    with pytest.raises(UserError, match="what reaches 1 is not finite"):
        normexp.recompute_averages(model, pairs)
    assert not model[1].running_mean.any()
    with pytest.raises(UserError, match="no norm with averages"):
        normexp.recompute_averages(nn.Linear(4, 3), draw())
    with pytest.raises(UserError, match="batches holds 0"):
        normexp.recompute_averages(network(), [])


# --- Samples that the first axis does not count ---------------------------------------------------


class Series(nn.Module):
    """Normalizes the steps of series (N, T, 4), as rows or as positions."""

    def __init__(self, *, as_rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.as_rows = as_rows
        self.embed, self.norm, self.head = nn.Linear(4, C), nn.BatchNorm1d(C), nn.Linear(C, 3)

    def forward(self, x):
        h = self.embed(x)
        h = self.norm(h.flatten(0, 1)).view_as(h) if self.as_rows else self.norm(h.mT).mT
        return self.head(h.relu().mean(1))


def test_rows_of_a_sample_are_positions():
    pairs = draw(positions=5)
    rows, positions = (
        examine(train(Series(as_rows=as_rows), positions=5), pairs) for as_rows in (True, False)
    )
    assert any(positions.terms[name].value for name in ("small_batch", "own_share"))
    for name, term in positions.terms.items():
        assert rows.terms[name].value == pytest.approx(term.value, abs=1e-4), name


class TimeFirst(nn.Module):
    """Attention over the steps of series (T, N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.MultiheadAttention(4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encode(x, x, x)[0].mean(0))


def test_samples_on_the_second_axis_are_independent():
    pairs = [(x.transpose(0, 1), y) for x, y in draw(positions=5, size=7)]
    diagnosis = examine(TimeFirst(), pairs)
    assert not diagnosis.findings and not diagnosis.loss_at_size
    assert "batches of 7" in diagnosis.summary


@pytest.mark.slow
def test_healthy_networks_have_no_finding_over_20_seeds():
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, C), nn.BatchNorm1d(C), nn.ReLU(), nn.Linear(C, 3))
        diagnosis = examine(train(model), draw(seed=100 + seed))
        assert not diagnosis.findings, f"{seed}: {diagnosis}"
