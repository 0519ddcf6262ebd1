"""Metrics with precise and with batch statistics, and that taking them changes nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from evaluation_cases import FORMS, foreign, population_of, snapshot, trained
from torch import Tensor
from torch.nn import functional
from training_cases import image_data, text_data, text_encoder

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.moments import Moments
from normexp.training import module as frozen
from normexp.training.evaluation import completed_blocks, score_batch, score_precise
from normexp.training.module import gather, shuffled


class Breaks(BatchNorm):
    """Raises in its `limit`-th forward in training mode."""

    limit = 1_000_000
    forwards = 0

    def kernel_moves_averages(self, x: Tensor) -> bool:
        del x
        return False  # but through `advance`

    def advance(self, groups: Moments) -> None:
        super().advance(groups)
        Breaks.forwards += 1
        if Breaks.forwards == Breaks.limit:
            raise RuntimeError("broken")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("limit", [1, 5, 13])
def test_all_is_as_before_when_a_forward_for_precise_statistics_raises(monkeypatch, limit, form):
    monkeypatch.setattr(frozen, "STACK_SAMPLES", 16)
    task = trained(make_norm=Breaks, **form)
    before = snapshot(task)
    monkeypatch.setattr(Breaks, "forwards", 0)
    monkeypatch.setattr(Breaks, "limit", limit)
    with pytest.raises(RuntimeError, match="broken"):
        population_of(task)
    assert snapshot(task) == before


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_all_is_as_before_when_a_forward_with_batch_statistics_raises(monkeypatch, form):
    task = trained(make_norm=Breaks, **form)
    before = snapshot(task)
    monkeypatch.setattr(Breaks, "forwards", 0)
    monkeypatch.setattr(Breaks, "limit", 5)
    with pytest.raises(RuntimeError, match="broken"):
        score_batch(task, 3, ["val", "test"])
    assert snapshot(task) == before


@pytest.mark.parametrize("make_norm", [BatchNorm, foreign], ids=["shipped", "foreign"])
def test_evaluating_changes_nothing(make_norm):
    task = trained(make_norm=make_norm, seeds=(0, 1))
    before = snapshot(task)
    score_precise(task, population_of(task, group_size=4), ["val"])
    score_batch(task, 3, ["val"])
    assert snapshot(task) == before


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_batch_of_the_whole_split_is_a_forward_in_training_mode(form):
    task = trained(**form)
    scores = score_batch(task, 12, ["val"])
    for index in range(len(form["seeds"])):
        network = task.replicas.replica(index).train()
        batch = gather(task.replicas, task.data, "val", torch.arange(12))
        output = network(batch["inputs"])
        loss = functional.cross_entropy(output, batch["targets"])
        right = (output.argmax(dim=1) == batch["targets"]).double().mean()
        assert scores["val/loss@batch12"][index] == pytest.approx(loss.item(), abs=1e-12)
        assert scores["val/accuracy@batch12"][index] == right


def test_batch_size_that_does_not_divide_counts_each_sample_once(monkeypatch):
    monkeypatch.setattr(frozen, "STACK_SAMPLES", 10)
    task = trained()
    scores = score_batch(task, 5, ["test"])
    order = shuffled(task.data, "test")
    network = task.replicas.replica(0).train()
    total = 0.0
    groups = [order[:5], order[5:10], torch.cat([order[10:], order[:3]])]
    for indices, counted in zip(groups, (5, 5, 2), strict=True):
        batch = gather(task.replicas, task.data, "test", indices)
        output = network(batch["inputs"])[:counted]
        targets = batch["targets"][:counted]
        total += functional.cross_entropy(output, targets, reduction="sum").item()
    assert scores["test/loss@batch5"][0] == pytest.approx(total / 12, abs=1e-12)


@pytest.mark.parametrize("num_samples", [12, 13, 17])
def test_blocks_hold_whole_batches_and_every_sample_once(num_samples):
    blocks = list(completed_blocks(torch.arange(num_samples), 8, 4))
    assert all(len(indices) % 4 == 0 for indices, _ in blocks)
    counted = torch.cat([indices[:num] for indices, num in blocks])
    assert counted.tolist() == list(range(num_samples))


def test_precise_score_uses_the_population_moments():
    task = trained()
    found = population_of(task)
    scores = score_precise(task, found, ["test"])
    network = task.replicas.replica(0).eval()
    for name, value in found.states[0].items():
        network.get_buffer(name).copy_(value)
    batch = gather(task.replicas, task.data, "test", torch.arange(12))
    loss = functional.cross_entropy(network(batch["inputs"]), batch["targets"])
    assert scores["test/loss@precise"][0] == pytest.approx(loss.item(), abs=1e-12)


def test_order_of_evaluation_is_the_same_for_all_runs_and_differs_between_splits():
    data = image_data()
    assert torch.equal(shuffled(data, "val"), shuffled(data, "val"))
    assert not torch.equal(shuffled(data, "val"), shuffled(data, "test"))
    assert sorted(shuffled(data, "train").tolist()) == list(range(40))


def test_batch_larger_than_the_split_is_refused():
    with pytest.raises(UserError, match="evaluate_batch_sizes=13 is more than the 12 samples"):
        score_batch(trained(), 13, ["val"])


def test_dropout_stays_off_under_batch_statistics():
    model = partial(text_encoder, dropout=0.5)
    task = trained(model=model, data=text_data())
    task.replicas.set_dropout(torch.tensor([[1]] * 3), 0)
    first = score_batch(task, 4, ["val"])
    task.replicas.set_dropout(torch.tensor([[2]] * 3), 0)
    assert score_batch(task, 4, ["val"]) == first
