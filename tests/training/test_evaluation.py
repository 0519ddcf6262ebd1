"""Running, precise and batch statistics against passes written by hand; all is given back."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_cases import (
    assert_same_state,
    batch_norm,
    build_module,
    image_data,
    rows_of,
    text_data,
    text_encoder,
    train,
)

from normexp.data.dataset import Data, Examples, Windows
from normexp.errors import UserError
from normexp.models.gpt import GPT
from normexp.norms.batch import BatchNorm
from normexp.norms.deviations import BatchNormBiasedAverage
from normexp.norms.group import GroupNorm
from normexp.norms.moments import Moments
from normexp.norms.site import named_sites
from normexp.training import statistics
from normexp.training.evaluation import EvaluationPlan, evaluation_blocks
from normexp.training.module import TrainingModule
from normexp.training.statistics import Population, gather, measure_population, shuffled

FORMS = {
    "one": {"seeds": (0,)},
    "in_turn": {"seeds": (0, 1)},
    "stacked": {"seeds": (0, 1), "stacked": True},
}
in_every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def plan(num_samples: int = 1000, group_size: int = 8, every_epoch: bool = False) -> EvaluationPlan:
    kinds = ("running", "precise", "batch")
    return EvaluationPlan(kinds, num_samples, group_size, (4,), every_epoch)


def torch_norm(num_features: int) -> nn.Module:
    """A norm that the project does not know."""
    return nn.BatchNorm2d(num_features, momentum=0.3)


def biased_average(num_features: int) -> nn.Module:
    return BatchNormBiasedAverage(num_features)


def trained(**choices) -> TrainingModule:
    """A module in float64 whose running averages have seen a few noisy batches."""
    module = build_module(**{"plan": plan(), **choices})
    module.double()
    module.train()
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, len(module.batches.data.train), (8,), generator=source)
        batch = gather(module.replicas, module.batches.data, "train", indices)
        with torch.no_grad():
            module.replicas.measure(batch, module.criterion.each_sample, shared=True)
    return module


def population_of(module: TrainingModule, num_samples: int, group_size: int) -> Population | None:
    data = module.batches.data
    return measure_population(module.replicas, data, num_samples=num_samples, group_size=group_size)


def snapshot(module: TrainingModule) -> dict[str, object]:
    """Everything of the replicas that evaluation changes for a while."""
    modules = dict(module.replicas.named_modules())
    taken: dict[str, object] = {f"{n}.training": m.training for n, m in modules.items()}
    taken |= {f"{n}.momentum": getattr(m, "momentum", None) for n, m in modules.items()}
    taken |= {f"{n}.size": getattr(m, "norm_batch_size", None) for n, m in modules.items()}
    taken |= {f"{n}.names": tuple(sorted(vars(m))) for n, m in modules.items()}
    taken |= {n: (id(b), b.tolist()) for n, b in module.replicas.named_buffers()}
    return taken


def moments_by_hand(
    module: TrainingModule, index: int, indices: Tensor, size: int
) -> dict[str, Tensor]:
    """Moments of all values that reach each norm, group by group in training mode."""
    network = module.replicas.replica(index).train()
    seen: dict[str, list[Tensor]] = {}
    for name, site in named_sites(network):
        site.norm_batch_size = None

        def keep(_, args, name=name):
            x, mask = (*args, None)[:2]
            real = x.flatten(0, 1)[mask.flatten()] if mask is not None else x
            seen.setdefault(name, []).append(real.movedim(1, 0).flatten(1))  # (C, values)

        site.register_forward_pre_hook(keep)
    with torch.no_grad():
        for group in indices.split(size):
            batch = gather(module.replicas, module.batches.data, "train", group)
            network(*(batch[k] for k in ("inputs", "mask") if k in batch))
    moments = {}
    for name, parts in seen.items():
        values = torch.cat(parts, dim=1)
        moments[f"{name}.norm.running_mean"] = values.mean(dim=1)
        moments[f"{name}.norm.running_var"] = values.var(dim=1, unbiased=False)
    return moments


def states_of(module: TrainingModule, population: Population, index: int) -> dict[str, Tensor]:
    if not module.replicas.is_stacked:
        return population.states[index]
    return {name: value[index] for name, value in population.states[0].items()}


TEXT = {"model": text_encoder, "data": text_data(40)}


@in_every_form
@pytest.mark.parametrize("num_samples", [37, 3], ids="N={}".format)
@pytest.mark.parametrize(
    "choices",
    [
        {"make_norm": batch_norm},
        {"make_norm": torch_norm},
        {"make_norm": biased_average},
        {"make_norm": batch_norm, **TEXT},
    ],
    ids=["shipped", "torch", "biased", "padded_text"],
)
def test_precise_statistics_equal_one_pass_over_all_values(monkeypatch, num_samples, choices, form):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", 16)  # several blocks
    module = trained(**choices, **form)
    found = population_of(module, num_samples, group_size=4)
    assert found is not None
    used = num_samples - (num_samples % 4 == 1)  # without a single last sample
    assert found.num_samples == used
    indices = shuffled(module.batches.data, "train")[:used]
    for index in range(len(form["seeds"])):
        expected = moments_by_hand(module, index, indices, 4)
        states = states_of(module, found, index)
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(states[name], value, rtol=0, atol=1e-10)


def test_gap_compares_running_with_population_moments_per_site():
    module = trained(seeds=(0, 1), stacked=True)
    found = population_of(module, 40, group_size=8)
    assert found is not None
    gap = found.gaps[1]["norm2"]
    norm = module.replicas.replica(1).get_submodule("norm2.norm")
    precise = states_of(module, found, 1)
    mean, var = precise["norm2.norm.running_mean"], precise["norm2.norm.running_var"]
    shift = (norm.running_mean - mean).abs() / var.sqrt()  # type: ignore[operator]
    ratio = (norm.running_var / var).log2()  # type: ignore[operator]
    assert gap["mean_shift"] == pytest.approx(
        {"mean": shift.mean().item(), "max": shift.max().item()}
    )
    assert gap["log2_var_ratio"]["mean"] == pytest.approx(ratio.mean().item())
    assert abs(gap["log2_var_ratio"]["max"]) == pytest.approx(ratio.abs().max().item())


class WeightOfTheOld(nn.Module):
    """A norm whose momentum is the weight of the old value."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.momentum = 0.9
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 - self.momentum
        return functional.batch_norm(
            x, self.running_mean, self.running_var, training=self.training, momentum=weight
        )


@pytest.mark.parametrize(
    "make_norm",
    [
        lambda c: GroupNorm(c, num_groups=4),
        WeightOfTheOld,
        lambda c: BatchNorm(c, track_running_stats=False),
    ],
    ids=["none", "opposite_momentum", "not_tracked"],
)
def test_without_replaceable_running_state_there_are_no_precise_statistics(make_norm, caplog):
    module = trained(make_norm=make_norm)
    before = snapshot(module)
    with caplog.at_level("INFO", "normexp"):
        assert module.evaluator.precise(["val"]) == {}
        assert module.evaluator.precise(["val"]) == {}
    assert len(caplog.messages) == 1
    assert snapshot(module) == before


def test_precise_score_uses_the_population_moments():
    module = trained()
    scores = module.evaluator.precise(["test"])
    population = module.evaluator.population
    assert population is not None
    network = module.replicas.replica(0).eval()
    for name, value in population.states[0].items():
        network.get_buffer(name).copy_(value)
    batch = gather(module.replicas, module.batches.data, "test", torch.arange(12))
    loss = functional.cross_entropy(network(batch["inputs"]), batch["targets"])
    assert scores["test/loss@precise"][0] == pytest.approx(loss.item(), abs=1e-12)


def loss_in_groups(network: nn.Module, inputs: Tensor, targets: Tensor, order: Tensor) -> float:
    """The mean loss of 12 samples in groups of 5; the last is filled up with the first samples."""
    total = 0.0
    with torch.no_grad():
        for group, num in (
            (order[:5], 5),
            (order[5:10], 5),
            (torch.cat([order[10:], order[:3]]), 2),
        ):
            loss = functional.cross_entropy(
                network(inputs[group])[:num], targets[group[:num]], reduction="sum"
            )
            total += loss.item()
    return total / 12


@in_every_form
@pytest.mark.parametrize("stack_samples", [10, 512])
def test_batch_statistics_count_each_sample_once(monkeypatch, form, stack_samples: int):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", stack_samples)
    module = trained(**form)
    scores = module.evaluator.batch(5, ["test"])
    data = module.batches.data
    inputs = data.model_inputs(data.test.inputs, torch.float64)
    order = shuffled(data, "test")
    for index in range(len(form["seeds"])):
        network = module.replicas.replica(index).train()
        expected = loss_in_groups(network, inputs, data.test.targets, order)
        assert scores["test/loss@batch5"][index] == pytest.approx(expected, abs=1e-12)


def test_norm_without_running_averages_is_scored_in_groups_whatever_order_and_neighbours(
    tmp_path: Path,
):
    data = image_data()
    ascending = torch.argsort(data.test.targets, stable=True)
    by_class = Examples(data.test.inputs[ascending], data.test.targets[ascending])
    data = dataclasses.replace(data, test=by_class)
    no_average = partial(BatchNorm, eps=1e-5, track_running_stats=False)
    common = {"make_norm": no_average, "eval_group": 5, "data": data}
    alone = train(build_module(**common), tmp_path / "a.ckpt")
    beside = train(build_module(seeds=(0, 1, 2, 3), **common), tmp_path / "b.ckpt")
    assert beside.metrics["test/loss"][0] == pytest.approx(alone.metrics["test/loss"][0], abs=1e-12)
    inputs = data.model_inputs(by_class.inputs, torch.float64)
    network, order = alone.replicas.trees[0], shuffled(data, "test")
    expected = loss_in_groups(network, inputs, by_class.targets, order)
    assert alone.metrics["test/loss"][0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("num_samples", "group"), [(8, 4), (4, 4), (5, 5), (12, 12), (20, 20)])
def test_blocks_hold_whole_groups_and_every_sample_once(num_samples: int, group: int):
    data = image_data()
    blocks = list(evaluation_blocks(data, "test", num_samples, group))
    assert all(len(indices) % min(group, 12) == 0 for indices, _ in blocks)
    counted = torch.cat([indices[:num] for indices, num in blocks])
    assert torch.equal(counted, shuffled(data, "test"))
    in_order = [indices for indices, _ in evaluation_blocks(data, "test", num_samples, None)]
    assert torch.cat(in_order).tolist() == list(range(12))


def test_order_is_the_same_for_all_runs_and_differs_between_splits():
    data = image_data()
    assert torch.equal(shuffled(data, "val"), shuffled(data, "val"))
    assert not torch.equal(shuffled(data, "val"), shuffled(data, "test"))


def test_batch_larger_than_the_split_is_refused():
    with pytest.raises(UserError, match=r"evaluate_batch_sizes=13.*\[12\]"):
        trained().evaluator.batch(13, ["val"])


def test_dropout_stays_off_under_batch_statistics():
    module = trained(model=partial(text_encoder, dropout=0.5), data=text_data())
    scores = []
    for key in (1, 2):
        module.replicas.set_dropout(torch.full((3, 1), key), 0)
        scores.append(module.evaluator.batch(4, ["val"]))
    assert scores[0] == scores[1]


class Breaks(BatchNorm):
    """Raises in its `limit`-th forward in training mode."""

    limit = 1_000_000
    forwards = 0

    def kernel_moves_averages(self, x: Tensor) -> bool:
        del x
        return False  # so that `advance` is called

    def advance(self, moments: Moments) -> None:
        super().advance(moments)
        Breaks.forwards += 1
        if Breaks.forwards == Breaks.limit:
            raise RuntimeError("broken")


@in_every_form
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("precise", 1),
        ("precise", 5),
        ("precise", 13),
        ("precise", None),
        ("batch", 5),
        ("batch", None),
    ],
)
def test_everything_is_given_back_also_if_a_forward_raises(monkeypatch, kind, limit, form):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", 16)
    module = trained(make_norm=Breaks, **form)
    before = snapshot(module)
    monkeypatch.setattr(Breaks, "forwards", 0)
    evaluator = module.evaluator
    measure = evaluator.precise if kind == "precise" else partial(evaluator.batch, 3)
    if limit is None:
        measure(["val", "test"])
    else:
        monkeypatch.setattr(Breaks, "limit", limit)
        with pytest.raises(RuntimeError, match="broken"):
            measure(["val", "test"])
    assert snapshot(module) == before


@pytest.mark.parametrize("every_epoch", [False, True])
def test_training_records_each_kind_when_asked_and_changes_no_weight(tmp_path: Path, every_epoch):
    choices = {"seeds": (0, 1), "stacked": True}
    module = build_module(plan=plan(40, every_epoch=every_epoch), **choices)
    train(module, tmp_path / "a.ckpt")
    rows = [(step, name) for step, _, _, values in rows_of(module) for name in values]
    for name in ("val/accuracy@precise", "val/loss@batch4"):
        steps = [step for step, found in rows if found == name]
        assert steps == ([5, 10] if every_epoch else [10])
    assert [step for step, name in rows if name == "test/loss@batch4"] == [10]
    content = module.evaluator.content(module.metrics, 1)
    assert content["precise"]["num_samples"] == 40
    assert content["batch4"]["val/loss"] == module.metrics["val/loss@batch4"][1]
    assert content["running"]["test/loss"] == module.metrics["test/loss"][1]
    assert content["gap"].keys() == {"norm1", "norm2", "norm3"}
    plain = train(build_module(**choices), tmp_path / "b.ckpt")
    assert_same_state(module, plain, 0, replica=1)


@in_every_form
def test_samples_tell_which_test_samples_are_right_in_the_order_of_the_split(monkeypatch, form):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", 10)  # several blocks
    module = trained(**form)
    data, evaluator = module.batches.data, module.evaluator
    module.replicas.eval()
    metrics = evaluator.running("test") | evaluator.others(["test"])
    inputs = data.model_inputs(data.test.inputs, torch.float64)
    for index in range(len(form["seeds"])):
        samples = evaluator.samples_of(metrics, index)
        assert samples.keys() == {"running", "precise", "batch4"}
        for kind, right in samples.items():
            name = "test/accuracy" if kind == "running" else f"test/accuracy@{kind}"
            assert right.mean() == pytest.approx(metrics[name][index], abs=1e-12)
        network = module.replicas.replica(index)
        running = network(inputs).argmax(dim=1) == data.test.targets
        assert samples["running"].tolist() == running.tolist()
        order = shuffled(data, "test")
        grouped = [network.train()(inputs[part]).argmax(dim=1) for part in order.split(4)]
        expected = torch.empty(12, dtype=torch.int64)
        expected[order] = torch.cat(grouped)
        assert samples["batch4"].tolist() == (expected == data.test.targets).tolist()


def test_samples_of_a_language_model_are_losses_per_sequence():
    tokens = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0))
    windows = Windows(tokens, 4)
    data = Data(
        *("letters", "language_modeling", windows, windows, windows, 5, (4,)),
        vocab_size=5,
        bytes_per_token=dict.fromkeys(("train", "val", "test"), 1.0),
    )
    model = partial(GPT, vocab_size=5, block_size=4, depth=1, width=8, num_heads=2, dropout=0.0)
    module = build_module(model=model, data=data, seeds=(0, 1), stacked=True)
    module.replicas.eval()
    metrics = module.evaluator.running("test")
    for index in range(2):
        losses = module.evaluator.samples_of(metrics, index)["running"]
        assert len(losses) == 49
        assert losses.mean() == pytest.approx(metrics["test/loss"][index], rel=1e-6)
        batch = windows.gather(torch.tensor([7]))
        output = module.replicas.replica(index)(batch["inputs"])
        own = functional.cross_entropy(output[0], batch["targets"][0])
        assert losses[7] == pytest.approx(own.item(), rel=1e-5)


def test_kind_whose_loss_is_not_finite_has_no_samples():
    module = trained()
    module.replicas.eval()
    metrics = module.evaluator.running("test") | module.evaluator.precise(["test"])
    metrics["test/loss"] = [float("nan")]
    assert module.evaluator.samples_of(metrics, 0).keys() == {"precise"}
