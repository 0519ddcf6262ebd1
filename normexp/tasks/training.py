"""The LightningModule that trains a stack of replicas, many optimizer steps per call.

Lightning owns epochs, validation, checkpoints, devices and precision; this module owns what
happens in an optimizer step. Position is counted in optimizer steps, never in chunks.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normexp.batching.processes import Processes
from normexp.batching.replicas import Batch, Measured, Replicas
from normexp.batching.sizes import Share, Sizes
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data
from normexp.tasks.chunks import ChunkLoader
from normexp.tasks.compilation import compiled, prepare_for
from normexp.tasks.evaluated import EvaluatedTask
from normexp.tasks.gradient import StepGradient
from normexp.tasks.losses import LossHistory
from normexp.tasks.optimizer import OptimizerFactory, ReplicaRates, Schedule, parameter_groups
from normexp.tasks.recorder import Position, Recorder


@dataclass(frozen=True)
class Recipe:
    """How a stack is trained: everything but the network, the data and the seeds."""

    sizes: Sizes
    optimizer: OptimizerFactory
    schedule: Schedule
    lr: float
    weight_decay: float
    decay_norm: bool
    max_grad_norm: float | None  # 2-norm per replica; None clips nothing
    eval_group: int | None  # samples a norm sees together in evaluation; None where it mixes none
    log_every: int  # optimizer steps between two rows of train/loss
    max_chunk: int  # most optimizer steps in one call of training_step
    lr_scales: tuple[float, ...] | None = None  # of each replica's own lr to `lr`, at most 1
    compile: bool = False  # torch.compile the forward and backward of training

    def optimizer_of(self, replicas: Replicas) -> torch.optim.Optimizer:
        """A new optimizer of all that is trained."""
        groups = parameter_groups(
            replicas, weight_decay=self.weight_decay, decay_norm=self.decay_norm
        )
        return self.optimizer(groups, lr=self.lr)


class TrainingTask(EvaluatedTask):
    """Trains S replicas on one data set.

    Attributes:
        processes: those that train together; None for one alone.
        train_seconds: spent in optimizer steps so far.
    """

    def __init__(
        self,
        replicas: Replicas,
        data: Data,
        batches: TrainingBatches,
        recipe: Recipe,
        recorder: Recorder,
    ) -> None:
        super().__init__(replicas, data, recorder, recipe.eval_group)
        self.automatic_optimization = False
        self.batches = batches
        self.recipe = recipe
        self.processes: Processes | None = None
        self.train_seconds = 0.0
        self.losses = LossHistory(replicas.num_replicas, recipe.log_every)
        self._gradient: StepGradient | None = None  # once training starts
        self._rates: ReplicaRates | None = None

    def setup(self, stage: str) -> None:
        del stage
        device = self.trainer.strategy.root_device
        self.data = self.batches.data = self.data.to(device)
        prepare_for(device, self.replicas, self.data)
        if self.trainer.world_size > 1 and self.processes is None:
            share = Share(self.trainer.global_rank, self.trainer.world_size)
            self.processes = Processes(share, device)

    def on_train_start(self) -> None:
        recipe, replicas = self.recipe, self.replicas
        self.batches.dtype = next(replicas.parameters()).dtype  # as the precision has made it
        if recipe.lr_scales is not None:
            self._rates = ReplicaRates(replicas, recipe.lr_scales)
        run = replicas.add_gradient
        if recipe.compile:
            run = compiled(replicas, recipe.sizes, self.device)
        self._gradient = StepGradient(
            *(replicas, self.batches, recipe.sizes, run, self._measure_loss, self.processes)
        )

    def _measure_loss(self, output: Tensor, batch: Batch) -> Measured:
        return {"loss": self.loss(output, batch)}

    @property
    def step(self) -> int:
        return self.losses.num_steps

    def position(self, step: int) -> Position:
        epoch = max(0, step - 1) // self.batches.steps_per_epoch
        return Position(step, epoch, self.batches.num_samples_before(step))

    def train_dataloader(self) -> ChunkLoader:
        return ChunkLoader(
            lambda: self.step,
            self.batches.steps_per_epoch,
            self.recipe.schedule.total_steps,
            self.recipe.max_chunk,
            agree=self.processes.agree if self.processes else None,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.optimizer_of(self.replicas)

    def training_step(self, chunk: slice) -> None:
        started = time.perf_counter()
        # The plain optimizer: Lightning's wrapper counts steps, which `losses` does, and scales the
        # gradients of float16, which no precision here has, for 5 % of a small step.
        recipe, optimizer = self.recipe, self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)  # a list only where there are several
        assert self._gradient is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for batch in self.batches.chunk(chunk.start, chunk.stop - chunk.start):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * recipe.schedule.factor(self.step)
            for parameter in parameters:  # as zero_grad, without its profiling
                parameter.grad = None
            self.losses.add(self._gradient.add(batch, self.step))
            if recipe.max_grad_norm is not None:
                self.replicas.clip_gradients(recipe.max_grad_norm)
            with self._rates.applied() if self._rates else nullcontext():
                optimizer.step()
        self._record_losses()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # both clocks, this one and that of the chunks
        self.train_seconds += time.perf_counter() - started

    def _record_losses(self) -> None:
        for step, losses in self.losses.take_rows():
            self.recorder.record(self.position(step), {"train/loss": losses})
        if self.losses.all_diverged:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        self.losses.finish()
        self.recorder.flush()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.recorder.flush()
        checkpoint["normexp"] = {
            "losses": self.losses.state_dict(),
            "train_seconds": self.train_seconds,
            "validated_at": self.validated_at,
            "is_stacked": self.replicas.is_stacked,
            "final": self.final,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["normexp"]
        device = self.trainer.strategy.root_device  # Lightning moves the networks there later
        self.losses.load_state_dict(state["losses"], device)
        self.train_seconds = state["train_seconds"]
        self.validated_at = state["validated_at"]
        self.final = state["final"]
        self.recorder.truncate_after(self.step)
