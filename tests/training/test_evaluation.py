"""Running, precise and batch statistics against passes by hand; state is restored."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_cases import (
    assert_same_state,
    build_module,
    group_norm,
    image_data,
    rows_of,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.data.dataset import Data, Examples, Windows
from normexp.models.gpt import GPT
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.moments import Moments
from normexp.norms.site import named_sites
from normexp.norms.state import write_state
from normexp.norms.zoo.batch import EvalNorm
from normexp.norms.zoo.deviations import BatchNormBiasedAverage
from normexp.training import statistics
from normexp.training.module import TrainingModule
from normexp.training.statistics import (
    Population,
    gather,
    measure_population,
    shuffled,
)

FORMS = {
    "one": {"seeds": (0,)},
    "in_turn": {"seeds": (0, 1)},
    "stacked": {"seeds": (0, 1), "stacked": True},
}
in_every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
TEXT = {"model": text_encoder, "data": text_data(40)}


class BiasedAverage(nn.Module):
    """Batch norm that averages the biased variance, unlike torch, without declaring it."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.momentum = 0.1
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W)
        averages = (self.running_mean, self.running_var)
        if self.training:
            moments = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            for average, moment in zip(averages, moments, strict=True):
                average.mul_(1 - self.momentum).add_(self.momentum * moment.detach())
            averages = moments
        return functional.batch_norm(x, *averages)


def measuring(
    *kinds: str, num_samples: int = 1000, batch_sizes: tuple[int, ...] = (), every_epoch=False
) -> dict[str, Any]:
    """The choices of a recipe that evaluates with these kinds of statistics."""
    return {
        "statistics": kinds,
        "precise_samples": num_samples,
        "evaluation_batch_sizes": batch_sizes,
        "evaluates_every_epoch": every_epoch,
    }


ALL_KINDS = measuring("running", "precise", "batch", batch_sizes=(5,))


def torch_norm(num_features: int) -> nn.Module:
    """A norm that the project does not know."""
    return nn.BatchNorm2d(num_features, momentum=0.3)


def trained(**choices) -> TrainingModule:
    """A module in float64 whose running averages have seen a few noisy batches."""
    module = build_module(**{**ALL_KINDS, **choices})
    module.double()
    module.train()
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, len(module.batches.data.train), (8,), generator=source)
        batch = gather(module.replicas, module.batches.data, "train", indices)
        with torch.no_grad():
            module.replicas.measure(batch, module.criterion.loss, shared=True)
    module.eval()
    return module


def population_of(module: TrainingModule, num_samples: int, group_size: int) -> Population:
    data, sizes = module.batches.data, {"num_samples": num_samples, "group_size": group_size}
    found = measure_population(module.replicas, data, **sizes)
    assert found is not None
    return found


def states_of(module: TrainingModule, population: Population, index: int) -> dict[str, Tensor]:
    return module.replicas.state_of(index, population.state)


def snapshot(module: TrainingModule) -> dict[str, object]:
    """All state of the replicas that evaluation changes temporarily."""
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


@in_every_form
@pytest.mark.parametrize(
    ("num_samples", "choices"),
    [
        (37, {}),
        (3, {}),
        (37, {"make_norm": torch_norm}),
        (37, {"make_norm": lambda c: BatchNormBiasedAverage(c)}),
        (37, TEXT),
    ],
    ids=["shipped", "few", "torch", "biased", "padded_text"],
)
def test_precise_statistics_equal_one_pass_over_all_values(monkeypatch, num_samples, choices, form):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", 16)  # several blocks
    module = trained(**choices, **form)
    found = population_of(module, num_samples, group_size=4)
    used = num_samples - (num_samples % 4 == 1)  # without a single last sample
    assert found.num_samples == used
    indices = shuffled(module.batches.data, "train")[:used]
    for index in range(len(form["seeds"])):
        expected = moments_by_hand(module, index, indices, 4)
        states = states_of(module, found, index)
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(states[name], value, rtol=0, atol=1e-10)


class SharesItsNorm(nn.Module):
    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.first, self.second, self.head = norm(1), norm(1), nn.Linear(64, 4)
        self.second.norm = self.first.norm

    def forward(self, images: Tensor) -> Tensor:  # (N, 1, 8, 8)
        return self.head(self.second(self.first(images).tanh()).flatten(1))


def test_precise_statistics_leave_a_norm_that_two_sites_share_as_it_was():
    module = trained(model=SharesItsNorm, make_norm=torch_norm, **FORMS["in_turn"])
    before = snapshot(module)
    population_of(module, 36, group_size=4)
    assert snapshot(module) == before


class OnlyFloat32(BiasedAverage):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward(x)


def test_a_foreign_norm_is_tried_in_the_precision_of_its_training():
    module = build_module(**ALL_KINDS, make_norm=OnlyFloat32, **FORMS["in_turn"])
    population_of(module, 36, group_size=4)


@in_every_form
def test_precise_statistics_of_instance_norm_average_over_samples(monkeypatch, form):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", 16)
    make = lambda c: nn.InstanceNorm2d(c, track_running_stats=True)  # noqa: E731
    module = trained(make_norm=make, **form)
    found = population_of(module, 36, group_size=4)
    indices = shuffled(module.batches.data, "train")[:36]
    for index in range(len(form["seeds"])):
        network, batch = (
            module.replicas.replica(index),
            gather(module.replicas, module.batches.data, "train", indices),
        )
        maps = network.get_submodule("conv1")(batch["inputs"]).flatten(2)  # (N, C, P)
        states = states_of(module, found, index)
        for name, value in (("mean", maps.mean((0, 2))), ("var", maps.var(2).mean(0))):
            torch.testing.assert_close(states[f"norm1.norm.running_{name}"], value)


@in_every_form
def test_gap_compares_running_with_population_moments_per_site(form):
    module, index = trained(**form), len(form["seeds"]) - 1
    found = population_of(module, 40, group_size=8)
    assert found.gaps[index].keys() == {"norm1", "norm2", "norm3"}
    gap, precise = found.gaps[index]["norm2"], states_of(module, found, index)
    norm = module.replicas.replica(index).get_submodule("norm2.norm")
    mean, var = precise["norm2.norm.running_mean"], precise["norm2.norm.running_var"]
    shift = (norm.running_mean - mean).abs() / var.sqrt()  # type: ignore[operator]
    ratio = (norm.running_var / var).log2()  # type: ignore[operator]
    largest = {"mean": shift.mean().item(), "max": shift.max().item()}
    assert gap["mean_shift"] == pytest.approx(largest)
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
    [group_norm, WeightOfTheOld, lambda c: BatchNorm(c, track_running_stats=False)],
    ids=["none", "opposite_momentum", "not_tracked"],
)
def test_without_replaceable_running_state_there_are_no_precise_statistics(make_norm, caplog):
    module = trained(make_norm=make_norm, **measuring("precise"))
    before = snapshot(module)
    with caplog.at_level("INFO", "normexp"):
        for _ in range(2):
            assert module.evaluator.with_other_statistics(["val"]) == {}
    assert len(caplog.messages) == 1
    assert snapshot(module) == before


def in_groups(network: nn.Module, inputs: Tensor, order: Tensor, size: int) -> Tensor:
    """Scores of 12 samples in groups; the last is filled up with the first samples."""
    scores = torch.empty(12, 4, dtype=torch.float64)
    for group in order.split(size):
        filled = torch.cat([group, order[: -len(group) % min(size, 12)]])
        scores[group] = network(inputs[filled])[: len(group)]
    return scores


@in_every_form
def test_own_share_is_what_eval_norm_evaluates_with(form):
    kinds: dict[str, Any] = {"statistics": ("precise", "own_share"), "sizes": Sizes(8, None, 4)}
    batch = trained(**{**form, **kinds}).evaluator.with_other_statistics(["test"])
    eval_norm = trained(**{**form, **kinds, "make_norm": partial(EvalNorm, eps=1e-5)})
    expected = eval_norm.evaluator.with_other_statistics(["test"])
    assert batch["test/loss@own_share"] == pytest.approx(expected["test/loss@precise"], rel=1e-9)
    assert batch["test/loss@own_share"] != pytest.approx(batch["test/loss@precise"], rel=1e-3)
    assert not [name for name in expected if "own_share" in name]  # it is there already


@in_every_form
@pytest.mark.parametrize("stack_samples", [10, 512])
@torch.no_grad()
def test_each_kind_scores_every_sample_once_by_its_statistics(monkeypatch, form, stack_samples):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", stack_samples)
    module = trained(**form)
    data, evaluator = module.batches.data, module.evaluator
    metrics = evaluator.running("test") | evaluator.with_other_statistics(["test"])
    inputs, order = data.model_inputs(data.test.inputs, torch.float64), shuffled(data, "test")
    assert evaluator.population is not None
    for index in range(len(form["seeds"])):
        samples = evaluator.samples_of(metrics, index)
        assert samples.keys() == {"running", "precise", "batch5"}
        for kind in samples:
            network, suffix = module.replicas.replica(index), f"@{kind}".removesuffix("@running")
            if kind == "precise":
                write_state(network, states_of(module, evaluator.population, index))
            network.train(kind == "batch5")
            scores = in_groups(network, inputs, order, 5 if kind == "batch5" else 12)
            loss = functional.cross_entropy(scores, data.test.targets).item()
            right = scores.argmax(dim=1) == data.test.targets
            assert metrics[f"test/loss{suffix}"][index] == pytest.approx(loss, abs=1e-12)
            assert metrics[f"test/accuracy{suffix}"][index] == pytest.approx(right.double().mean())
            assert samples[kind].tolist() == right.tolist()  # in the order of the split
    metrics["test/loss"][0] = float("nan")
    assert evaluator.samples_of(metrics, 0).keys() == {"precise", "batch5"}


@pytest.mark.parametrize("group", [5, 20])
def test_norm_without_running_averages_is_scored_in_groups_whatever_order_and_neighbours(
    tmp_path: Path, group: int
):
    data = image_data()
    ascending = torch.argsort(data.test.targets, stable=True)
    by_class = Examples(data.test.inputs[ascending], data.test.targets[ascending])
    data = dataclasses.replace(data, test=by_class)
    no_average = partial(BatchNorm, eps=1e-5, track_running_stats=False)
    common = {"make_norm": no_average, "mixed_in_evaluation": group, "data": data}
    alone = train(build_module(**common), tmp_path / "a.ckpt")
    beside = train(build_module(seeds=(0, 1, 2, 3), **common), tmp_path / "b.ckpt")
    assert beside.metrics["test/loss"][0] == pytest.approx(alone.metrics["test/loss"][0], abs=1e-12)
    order = shuffled(data, "test")
    assert not torch.equal(order, shuffled(data, "val")) and not torch.equal(order, order.sort()[0])
    inputs = data.model_inputs(by_class.inputs, torch.float64)
    with torch.no_grad():
        scores = in_groups(alone.replicas.trees[0], inputs, order, group)
    expected = functional.cross_entropy(scores, by_class.targets).item()
    assert alone.metrics["test/loss"][0] == pytest.approx(expected, abs=1e-12)


def test_dropout_stays_off_under_batch_statistics():
    module = trained(model=partial(text_encoder, dropout=0.5), data=text_data())
    scores = []
    for key in (1, 2):
        module.replicas.set_dropout(torch.full((3, 1), key), 0)
        scores.append(module.evaluator.with_other_statistics(["val"]))
    assert scores[0] == scores[1] != {}


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
    ("own", "limit"),
    [
        (measuring("precise"), 1),
        (measuring("precise"), 13),
        (measuring("batch", batch_sizes=(3,)), 5),
        (ALL_KINDS, None),
    ],
    ids=["probing", "pooling", "batch", "nothing"],
)
def test_everything_is_given_back_also_if_a_forward_raises(monkeypatch, own, limit, form):
    monkeypatch.setattr(statistics, "STACK_SAMPLES", 16)
    module = trained(make_norm=Breaks, **own, **form)
    before = snapshot(module)
    monkeypatch.setattr(Breaks, "forwards", 0)
    if limit is None:
        module.evaluator.with_other_statistics(["val", "test"])
    else:
        monkeypatch.setattr(Breaks, "limit", limit)
        with pytest.raises(RuntimeError, match="broken"):
            module.evaluator.with_other_statistics(["val", "test"])
    assert snapshot(module) == before


@pytest.mark.parametrize("every_epoch", [False, True])
def test_training_records_each_kind_when_asked_and_changes_no_weight(tmp_path: Path, every_epoch):
    choices = {"seeds": (0, 1), "stacked": True}
    own = measuring(*("running", "precise", "batch"), batch_sizes=(4,), every_epoch=every_epoch)
    module = train(build_module(**own, **choices), tmp_path / "a.ckpt")
    rows = [(step, name) for step, _, _, values in rows_of(module) for name in values]
    for name in ("val/accuracy@precise", "val/loss@batch4"):
        steps = [step for step, found in rows if found == name]
        assert steps == ([5, 10] if every_epoch else [10])
    assert [step for step, name in rows if name == "test/loss@batch4"] == [10]
    content = module.evaluator.content(module.metrics, 1)
    assert content["asked"] == {"precise": 1000, "batch4": 4}
    assert content["precise"]["num_samples"] == 40
    assert content["batch4"]["val/loss"] == module.metrics["val/loss@batch4"][1]
    assert content["running"]["test/loss"] == module.metrics["test/loss"][1]
    assert content["gap"].keys() == {"norm1", "norm2", "norm3"}
    plain = train(build_module(**choices), tmp_path / "b.ckpt")
    assert_same_state(module, plain, 0, replica=1)


def test_samples_of_a_language_model_are_losses_per_sequence():
    tokens = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0))
    windows = Windows(tokens, 4)
    data = Data(
        *("letters", "language_modeling", windows, windows, windows, 5, (4,)),
        vocab_size=5,
        bytes_per_token=dict.fromkeys(("train", "val", "test"), 2.0),
    )
    model = partial(GPT, vocab_size=5, block_size=4, depth=1, width=8, num_heads=2, dropout=0.0)
    module = build_module(model=model, data=data, seeds=(0, 1), stacked=True)
    module.replicas.eval()
    metrics = module.evaluator.running("test")
    for index in range(2):
        losses = module.evaluator.samples_of(metrics, index)["running"]
        assert len(losses) == 49
        loss = metrics["test/loss"][index]
        assert losses.mean() == pytest.approx(loss, rel=1e-6)
        assert metrics["test/bits_per_byte"][index] == pytest.approx(loss / 0.6931472 / 2)
        batch = windows.gather(torch.tensor([7]))
        output = module.replicas.replica(index)(batch["inputs"])
        own = functional.cross_entropy(output[0], batch["targets"][0])
        assert losses[7] == pytest.approx(own.item(), rel=1e-5)
