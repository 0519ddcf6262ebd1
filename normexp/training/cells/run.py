"""Trains a stack: from its claim, through its attempts, to the commit of its results."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback

from normexp.errors import Halted, UserError, one_line
from normexp.norms.site import state_as_built
from normexp.training.batching.replicas import suitable_threads
from normexp.training.callbacks import why_stopped
from normexp.training.cells.cell import Cell, Prepared
from normexp.training.cells.module import arrange_replicas, build_module, form_of, run_loggers
from normexp.training.cells.stack import Run, Stack, claimed, commit, remove, settle
from normexp.training.fit import StepReports, fit
from normexp.training.module import Recorder, TrainingModule
from normexp.training.records.environment import describe_environment, usable_cores
from normexp.training.records.files import (
    FULL_DISK,
    is_full_disk,
    open_atomic,
    write_json,
    write_text,
)
from normexp.training.records.journal import CommandEntry, Refusal, append_entry, refused_by
from normexp.training.records.layout import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
    PICTURE_FILE,
    PROGRESS_FILE,
    WEIGHTS_FILE,
    seed_dir,
)
from normexp.training.records.locks import file_lock
from normexp.training.records.logs import messages_to_file
from normexp.training.records.result import Measured, Result, Status
from normexp.training.records.samples import write_samples
from normexp.training.records.stack_state import Attempts, lock_of, read_attempts, write_attempts
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl

logger = logging.getLogger(__name__)

DIED = "its process died twice without a new checkpoint (out of memory?)"


def train_stack(
    stack: Stack, command: CommandEntry, control: TrainingControl, prepared: Prepared
) -> bool:
    """Claims a stack, trains its missing runs, and commits their results.

    Args:
        prepared: the cells of the stack that this process trained before.

    Returns:
        False if another process trains one of its runs.

    Raises:
        Interrupted: stopped, with a checkpoint.
        Halted: nothing more can be trained in this process.
    """
    refused = refused_by(stack.study_dir, command.id)
    claims = stack.left(refused)
    with claimed(lock_of(spec.directory, seed) for spec, seed in claims) as is_mine:
        if is_mine:
            settle(stack.study_dir, [(spec.id, seed) for spec, seed in claims])
            runs = [run for run in stack.left(refused) if run in claims]
            if runs and not read_attempts(stack.folder).is_apart:
                Attempt(stack, runs, command, control, prepared).run()
    return is_mine


@dataclass
class Attempt:
    """An attempt to train the runs that are left of a stack, whose locks this process holds."""

    stack: Stack
    runs: Sequence[Run]
    command: CommandEntry
    control: TrainingControl
    prepared: Prepared

    def __post_init__(self) -> None:
        self.folder = self.stack.folder
        self.checkpoint = self.folder / CHECKPOINT_FILE
        self.specs = list({spec.id: spec for spec, _ in self.runs}.values())

    def run(self) -> None:
        """Trains and commits; if it cannot, its folder or study.jsonl says why."""
        self.attempts = self._count()
        if self.attempts.count > 2:
            self._give_up(DIED)
            return
        try:
            self.prepared.prepare(self.specs[:1])
            begun = self.checkpoint.is_file()
            num_runs, num_rates = len(self.stack.runs), len(self.specs)
            if not begun and form_of(self.cell, num_runs, num_rates) == "apart":
                self._split("")
                return
            self.prepared.prepare(self.specs)
            append_entry(self.stack.study_dir, self.command)
            with self.control.together((self.runs, self.folder, self.attempts.threads)):
                results = self._train()
            commit(self.folder, results)
        except UserError as error:
            self._refuse(str(error))
            self._leave()
        except (Halted, Interrupted, KeyboardInterrupt):
            self._leave()
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            if is_full_disk(error):
                raise Halted(FULL_DISK) from error
            self._give_up(one_line(error), "".join(traceback.format_exception(error)))
            if "CUDA error" in str(error):
                raise Halted(
                    f"the GPU failed ({one_line(error)}), and this process cannot use it any more; "
                    "the same command continues"
                ) from error

    def _count(self) -> Attempts:
        """Counts this attempt in attempts.json, so that the death of this process counts too."""
        members = [(spec.id, seed) for spec, seed in self.runs]
        attempts = read_attempts(self.folder)
        if attempts.members != members:  # new, or some of its runs have ended elsewhere
            remove(self.folder)
            cores = min(usable_cores(), torch.get_num_threads())  # of OMP_NUM_THREADS, if it is set
            attempts = Attempts(members, max(1, cores // self.command.num_runs))
        at = self.checkpoint.stat().st_mtime_ns if self.checkpoint.is_file() else 0
        attempts.count = 1 + (attempts.count if at == attempts.checkpointed_at else 0)
        attempts.checkpointed_at = at
        write_attempts(self.folder, attempts)
        return attempts

    def _leave(self) -> None:
        """Keeps the folder if it holds a checkpoint; this attempt does not count."""
        self.attempts.count -= 1
        if self.checkpoint.is_file():
            write_attempts(self.folder, self.attempts)
        else:
            remove(self.folder)

    def _split(self, why: str) -> None:
        """Cuts the stack, so that each run is trained by itself."""
        self.attempts.is_apart = True
        self.attempts.why = why
        self.checkpoint.unlink(missing_ok=True)
        write_attempts(self.folder, self.attempts)

    def _refuse(self, error: str) -> None:
        """Notes which cells cannot be trained: all, or the first that could not be prepared."""
        refused = self.specs
        unprepared = [spec for spec in self.specs if spec.id not in self.cells]
        if self.cells and unprepared:
            refused = unprepared[:1]
        for spec in refused:
            refusal = Refusal(spec.id, spec.title, spec.seeds, self.command.id, error)
            append_entry(self.stack.study_dir, refusal)

    def _give_up(self, reason: str, trace: str = "") -> None:
        """Splits a stack; records a single run as failed."""
        if len(self.runs) > 1:
            logger.warning("each run of %s is now trained by itself: %s", self.folder, reason)
            self._split(reason)
            return
        ((spec, seed),) = self.runs
        append_entry(self.stack.study_dir, self.command)
        run_dir = seed_dir(spec.directory, seed)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / LOG_FILE, trace or reason)
        if cell := self.cells.get(spec.id):
            defines, derived, measured = cell.defines, cell.derived, cell.measured
        else:  # it failed before its cell was prepared
            defines, derived = spec.identity, spec.derived
            measured = Measured(traits={"mixes_samples": spec.settings.norm.may_mix_samples})
        environment = describe_environment(threads=self.attempts.threads)
        measured = replace(measured, environment=environment)
        failed = Result(
            cell_id=spec.id,
            seed=seed,
            status=Status.FAILED,
            defines=defines,
            derived=derived,
            defaults=spec.defaults,
            measured=measured,
            error=reason,
        )
        commit(self.folder, [failed])

    # --- Training ---------------------------------------------------------------------------------

    @property
    def cells(self) -> dict[str, Cell]:
        return self.prepared.cells

    @property
    def cell(self) -> Cell:
        """The first cell; all share everything but id, description and learning rate."""
        return self.cells[self.specs[0].id]

    def _train(self) -> list[Result]:
        """Trains the runs and writes their files; returns what result.json will hold."""
        run_dirs = [seed_dir(spec.directory, seed) for spec, seed in self.runs]
        for (spec, _), run_dir in zip(self.runs, run_dirs, strict=True):
            run_dir.mkdir(exist_ok=True)
            config = OmegaConf.to_yaml(spec.config)
            with file_lock(spec.directory / LOCK_FILE, waits=True):  # others train its other seeds
                write_text(spec.directory / CONFIG_FILE, config)
        if torch.cuda.is_initialized():  # asking would wake a GPU that is not in use
            torch.cuda.reset_peak_memory_stats()
        with ExitStack() as opened:
            opened.enter_context(messages_to_file(self.folder / LOG_FILE))
            for message in self.cell.messages:
                logger.info(message)
            size, threads = self.cell.elements_per_forward, self.attempts.threads
            opened.enter_context(suitable_threads(size, threads))  # its last digits depend on them
            stop = self.control.stop
            opened.enter_context(stop.listening())
            # Loggers log nothing in a process of another rank, as RANK and SLURM_PROCID say it,
            # also where each process trains for itself. Of several that train together, only the
            # first comes here.
            LightningEnvironment().set_global_rank(0)
            loggers = None
            if targets := self.cell.recipe.loggers:
                build = partial(self.prepared.trackers.loggers, targets)
                loggers = [
                    opened.enter_context(run_loggers(spec, seed, self.cells[spec.id], build))
                    for spec, seed in self.runs
                ]
            recorder = Recorder([run_dir / METRICS_FILE for run_dir in run_dirs], loggers)
            callbacks = [StepReports(self._report), *self.cell.recipe.callbacks()]
            module = _fit(self.runs, self.cells, self.folder, recorder, callbacks, stop)
            return self._record(module)

    def _report(self, module: TrainingModule) -> None:
        """Writes what the display shows of this training."""
        shown = ("train/loss", f"val/{module.recipe.criterion.metrics[-1]}")
        known = module.trainer.callback_metrics
        metrics = {name: float(known[name]) for name in shown if name in known}
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        progress = {"step": module.step, "total": module.recipe.num_steps, "metrics": metrics}
        write_json(self.folder / PROGRESS_FILE, progress)
        self.control.on_steps()

    def _record(self, module: TrainingModule) -> list[Result]:
        """Writes the files of each run but result.json, which it returns."""
        device = module.trainer.strategy.root_device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        environment = describe_environment(gpu, threads=torch.get_num_threads())
        if source := self.cell.data.source_version:
            environment["data_source"] = source
        timing = self._timing(module, device)
        results = []
        for index, (spec, seed) in enumerate(self.runs):
            cell, run_dir = self.cells[spec.id], seed_dir(spec.directory, seed)
            if cell.recipe.settings.save_weights and module.diverged_at_step(index) is None:
                with open_atomic(run_dir / WEIGHTS_FILE) as file:
                    torch.save(state_as_built(module.replicas.replica(index).cpu()), file)
            content = module.evaluator.content(module.metrics, index)
            if content.keys() - {"running"}:
                write_json(run_dir / EVALUATION_FILE, content)
            write_samples(run_dir, module.evaluator.samples_of(module.metrics, index))
            if picture := module.evaluator.picture_of(index):
                with open_atomic(run_dir / PICTURE_FILE) as file:
                    file.write(picture)
            results.append(self._result(module, index, environment, timing))
        return results

    def _timing(self, module: TrainingModule, device: torch.device) -> dict[str, float]:
        seconds, num_runs = module.train_seconds, len(self.runs)
        num_samples = module.batches.num_samples_before(module.step) * num_runs
        timing = {
            "train_seconds": seconds,
            "step_ms": 1000 * seconds / max(module.step, 1),
            "stack_size": num_runs,
            "samples_per_second": num_samples / max(seconds, 1e-9),
        }
        if device.type == "cuda":  # on a CPU only the peak of the whole process is known
            timing["peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
        return timing

    def _result(
        self,
        module: TrainingModule,
        index: int,
        environment: dict[str, Any],
        timing: dict[str, float],
    ) -> Result:
        spec, seed = self.runs[index]
        cell = self.cells[spec.id]
        metrics = {name: column[index] for name, column in module.metrics.items()}
        diverged_at = module.diverged_at_step(index)
        ended_early = why_stopped(module.trainer) if module.step < cell.recipe.num_steps else None
        return Result(
            cell_id=spec.id,
            seed=seed,
            status=Status.FINISHED if diverged_at is None else Status.DIVERGED,
            defines=cell.defines,
            derived=cell.derived,
            defaults=spec.defaults,
            measured=replace(
                cell.measured,
                metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
                environment=environment,
                diverged_at_step=diverged_at,
                last_step=diverged_at or module.step,
                stopped=ended_early,
                apart=self.stack.apart or None,
                is_stacked=module.replicas.is_stacked,
                timing=timing,
            ),
        )


def follow_stack(prepared: Prepared, runs: Sequence[Run], folder: Path, threads: int) -> None:
    """Trains along with rank 0, in the other processes of a training; writes nothing."""
    prepared.prepare([spec for spec, _ in runs])
    cell = prepared.cells[runs[0][0].id]
    with suitable_threads(cell.elements_per_forward, threads):
        _fit(runs, prepared.cells, folder, Recorder([]), cell.recipe.callbacks(), StopRequest())


def _fit(
    runs: Sequence[Run],
    cells: Mapping[str, Cell],
    folder: Path,
    recorder: Recorder,
    callbacks: Sequence[Callback],
    stop: StopRequest,
) -> TrainingModule:
    """Trains, from the checkpoint if there is one, stacked as it was."""
    cell = cells[runs[0][0].id]
    seeds = [seed for _, seed in runs]
    checkpoint = folder / CHECKPOINT_FILE
    is_stacked = None
    if checkpoint.is_file():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)["normexp"]
        step, is_stacked = state["step"], state["is_stacked"]
        logger.info("%s continues from step %d of %d", cell.title, step, cell.recipe.num_steps)
    replicas = arrange_replicas(cell, [cell.build(seed) for seed in seeds], is_stacked=is_stacked)
    lrs = None
    if len(cells) > 1:
        lrs = [cells[spec.id].recipe.lr for spec, _ in runs]
    module = build_module(cell, seeds, replicas, recorder, lrs)
    fit(module, checkpoint=checkpoint, callbacks=[*callbacks], stop=stop)
    return module
