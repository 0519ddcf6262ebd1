"""The engine as the benchmark runs it: a cell's stack through Lightning, without a study."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from bench_measure import Bench
from omegaconf import OmegaConf

from normexp.batching.replicas import suitable_threads
from normexp.cells.assembly import build_module, build_replicas
from normexp.cells.cell import Cell, prepare_cell
from normexp.config.compose import compose_cell
from normexp.records.metrics import MetricsWriter
from normexp.training.fit import fit
from normexp.training.progress import TrainingProgress
from normexp.training.recorder import Recorder, RunSink

NEVER = 10**6  # epochs between validations: only training is timed


class Watch(pl.Callback):
    """Time from the first chunk's end on, with the steps done in it; the warm-up is left out."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.begun: tuple[int, float] | None = None
        self.ended = (0, 0.0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        del trainer
        self.ended = (pl_module.step, time.perf_counter())
        if self.begun is None and pl_module.step >= self.warm_up:
            self.begun = self.ended

    @property
    def seconds_per_step(self) -> float:
        assert self.begun is not None
        return (self.ended[1] - self.begun[1]) / (self.ended[0] - self.begun[0])


def _names_trainer(overrides: Sequence[str]) -> bool:
    return any(word.startswith("trainer=") for word in overrides)


def make_cell(*overrides: str) -> Cell:
    """A cell on the CPU, unless told otherwise."""
    config, choices = compose_cell(
        overrides if _names_trainer(overrides) else ["trainer=cpu", *overrides]
    )
    return prepare_cell(config, choices)


def seconds_per_step(bench: Bench, cell: Cell, seeds: list[int], *, records: bool = False) -> float:
    """Wall time of an optimizer step of the stack, with all that Lightning does around it.

    Args:
        records: with metrics.csv and the progress of the command line.
    """
    replicas = build_replicas(cell, seeds)
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    sinks: list[list[RunSink]] = [[] for _ in seeds]
    watch = Watch(warm_up=cell.plan.num_steps // 4)
    callbacks: list[pl.Callback] = [watch]
    if records:
        sinks = [[MetricsWriter(folder / f"{seed}.csv")] for seed in seeds]
        callbacks.insert(0, TrainingProgress(cell.title, cell.plan.epochs))
    module = build_module(cell, seeds, replicas, Recorder(sinks))
    trainer: Any = OmegaConf.to_container(cell.cfg.trainer, resolve=True)
    with suitable_threads(cell.elements_per_forward):
        fit(
            module,
            checkpoint=folder / "none.ckpt",
            epochs=cell.plan.epochs,
            val_every_epochs=NEVER,
            trainer_options=trainer,
            loggers=[],
            callbacks=callbacks,
        )
    return watch.seconds_per_step
