"""Networks and data for the checks of a GPU; every check runs on the CPU too.

On a CPU a check proves little about a GPU, but it proves that the check itself is not broken.
It is slow there if tests/training holds the same promise of a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import image_data, recipe_for, text_data

from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.config.compose import compose_config
from normexp.config.sizes import Sizes
from normexp.config.validate import read_settings
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data, Windows
from normexp.models.build import build_network
from normexp.norms.build import build_norm
from normexp.training.cuda_graph import RecordedStep
from normexp.training.devices import gpu_arithmetic
from normexp.training.module import Recorder, TrainingModule
from normexp.training.optimizer import build_optimizer
from normexp.training.step import Step, StepGradient

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
ON_GPU = pytest.param("cuda", marks=NEEDS_GPU)
on_each_device = pytest.mark.parametrize("device", ["cpu", ON_GPU])


def in_each_form(*marks_of_cpu: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """In turn on the CPU is what trainings on a GPU are compared with."""
    forms = [
        pytest.param("cpu", True, id="cpu-stacked", marks=marks_of_cpu),
        pytest.param("cuda", False, id="cuda-in_turn", marks=NEEDS_GPU),
        pytest.param("cuda", True, id="cuda-stacked", marks=NEEDS_GPU),
    ]
    return pytest.mark.parametrize(("device", "stacked"), forms)


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
    gradient = StepGradient(replicas, module.recipe.criterion.loss, module.recipe.sizes, SEEDS)
    (batch,) = module.batches.chunk(0, 1, dtype)
    with gpu_arithmetic("highest"):
        values = {"loss": gradient.add(0, batch, gradient.dropout_keys(0))}
    state = {name: p.grad for name, p in replicas.named_parameters() if p.grad is not None}
    for name, value in {**state, **dict(replicas.named_buffers())}.items():
        _, tree, own = name.split(".", 2)
        rows = value if replicas.is_stacked else [value]
        values |= {f"{int(tree) + index} {own}": row for index, row in enumerate(rows)}
    return {name: value.detach().cpu() for name, value in values.items()}


def steps_of(
    module: TrainingModule, device: str, *, num_replayed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Losses and all state after the first steps, of which the last ones are replayed."""
    place(module, device)
    replicas, recipe = module.replicas.train(), module.recipe
    optimizer = recipe.build_optimizer(replicas)
    recorded = RecordedStep(replicas, optimizer, recipe.sizes.batch_size)
    if not num_replayed:
        recorded.why_not = "asked for by the test"
    running_from = recipe.settings.norm.running_from
    gradient = StepGradient(replicas, recipe.criterion.loss, recipe.sizes, SEEDS, running_from)
    step = Step(
        gradient,
        optimizer,
        None,
        [],
        max_grad_norm=recipe.settings.max_grad_norm,
        rates=recipe.build_rates(replicas),
        recorded=recorded,
    )
    bf16 = torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)
    with bf16, gpu_arithmetic("high"):
        losses = []
        for index in range(3 + max(num_replayed, 2)):
            (batch,) = module.batches.chunk(index % 2, 1, torch.float32)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (index + 1)
            losses.append(step.take(index, batch))
    assert recorded.num_replayed == num_replayed, recorded.why_not
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
