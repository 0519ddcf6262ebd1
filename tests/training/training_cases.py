"""Small trainings through the real Trainer, shared by the tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.sample import GroupNorm
from normexp.training.batching.draws import derive_seed
from normexp.training.batching.replicas import InTurn, Replicas, Stacked
from normexp.training.config.compose import compose_config
from normexp.training.config.groups import shipped_defaults
from normexp.training.config.keys import Settings, TrainerKeys
from normexp.training.config.sizes import Sizes
from normexp.training.config.validate import read_settings
from normexp.training.criterion import criterion_of
from normexp.training.data.augment import IGNORED
from normexp.training.data.batches import TrainingBatches
from normexp.training.data.dataset import Data, Examples
from normexp.training.fit import fit
from normexp.training.models.transformer import TextEncoder
from normexp.training.models.vision import ConvNet, ResNet
from normexp.training.module import Recorder, TrainingModule
from normexp.training.recipe import Recipe, count_steps_per_epoch
from normexp.training.schedule import build_schedule
from normexp.training.stopping import Interrupted, StopRequest

Row = tuple[int, int, int, dict[str, float]]
EPOCHS = 2
NUM_CLASSES = 3  # of a pixel
NOT_SAVED = ("key", "first_sample", "num_values")  # of a step, and counted since a start
SGD = partial(torch.optim.SGD, momentum=0.9, fused=True)
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


def image_data(num_train: int = 40, size: int = 8) -> Data:
    """Images whose brightness follows their class, with noise."""
    generator = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        targets = torch.randint(0, 4, (count,), generator=generator)
        noise = torch.rand(count, 1, size, size, generator=generator) * 100
        images = noise + targets.view(-1, 1, 1, 1) * 30
        return Examples(images.to(torch.uint8), targets)

    splits = [examples(count) for count in (num_train, 12, 12)]
    shape = (1, size, size)
    return Data("squares", "classification", *splits, 4, shape, mean=(0.4,), std=(0.2,))


def pictures(num_train: int = 40, size: int = 8) -> Data:
    """Squares as bright as their class; of image i, about i in 40 of the pixels have no class."""
    generator = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        masks = torch.randint(0, NUM_CLASSES, (count, 2, 2), generator=generator)
        masks = masks.repeat_interleave(size // 2, 1).repeat_interleave(size // 2, 2)
        noise = torch.randint(0, 60, (count, 1, size, size), generator=generator)
        images = noise + 80 * masks[:, None]
        share = torch.arange(count).view(-1, 1, 1) / 40
        is_ignored = torch.rand(masks.shape, generator=generator) < share
        return Examples(images.byte(), masks.masked_fill(is_ignored, IGNORED).byte())

    splits = [examples(count) for count in (num_train, 12, 12)]
    shape = (1, size, size)
    return Data("pictures", "segmentation", *splits, NUM_CLASSES, shape, mean=(0.4,), std=(0.2,))


def text_data(num_train: int = 24, length: int = 7) -> Data:
    """Padded strings of one to `length` tokens; the class is the first token."""
    generator = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        tokens = torch.randint(1, 6, (count, length), generator=generator)
        lengths = torch.randint(2, length + 1, (count, 1), generator=generator)
        mask = torch.arange(length) < lengths
        return Examples(tokens * mask, tokens[:, 0] - 1, mask)

    splits = [examples(count) for count in (num_train, 12, 12)]
    return Data("strings", "classification", *splits, 5, (length,), vocab_size=6)


def batch_norm(num_features: int) -> nn.Module:
    return BatchNorm(num_features, eps=1e-5, momentum=0.1)


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, eps=1e-5, num_groups=4)


def convnet(norm: NormFactory) -> nn.Module:
    return ConvNet(norm, (1, 8, 8), 4, width=8)


def resnet20(norm: NormFactory) -> nn.Module:
    return ResNet(norm, (1, 8, 8), 4, depth=20, width=8)


def text_encoder(norm: NormFactory, dropout: float = 0.0) -> nn.Module:
    return TextEncoder(norm, 6, 7, 5, depth=1, width=16, num_heads=2, dropout=dropout)


SETTINGS = read_settings(
    compose_config(
        [
            *("trainer=cpu", "trainer.precision=64-true", "optim.weight_decay=1e-3"),
            *("log_every=3", "chunk=4", "evaluate_with=[running]", "precise_samples=2"),
        ]
    )
)


def recipe_for(data: Data, sizes: Sizes, **choices: Any) -> Recipe:
    """Two epochs by SGD on the CPU; everything but the tested choices has a default.

    Args:
        choices: fields of the recipe, and values of its settings.
    """
    fields = {field.name for field in dataclasses.fields(Recipe)}
    typed = {name: choices.pop(name) for name in choices.keys() - fields}
    assert typed.keys() <= Settings.model_fields.keys()
    settings = SETTINGS.model_copy(update=typed)
    steps_per_epoch = count_steps_per_epoch(
        len(data.train), sizes.batch_size, drop_last=settings.drop_last
    )
    values = {
        "settings": settings,
        "criterion": criterion_of(data),
        "num_train": len(data.train),
        "sizes": sizes,
        "schedule": build_schedule(
            shipped_defaults("schedule", "cosine") or {}, EPOCHS * steps_per_epoch
        ),
        "optimizer": SGD,
        "lr": 0.05,
        "optimizer_momentum": 0.9,
        "max_chunk": settings.chunk,
        "is_synchronized": False,
        "callbacks": list,
        "loggers": (),
    }
    return Recipe(**{**values, **choices})


def on_devices(recipe: Recipe, **keys: Any) -> Recipe:
    """The recipe with other values of `trainer`."""
    assert keys.keys() <= TrainerKeys.model_fields.keys()
    trainer = recipe.settings.trainer.model_copy(update=keys)
    settings = recipe.settings.model_copy(update={"trainer": trainer})
    return dataclasses.replace(recipe, settings=settings)


def build_module(
    *,
    model: Callable[[NormFactory], nn.Module] = convnet,
    make_norm: Callable[[int], nn.Module] = batch_norm,
    data: Data | None = None,
    seeds: tuple[int, ...] = (0,),
    stacked: bool = False,
    sizes: Sizes | None = None,
    **choices: Any,
) -> TrainingModule:
    """Two epochs of five steps by default; for the choices see `recipe_for`."""
    data, sizes = data or image_data(), sizes or Sizes(8)
    norm = NormFactory(make_norm, view="token", norm_batch_size=sizes.norm_batch_size)
    networks = []
    for seed in seeds:
        torch.manual_seed(derive_seed(seed, "init"))
        networks.append(model(norm))
    replicas: Replicas = Stacked(networks) if stacked else InTurn(networks)
    recipe = recipe_for(data, sizes, **choices)
    batches = TrainingBatches(
        data, list(seeds), sizes.batch_size, drop_last=recipe.settings.drop_last
    )
    return TrainingModule(replicas, batches, recipe, Recorder([None] * len(seeds)))


def train(
    module: TrainingModule,
    checkpoint: Path,
    callbacks: list[pl.Callback] | None = None,
    precision: str = "64-true",
    stop: StopRequest | None = None,
    **devices: Any,
) -> TrainingModule:
    module.recipe = on_devices(module.recipe, precision=precision, **devices)
    fit(module, checkpoint=checkpoint, callbacks=callbacks or [], stop=stop)
    return module


def rows_of(module: TrainingModule, replica: int = 0) -> list[Row]:
    """The rows of one run, those of a position and a split together."""
    rows: dict[tuple[int, int, int, str], dict[str, float]] = {}
    for step, epoch, seen, name, value in module.recorder.rows[replica]:
        values = rows.setdefault((step, epoch, seen, name.split("/")[0]), {})
        assert name not in values
        values[name] = value
    return [(*where[:3], values) for where, values in rows.items()]


def state_of(module: TrainingModule, replica: int = 0) -> dict[str, torch.Tensor]:
    """Parameters and all buffers of one replica, including non-persistent ones."""
    network = module.replicas.replica(replica)
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def assert_same_state(
    a: TrainingModule, b: TrainingModule, atol: float, *, replica: int = 0, other: int | None = None
) -> None:
    """Compares replica `replica` of a with replica `other` of b; to the bit if atol is 0."""
    found = state_of(a, replica)
    expected = state_of(b, replica if other is None else other)
    assert found.keys() == expected.keys()
    for name in (name for name in found if not name.endswith(NOT_SAVED)):
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=atol, equal_nan=True, msg=name
        )


class StopAt(pl.Callback):
    """Requests a stop once a number of steps is done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.request = StopRequest()

    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        if pl_module.step >= self.step:
            self.request.requested = True


def stopped_and_resumed(
    build: Callable[[], TrainingModule],
    stop_at: int,
    checkpoint: Path,
    precision: str,
    callbacks: Callable[[], list[pl.Callback]] = list,
    **devices: Any,
) -> TrainingModule:
    """A training that was stopped once `stop_at` steps were done, then resumed."""
    first, second, stopper = build(), build(), StopAt(stop_at)
    with pytest.raises(Interrupted):
        own = [*callbacks(), stopper]
        train(first, checkpoint, own, precision, stopper.request, **devices)
    assert stop_at <= first.step < 10
    return train(second, checkpoint, callbacks(), precision, **devices)
