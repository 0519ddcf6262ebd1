"""One step on a GPU: every model and norm as on the CPU, groups, draws, statistics."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    DATA,
    ON_GPU,
    assert_near,
    build,
    first_step,
    images,
    on_each_device,
    place,
)

from normexp.batching.draws import Dropout
from normexp.batching.sizes import Sizes
from normexp.checks.preflight import Traits
from normexp.config.help import group_choices
from normexp.data.augment import Augmentation
from normexp.data.batches import TrainingBatches
from normexp.errors import UserError
from normexp.norms.affine import Affine
from normexp.norms.kernel import normalize_groups
from normexp.training.statistics import with_population

NORMS = [name for name in group_choices("norm") if name not in ("custom", "as_built")]
TRAITS = Traits("norm1", False, None, False, False, None, 0, {})
FEW = ("batch", "group", "layer")  # on a CPU
FORMS = {"cpu": [True], "cuda": [False, True]}  # whether replicas are stacked
EVERY = [
    pytest.param(*ON_GPU.values, model, norm, marks=ON_GPU.marks)
    for model in DATA
    for norm in NORMS
]
MODEL_CASES = [
    *(pytest.param("cpu", model, norm) for model in ("convnet", "text_encoder") for norm in FEW),
    *(EVERY if torch.cuda.is_available() else EVERY[:1]),
]


@pytest.mark.parametrize(("device", "model", "norm"), MODEL_CASES)
def test_a_step_is_that_of_the_cpu(device: str, model: str, norm: str):
    # In float32 a value near zero may pass a ReLU on one device alone.
    for dtype, rtol in ((torch.float64, 1e-7), (torch.float32, 1e-2)):
        try:
            expected = first_step(build(model, norm, stacked=False), "cpu", dtype)
            modules = [build(model, norm, stacked=form) for form in FORMS[device]]
        except (UserError, ValueError) as error:
            pytest.skip(f"not on a CPU either: {error}")
        for module in modules:
            assert_near(first_step(module, device, dtype), expected, rtol)


@on_each_device
@pytest.mark.parametrize("norm_batch_size", [2, 8])
def test_ghost_batches_are_those_of_the_cpu(device: str, norm_batch_size: int):
    sizes = Sizes(16, None, norm_batch_size)
    expected = first_step(build("resnet20", "batch", stacked=False, sizes=sizes), "cpu")
    found = first_step(build("resnet20", "batch", stacked=True, sizes=sizes), device)
    assert_near(found, expected, rtol=1e-7)


@on_each_device
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("size", [4, 32], ids=["small", "large"])
def test_folded_groups_equal_one_group_at_a_time(device: str, groups: int, size: int):
    x = torch.randn(groups, 4, 16, size, size, dtype=torch.double).to(device).requires_grad_()
    affine = Affine(*(torch.randn(16, dtype=torch.double).to(device) for _ in range(2)))
    whole, moments = normalize_groups(x, None, affine, 1e-5)
    weights = torch.randn_like(whole)
    (gradient,) = torch.autograd.grad((whole * weights).sum(), x)
    for index in range(groups):
        part = x.detach()[index : index + 1].requires_grad_()
        out, alone = normalize_groups(part, None, affine, 1e-5)
        torch.testing.assert_close(whole[index], out[0])
        torch.testing.assert_close(moments.mean[index], alone.mean[0])
        torch.testing.assert_close(moments.var[index], alone.var[0])
        (own,) = torch.autograd.grad((out[0] * weights[index]).sum(), part)
        torch.testing.assert_close(gradient[index], own[0])


@on_each_device
def test_draws_are_those_of_the_cpu_to_the_bit(device: str):
    data = images(Augmentation(crop_padding=2, flip=True, cutout=3))
    augmentation = data.augmentation
    assert augmentation is not None
    draws = augmentation.draw(seed=3, step=7, num_samples=len(data.train))
    inputs = data.train.tensors[0]
    on_device = {name: draw.to(device) for name, draw in draws.items()}
    found = augmentation.apply(inputs.to(device), on_device).cpu()
    assert torch.equal(found, augmentation.apply(inputs, draws))
    assert not torch.equal(found, inputs)
    here = TrainingBatches(data, [0, 1], 10, drop_last=False)
    there = here.to(device)
    for step in (0, 7):  # of two epochs
        for batch, other in zip(here.chunk(step, 3), there.chunk(step, 3), strict=True):
            assert torch.equal(batch["targets"], other["targets"].cpu())
            torch.testing.assert_close(batch["inputs"], other["inputs"].cpu(), rtol=0, atol=1e-6)
    dropout = Dropout(0.3)
    dropout.key.fill_(123456789)
    x = torch.ones(6, 1000)
    assert torch.equal(dropout(x), dropout.to(device)(x.to(device)).cpu())


@on_each_device
@pytest.mark.parametrize("norm", ["frozen", "custom norm._target_=torch.nn.BatchNorm2d", "batch"])
def test_precise_statistics_are_those_of_the_cpu(device: str, norm: str):
    name, *words = norm.split()
    states = []
    for where in ("cpu", device):
        module = build("convnet", name, *words, stacked=False)
        place(module, where)
        module.replicas.train()
        sizes = {"num_samples": 40, "group_size": 16}
        population = with_population(module.replicas, module.batches.data, **sizes)
        states.append({} if population is None else dict(population.named_buffers()))
    assert states[0].keys() == states[1].keys()
    assert bool(states[0]) is (name != "frozen")  # it has no running averages
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)


def test_every_model_and_norm_is_among_the_cases():
    assert set(DATA) == set(group_choices("model")) - {"custom", "timm", "torchvision"}
    assert len(EVERY) == len(DATA) * len(NORMS)
