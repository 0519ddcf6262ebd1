"""Running, precise and batch statistics and own shares, against passes by hand."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, get_args

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

from normexp.norms.batch import BatchNorm
from normexp.norms.sample import InstanceNorm
from normexp.norms.site import named_sites, read_state
from normexp.norms.zoo.batch import EvalNorm
from normexp.norms.zoo.deviations import BatchNormBiasedAverage
from normexp.training.batching.replicas import Replicas
from normexp.training.config.keys import RunningFrom
from normexp.training.config.sizes import Sizes
from normexp.training.criterion import Classification, LanguageModeling
from normexp.training.data.augment import Augmentation
from normexp.training.data.dataset import Data, Examples, Windows
from normexp.training.models.transformer import GPT
from normexp.training.module import TrainingModule
from normexp.training.samples import gather, samples_per_forward, shuffled
from normexp.training.statistics import with_population

FORMS = {
    "one": {"seeds": (0,)},
    "in_turn": {"seeds": (0, 1)},
    "stacked": {"seeds": (0, 1), "stacked": True},
}
in_every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
TEXT = {"model": text_encoder, "data": text_data(40)}


def measuring(
    *kinds: str, num_samples: int = 1000, batch_sizes: tuple[int, ...] = (), every_epoch=False
) -> dict[str, Any]:
    """The choices of a recipe that evaluates with these kinds of statistics."""
    return {
        "evaluate_with": [*kinds],
        "precise_samples": num_samples,
        "evaluate_batch_sizes": [*batch_sizes] or None,
        "evaluate_every_epoch": every_epoch,
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
            module.replicas.measure(batch, module.recipe.criterion.loss, shared=True)
    module.eval()
    return module


def population_of(module: TrainingModule, num_samples: int, group_size: int) -> Replicas:
    data, sizes = module.batches.data, {"num_samples": num_samples, "group_size": group_size}
    found = with_population(module.replicas, data, **sizes)
    assert found is not None
    return found


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


@pytest.mark.parametrize(
    ("num_samples", "choices", "form"),
    [
        (37, {}, "one"),
        (37, {}, "stacked"),
        (3, {}, "in_turn"),
        (37, {"make_norm": torch_norm}, "in_turn"),
        (37, {"make_norm": torch_norm}, "stacked"),
        (37, {"make_norm": lambda c: BatchNormBiasedAverage(c)}, "stacked"),
        (37, TEXT, "stacked"),
    ],
)
def test_precise_statistics_equal_one_pass_over_all_values(monkeypatch, num_samples, choices, form):
    monkeypatch.setattr("normexp.training.samples.STACK_SAMPLES", 16)  # several blocks
    module = trained(**choices, **FORMS[form])
    found = population_of(module, num_samples, group_size=4)
    used = num_samples - (num_samples % 4 == 1)  # without a single last sample
    indices = shuffled(module.batches.data, "train")[:used]
    for index in range(module.replicas.num_replicas):
        expected = moments_by_hand(module, index, indices, 4)
        state = dict(found.replica(index).named_buffers())
        assert expected
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["in_turn", "stacked"])
def test_precise_statistics_are_of_all_groups_whatever_the_averages_are_taken_from(form: str):
    found = []
    for running_from in get_args(RunningFrom):
        module = trained(**FORMS[form])
        for _, site in named_sites(module.replicas):
            site.running_from = running_from
        found.append(read_state(population_of(module, 36, group_size=4)))
    of_step, *others = found
    for state in others:
        torch.testing.assert_close(state, of_step, rtol=0, atol=1e-12)


def test_precise_statistics_are_of_augmented_samples():
    module = trained()
    data = dataclasses.replace(
        module.batches.data, augmentation=Augmentation(crop_padding=2, flip=False, cutout=0)
    )
    indices = torch.arange(6)
    several = gather(module.replicas, data, "train", indices)["inputs"]
    one = gather(module.replicas, data, "train", indices[3:4])["inputs"]
    plain = gather(module.replicas, module.batches.data, "train", indices)["inputs"]
    torch.testing.assert_close(several[3], one[0], rtol=0, atol=0)
    assert (several != plain).any()


class Decays(nn.Module):
    """A norm that moves its averages at a rate of another name, or by the weight of the old one."""

    def __init__(self, num_features: int, name: str) -> None:
        super().__init__()
        setattr(self, name, 0.9)
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 - getattr(self, "momentum", 0.9)
        return functional.batch_norm(
            x, self.running_mean, self.running_var, training=self.training, momentum=weight
        )


@pytest.mark.parametrize(
    "make_norm",
    [
        group_norm,
        partial(Decays, name="momentum"),
        partial(Decays, name="decay"),
        lambda c: BatchNorm(c, track_running_stats=False),
    ],
    ids=["none", "opposite_momentum", "no_momentum", "not_tracked"],
)
def test_without_replaceable_running_state_there_are_no_precise_statistics(make_norm, caplog):
    module = trained(make_norm=make_norm, **measuring("precise"))
    with caplog.at_level("INFO", "normexp"):
        assert module.evaluator.with_other_statistics(["val"]) == {}
    assert len(caplog.messages) == 1


def in_groups(network: nn.Module, inputs: Tensor, order: Tensor, size: int) -> Tensor:
    """Scores of 12 samples in groups; the last is filled up with the first samples."""
    scores = torch.empty(12, 4, dtype=torch.float64)
    for group in order.split(size):
        filled = torch.cat([group, order[: -len(group) % min(size, 12)]])
        scores[group] = network(inputs[filled])[: len(group)]
    return scores


@in_every_form
def test_own_share_is_what_eval_norm_evaluates_with(form):
    kinds: dict[str, Any] = {"evaluate_with": ["precise", "own_share"], "sizes": Sizes(8, None, 4)}
    module = trained(**{**form, **kinds})
    batch = module.evaluator.with_other_statistics(["test"])
    eval_norm = trained(**{**form, **kinds, "make_norm": partial(EvalNorm, eps=1e-5)})
    expected = eval_norm.evaluator.with_other_statistics(["test"])
    assert batch["test/loss@own_share"] == pytest.approx(expected["test/loss@precise"], rel=1e-9)
    assert batch["test/loss@own_share"] != pytest.approx(batch["test/loss@precise"], rel=1e-3)
    assert not [name for name in expected if "own_share" in name]  # it is there already
    if module.replicas.num_replicas > 1:  # a diverged run takes it from no other
        weight = next(module.replicas.parameters())
        (weight.data[0] if module.replicas.is_stacked else weight.data).fill_(torch.nan)
        beside = module.evaluator.with_other_statistics(["test"])
        assert beside["test/loss@own_share"][1] == batch["test/loss@own_share"][1]


@torch.no_grad()
def test_precise_averages_of_instance_norm_are_means_over_samples_and_no_share_is_its_own():
    tracking = partial(InstanceNorm, track_running_stats=True)
    kinds: dict[str, Any] = {"evaluate_with": ["precise", "own_share"], "sizes": Sizes(8, None, 4)}
    module = trained(seeds=(0,), make_norm=tracking, **kinds)
    metrics = module.evaluator.with_other_statistics(["test"])
    assert {name.partition("@")[2] for name in metrics} == {"precise"}
    population, data = population_of(module, 40, 4), module.batches.data
    network = population.replica(0)
    x = network.conv1(data.model_inputs(data.train.inputs, torch.float64))
    site = next(site for _, site in named_sites(network))
    torch.testing.assert_close(site.norm.running_mean, x.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(site.norm.running_var, x.var(dim=(2, 3)).mean(dim=0))


@pytest.mark.parametrize(("form", "stack_samples"), [("in_turn", 10), ("stacked", 512)])
@torch.no_grad()
def test_each_kind_scores_every_sample_once_and_changes_nothing(monkeypatch, form, stack_samples):
    monkeypatch.setattr("normexp.training.samples.STACK_SAMPLES", stack_samples)
    module = trained(**FORMS[form])
    before = copy.deepcopy(module.replicas)
    data, evaluator = module.batches.data, module.evaluator
    metrics = evaluator.running("test") | evaluator.with_other_statistics(["test"])
    inputs, order = data.model_inputs(data.test.inputs, torch.float64), shuffled(data, "test")
    torch.testing.assert_close(module.replicas.state_dict(), before.state_dict(), rtol=0, atol=0)
    population = population_of(module, 1000, module.recipe.sizes.norm)
    for index in range(2):
        samples = evaluator.samples_of(metrics, index)
        assert samples.keys() == {"running", "precise", "batch5"}
        for kind in samples:
            replicas = population if kind == "precise" else module.replicas
            network, suffix = replicas.replica(index), f"@{kind}".removesuffix("@running")
            network.train(kind == "batch5")
            scores = in_groups(network, inputs, order, 5 if kind == "batch5" else 12)
            loss = functional.cross_entropy(scores, data.test.targets).item()
            right = scores.argmax(dim=1) == data.test.targets
            assert metrics[f"test/loss{suffix}"][index] == pytest.approx(loss, abs=1e-12)
            assert metrics[f"test/accuracy{suffix}"][index] == pytest.approx(right.double().mean())
            assert samples[kind].tolist() == right.tolist()  # in the order of the split
    metrics["test/loss"][0] = float("nan")
    assert evaluator.samples_of(metrics, 0).keys() == {"precise", "batch5"}


def test_norm_without_running_averages_is_scored_in_groups_whatever_order_and_neighbours(
    tmp_path: Path,
):
    data, group = image_data(), 5
    ascending = torch.argsort(data.test.targets, stable=True)
    by_class = Examples(data.test.inputs[ascending], data.test.targets[ascending])
    data = dataclasses.replace(data, test=by_class)
    no_average = partial(BatchNorm, eps=1e-5, track_running_stats=False)
    common = {
        "make_norm": no_average,
        "mixes_in_evaluation": True,
        "data": data,
        "sizes": Sizes(10, None, group),
    }
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
    assert content["batch4"]["val/loss"] == module.metrics["val/loss@batch4"][1]
    assert content["running"]["test/loss"] == module.metrics["test/loss"][1]
    assert content.keys() == {"running", "precise", "batch4"}
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


@pytest.mark.parametrize(
    ("criterion", "shape"),
    [(Classification(), (2, 8, 4)), (LanguageModeling({"val": 1.0}), (2, 4, 5, 30))],
)
def test_losses_are_float32_under_bfloat16_also_in_a_stack(criterion, shape: tuple[int, ...]):
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=noise).bfloat16()
    targets = torch.randint(0, shape[-1], shape[:-1], generator=noise)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        batch = {"targets": targets}
        return criterion.loss(output, batch) + criterion.measure(output, batch)["loss"]

    with torch.autocast("cpu", torch.bfloat16):
        alone = [loss(logits[i], targets[i]) for i in range(2)]
        stacked = torch.func.vmap(loss)(logits, targets)
    assert stacked.dtype == torch.float32
    torch.testing.assert_close(stacked, torch.stack(alone))


@pytest.mark.parametrize(("size", "on_gpu"), [(8, 4096), (32, 4096), (96, 455), (224, 83)])
def test_a_gpu_evaluates_fewer_samples_at_once_if_they_are_large(size: int, on_gpu: int):
    replicas, data = (
        build_module().replicas,
        dataclasses.replace(image_data(), input_shape=(1, size, size)),
    )
    assert samples_per_forward(replicas, data, 1) == 512
    assert samples_per_forward(replicas.to("meta"), data, 1) == on_gpu
    assert samples_per_forward(replicas, data, 128) == max(on_gpu // 128, 1) * 128
