"""Evaluation with precise and with batch statistics, against passes written out by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_cases import (
    build_task,
    image_data,
    rows_of,
    state_of,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.contract import named_sites
from normexp.norms.deviations import BatchNormBiasedAverage
from normexp.norms.group import GroupNorm
from normexp.norms.moments import Moments
from normexp.tasks import frozen
from normexp.tasks.evaluation import EvaluationPlan, StatisticsEvaluation
from normexp.tasks.frozen import gather, shuffled
from normexp.tasks.population import Population, measure_population
from normexp.tasks.scoring import completed_blocks, score_batch, score_precise
from normexp.tasks.training import TrainingTask

FORMS = {
    "one": {"seeds": (0,)},
    "in turn": {"seeds": (0, 1)},
    "stacked": {"seeds": (0, 1), "stacked": True},
}


def foreign(num_features: int) -> nn.Module:
    """A norm that the project does not know: torch's own, 3-D maps."""
    return nn.BatchNorm2d(num_features, momentum=0.3)


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, num_groups=4)


def no_running_state(num_features: int) -> nn.Module:
    return BatchNorm(num_features, track_running_stats=False)


def backwards(num_features: int) -> nn.Module:
    """A norm whose momentum is the weight of the old value."""

    class Backwards(BatchNorm):
        def _kernel_advances(self, x: Tensor) -> bool:
            del x
            return False  # the kernel takes the momentum as it is

        def _factor(self, step: Tensor, dtype: torch.dtype):
            del step, dtype
            assert self.momentum is not None
            return 1 - self.momentum

    return Backwards(num_features, momentum=0.9)


def trained(**choices) -> TrainingTask:
    """A task in float64 whose running averages have seen a few noisy steps."""
    task = build_task(**choices)
    task.double()
    task.train()
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, len(task.data.train), (8,), generator=source)
        batch = gather(task.replicas, task.data, "train", indices)
        with torch.no_grad():
            task.replicas.measure(batch, task.measure, shared=True)
    return task


def population_of(task: TrainingTask, num_samples: int = 1000, group_size: int = 8) -> Population:
    found = measure_population(
        task.replicas, task.data, num_samples=num_samples, group_size=group_size
    )
    assert found is not None
    return found


def brute_force(task: TrainingTask, index: int, indices: Tensor, size: int) -> dict[str, Tensor]:
    """Moments of all values that reach each norm, group by group in training mode."""
    network = task.replicas.replica(index).train()
    seen: dict[str, list[Tensor]] = {}
    for name, site in named_sites(network):
        site.norm_batch_size = None

        def keep(_, args, name=name):
            x, mask = (*args, None)[:2]
            wide = x.flatten(0, 1)[mask.flatten()] if mask is not None else x
            seen.setdefault(name, []).append(wide.movedim(1, 0).flatten(1))  # (C, values)

        site.register_forward_pre_hook(keep)
    with torch.no_grad():
        for group in indices.split(size):
            batch = gather(task.replicas, task.data, "train", group)
            network(*(batch[k] for k in ("inputs", "mask") if k in batch))
    moments = {}
    for name, parts in seen.items():
        values = torch.cat(parts, dim=1)
        moments[f"{name}.norm.running_mean"] = values.mean(dim=1)
        moments[f"{name}.norm.running_var"] = values.var(dim=1, unbiased=False)
    return moments


def own(task: TrainingTask, states: list[dict[str, Tensor]], index: int) -> dict[str, Tensor]:
    if not task.replicas.is_stacked:
        return states[index]
    return {name: value[index] for name, value in states[0].items()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("num_samples", [40, 37, 3], ids="N={}".format)
@pytest.mark.parametrize(
    "make_norm",
    [BatchNorm, foreign, BatchNormBiasedAverage],
    ids=["shipped", "foreign", "biased"],
)
def test_precise_statistics_equal_one_pass_over_all_values(make_norm, num_samples, form):
    task = trained(make_norm=make_norm, sizes=Sizes(8), **form)
    found = population_of(task, num_samples, group_size=4)
    indices = shuffled(task.data, "train")[: num_samples - (num_samples % 4 == 1)]
    for index in range(len(form["seeds"])):
        expected = brute_force(task, index, indices, 4)
        states = own(task, found.states, index)
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(states[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_precise_statistics_do_not_depend_on_the_blocks(monkeypatch, form):
    task = trained(sizes=Sizes(8), **form)
    whole = population_of(task, 38, group_size=4)
    monkeypatch.setattr(frozen, "STACK_SAMPLES", 8)
    blocks = population_of(task, 38, group_size=4)
    for states, others in zip(whole.states, blocks.states, strict=True):
        for name, value in states.items():
            torch.testing.assert_close(others[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stacked", [False, True])
def test_precise_statistics_of_padded_text_count_real_positions_only(stacked):
    choices = {"model": text_encoder, "data": text_data(), "seeds": (0, 1), "stacked": stacked}
    task = trained(sizes=Sizes(8), **choices)
    found = population_of(task, 22, group_size=4)
    expected = brute_force(task, 1, shuffled(task.data, "train")[:22], 4)
    for name, value in expected.items():
        torch.testing.assert_close(own(task, found.states, 1)[name], value, rtol=0, atol=1e-10)


def test_lone_last_sample_is_left_out_and_not_counted():
    task = trained(sizes=Sizes(8))
    assert population_of(task, 37, group_size=4).num_samples == 36
    assert population_of(task, 38, group_size=4).num_samples == 38
    assert population_of(task, 10_000, group_size=8).num_samples == 40


def test_gap_compares_running_with_population_moments_per_site():
    task = trained(seeds=(0, 1), stacked=True)
    found = population_of(task)
    gap = found.gaps[1]["norm2"]
    site = task.replicas.replica(1).get_submodule("norm2.norm")
    precise = own(task, found.states, 1)
    mean, var = precise["norm2.norm.running_mean"], precise["norm2.norm.running_var"]
    shift = (site.running_mean - mean).abs() / var.sqrt()  # type: ignore[operator]
    ratio = (site.running_var / var).log2()  # type: ignore[operator]
    assert gap["mean_shift"] == pytest.approx(
        {"mean": shift.mean().item(), "max": shift.max().item()}
    )
    assert gap["log2_var_ratio"]["mean"] == pytest.approx(ratio.mean().item())
    assert abs(gap["log2_var_ratio"]["max"]) == pytest.approx(ratio.abs().max().item())


@pytest.mark.parametrize("make_norm", [group_norm, backwards, no_running_state])
def test_no_precise_statistics_where_no_running_moments_can_be_replaced(make_norm):
    task = trained(make_norm=make_norm)
    before = snapshot(task)
    found = measure_population(task.replicas, task.data, num_samples=40, group_size=8)
    assert found is None
    assert snapshot(task) == before


def snapshot(task: TrainingTask) -> dict[str, object]:
    """Everything of the replicas that evaluation borrows."""
    modules = dict(task.replicas.named_modules())
    taken: dict[str, object] = {f"{n}.training": m.training for n, m in modules.items()}
    taken |= {f"{n}.momentum": getattr(m, "momentum", None) for n, m in modules.items()}
    taken |= {f"{n}.size": getattr(m, "norm_batch_size", None) for n, m in modules.items()}
    taken |= {f"{n}.names": tuple(sorted(vars(m))) for n, m in modules.items()}
    taken |= {n: (id(b), b.tolist()) for n, b in task.replicas.named_buffers()}
    return taken


class Breaks(BatchNorm):
    """Raises in its `limit`-th forward in training mode."""

    limit = 1_000_000
    forwards = 0

    def _kernel_advances(self, x: Tensor) -> bool:
        del x
        return False  # but through `_advance`

    def _advance(self, moments: Moments) -> None:
        super()._advance(moments)
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


def plan(every_epoch: bool) -> EvaluationPlan:
    return EvaluationPlan(("running", "precise", "batch"), 40, 8, (4,), every_epoch)


@pytest.mark.parametrize("every_epoch", [False, True])
def test_training_records_each_statistics_once_where_asked(tmp_path: Path, every_epoch: bool):
    evaluation = StatisticsEvaluation(plan(every_epoch))
    task = train(build_task(seeds=(0, 1), stacked=True), tmp_path / "a.ckpt", [evaluation])
    rows = [(step, name) for step, _, _, metrics in rows_of(task) for name in metrics]
    val = [step for step, name in rows if name == "val/accuracy@precise"]
    assert val == ([5, 10] if every_epoch else [10])
    assert [step for step, name in rows if name == "test/loss@batch4"] == [10]
    content = evaluation.content(task, 1)
    assert content["precise"]["num_samples"] == 40
    assert content["batch4"]["val/loss"] == task.final["val/loss@batch4"][1]
    assert content["running"]["test/loss"] == task.final["test/loss"][1]
    assert content["gap"].keys() == {"norm1", "norm2", "norm3"}


def test_evaluating_every_epoch_changes_no_weight(tmp_path: Path):
    plain = train(build_task(), tmp_path / "a.ckpt")
    watched = train(build_task(), tmp_path / "b.ckpt", [StatisticsEvaluation(plan(True))])
    for name, value in state_of(plain).items():
        assert torch.equal(state_of(watched)[name], value), name
