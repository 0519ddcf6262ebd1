"""The LightningModule that trains a stack of replicas, many optimizer steps per call.

Lightning owns epochs, validation, checkpoints, devices and precision; this module owns what
happens in an optimizer step. Position is counted in optimizer steps, never in chunks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional

from normexp.batching.draws import generator
from normexp.batching.processes import Processes
from normexp.batching.replicas import Batch, Measured, Replicas
from normexp.batching.sizes import Share, Sizes
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data
from normexp.norms.site import named_sites
from normexp.norms.state import State, install_state, read_state, write_state
from normexp.training.compilation import compiled, prepare_for
from normexp.training.optim import OptimizerFactory, ReplicaRates, Schedule, parameter_groups
from normexp.training.recorder import Position, Recorder, finite_mean
from normexp.training.step import StepGradient


class LossHistory:
    """Collects the losses of optimizer steps on the device and reads them a chunk at a time.

    Args:
        every: optimizer steps between two rows. Rows stand at multiples of it, so that the size of
            chunks leaves no trace.
    """

    def __init__(self, num_replicas: int, every: int) -> None:
        self.every = every
        self.num_steps = 0  # added so far
        self.latest: list[float] | None = None  # the last row
        self.diverged_at: list[int | None] = [None] * num_replicas
        self._pending: list[Tensor] = []  # (S,) each, since the last row

    @property
    def all_diverged(self) -> bool:
        return all(step is not None for step in self.diverged_at)

    def add(self, losses: Tensor) -> None:
        """The losses (S,) of one optimizer step."""
        self._pending.append(losses)
        self.num_steps += 1

    def take_rows(self) -> Iterator[tuple[int, list[float]]]:
        """The rows that are complete: the step each stands at, and the mean loss per replica."""
        first = self.num_steps - len(self._pending)
        if self.num_steps // self.every == first // self.every:
            return
        losses = self._read()  # the one wait for the device
        done, boundary = 0, (first // self.every + 1) * self.every
        while boundary <= self.num_steps:
            part = losses[done : boundary - first]
            self._note_divergence(part, first + done)
            self.latest = part.mean(dim=0).tolist()
            yield boundary, self.latest
            done, boundary = boundary - first, boundary + self.every
        self._pending = self._pending[done:]

    def finish(self) -> None:
        """Looks at the steps after the last row; they have no row of their own."""
        if self._pending:
            self._note_divergence(self._read(), self.num_steps - len(self._pending))
            self._pending = []

    def _read(self) -> Tensor:
        return torch.stack(self._pending).double().cpu()  # (K, S)

    def _note_divergence(self, losses: Tensor, first_step: int) -> None:
        """Remembers for each replica the first step, counted from 1, whose loss was not finite."""
        bad = ~torch.isfinite(losses)  # (K, S)
        for index in bad.any(dim=0).nonzero().flatten().tolist():
            if self.diverged_at[index] is None:
                steps = first_step + int(bad[:, index].float().argmax())
                self.diverged_at[index] = steps + 1

    def state_dict(self) -> dict[str, Any]:
        pending = [losses.cpu() for losses in self._pending]
        return {
            "num_steps": self.num_steps,
            "pending": pending,
            "diverged_at": list(self.diverged_at),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.num_steps = state["num_steps"]
        self._pending = [losses.to(device) for losses in state["pending"]]
        self.diverged_at = list(state["diverged_at"])


class ChunkLoader:
    """The chunks of one epoch, from wherever training stands: slices of optimizer steps.

    Chunks end with the epoch and with the last step. Within these bounds their size follows the
    clock: they double from one step until a chunk takes `target_seconds`, so that a small step
    pays little for Lightning's loop and a large one still shows progress and can be interrupted.
    The size of a chunk changes no result.

    Args:
        current_step: optimizer steps done so far.
        max_steps: the most steps in a chunk.
        agree: of processes that train together, the first one's number; None for one alone.
    """

    target_seconds = 0.25

    def __init__(
        self,
        current_step: Callable[[], int],
        steps_per_epoch: int,
        total_steps: int,
        max_steps: int,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self.current_step = current_step
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = total_steps
        self.max_steps = max_steps
        self.agree = agree or (lambda number: number)
        self._size = 1

    def __iter__(self) -> Iterator[slice]:
        step = self.current_step()
        epoch_end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        end = min(epoch_end, self.total_steps)
        while step < end:
            num_steps = self.agree(min(self._size, end - step))
            started = time.perf_counter()
            yield slice(step, step + num_steps)
            self._resize(time.perf_counter() - started, num_steps)
            step += num_steps

    def _resize(self, seconds: float, num_steps: int) -> None:
        affordable = int(self.target_seconds / max(seconds / num_steps, 1e-9))
        self._size = max(1, min(2 * self._size, affordable, self.max_steps))


class IndexBlocks:
    """The indices of a split as consecutive slices, for evaluation."""

    def __init__(self, num_samples: int, block_size: int) -> None:
        self.num_samples = num_samples
        self.block_size = block_size

    def __len__(self) -> int:
        return -(-self.num_samples // self.block_size)

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.num_samples, self.block_size):
            yield slice(first, min(first + self.block_size, self.num_samples))


SPLITS = ("train", "val", "test")
# Samples per forward over all replicas: memory is shared by the stack.
STACK_SAMPLES = 512


def shuffled(data: Data, split: str) -> Tensor:
    """The samples of a split in a random order (N,).

    One order for every run, whatever its seed and norm, so that they are compared on the same
    batches.
    """
    source = generator(0, "evaluate", SPLITS.index(split))
    return torch.randperm(len(getattr(data, split)), generator=source)


def block_size(replicas: Replicas, group_size: int = 1) -> int:
    """Samples per forward, a whole number of groups."""
    return max(1, STACK_SAMPLES // replicas.num_replicas // group_size) * group_size


def gather(replicas: Replicas, data: Data, split: str, indices: Tensor) -> Batch:
    """The samples at `indices` (N,) of a split as the models take them, without augmentation."""
    batch = getattr(data, split).gather(indices)
    batch["inputs"] = data.model_inputs(batch["inputs"], next(replicas.parameters()).dtype)
    return batch


def run(replicas: Replicas, batch: Batch) -> None:
    """A forward of every replica, for what it does to their buffers."""
    replicas.measure(batch, _nothing, shared=True)


def _nothing(output: Tensor, _: Batch) -> Measured:
    return {"ran": output.new_zeros(())}


@contextmanager
def holding(replicas: Replicas, states: list[State]) -> Iterator[None]:
    """In evaluation mode, with the values of `states`, one for each tree, in their buffers."""
    before = replicas.read_buffers()
    with evaluation_mode(replicas):
        try:
            replicas.write_buffers(states)
            yield
        finally:
            replicas.write_buffers(before)


@contextmanager
def evaluation_mode(replicas: Replicas) -> Iterator[None]:
    """As `eval()`, with every module's mode as before afterwards."""
    modes = {module: module.training for module in replicas.modules()}
    replicas.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def batch_statistics(replicas: Replicas, group_size: int) -> Iterator[None]:
    """Norms use the statistics of groups of `group_size` samples; all else is in evaluation mode.

    A norm's running state moves while inside. Modes, group sizes and buffers are as before
    afterwards, also on an error.
    """
    sites = [site for _, site in named_sites(replicas)]
    sizes = [site.norm_batch_size for site in sites]
    buffers, values = dict(replicas.named_buffers()), read_state(replicas)
    with evaluation_mode(replicas):
        try:
            for site in sites:
                site.train()
                site.norm_batch_size = group_size
            yield
        finally:
            for site, size in zip(sites, sizes, strict=True):
                site.norm_batch_size = size
            install_state(replicas, buffers)  # a foreign norm may have replaced the tensors
            write_state(replicas, values)


Columns = dict[str, list[float]]  # a value per replica, by metric


class Scorer(Protocol):
    """What a score is taken of: a training task."""

    replicas: Replicas
    data: Data

    def measure(self, output: Tensor, batch: Batch) -> Measured: ...
    def summarise(self, means: Measured, split: str) -> Measured: ...


class SplitScore:
    """Sums in float64 of what `task` measures, and the metrics that their means come to."""

    def __init__(self, task: Scorer, split: str) -> None:
        self.task = task
        self.split = split
        self._sums: dict[str, Tensor] = {}  # (S,) each
        self._num_targets = 0

    def add(self, indices: Tensor, num_counted: int) -> None:
        """A forward of the samples at `indices` (N,), of which the first `num_counted` count."""
        task = self.task
        batch = gather(task.replicas, task.data, self.split, indices)

        def measure(output: Tensor, own: Batch) -> Measured:
            counted = {name: value[:num_counted] for name, value in own.items()}
            return task.measure(output[:num_counted], counted)

        for name, value in task.replicas.measure(batch, measure, shared=True).items():
            self._sums[name] = self._sums.get(name, 0) + value.double()
        self._num_targets += batch["targets"][:num_counted].numel()

    def metrics(self) -> Columns:
        """Of all that was added: `loss` and others, without the split's name."""
        means = {name: total / self._num_targets for name, total in self._sums.items()}
        summary = self.task.summarise(means, self.split)
        return {name: column.tolist() for name, column in summary.items()}


class EvaluatedTask(pl.LightningModule, ABC):
    """S replicas on one data set; a subclass says what is measured, and where training stands.

    Args:
        eval_group: samples a norm sees together in evaluation; None where it mixes none.

    Attributes:
        final: the latest metrics, a value per replica.
        validated_at: the step of the last validation.
    """

    def __init__(
        self, replicas: Replicas, data: Data, recorder: Recorder, eval_group: int | None
    ) -> None:
        super().__init__()
        self.replicas = replicas
        self.data = data
        self.recorder = recorder
        self.eval_group = eval_group
        self.final: dict[str, list[float]] = {}
        self.validated_at: int | None = None
        self._scores: dict[str, SplitScore] = {}  # of splits that are being evaluated

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Summed over the batch's targets."""

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        """What evaluation sums up; training wants the loss alone."""
        return {"loss": self.loss(output, batch)}

    @abstractmethod
    def summarise(self, means: Measured, split: str) -> Measured:
        """Metrics from what `measure` sums up, divided by the number of targets."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps done."""

    @abstractmethod
    def position(self, step: int) -> Position:
        """Where the run stands once `step` optimizer steps are done."""

    def transfer_batch_to_device(
        self, batch: slice, device: torch.device, dataloader_idx: int
    ) -> slice:
        del device, dataloader_idx
        return batch  # places in data that is on the device already

    def val_dataloader(self) -> IndexBlocks:
        return self._blocks("val")

    def test_dataloader(self) -> IndexBlocks:
        return self._blocks("test")

    def _blocks(self, split: str) -> IndexBlocks:
        size = self.eval_group or block_size(self.replicas)
        return IndexBlocks(len(getattr(self.data, split)), size)

    def on_validation_epoch_start(self) -> None:
        self._scores["val"] = SplitScore(self, "val")

    def on_test_epoch_start(self) -> None:
        self._scores["test"] = SplitScore(self, "test")

    def validation_step(self, block: slice) -> None:
        self._scores["val"].add(*self._samples("val", block))

    def test_step(self, block: slice) -> None:
        self._scores["test"].add(*self._samples("test", block))

    def _samples(self, split: str, block: slice) -> tuple[Tensor, int]:
        """A block's samples, and how many of them count.

        Where norms mix samples, blocks are of one size and in random order: the score of a sample
        must depend neither on the order of the split nor on the replicas beside its own.
        """
        if self.eval_group is None:
            return torch.arange(block.start, block.stop), block.stop - block.start
        order = shuffled(self.data, split)
        own = order[block]
        missing = min(self.eval_group, len(order)) - len(own)
        return torch.cat([own, order[:missing]]), len(own)

    def on_validation_epoch_end(self) -> None:
        self._finish("val")
        self.validated_at = self.step

    def on_test_epoch_end(self) -> None:
        self._finish("test")

    def _finish(self, split: str) -> None:
        scores = self._scores.pop(split).metrics()
        metrics = {f"{split}/{name}": column for name, column in scores.items()}
        self.final.update(metrics)
        self.recorder.record(self.position(self.step), metrics)
        for name, column in metrics.items():
            mean = finite_mean(column)
            if mean is not None:
                self.log(name, mean, logger=False)


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


class Classification(TrainingTask):
    """Cross-entropy in nats over classes, and accuracy as a share of samples."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        # output (N, num_classes), targets (N,)
        return functional.cross_entropy(output, batch["targets"], reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        correct = (output.argmax(dim=-1) == batch["targets"]).sum()
        return {"loss": self.loss(output, batch), "correct": correct}

    def summarise(self, means: Measured, split: str) -> Measured:  # noqa: ARG002
        loss, correct = means["loss"], means["correct"]
        accuracy = torch.where(loss.isfinite(), correct, torch.nan)  # NaN logits point at class 0
        return {"loss": loss, "accuracy": accuracy}


class LanguageModeling(TrainingTask):
    """Cross-entropy in nats per token, and bits per byte of the text it stands for."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()  # (N*T, V), (N*T,)
        return functional.cross_entropy(logits, targets, reduction="sum")

    def summarise(self, means: Measured, split: str) -> Measured:
        assert self.data.bytes_per_token is not None
        bits = means["loss"] / math.log(2)
        return {"loss": means["loss"], "bits_per_byte": bits / self.data.bytes_per_token[split]}
