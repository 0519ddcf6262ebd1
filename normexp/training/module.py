"""The LightningModule that trains and evaluates a stack of replicas.

Lightning owns epochs, validation, checkpoints, devices and precision; this module owns what
happens in an optimizer step. `training_step` gets a chunk of several optimizer steps, so positions
are counted in optimizer steps, never in Lightning's batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor

from normexp.errors import UserError
from normexp.training.batching.processes import Processes
from normexp.training.batching.replicas import Replicas
from normexp.training.config.sizes import Share
from normexp.training.criterion import OfClasses
from normexp.training.data.batches import TrainingBatches
from normexp.training.devices import gpu_arithmetic
from normexp.training.evaluation import Columns, Evaluator
from normexp.training.optimizer import OwnRates, match_layouts
from normexp.training.recipe import Recipe
from normexp.training.records.metrics import write_metrics
from normexp.training.step import Step, StepGradient, compiled_gradient, learning_rates

SECONDS_PER_CHUNK = 0.25
Position = tuple[int, int, int]  # optimizer steps done, epoch, samples seen


class TrainingModule(pl.LightningModule):
    """Trains and evaluates S replicas on one data set.

    Attributes:
        batches: the data of each optimizer step.
        evaluator: computes the metrics of a split.
        step: optimizer steps done.
        losses: those since the last row, and where replicas diverged.
        metrics: the latest metrics by name, a value per replica.
        validated_at: the step of the last validation.
        processes: those that share each step; None for a single process.
        train_seconds: time spent in optimizer steps so far.
        chunk_size: optimizer steps in the next call of `training_step`.
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
        self.evaluator = Evaluator(replicas, batches.data, recipe)
        self.step = 0
        self.losses = LossHistory(replicas.num_replicas, recipe.settings.log_every)
        self.metrics: Columns = {}
        self.validated_at: int | None = None
        self.processes: Processes | None = None
        self.train_seconds = 0.0
        self.chunk_size = 1
        self.arithmetic = ExitStack()  # of a GPU, from `setup` to `teardown`
        self._optimizer_step: Step | None = None  # from the start of training on

    @property
    def has_ended(self) -> bool:
        return self.step >= self.recipe.schedule.total_steps

    def diverged_at_step(self, index: int) -> int | None:
        """The first step of a replica whose loss, or after the test its metrics, are not finite."""
        values = [column[index] for column in self.metrics.values()]
        # The last update may break a network after its loss was taken.
        at_end = None if all(map(math.isfinite, values)) else self.step
        return self.losses.diverged_at[index] or at_end

    # Training

    def setup(self, stage: str) -> None:
        del stage
        # Lightning converts too, but only after it has loaded a checkpoint into these tensors.
        self.trainer.precision_plugin.convert_module(self)
        settings, device = self.recipe.settings, self.trainer.strategy.root_device
        self.arithmetic.close()
        if device.type == "cuda":
            self.arithmetic.enter_context(gpu_arithmetic(settings.matmul_precision))
        wanted = settings.trainer.num_processes
        if self.trainer.world_size != wanted:
            raise UserError(f"Trainer(devices={self.trainer.world_size}): set devices={wanted}")
        self.batches = self.batches.to(device)
        criterion = self.recipe.criterion
        if isinstance(criterion, OfClasses) and criterion.class_weights is not None:
            criterion.class_weights = criterion.class_weights.to(device)
        self.evaluator.data = self.batches.data
        is_image = len(self.batches.data.input_shape) == 3
        pays = is_image if device.type == "cuda" else self.recipe.channels_last
        if pays and not self.replicas.is_stacked:
            # A stack would gain as well, with its replicas among the channels.
            self.replicas.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.trainer.world_size > 1:
            share = Share(self.trainer.global_rank, self.trainer.world_size)
            self.processes = Processes(share, device)

    def teardown(self, stage: str) -> None:
        del stage
        self.arithmetic.close()

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.build_optimizer(self.replicas)
        schedulers = [self.recipe.schedule.build(optimizer)]
        self._first_rates = learning_rates(optimizer)
        return [optimizer], schedulers

    def train_dataloader(self) -> ChunkLoader:
        return ChunkLoader(self)

    def on_train_start(self) -> None:
        recipe, replicas = self.recipe, self.replicas
        compiled = None
        if recipe.settings.compile:
            compiled = compiled_gradient(replicas, recipe.sizes, self.device)
        gradient = StepGradient(
            replicas,
            recipe.criterion,
            recipe.sizes,
            self.batches.seeds,
            recipe.settings.norm.running_from,
            self.processes,
            compiled,
        )
        # Lightning's wrapper counts steps for callbacks on batches, at 5 % of a small step.
        optimizer: Any = self.optimizers(use_pl_optimizer=recipe.max_chunk == 1)
        match_layouts(optimizer)
        scheduler: Any = None if recipe.schedule.monitor else self.lr_schedulers()
        self._optimizer_step = Step(
            gradient,
            optimizer,
            scheduler,
            # In a new training a callback may already have changed them.
            learning_rates(optimizer) if self.step else self._first_rates,
            max_grad_norm=recipe.settings.max_grad_norm,
            rates=OwnRates(replicas, recipe.lr_scales) if recipe.lr_scales else None,
        )

    def training_step(self, chunk: slice) -> None:
        """Takes the optimizer steps of a chunk."""
        started, num_steps = time.perf_counter(), chunk.stop - chunk.start
        dtype = next(self.replicas.parameters()).dtype
        assert self._optimizer_step is not None
        self._optimizer_step.gradient.draw(range(chunk.start, chunk.stop))
        gradient_norms: dict[int, Tensor] = {}  # (S,) after any clipping, by steps done
        rates: dict[int, float] = {}  # of the optimizer, in these steps
        for batch in self.batches.chunk(chunk.start, num_steps, dtype):
            rate = self._optimizer_step.learning_rate
            self.losses.add(self._optimizer_step.take(self.step, batch))
            self.step += 1
            if self.step % self.recipe.settings.log_every == 0:
                gradient_norms[self.step], rates[self.step] = self.replicas.gradient_norms(), rate
        rows = list(self.losses.read(self.step))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # for the time measured here
        seconds = time.perf_counter() - started
        self.train_seconds += seconds
        scales = self.recipe.lr_scales or [1.0] * self.replicas.num_replicas
        samples = num_steps * self.recipe.sizes.batch_size * self.replicas.num_replicas
        for end, losses in rows:
            norms = gradient_norms[end].tolist()
            self.record(
                end,
                {"train/loss": losses, "train/grad_norm": norms},
                logged={
                    "train/lr": [rates[end] * scale for scale in scales],
                    "train/samples_per_second": [samples / max(seconds, 1e-9)] * len(scales),
                },
            )
            self._log_means({"train/loss": finite_mean(losses)}, prog_bar=True)
        # Nothing below reaches a record, so it may be seen late, at the end of a chunk.
        self.trainer.should_stop |= self.has_ended or None not in self.losses.diverged_at
        affordable = int(SECONDS_PER_CHUNK * num_steps / max(seconds, 1e-9))
        self.chunk_size = max(1, min(2 * self.chunk_size, affordable, self.recipe.max_chunk))

    def record(self, step: int, values: Columns, logged: Columns | None = None) -> Columns:
        """Records values after `step`; returns them without those of runs that diverged before.

        Args:
            logged: what loggers get besides.
        """
        ends = [step if at is None else at for at in self.losses.diverged_at]
        values = {
            name: [v if step <= end else math.nan for v, end in zip(column, ends, strict=True)]
            for name, column in values.items()
        }
        epoch = max(0, step - 1) // self.batches.steps_per_epoch
        position = step, epoch, self.batches.num_samples_before(step)
        self.recorder.record(position, values, logged)
        return values

    # Evaluation. Lightning's loop gets a single batch, which stands for the whole split.

    def val_dataloader(self) -> range:
        return range(1)

    test_dataloader = val_dataloader

    def _measured(self, values: Columns) -> dict[str, float]:
        """Records metrics, and logs their means over the stack, which it returns.

        All processes have equal means.
        """
        values = self.record(self.step, values)
        self.metrics |= values
        means = {name: finite_mean(column) for name, column in values.items()}
        self._log_means(means, batch_size=1, sync_dist=True)
        return means

    def _log_means(self, means: dict[str, float], **options: Any) -> None:
        """Logs means over the stack for callbacks, and for the loggers of a user's own Trainer.

        `recorder` has given those of runs their values.
        """
        is_ours = isinstance(self.trainer.logger, RunLoggers)
        self.log_dict(means, logger=False if is_ours else None, **options)

    def validation_step(self, _: int) -> None:
        means = self._measured(self.evaluator.running("val"))
        if self.recipe.settings.evaluate_every_epoch:
            self._measured(self.evaluator.with_other_statistics(["val"]))
            for view in self.recipe.views:
                self._measured(self.evaluator.with_view(view, "val"))
        self.validated_at = self.step
        monitor, is_in_training = self.recipe.schedule.monitor, self.trainer.state.fn == "fit"
        if monitor is not None and is_in_training and not self.trainer.sanity_checking:
            scheduler: Any = self.lr_schedulers()
            scheduler.step(means[monitor])

    def test_step(self, _: int) -> None:
        """Evaluates the test split, and whatever remains for the end on the val split."""
        splits = ["test"] if self.recipe.settings.evaluate_every_epoch else ["val", "test"]
        self._measured(self.evaluator.running("test"))
        self.evaluator.predict_some()
        self._measured(self.evaluator.with_other_statistics(splits))
        for view in self.recipe.views:
            for split in splits:
                self._measured(self.evaluator.with_view(view, split))

    def on_test_end(self) -> None:
        self.recorder.write()  # with what callbacks have logged

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.recorder.write()
        checkpoint["normexp"] = {
            "step": self.step,
            "row": self.losses.row,
            "diverged_at": self.losses.diverged_at,
            "train_seconds": self.train_seconds,
            "is_stacked": self.replicas.is_stacked,
            "rows": self.recorder.rows,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["normexp"]
        self.step = state["step"]
        self.losses.row = state["row"]
        self.losses.diverged_at = state["diverged_at"]
        self.train_seconds = state["train_seconds"]
        self.recorder.rows = state["rows"]


@dataclass(eq=False)
class ChunkLoader:
    """Yields the chunks of an epoch as slices of optimizer steps, from the current step on.

    A chunk ends with the epoch and with the last step at the latest. Within these bounds its size
    doubles from one step until a chunk takes SECONDS_PER_CHUNK: small steps then pay little for
    Lightning's loop, and large ones still show progress and can be interrupted. The size of chunks
    does not change any result. (Slices, because Lightning unpacks a range into its items.)
    """

    module: TrainingModule

    def __iter__(self) -> Iterator[slice]:
        module, step = self.module, self.module.step
        steps_per_epoch = module.batches.steps_per_epoch
        end = min((step // steps_per_epoch + 1) * steps_per_epoch, module.recipe.num_steps)
        while step < end:
            num_steps = min(module.chunk_size, end - step)
            if module.processes is not None:  # all use the largest of their sizes
                num_steps = module.processes.maximum(num_steps)
            yield slice(step, step + num_steps)
            step += num_steps


class LossHistory:
    """Collects the losses of optimizer steps on the device and averages them into rows.

    Args:
        every: optimizer steps per row. Rows end at multiples of it, independent of chunks.

    Attributes:
        diverged_at: for each replica, the first step (from 1) with a loss that is not finite.
        row: float64 losses (S,) on the CPU, of the steps since the last row.
        unread: losses (S,) on the device, of the steps since `read`; nothing waits for them.
    """

    def __init__(self, num_replicas: int, every: int) -> None:
        self.every = every
        self.diverged_at: list[int | None] = [None] * num_replicas
        self.row: list[Tensor] = []
        self.unread: list[Tensor] = []

    def add(self, of_step: Tensor) -> None:
        self.unread.append(of_step)

    def read(self, num_steps: int) -> Iterator[tuple[int, list[float]]]:
        """Reads the losses up to step `num_steps`; yields rows: last step, mean of each replica."""
        first = num_steps - len(self.unread) + 1
        losses, self.unread = torch.stack(self.unread).double().cpu(), []
        for index, bad in enumerate((~losses.isfinite()).T):
            if self.diverged_at[index] is None and bad.any():
                self.diverged_at[index] = first + int(bad.float().argmax())
        for step, of_step in enumerate(losses, start=first):
            self.row.append(of_step)
            if step % self.every == 0:
                yield step, torch.stack(self.row).mean(dim=0).tolist()
                self.row = []


class Recorder:
    """Keeps the rows of each run, which go into checkpoints, and passes them to its loggers.

    Args:
        files: metrics.csv of each run; None: not written. Empty for a process that records nothing.
        loggers: Lightning loggers of each run.

    Attributes:
        rows: of each run, (step, epoch, samples seen, name, value).
    """

    def __init__(
        self, files: Sequence[Path | None], loggers: Sequence[Sequence[Logger]] | None = None
    ) -> None:
        self.files = files
        self.loggers = loggers or [[] for _ in files]
        self.rows: list[list[tuple[int, int, int, str, float]]] = [[] for _ in files]

    def record(self, position: Position, values: Columns, logged: Columns | None = None) -> None:
        """Records a value per replica for each metric, except those that are not finite.

        Args:
            logged: for loggers alone, such as speed, which no repetition has again.
        """
        step, epoch, samples_seen = position
        for index, loggers in enumerate(self.loggers):
            of_run = {name: column[index] for name, column in values.items()}
            of_run = {name: value for name, value in of_run.items() if math.isfinite(value)}
            self.rows[index] += [(*position, name, value) for name, value in of_run.items()]
            more = {"epoch": epoch, "samples_seen": samples_seen}
            more |= {name: column[index] for name, column in (logged or {}).items()}
            for logger in loggers if of_run else ():
                logger.log_metrics({**of_run, **more}, step=step)

    def write(self) -> None:
        """Writes the rows so far to metrics.csv."""
        for path, rows in zip(self.files, self.rows, strict=False):
            if path is not None:
                write_metrics(path, rows)


class RunLoggers(Logger):
    """The logger of our Trainer: all runs and their loggers get what callbacks log.

    Args:
        module: whose optimizer steps count, since Lightning's are chunks.
        save_dir: where callbacks find a place to write.
    """

    def __init__(self, module: TrainingModule, save_dir: Path) -> None:
        super().__init__()
        self.module = module
        self.folder = save_dir

    @property
    def name(self) -> None:
        return None

    version = name

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        del step
        own = {"train/loss", "train/grad_norm", *self.module.metrics}
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        for name in values:
            if name in own or "," in name:
                why = "normexp records it itself" if name in own else "a name has no comma"
                raise UserError(f"callback: one logs {name}; {why}; log it by another name")
        count = self.module.replicas.num_replicas
        self.module.record(self.module.step, {name: [v] * count for name, v in values.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Has none: those of a run are its loggers' from the start."""


def finite_mean(column: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
