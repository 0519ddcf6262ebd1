"""The LightningModule that trains and evaluates a stack of replicas.

Lightning owns epochs, validation, checkpoints, devices and precision; this module owns what
happens in an optimizer step. `training_step` gets a chunk of several optimizer steps, so positions
are counted in optimizer steps, never in Lightning's batches.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytorch_lightning as pl
import torch

from normexp.batching.processes import Processes
from normexp.batching.replicas import Batch, Replicas
from normexp.batching.sizes import Share
from normexp.data.batches import TrainingBatches
from normexp.training.chunks import ChunkLoader, LossHistory
from normexp.training.devices import compiled_gradient
from normexp.training.evaluation import Evaluator, criterion_of
from normexp.training.optim import ReplicaRates
from normexp.training.recipe import Recipe
from normexp.training.recorder import Columns, Position, Recorder, finite_mean
from normexp.training.step import StepGradient


class TrainingModule(pl.LightningModule):
    """Trains and evaluates S replicas on one data set.

    Attributes:
        batches: the data of each optimizer step.
        evaluator: computes the metrics of a split.
        losses: the position in training, and the losses since the last row.
        metrics: the latest metrics by name, a value per replica.
        validated_at: the step of the last validation.
        processes: those that share each step; None for a single process.
        train_seconds: time spent in optimizer steps so far.
    """

    def __init__(
        self,
        replicas: Replicas,
        batches: TrainingBatches,
        recipe: Recipe,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.replicas = replicas
        self.batches = batches
        self.recipe = recipe
        self.recorder = recorder
        self.criterion = criterion_of(batches.data)
        self.evaluator = Evaluator(replicas, batches.data, self.criterion, recipe)
        self.losses = LossHistory(replicas.num_replicas, recipe.log_every)
        self.metrics: Columns = {}
        self.validated_at: int | None = None
        self.processes: Processes | None = None
        self.train_seconds = 0.0
        self._is_placed = False
        self._gradient: StepGradient | None = None  # from the start of training on
        self._rates: ReplicaRates | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.losses.num_steps

    @property
    def total_steps(self) -> int:
        return self.recipe.schedule.total_steps

    @property
    def num_epochs(self) -> int:
        """Passes over the training samples; the last one may be partial."""
        return math.ceil(self.total_steps / self.batches.steps_per_epoch)

    @property
    def has_ended(self) -> bool:
        return self.step >= self.total_steps

    def position(self, step: int) -> Position:
        """Returns where the run stands once `step` optimizer steps are done."""
        epoch = max(0, step - 1) // self.batches.steps_per_epoch
        return Position(step, epoch, self.batches.num_samples_before(step))

    # Training

    def setup(self, stage: str) -> None:
        del stage
        if self._is_placed:  # by an earlier stage
            return
        self._is_placed = True
        # Lightning converts too, but only after it has loaded a checkpoint into these tensors.
        self.trainer.precision_plugin.convert_module(self)
        device = self.trainer.strategy.root_device
        self.batches = self.batches.to(device)
        self.evaluator = self.evaluator.on(self.batches.data)
        is_image = len(self.batches.data.input_shape) == 3
        if device.type == "cuda" and is_image and not self.replicas.is_stacked:
            self.replicas.make_channels_last()  # faster; under vmap a convolution gains nothing
        if self.trainer.world_size > 1:
            share = Share(self.trainer.global_rank, self.trainer.world_size)
            self.processes = Processes(share, device)

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.build_optimizer(self.replicas)
        if self.recipe.schedule.build is None:
            return optimizer
        return [optimizer], [self.recipe.schedule.build(optimizer)]

    def train_dataloader(self) -> ChunkLoader:
        return ChunkLoader(
            lambda: self.step,
            self.batches.steps_per_epoch,
            self.total_steps,
            self.recipe.max_chunk,
            self.processes,
        )

    def on_train_start(self) -> None:
        recipe, replicas = self.recipe, self.replicas
        if recipe.lr_scales is not None:
            self._rates = ReplicaRates(replicas, recipe.lr_scales)
        compiled = None
        if recipe.compile:
            compiled = compiled_gradient(replicas, recipe.sizes, self.device)
        loss, seeds = self.criterion.loss, self.batches.seeds
        self._gradient = StepGradient(replicas, loss, recipe.sizes, seeds, self.processes, compiled)

    def training_step(self, chunk: slice) -> None:
        """Takes the optimizer steps of a chunk."""
        started = time.perf_counter()
        # Without Lightning's wrapper, which costs 5 % of a small step: it counts steps, as `losses`
        # does already, and scales float16 gradients, which are not supported.
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dtype = next(self.replicas.parameters()).dtype
        batches = self.batches.chunk(chunk.start, chunk.stop - chunk.start, dtype)
        assert self._gradient is not None
        self._gradient.draw(range(chunk.start, chunk.stop))
        gradient_norms: dict[int, torch.Tensor] = {}  # (S,) after any clipping, by steps done
        for step, batch in enumerate(batches, start=chunk.start):
            torch.clear_autocast_cache()  # some versions of Lightning keep weights for a chunk
            for parameter in parameters:  # zero_grad without its profiling
                parameter.grad = None
            self._take_step(step, batch, optimizer)
            if self.step % self.recipe.log_every == 0:
                gradient_norms[self.step] = self.replicas.gradient_norms()
        for end, losses in self.losses.read():
            norms = gradient_norms.get(end)  # None if a resumed training has another log_every
            known = {} if norms is None else {"train/grad_norm": norms.tolist()}
            self._record(end, {"train/loss": losses} | known)
        # What follows is recorded of no run, so it does not matter at which chunk this is seen.
        self.trainer.should_stop |= self.losses.all_diverged
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # for the time measured here and by ChunkLoader
        elapsed = time.perf_counter() - started
        self.train_seconds += elapsed
        if self.recorder.tracks:
            self._track(chunk, elapsed, optimizer.param_groups[0]["lr"])

    def _take_step(self, step: int, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        assert self._gradient is not None
        recipe = self.recipe
        if recipe.schedule.factor is not None:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * recipe.schedule.factor(step)
        self.losses.add(self._gradient.add(step, batch))
        if recipe.max_grad_norm is not None:
            self.replicas.clip_gradients(recipe.max_grad_norm)
        if self._rates is None:
            optimizer.step()
        else:
            self._rates.step(optimizer)
        if recipe.schedule.build is not None and recipe.schedule.monitor is None:
            self.lr_schedulers().step()

    def _track(self, chunk: slice, elapsed: float, lr: float) -> None:
        """Sends loggers the values of a chunk's last step that metrics.csv does not hold."""
        count, position = self.replicas.num_replicas, self.position(self.step)
        num_samples = position.samples_seen - self.position(chunk.start).samples_seen
        values = {
            "train/lr": [lr * scale for scale in self.recipe.lr_scales or [1.0] * count],
            "train/samples_per_second": [num_samples * count / max(elapsed, 1e-9)] * count,  # all
        }
        self.recorder.track(position, values)

    def _record(self, step: int, values: Columns) -> Columns:
        """Records values after `step`; returns them without those of runs that diverged before."""
        ends = [step if at is None else at for at in self.losses.diverged_at]
        values = {
            name: [v if step <= end else math.nan for v, end in zip(column, ends, strict=True)]
            for name, column in values.items()
        }
        self.recorder.record(self.position(step), values)
        return values

    # Evaluation. Lightning's loop gets a single batch, which stands for the whole split.

    def val_dataloader(self) -> range:
        return range(1)

    test_dataloader = val_dataloader

    def validation_step(self, _: int) -> None:
        self._record_metrics(self.evaluator.running("val"))
        if self.recipe.evaluates_every_epoch:
            self._record_metrics(self.evaluator.with_other_statistics(["val"]))
        self.validated_at = self.step
        means = {name: finite_mean(column) for name, column in self.metrics.items()}
        # For callbacks only: `recorder` serves the loggers. All processes have equal means.
        self.log_dict(means, logger=False, batch_size=1, sync_dist=True)
        if self.recipe.schedule.monitor is not None and self.trainer.state.fn == "fit":
            self.lr_schedulers().step(means[self.recipe.schedule.monitor])

    def test_step(self, _: int) -> None:
        """Evaluates the test split, and whatever remains for the end on the val split."""
        self._record_metrics(self.evaluator.running("test"))
        val_is_done = self.recipe.evaluates_every_epoch and self.validated_at == self.step
        self._record_metrics(
            self.evaluator.with_other_statistics(["test"] if val_is_done else ["val", "test"])
        )
        self.recorder.write()

    def _record_metrics(self, metrics: Columns) -> None:
        self.metrics.update(self._record(self.step, metrics))

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.recorder.write()
        checkpoint["normexp"] = {
            "losses": self.losses.state_dict(),
            "train_seconds": self.train_seconds,
            "validated_at": self.validated_at,
            "is_stacked": self.replicas.is_stacked,
            "metrics": self.metrics,
            "rows": self.recorder.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["normexp"]
        self.losses.load_state_dict(state["losses"])
        self.recorder.load_state_dict(state["rows"])
        self.train_seconds = state["train_seconds"]
        self.validated_at = state["validated_at"]
        self.metrics = state["metrics"]
