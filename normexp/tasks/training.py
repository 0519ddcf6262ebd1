"""The LightningModule that trains a stack of replicas, many optimizer steps per call.

Lightning owns epochs, validation, checkpoints, devices and precision; this module owns what
happens in an optimizer step. Position is counted in optimizer steps, never in chunks.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from normexp.batching.accumulation import accumulate
from normexp.batching.draws import derive_seed
from normexp.batching.processes import Processes
from normexp.batching.replicas import Batch, Measured, Replicas, dropouts
from normexp.batching.sizes import WHOLE, Bounds, Share, Sizes
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data
from normexp.tasks.chunks import ChunkLoader, IndexBlocks
from normexp.tasks.compilation import compiled, prepare_for
from normexp.tasks.frozen import block_size, score_block, shuffled
from normexp.tasks.losses import LossHistory
from normexp.tasks.optimizer import OptimizerFactory, ReplicaRates, Schedule, parameter_groups
from normexp.tasks.recorder import Position, Recorder, finite_mean


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


class TrainingTask(pl.LightningModule):
    """Trains S replicas on one data set; a subclass says what is measured.

    A subclass gives `loss(output, batch)`, summed over a batch's targets; where evaluation wants
    other sums too, `measure(output, batch)`; and `summarise(means, split)`: metrics from those sums
    divided by the number of targets.
    """

    def __init__(
        self,
        replicas: Replicas,
        data: Data,
        batches: TrainingBatches,
        recipe: Recipe,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.replicas = replicas
        self.data = data
        self.batches = batches
        self.recipe = recipe
        self.recorder = recorder
        self.processes: Processes | None = None  # those that train together; None for one alone
        self.validated_at: int | None = None  # the step of the last validation
        self.train_seconds = 0.0
        self.losses = LossHistory(replicas.num_replicas, recipe.log_every)
        self.final: dict[str, list[float]] = {}
        self._sums: dict[str, Tensor] = {}
        self._num_targets = 0
        self._rates: ReplicaRates | None = None
        self._measured = replicas.measure
        self._num_dropouts = len(dropouts(replicas.trees[0]))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        """What evaluation sums up; training wants the loss alone."""
        return self._measure_loss(output, batch)

    def _measure_loss(self, output: Tensor, batch: Batch) -> Measured:
        return {"loss": self.loss(output, batch)}

    def summarise(self, means: Measured, split: str) -> Measured:
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        del stage
        device = self.trainer.strategy.root_device
        self.data = self.batches.data = self.data.to(device)
        prepare_for(device, self.replicas, self.data)
        if self.trainer.world_size > 1 and self.processes is None:
            share = Share(self.trainer.global_rank, self.trainer.world_size)
            self.processes = Processes(share, device)
            self.batches.own_samples = self._own_samples

    def on_train_start(self) -> None:
        self.batches.dtype = self.input_dtype  # as the trainer's precision has made it
        if self.recipe.lr_scales is not None:
            self._rates = ReplicaRates(self.replicas, self.recipe.lr_scales)
        if self.recipe.compile:
            self._measured = compiled(self.replicas, self.recipe.sizes, self.device)

    def transfer_batch_to_device(
        self, batch: slice, device: torch.device, dataloader_idx: int
    ) -> slice:
        del device, dataloader_idx
        return batch  # places in data that is on the device already

    @property
    def input_dtype(self) -> torch.dtype:
        """What images are given as: the precision of the parameters."""
        return next(self.replicas.parameters()).dtype

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.losses.num_steps

    # --- training ---------------------------------------------------------------------------

    def train_dataloader(self) -> ChunkLoader:
        return ChunkLoader(
            lambda: self.step,
            self.batches.steps_per_epoch,
            self.recipe.schedule.total_steps,
            self.recipe.max_chunk,
            agree=self.processes.agree if self.processes else None,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        groups = parameter_groups(
            self.replicas, weight_decay=recipe.weight_decay, decay_norm=recipe.decay_norm
        )
        return recipe.optimizer(groups, lr=recipe.lr)

    def training_step(self, chunk: slice) -> None:
        started = time.perf_counter()
        # The plain optimizer: Lightning's wrapper counts steps, which `losses` does, and scales the
        # gradients of float16, which no precision here has, for 5 % of a small step.
        recipe, optimizer = self.recipe, self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)  # a list only where there are several
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for batch in self.batches.chunk(chunk.start, chunk.stop - chunk.start):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * recipe.schedule.factor(self.step)
            for parameter in parameters:  # as zero_grad, without its profiling
                parameter.grad = None
            self.losses.add(self._gradient(batch))
            if recipe.max_grad_norm is not None:
                self.replicas.clip_gradients(recipe.max_grad_norm)
            with self._rates.applied() if self._rates else nullcontext():
                optimizer.step()
        self._record_losses()
        self.train_seconds += time.perf_counter() - started

    def _gradient(self, batch: Batch) -> Tensor:
        """Leaves the step's gradient and buffers in the replicas; returns its losses (S,)."""
        num_samples = self.batches.num_samples_of(self.step)
        start = self.replicas.read_buffers() if self.processes else []
        bounds = self._bounds(num_samples, self.share)
        losses = accumulate(self.replicas, batch, bounds, num_samples, self._backward_part)
        if self.processes is None:
            return losses
        shares = [Share(index, self.share.count) for index in range(self.share.count)]
        taken = [_count(self._bounds(num_samples, share)) for share in shares]
        self.processes.merge_buffers(self.replicas, start, taken)
        return self.processes.sum_gradients(self.replicas, losses, taken)

    @property
    def share(self) -> Share:
        """What this process takes of each step."""
        return self.processes.share if self.processes else WHOLE

    def _bounds(self, num_samples: int, share: Share) -> list[Bounds]:
        return self.recipe.sizes.micro_bounds(num_samples, share)

    def _own_samples(self, num_samples: int) -> Tensor:
        """Indices of this process's samples in a step of `num_samples`."""
        own = self._bounds(num_samples, self.share)
        return torch.tensor([index for first, last in own for index in range(first, last)]).long()

    def _backward_part(self, part: Batch, num_targets: int, first_sample: int) -> Tensor:
        """Adds a part's gradient, over the whole step's targets: a short part weighs less."""
        self._hand_in_draws(first_sample)
        losses = self._measured(part, self._measure_loss)["loss"]
        # Not Lightning's manual_backward: its hooks cost more than a small step's optimizer, and
        # none of the precisions here scales a loss.
        losses.backward(torch.full_like(losses, 1 / num_targets))
        return losses.detach() / num_targets

    def _hand_in_draws(self, first_sample: int) -> None:
        seeds = self.batches.seeds
        if self._num_dropouts:
            keys = [
                [derive_seed(seed, "dropout", self.step * self._num_dropouts + i) for seed in seeds]
                for i in range(self._num_dropouts)
            ]
            self.replicas.set_dropout(torch.tensor(keys, device=self.device), first_sample)
        if self.replicas.foreign_seeds is not None:
            index = self.step * self.recipe.sizes.batch_size + first_sample
            self.replicas.foreign_seeds = [derive_seed(seed, "foreign", index) for seed in seeds]

    def _record_losses(self) -> None:
        for step, losses in self.losses.take_rows():
            self.recorder.record(self.position(step), {"train/loss": losses})
        if self.losses.all_diverged:
            self.trainer.should_stop = True

    def position(self, step: int) -> Position:
        """Where the run stands once `step` optimizer steps are done."""
        epoch = max(0, step - 1) // self.batches.steps_per_epoch
        return Position(step, epoch, self.batches.num_samples_before(step))

    def on_train_end(self) -> None:
        self.losses.finish()
        self.recorder.flush()

    # --- evaluation -------------------------------------------------------------------------

    def val_dataloader(self) -> IndexBlocks:
        return IndexBlocks(len(self.data.val), self._eval_size())

    def test_dataloader(self) -> IndexBlocks:
        return IndexBlocks(len(self.data.test), self._eval_size())

    def _eval_size(self) -> int:
        return self.recipe.eval_group or block_size(self.replicas)

    def validation_step(self, block: slice) -> None:
        self._add("val", block)

    def test_step(self, block: slice) -> None:
        self._add("test", block)

    def _add(self, split: str, block: slice) -> None:
        indices, num_counted = self._eval_samples(split, block)
        sums, num_targets = score_block(self, split, indices, num_counted)
        self._num_targets += num_targets
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value

    def _eval_samples(self, split: str, block: slice) -> tuple[Tensor, int]:
        """A block's samples, and how many of them count.

        Where norms mix samples, blocks are of one size and in random order: the score of a sample
        must depend neither on the order of the split nor on the replicas beside its own.
        """
        if self.recipe.eval_group is None:
            return torch.arange(block.start, block.stop), block.stop - block.start
        order = shuffled(self.data, split)
        own = order[block]
        missing = min(self.recipe.eval_group, len(order)) - len(own)
        return torch.cat([own, order[:missing]]), len(own)

    def on_validation_epoch_end(self) -> None:
        self._finish("val")
        self.validated_at = self.step

    def on_test_epoch_end(self) -> None:
        self._finish("test")

    def _finish(self, split: str) -> None:
        means = {name: total / self._num_targets for name, total in self._sums.items()}
        metrics = {f"{split}/{k}": v.tolist() for k, v in self.summarise(means, split).items()}
        self._sums, self._num_targets = {}, 0
        self.final.update(metrics)
        self.recorder.record(self.position(self.step), metrics)
        for name, column in metrics.items():
            mean = finite_mean(column)
            if mean is not None:
                self.log(name, mean, logger=False)

    # --- checkpoints ------------------------------------------------------------------------

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
        self.losses.load_state_dict(state["losses"], self.device)
        self.train_seconds = state["train_seconds"]
        self.validated_at = state["validated_at"]
        self.final = state["final"]
        self.recorder.truncate_after(self.step)


def _count(bounds: list[Bounds]) -> int:
    return sum(last - first for first, last in bounds)
