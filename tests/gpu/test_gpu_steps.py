"""One step on a GPU: every model and norm as on the CPU, groups, draws, statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_cases import (
    DATA,
    NEEDS_GPU,
    assert_near,
    build,
    first_step,
    images,
    on_each_device,
    place,
    steps_of,
)
from tape import Tape

from normexp.batching.draws import Dropout
from normexp.config.groups import group_choices
from normexp.config.sizes import Sizes
from normexp.data.augment import Augmentation
from normexp.data.batches import TrainingBatches
from normexp.errors import UserError
from normexp.training import cuda_graph
from normexp.training.devices import gpu_arithmetic
from normexp.training.statistics import with_population

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
        pytest.param("cpu", "convnet", "batch", Sizes(16, None, 4), marks=slow),
        *(pytest.param("cpu", "text_encoder", norm, Sizes(16), marks=slow) for norm in NORMS),
        *(EVERY if torch.cuda.is_available() else EVERY[:1]),
    ],
)
def test_a_replayed_step_has_the_bits_of_the_step_itself(
    monkeypatch, device: str, model: str, norm: str, sizes: Sizes
):
    """Which also shows that two equal steps have equal bits."""
    if device == "cpu":
        monkeypatch.setattr(cuda_graph, "CudaGraph", Tape)
    try:
        first_step(build(model, norm, stacked=False, sizes=sizes), "cpu", torch.float32)
    except (UserError, ValueError) as error:
        pytest.skip(f"not on a CPU either: {error}")
    for stacked, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        modules = [build(model, norm, stacked=stacked, sizes=sizes) for _ in range(2)]
        expected = steps_of(modules[0], device, num_replayed=0, dtype=dtype)
        found = steps_of(modules[1], device, num_replayed=2, dtype=dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


SMALL = "model.depth=1 model.width=16 model.num_heads=2"
TYPED = {
    "averages of the first group": ("convnet", "power norm.running_from=group", Sizes(16, 8, 4)),
    "averages in sequence": ("convnet", "batch norm.running_from=sequence", Sizes(16, 8, 4)),
    "decay of norms": ("convnet", "group optim.decay_norm=0.3", Sizes(16)),
    "norms at places": ("convnet", "salu norm.at={norm1:batch}", Sizes(16, None, 4)),
    "placement": ("text_encoder", f"progressive_rep_batch placement=simple {SMALL}", Sizes(16)),
    "adamw": ("text_encoder", f"one_plus_rms optim=adamw model.dropout=0.1 {SMALL}", Sizes(16)),
    "language": ("gpt", f"rep_batch optim=adamw {SMALL}", Sizes(16)),
}


@on_each_device
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in_turn"])
@pytest.mark.parametrize(("model", "words", "sizes"), TYPED.values(), ids=TYPED.keys())
def test_a_step_as_typed_is_replayed(
    monkeypatch, device: str, stacked: bool, model: str, words: str, sizes: Sizes
):
    if device == "cpu":
        monkeypatch.setattr(cuda_graph, "CudaGraph", Tape)
    norm, *others = words.split()
    choices = {"lr_scales": (1.0, 0.25), "max_grad_norm": 0.5} if model == "convnet" else {}
    expected, found = (
        steps_of(
            build(model, norm, *others, stacked=stacked, sizes=sizes, **choices),
            device,
            num_replayed=num_replayed,
            dtype=torch.bfloat16,
        )
        for num_replayed in (0, 2)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_each_device
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


@on_each_device
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


def test_every_model_and_norm_is_among_the_cases():
    assert len(set(PAIRS)) == len(PAIRS) == len(DATA) * len(NORMS)
    assert {norm for _, norm in PAIRS[: ROUNDS * len(DATA)]} == set(NORMS)
    assert set(DATA) == set(group_choices("model")) - {"custom", "timm", "torchvision"}
