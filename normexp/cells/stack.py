"""A stack: runs that are trained together, resumed from their checkpoint, and recorded."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from normexp.batching.speed import suitable_threads
from normexp.cells.assembly import (
    build_callbacks,
    build_module,
    resume_replicas,
    run_loggers,
)
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.reloading import fault_of_reloaded
from normexp.config.spec import title_of
from normexp.data.prediction import Preprocessing
from normexp.errors import UserError
from normexp.norms.site import state_as_built
from normexp.records.environment import describe_environment
from normexp.records.files import open_atomic, remove_leftovers, write_json, write_text
from normexp.records.logs import messages_to_file
from normexp.records.paths import (
    CONFIG_FILE,
    EVALUATION_FILE,
    LOG_FILE,
    METRICS_FILE,
    PREPROCESSING_FILE,
    WEIGHTS_FILE,
    seed_dir,
)
from normexp.records.result import Result, Status, write_result
from normexp.records.samples import write_samples
from normexp.records.stacks import StackRecord, begin_stack, end_stack
from normexp.training.callbacks import why_stopped
from normexp.training.fit import fit
from normexp.training.module import TrainingModule
from normexp.training.recorder import Recorder
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl

logger = logging.getLogger(__name__)

Run = tuple[Cell, int]  # a cell and a seed


@dataclass(frozen=True)
class Stack:
    """Runs that are trained together, and their record on disk."""

    runs: list[Run]  # one per replica; their cells differ only in `lr`
    record: StackRecord

    @property
    def cell(self) -> Cell:
        """The first cell; all cells share everything except id, description and learning rate."""
        return self.runs[0][0]

    @property
    def seeds(self) -> list[int]:
        return [seed for _, seed in self.runs]

    @property
    def lrs(self) -> list[float] | None:
        """The learning rate of each replica; None if they share the cell's."""
        is_one_cell = len({cell.spec.id for cell, _ in self.runs}) == 1
        return None if is_one_cell else [cell.recipe.lr for cell, _ in self.runs]

    def open_runs(self) -> list[Run]:
        """The runs that have no result from this stack yet."""
        return [
            (cell, seed)
            for cell, seed in self.runs
            if not self.record.has_ended(cell.study_dir, (cell.spec.id, seed))
        ]


def create_stack(runs: list[Run], *, apart: str | None = None, attempts: int = 0) -> Stack:
    """Begins a stack and writes its members to disk. The caller must hold the locks of its cells.

    Args:
        apart: why the run is trained apart from its former stack.
        attempts: of a stack of one: how often its run has failed.
    """
    members = [(cell.spec.id, seed) for cell, seed in runs]
    rates = {cell.spec.id: cell.spec.lr for cell, _ in runs}
    study_dir = runs[0][0].study_dir
    return Stack(runs, begin_stack(study_dir, members, rates, apart=apart, attempts=attempts))


def restore_stack(record: StackRecord, cells: Iterable[Cell]) -> Stack:
    """The stack of a record; prepares those of its cells that only an earlier command named.

    Args:
        cells: prepared cells, at least one of them in the stack.

    Raises:
        UserError: another cell has changed since the stack began.
    """
    known = {cell.spec.id: cell for cell in cells}
    template = next(known[cell_id] for cell_id in record.rates if cell_id in known)
    for cell_id in sorted(record.rates.keys() - known.keys()):
        spec = template.spec.with_values({"lr": record.rates[cell_id]})
        known[cell_id] = prepare_cell(spec)
        if known[cell_id].spec.id != cell_id:
            raise UserError(
                f"{record.directory}: cannot repeat its cell {cell_id}; remove the folder"
            )
    return Stack([(known[cell_id], seed) for cell_id, seed in record.members], record)


def train_stack(stack: Stack, control: TrainingControl) -> None:
    """Trains a stack, from its checkpoint if there is one, and writes the records of its runs.

    Raises:
        Interrupted: stopped with a checkpoint, from which the next call resumes.
    """
    remove_leftovers(stack.record.directory)
    for cell, seed in stack.runs:
        config = OmegaConf.to_yaml(OmegaConf.create(cell.spec.values))
        write_text(cell.directory / CONFIG_FILE, config)
        seed_dir(cell.directory, seed).mkdir(exist_ok=True)
    with messages_to_file(stack.record.directory / LOG_FILE):
        if words := stack.record.resumes_at:
            logger.info("%s %s", title_of(stack.cell.spec), words)
        for message in stack.cell.messages:
            logger.info(message)
        with suitable_threads(stack.cell.elements_per_forward), control.stop.listening():
            _train(stack, control)


def follow_stack(stack: Stack, stop: StopRequest) -> None:
    """Trains along with `train_stack` in the processes other than rank 0; writes nothing."""
    with suitable_threads(stack.cell.elements_per_forward):
        control = TrainingControl(stop, on_steps=lambda *_: None)
        _fit(stack, Recorder([]), control)


def _train(stack: Stack, control: TrainingControl) -> None:
    if torch.cuda.is_initialized():  # asking would wake a GPU that is not in use
        torch.cuda.reset_peak_memory_stats()
    still_open = stack.open_runs()  # runs that ended before a kill keep their files
    with ExitStack() as opened:
        files = [
            seed_dir(run[0].directory, run[1]) / METRICS_FILE if run in still_open else None
            for run in stack.runs
        ]
        loggers = [opened.enter_context(run_loggers(*run)) for run in stack.runs]
        module, must_stop = _fit(stack, Recorder(files, loggers), control)
        _record(stack, module)
    if must_stop:
        raise Interrupted


def _fit(stack: Stack, recorder: Recorder, control: TrainingControl) -> tuple[TrainingModule, bool]:
    """The trained module, and whether a stop was requested too late for a checkpoint."""
    cell = stack.cell
    replicas = resume_replicas(cell, stack.seeds, stack.record.checkpoint)
    module = build_module(cell, stack.seeds, replicas, recorder, stack.lrs)
    must_stop = fit(
        module,
        checkpoint=stack.record.checkpoint,
        callbacks=build_callbacks(cell, control),
        stop=control.stop,
    )
    return module, must_stop


def _record(stack: Stack, module: TrainingModule) -> None:
    """Writes the files of every run, result.json last: its presence means ended."""
    device, source = module.trainer.strategy.root_device, stack.cell.data.source_version
    timing, gpu = _timing(module), None
    if device.type == "cuda":  # on a CPU only the peak of the whole process is known
        gpu = torch.cuda.get_device_name(device)
        timing["peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
    environment = describe_environment(gpu) | ({"data_source": source} if source else {})
    still_open, results = stack.open_runs(), []
    for index, (cell, seed) in enumerate(stack.runs):
        if (cell, seed) not in still_open:
            continue
        run_dir = seed_dir(cell.directory, seed)
        if cell.recipe.save_weights and module.losses.diverged_at[index] is None:
            _save_weights(run_dir / WEIGHTS_FILE, module.replicas.replica(index))
            if (preprocessing := Preprocessing.of(stack.cell.data)) is not None:
                write_json(run_dir / PREPROCESSING_FILE, asdict(preprocessing))
        if cell.recipe.evaluations:
            content = module.evaluator.content(module.metrics, index)
            write_json(run_dir / EVALUATION_FILE, content)
        write_samples(run_dir, module.evaluator.samples_of(module.metrics, index))
        results.append((run_dir, _result_of(stack, module, index, environment, timing)))
    fault = _fault_of_reloaded(stack, module)
    for run_dir, result in results:
        if fault is not None:
            result = replace(result, invalid=result.invalid or fault)
        write_result(run_dir, result)
    end_stack(stack.record)


def _fault_of_reloaded(stack: Stack, module: TrainingModule) -> str | None:
    """Why saved weights of foreign code do not give the numbers again; None if they do."""
    saved = [seed_dir(cell.directory, seed) / WEIGHTS_FILE for cell, seed in stack.runs]
    index = next((i for i, path in enumerate(saved) if path.is_file()), None)
    if index is None or not stack.cell.is_foreign:
        return None
    cell, _ = stack.runs[index]
    fault = fault_of_reloaded(
        module.replicas, index, cell.data, cell.spec, cell.recipe, saved[index]
    )
    if fault is not None:
        logger.warning("%s; every number is marked INVALID", fault)
    return fault


def record_failure(stack: Stack, reason: str) -> None:
    """Writes the failed result of a stack of one."""
    ((cell, seed),) = stack.runs
    run_dir = seed_dir(cell.directory, seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    failed = Result(
        *(cell.spec.id, seed, Status.FAILED, cell.description, {}, describe_environment()),
        error=reason,
        attempts=stack.record.attempts + 1,
        apart=stack.record.apart,
    )
    write_result(run_dir, failed)
    end_stack(stack.record)


def _save_weights(path: Path, network: nn.Module) -> None:
    with open_atomic(path) as file:
        torch.save(state_as_built(network.cpu()), file)


def _result_of(
    stack: Stack,
    module: TrainingModule,
    index: int,
    environment: dict[str, Any],
    timing: dict[str, float],
) -> Result:
    cell, seed = stack.runs[index]
    metrics = {name: column[index] for name, column in module.metrics.items()}
    diverged_at = module.losses.diverged_at[index]
    if diverged_at is None and not all(map(math.isfinite, metrics.values())):
        diverged_at = module.step  # the last update broke the network, after its loss was taken
    has_stopped = module.step < cell.recipe.num_steps
    return Result(
        cell_id=cell.spec.id,
        seed=seed,
        status=Status.FINISHED if diverged_at is None else Status.DIVERGED,
        config=cell.description | {"stacked": module.replicas.is_stacked},
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        environment=environment,
        diverged_at_step=diverged_at,
        steps=module.losses.diverged_at[index] or module.step,
        num_parameters=cell.num_parameters,
        timing=timing,
        invalid=cell.invalid,
        apart=stack.record.apart,
        stopped=why_stopped(module.trainer) if has_stopped else None,
    )


def _timing(module: TrainingModule) -> dict[str, float]:
    num_replicas, seconds = module.replicas.num_replicas, module.train_seconds
    samples = module.batches.num_samples_before(module.step) * num_replicas
    return {
        "train_seconds": seconds,
        "step_ms": 1000 * seconds / max(module.step, 1),
        "stack_size": num_replicas,
        "samples_per_second": samples / max(seconds, 1e-9),
    }
