"""Synthetic studies with known effects, written as a training writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result
from normexp.records.study_file import append_command
from normexp.records.writer import write_config, write_result

MIXING = ("batch",)
TARGET = "normexp.norms.{0}.Norm"


def write_cell(
    runs_dir: Path,
    norm: str,
    accuracies: Mapping[int, float | None],
    *,
    study: str = "synthetic",
    batch_size: int = 128,
    norm_batch_size: int | None = None,
    failed: Collection[int] = (),
    metrics: Mapping[str, float] | None = None,
    with_history: bool = False,
    **overrides: Any,
) -> Path:
    """One cell; accuracies in 0..1 by seed, None for a seed that diverged."""
    mixes = overrides.pop("mixes_samples", norm.startswith(MIXING))
    invalid = overrides.pop("invalid", None)
    environment = overrides.pop("environment", {"python": "3.11", "code_version": "one"})
    knobs = overrides.pop("knobs", {})
    config = {
        "norm": norm,
        "model": "resnet",
        "data": "cifar10",
        "optim": "sgd",
        "batch_size": batch_size,
        "micro_batch_size": None,
        "norm_batch_size": norm_batch_size,
        "epochs": 3,
        "lr": 0.1,
        "mixes_samples": mixes,
        **overrides,
    }
    config["identity"] = {"norm": {"_target_": TARGET.format(norm), **knobs}}
    size = norm_batch_size if mixes else None
    parts = [norm, config["model"], config["data"], f"b{batch_size}", f"n{size}", f"lr{config['lr']}"]
    parts += [f"{key}{value}" for key, value in sorted(knobs.items())]
    cell_id = "-".join(map(str, parts))
    cell = runs_dir / study / cell_id
    for seed, accuracy in accuracies.items():
        directory = cell / f"seed-{seed}"
        directory.mkdir(parents=True)
        status = "failed" if seed in failed else "diverged" if accuracy is None else "finished"
        numbers = {} if accuracy is None else _metrics(accuracy)
        result = Result(
            cell_id=cell_id,
            seed=seed,
            status=status,
            config=config,
            metrics={**numbers, **(metrics or {})} if status == "finished" else {},
            environment=environment,
            diverged_at_step=40 if status == "diverged" else None,
            error="CUDA out of memory" if status == "failed" else None,
            num_parameters=1000,
            timing={"step_ms": 5.0, "stack_size": 8.0, "samples_per_second": 25600.0,
                    "train_seconds": 9.0},
            invalid=invalid,
        )
        if with_history:
            _write_history(directory, accuracy)
        write_result(directory, result)
    write_config(cell, "norm: " + norm + "\n")
    return cell


def write_study(
    runs_dir: Path,
    rng: np.random.Generator,
    *,
    drop: float = 0.03,
    num_seeds: int = 8,
    noise: float = 0.004,
    sizes: Collection[int] = (2, 8, 32, 128),
    study: str = "synthetic",
    with_history: bool = False,
) -> None:
    """batch loses `drop` from 128 to 2, in equal parts per halving; group is level with it at 128.

    Seeds share an effect of their own, as paired seeds do. `layer` is group without any difference.
    """
    (runs_dir / study).mkdir(parents=True, exist_ok=True)
    append_command(runs_dir / study, ["normexp-train", "-m"], {}, "one")
    effect = rng.normal(0, 2 * noise, num_seeds)

    def draw(level: float) -> dict[int, float | None]:
        values = level + effect + rng.normal(0, noise, num_seeds)
        return dict(enumerate(map(float, values)))

    largest, smallest = max(sizes), min(sizes)
    for size in sizes:
        share = np.log2(largest / size) / np.log2(largest / smallest)
        write_cell(runs_dir, "batch", draw(0.9 - drop * share), norm_batch_size=size, study=study,
                   with_history=with_history)
    for norm in ("layer", "group"):
        write_cell(runs_dir, norm, draw(0.9), norm_batch_size=2, study=study,
                   with_history=with_history)


def _metrics(accuracy: float) -> dict[str, float]:
    loss = 1 - accuracy
    return {
        "test/accuracy": accuracy,
        "val/accuracy": accuracy - 0.005,
        "test/loss": loss,
        "val/loss": loss,
        "val/accuracy@precise": accuracy - 0.004,
        "val/accuracy@batch32": accuracy - 0.01,
    }


def _write_history(directory: Path, accuracy: float | None) -> None:
    final = 0.5 if accuracy is None else accuracy
    with MetricsWriter(directory / "metrics.csv") as writer:
        for step in range(20, 201, 20):
            loss = 2.3 * np.exp(-step / 100) + 1 - final
            writer.add(step, step // 100, step * 128, {"train/loss": float(loss)})
            if step % 100 == 0:
                writer.add(step, step // 100, step * 128, {"val/accuracy": final * step / 200})
