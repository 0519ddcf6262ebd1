"""Small trainings for the tests of the engine: real data flow, real Trainer, seconds in all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import normexp.training.fit
from normexp.batching.draws import derive_seed
from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.batching.sizes import Sizes
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data, Examples
from normexp.models.convnet import ConvNet
from normexp.models.resnet import ResNet
from normexp.models.text_encoder import TextEncoder
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.training.fit import fit
from normexp.training.module import Classification, Recipe, TrainingTask
from normexp.training.optim import Schedule
from normexp.training.recorder import Recorder
from normexp.training.stopping import Interrupted, StopRequest

Row = tuple[int, int, int, dict[str, float]]
EPOCHS = 2
SGD = partial(torch.optim.SGD, momentum=0.9, fused=True)


class MemorySink:
    """Rows of one run, in memory."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, epoch, samples_seen, dict(metrics)))

    def flush(self) -> None:
        pass

    def truncate_after(self, step: int) -> None:
        self.rows = [row for row in self.rows if row[0] <= step]


def image_data(num_train: int = 40, size: int = 8) -> Data:
    """Images whose brightness follows their class, with noise."""
    generator = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        targets = torch.randint(0, 4, (count,), generator=generator)
        noise = torch.rand(count, 1, size, size, generator=generator) * 100
        images = noise + targets.view(-1, 1, 1, 1) * 30
        return Examples(images.to(torch.uint8), targets)

    return Data(
        name="squares",
        task="classification",
        train=examples(num_train),
        val=examples(12),
        test=examples(12),
        num_outputs=4,
        input_shape=(1, size, size),
        mean=(0.4,),
        std=(0.2,),
    )


def text_data(num_train: int = 24, length: int = 7) -> Data:
    """Padded strings of one to `length` tokens; the class is the first token."""
    generator = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        tokens = torch.randint(1, 6, (count, length), generator=generator)
        lengths = torch.randint(2, length + 1, (count, 1), generator=generator)
        mask = torch.arange(length) < lengths
        return Examples(tokens * mask, tokens[:, 0] - 1, mask)

    return Data(
        name="strings",
        task="classification",
        train=examples(num_train),
        val=examples(12),
        test=examples(12),
        num_outputs=5,
        input_shape=(length,),
        vocab_size=6,
    )


def batch_norm(num_features: int) -> nn.Module:
    return BatchNorm(num_features, eps=1e-5, momentum=0.1)


def convnet(norm: NormFactory) -> nn.Module:
    return ConvNet(norm, (1, 8, 8), 4, width=8)


def resnet20(norm: NormFactory) -> nn.Module:
    return ResNet(norm, (1, 8, 8), 4, depth=20, width=8)


def text_encoder(norm: NormFactory, dropout: float = 0.0) -> nn.Module:
    return TextEncoder(norm, 6, 7, 5, depth=1, width=16, num_heads=2, dropout=dropout)


def build_task(
    *,
    model: Callable[[NormFactory], nn.Module] = convnet,
    make_norm: Callable[[int], nn.Module] = batch_norm,
    data: Data | None = None,
    seeds: tuple[int, ...] = (0,),
    stacked: bool = False,
    sizes: Sizes | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    lr: float = 0.05,
    max_chunk: int = 4,
    max_grad_norm: float | None = None,
    drop_last: bool = True,
    eval_group: int | None = None,
) -> TrainingTask:
    data = data or image_data()
    sizes = sizes or Sizes(8)
    norm = NormFactory(make_norm, view="token", norm_batch_size=sizes.norm_batch_size)
    networks = []
    for seed in seeds:
        torch.manual_seed(derive_seed(seed, "init"))
        networks.append(model(norm))
    replicas: Replicas = Stacked(networks) if stacked else InTurn(networks)
    batches = TrainingBatches(data, list(seeds), sizes.batch_size, drop_last=drop_last)
    recipe = Recipe(
        sizes=sizes,
        optimizer=optimizer,
        schedule=Schedule("cosine", 0.1, EPOCHS * batches.steps_per_epoch),
        lr=lr,
        weight_decay=1e-3,
        decay_norm=False,
        max_grad_norm=max_grad_norm,
        eval_group=eval_group,
        log_every=3,
        max_chunk=max_chunk,
    )
    return Classification(
        replicas, data, batches, recipe, Recorder([[MemorySink()] for _ in seeds])
    )


def train(
    task: TrainingTask,
    checkpoint: Path,
    callbacks: list[pl.Callback] | None = None,
    precision: str = "64-true",
) -> TrainingTask:
    options = {"accelerator": "cpu", "devices": 1, "precision": precision}
    fit(
        task,
        checkpoint=checkpoint,
        epochs=EPOCHS,
        val_every_epochs=1,
        trainer_options=options,
        loggers=[],
        callbacks=callbacks or [],
    )
    return task


def rows_of(task: TrainingTask, replica: int = 0) -> list[Row]:
    sink = task.recorder.sinks[replica][0]
    assert isinstance(sink, MemorySink)
    return sink.rows


def state_of(task: TrainingTask, replica: int = 0) -> dict[str, torch.Tensor]:
    """Parameters and all buffers of one replica, those that a state_dict leaves out too."""
    network = task.replicas.replica(replica)
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


class StopAt(pl.Callback):
    """Asks for a stop once a number of steps is done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stop: StopRequest | None = None

    def request(self) -> StopRequest:
        """Stands in for the request that `fit` makes."""
        self.stop = StopRequest()
        return self.stop

    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        if pl_module.step >= self.step and self.stop is not None:
            self.stop.requested = True


def stopped_and_resumed(
    build: Callable[[], TrainingTask],
    stop_at: int,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> TrainingTask:
    """A training in float32 that was stopped once `stop_at` steps were done, and taken up again."""
    first, second, stopper = build(), build(), StopAt(stop_at)
    with monkeypatch.context() as patch:
        patch.setattr(normexp.training.fit, "StopRequest", stopper.request)
        with pytest.raises(Interrupted):
            train(first, checkpoint, [stopper], precision="32-true")
    assert stop_at <= first.step < 10
    for sink, old in zip(second.recorder.sinks, first.recorder.sinks, strict=True):
        sink[0].rows = list(old[0].rows)  # what is on the disk
    return train(second, checkpoint, precision="32-true")
