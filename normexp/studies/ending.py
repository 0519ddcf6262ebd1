"""What a stack leaves when its runs have ended: weights, evaluations, results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from normexp.records.committed import commit_results, publish_results
from normexp.records.environment import describe_environment
from normexp.records.layout import WEIGHTS_FILE, seed_dir
from normexp.records.result import Result
from normexp.records.writer import open_atomic, write_evaluation
from normexp.studies.cell import Cell
from normexp.tasks.evaluation import StatisticsEvaluation
from normexp.tasks.training import TrainingTask


def write_results(
    runs: Sequence[tuple[Cell, int]],
    stack_dir: Path,
    task: TrainingTask,
    evaluation: StatisticsEvaluation,
) -> list[Result]:
    """Weights and evaluations, then result.json of every run: its presence means ended.

    The stack's results are committed together before the first of them is written, so that its
    runs end together; the checkpoint goes.

    Args:
        runs: cell and seed of each replica.
    """
    environment = describe_environment(gpu_name(task.trainer.strategy.root_device))
    if task.data.source_version:
        environment["data_source"] = task.data.source_version
    timing = _timing(task, len(runs))
    results = []
    for index, (cell, seed) in enumerate(runs):
        run_dir = seed_dir(cell.directory, seed)
        if cell.cfg.save_weights:
            with open_atomic(run_dir / WEIGHTS_FILE) as file:
                torch.save(task.replicas.replica(index).cpu().state_dict(), file)
        if cell.evaluation.adds:
            write_evaluation(run_dir, evaluation.content(task, index))
        diverged_at = task.losses.diverged_at[index]
        finals = {name: column[index] for name, column in task.final.items()}
        if diverged_at is None and not all(map(math.isfinite, finals.values())):
            diverged_at = task.step  # the last update broke what its loss could not show yet
        result = Result(
            cell_id=cell.id,
            seed=seed,
            status="finished" if diverged_at is None else "diverged",
            config=cell.record | {"stacked": task.replicas.is_stacked},
            metrics={name: value for name, value in finals.items() if math.isfinite(value)},
            environment=environment,
            diverged_at_step=diverged_at,
            num_parameters=cell.num_parameters,
            timing=timing,
            invalid=cell.invalid,
        )
        results.append(result)
    commit_results(stack_dir, results)
    for directory in dict.fromkeys(cell.directory for cell, _ in runs):
        publish_results(directory)
    return results


def _timing(task: TrainingTask, num_replicas: int) -> dict[str, float]:
    samples = task.batches.num_samples_before(task.step) * num_replicas
    return {
        "train_seconds": task.train_seconds,
        "step_ms": 1000 * task.train_seconds / max(task.step, 1),
        "stack_size": num_replicas,
        "samples_per_second": samples / max(task.train_seconds, 1e-9),
        **peak_memory(task.trainer.strategy.root_device),
    }


def gpu_name(device: torch.device) -> str | None:
    """Of the GPU that trained; to ask on a CPU would wake a GPU that has nothing to do with it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def forget_peak_memory() -> None:
    """Starts the count of a new stack; does not wake a GPU that nobody has used yet."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> dict[str, float]:
    """`peak_memory_mb`: most memory that tensors held since then, in 10^6 bytes; GPUs alone.

    On a CPU there is only the peak of the process since its start, which is that of the largest
    cell so far, so nothing is recorded.
    """
    if device.type != "cuda":
        return {}
    return {"peak_memory_mb": torch.cuda.max_memory_allocated(device) / 1e6}
