"""One step on each device: every model and norm as on the CPU, equal bits, draws, statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import NEEDS_GPU, image_data, pictures, recipe_for, text_data, train

from normexp.errors import UserError
from normexp.norms.build import build_norm
from normexp.training.batching.draws import Dropout
from normexp.training.batching.replicas import Batch, InTurn, Replicas, Stacked
from normexp.training.config.compose import compose_config
from normexp.training.config.groups import group_choices
from normexp.training.config.sizes import Sizes
from normexp.training.config.validate import read_settings
from normexp.training.data.augment import Augmentation
from normexp.training.data.batches import TrainingBatches
from normexp.training.data.dataset import Data, Windows
from normexp.training.devices import gpu_arithmetic
from normexp.training.models.build import build_network
from normexp.training.module import Recorder, TrainingModule
from normexp.training.optimizer import build_optimizer
from normexp.training.statistics import with_population
from normexp.training.step import Step, StepGradient

SEEDS = [0, 1]


def images() -> Data:
    return image_data(48)


def strings() -> Data:
    """Padded strings of 7 tokens, with masks."""
    return text_data(48)


def text() -> Data:
    """Random tokens in windows of 16."""
    noise = torch.Generator().manual_seed(0)
    splits = [Windows(torch.randint(0, 30, (n,), generator=noise), 16) for n in (900, 300, 300)]
    per_token = dict.fromkeys(("train", "val", "test"), 1.0)
    facts = {"vocab_size": 30, "bytes_per_token": per_token}
    return Data("text", "language_modeling", *splits, 30, (16,), **facts)


DATA = {
    **dict.fromkeys(("convnet", "small_resnet", "resnet20", "vit", "deep_mlp"), images),
    "unet": partial(pictures, 48, size=16),
    "gpt": text,
    "text_encoder": strings,
}


@cache
def data_for(model: str) -> Data:
    return DATA[model]()


def build(
    model: str, norm: str, *words: str, stacked: bool, sizes: Sizes | None = None, **choices: Any
) -> TrainingModule:
    """The module of a shipped model and norm in float32, on the CPU.

    Args:
        words: of the groups norm, model and optim, and of slots.
        choices: see `recipe_for`.
    """
    data, sizes = data_for(model), sizes or Sizes(16)
    config = compose_config([f"norm={norm}", f"model={model}", *words])
    settings = read_settings(config)
    choices = {
        "norm": settings.norm,
        "optim": settings.optim,
        "optimizer": build_optimizer(config["optim"]),
    } | choices
    factory = build_norm(
        config, sizes.norm_batch_size, num_steps=20, num_positions=data.input_shape[-1]
    )
    make = build_network(config["model"], factory, data)
    networks = [make(seed) for seed in SEEDS]
    replicas: Replicas = Stacked(networks) if stacked else InTurn(networks)
    recipe = recipe_for(data, sizes, **choices)
    batches = TrainingBatches(data, SEEDS, sizes.batch_size, drop_last=recipe.settings.drop_last)
    return TrainingModule(replicas, batches, recipe, Recorder([None] * len(SEEDS)))


def place(module: TrainingModule, device: str) -> None:
    module.replicas.to(device)
    module.batches = module.batches.to(device)
    module.evaluator.data = module.batches.data


def first_step(module: TrainingModule, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Losses, gradients and buffers after the first forward and backward, on the CPU."""
    module.replicas.to(dtype)
    place(module, device)
    replicas = module.replicas.train()
    gradient = StepGradient(replicas, module.recipe.criterion, module.recipe.sizes, SEEDS)
    (batch,) = module.batches.chunk(0, 1, dtype)
    with gpu_arithmetic("highest"):
        values = {"loss": gradient.add(0, batch)}
    state = {name: p.grad for name, p in replicas.named_parameters() if p.grad is not None}
    for name, value in {**state, **dict(replicas.named_buffers())}.items():
        _, tree, own = name.split(".", 2)
        rows = value if replicas.is_stacked else [value]
        values |= {f"{int(tree) + index} {own}": row for index, row in enumerate(rows)}
    return {name: value.detach().cpu() for name, value in values.items()}


def steps_of(module: TrainingModule, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Losses, gradients and all state after two steps."""
    place(module, device)
    replicas, recipe = module.replicas.train(), module.recipe
    gradient = StepGradient(replicas, recipe.criterion, recipe.sizes, SEEDS)
    step = Step(gradient, recipe.build_optimizer(replicas), None, [])
    bf16 = torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)
    with bf16, gpu_arithmetic("high"):
        batches = module.batches.chunk(0, 2, torch.float32)
        losses = [step.take(index, batch) for index, batch in enumerate(batches)]
    gradients = [p.grad for p in replicas.parameters() if p.grad is not None]
    return [*losses, *replicas.parameters(), *replicas.buffers(), *gradients]


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Each tensor differs by at most `rtol` of the largest value of the network's gradients.

    Not of its own values: the gradient of a bias before a norm is only rounding.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol * scale, msg=name)


slow = pytest.mark.slow
NORMS = [name for name in group_choices("norm") if name not in ("custom", "as_built")]
# Every pair of a model and a norm; the first rounds have each norm once, for a run that is cut.
ROUNDS = -(-len(NORMS) // len(DATA))
PAIRS = [
    (model, NORMS[(first + ROUNDS * number) % len(NORMS)])
    for first in range(len(NORMS))
    for number, model in enumerate(DATA)
]
EVERY = [pytest.param("cuda", *pair, Sizes(16), marks=NEEDS_GPU) for pair in PAIRS]


@pytest.mark.parametrize(
    ("device", "model", "norm", "sizes"),
    [
        pytest.param("cpu", "convnet", "batch", Sizes(16), marks=slow),
        pytest.param("cpu", "text_encoder", "layer", Sizes(16), marks=slow),
        *(
            pytest.param("cuda", "resnet20", "batch", Sizes(16, None, size), marks=NEEDS_GPU)
            for size in (2, 8)
        ),
        *(EVERY if torch.cuda.is_available() else EVERY[:1]),
    ],
)
def test_a_step_is_that_of_the_cpu(device: str, model: str, norm: str, sizes: Sizes):
    # In float32 a value near zero may pass a ReLU on one device alone.
    for dtype, rtol in ((torch.float64, 1e-7), (torch.float32, 1e-2)):
        try:
            expected = first_step(build(model, norm, stacked=False, sizes=sizes), "cpu", dtype)
            forms = [True] if device == "cpu" else [False, True]
            modules = [build(model, norm, stacked=form, sizes=sizes) for form in forms]
        except (UserError, ValueError) as error:
            pytest.skip(f"not on a CPU either: {error}")
        for module in modules:
            assert_near(first_step(module, device, dtype), expected, rtol)


@pytest.mark.parametrize(
    ("device", "model", "norm", "sizes"),
    [
        pytest.param("cpu", "text_encoder", "batch", Sizes(16, None, 4), marks=slow),
        *(EVERY if torch.cuda.is_available() else EVERY[:1]),
    ],
)
def test_equal_steps_have_equal_bits(device: str, model: str, norm: str, sizes: Sizes):
    try:
        first_step(build(model, norm, stacked=False, sizes=sizes), "cpu", torch.float32)
    except (UserError, ValueError) as error:
        pytest.skip(f"not on a CPU either: {error}")
    for stacked, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        expected, found = (
            steps_of(build(model, norm, stacked=stacked, sizes=sizes), device, dtype)
            for _ in range(2)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_draws_are_those_of_the_cpu_to_the_bit(device: str):
    augmentation = Augmentation(crop_padding=2, flip=True, cutout=3)
    data = replace(images(), augmentation=augmentation)
    draws = augmentation.draw(seed=3, step=7, num_samples=len(data.train))
    inputs = data.train.tensors[0]
    found = augmentation.apply(inputs.to(device), draws.to(device)).cpu()
    assert torch.equal(found, augmentation.apply(inputs, draws))
    assert not torch.equal(found, inputs)
    here = TrainingBatches(data, [0, 1], 10, drop_last=False)
    there = here.to(device)
    for step in (0, 7):  # of two epochs
        for batch, other in zip(here.chunk(step, 3), there.chunk(step, 3), strict=True):
            assert torch.equal(batch["targets"], other["targets"].cpu())
            torch.testing.assert_close(batch["inputs"], other["inputs"].cpu(), rtol=0, atol=1e-6)
    dropout, x = Dropout(0.3), torch.ones(6, 1000)
    dropout.key.fill_(123456789)
    assert torch.equal(dropout(x), dropout.to(device)(x.to(device)).cpu())


@pytest.mark.parametrize("norm", ["custom norm._target_=torch.nn.BatchNorm2d", "batch"])
def test_precise_statistics_are_those_of_the_cpu(device: str, norm: str):
    name, *words = norm.split()
    states = []
    for where in ("cpu", device):
        module = build("convnet", name, *words, stacked=False)
        place(module, where)
        data = module.batches.data
        with gpu_arithmetic("highest"):
            population = with_population(module.replicas, data, num_samples=40, group_size=16)
        assert population is not None
        states.append(dict(population.cpu().named_buffers()))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


class NoReads(TorchDispatchMode):
    """Fails where the CPU would wait for a GPU to know a value; a copy to it passes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("_local_scalar_dense", "nonzero", "equal", "masked_select"):
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Fails if the CPU waits for the device inside the block."""
    if device != "cuda":
        with NoReads():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in_turn"])
@pytest.mark.parametrize(
    ("model", "choices"),
    [
        ("small_resnet", {"lr_scales": (1.0, 0.5), "sizes": Sizes(16, 8, 4)}),
        pytest.param("text_encoder", {}, marks=slow),
    ],
)
def test_no_step_waits_for_the_device(
    tmp_path: Path, monkeypatch, device: str, model: str, stacked: bool, choices: dict
):
    words = ["model.dropout=0.1"] if model == "text_encoder" else []
    module = build(model, "batch", *words, stacked=stacked, max_grad_norm=1.0, **choices)
    take, num_watched = Step.take, 0

    def watched(self: Step, index: int, batch: Batch) -> Tensor:
        nonlocal num_watched
        if index <= 3:  # they allocate and choose kernels
            return take(self, index, batch)
        num_watched += 1
        with no_waiting(device):
            return take(self, index, batch)

    monkeypatch.setattr(Step, "take", watched)
    train(module, tmp_path / "a.ckpt", precision="32-true", accelerator=device)
    assert num_watched == module.recipe.num_steps - 4 > 0


def test_every_model_and_norm_is_among_the_cases():
    assert len(set(PAIRS)) == len(PAIRS) == len(DATA) * len(NORMS)
    assert {norm for _, norm in PAIRS[: ROUNDS * len(DATA)]} == set(NORMS)
    assert set(DATA) == set(group_choices("model")) - {"custom", "timm", "torchvision"}
