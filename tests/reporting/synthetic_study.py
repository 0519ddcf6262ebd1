"""Synthetic studies with known effects: as runs in memory, or written as a training writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normexp.records.files import write_config
from normexp.records.history import append_command
from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result, write_result
from normexp.reporting.runs import Run, StudyRuns

Accuracies = Mapping[int, float | None]
TIMING = {"step_ms": 5.0, "stack_size": 8.0, "samples_per_second": 25600.0, "train_seconds": 9.0}


def make_runs(
    norm: str,
    accuracies: Accuracies,
    *,
    root: Path = Path("runs"),
    study: str = "synthetic",
    batch_size: int = 128,
    norm_batch_size: int | None = None,
    mixes_samples: bool | None = None,
    failed: Collection[int] = (),
    invalid: str | None = None,
    knobs: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    environment: Mapping[str, Any] | None = None,
    **config: Any,
) -> list[Run]:
    """The runs of one cell; accuracies in 0..1 by seed, None for a seed that diverged.

    batch mixes samples unless said otherwise; metrics replace those that follow from the accuracy;
    config overrides the record.
    """
    mixes = norm == "batch" if mixes_samples is None else mixes_samples
    record = {
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
        **config,
        "identity": {"norm": {"_target_": f"normexp.norms.{norm}.Norm", **(knobs or {})}},
    }
    size = norm_batch_size if mixes else None
    names = [norm, record["model"], record["data"], f"b{batch_size}", f"n{size}"]
    names += [f"{key}{value}" for key, value in sorted({**config, **(knobs or {})}.items())]
    cell_id = "-".join(map(str, names)).replace("/", "_")
    runs = []
    for seed, accuracy in accuracies.items():
        status = "failed" if seed in failed else "diverged" if accuracy is None else "finished"
        own = _metrics_of(accuracy) if metrics is None and accuracy is not None else metrics
        result = Result(
            cell_id=cell_id,
            seed=seed,
            status=status,
            config=record,
            metrics=dict(own or {}) if status == "finished" else {},
            environment=dict(environment or {"python": "3.11", "code_version": "one"}),
            diverged_at_step=40 if status == "diverged" else None,
            error="CUDA out of memory" if status == "failed" else None,
            timing=TIMING,
            invalid=invalid,
        )
        runs.append(Run(study, root / study / cell_id / f"seed-{seed}", result))
    return runs


def study_of(runs: Iterable[Run], name: str = "synthetic") -> StudyRuns:
    return StudyRuns(name, Path("runs") / name, list(runs), [], [])


def write_runs(runs: Iterable[Run], *, with_history: bool = False) -> Path:
    """Writes runs to their directories; returns the directory of the last cell."""
    cell = Path()
    for run in runs:
        cell = run.directory.parent
        run.directory.mkdir(parents=True)
        if with_history:
            _write_history(run)
        write_result(run.directory, run.result)
        write_config(cell, f"norm: {run.result.config['norm']}\n")
    return cell


def make_study(
    rng: np.random.Generator,
    *,
    drop: float = 0.03,
    num_seeds: int = 8,
    noise: float = 0.004,
    sizes: Collection[int] = (2, 8, 32, 128),
    level: Collection[str] = ("layer", "group"),
    root: Path = Path("runs"),
    study: str = "synthetic",
) -> list[Run]:
    """batch loses `drop` from the largest size to the smallest, in equal parts per halving.

    It is level with the norms in `level` at the largest size, and these with each other. Seeds
    share an effect of twice the noise, as paired seeds do.
    """
    effect = rng.normal(0, 2 * noise, num_seeds)

    def draw(mean: float) -> dict[int, float | None]:
        return dict(enumerate((mean + effect + rng.normal(0, noise, num_seeds)).tolist()))

    largest, smallest = max(sizes), min(sizes)
    place: dict[str, Any] = {"root": root, "study": study}
    runs = []
    for size in sizes:
        share = np.log2(largest / size) / np.log2(largest / smallest)
        runs += make_runs("batch", draw(0.9 - drop * share), norm_batch_size=size, **place)
    for norm in level:
        runs += make_runs(norm, draw(0.9), norm_batch_size=smallest, **place)
    return runs


def write_study(root: Path, rng: np.random.Generator, **options: Any) -> None:
    """`make_study` on disk, with histories and study.yaml."""
    study = options.get("study", "synthetic")
    (root / study).mkdir(parents=True)
    append_command(root / study, ["normexp-train", "-m"], {}, "one")
    write_runs(make_study(rng, root=root, **options), with_history=True)


def _metrics_of(accuracy: float) -> dict[str, float]:
    return {
        "test/accuracy": accuracy,
        "val/accuracy": accuracy - 0.005,
        "test/loss": 1 - accuracy,
        "val/loss": 1 - accuracy,
        "val/accuracy@precise": accuracy - 0.004,
        "val/accuracy@batch32": accuracy - 0.01,
    }


def _write_history(run: Run) -> None:
    final = run.result.metrics.get("test/accuracy", 0.5)
    with MetricsWriter(run.directory / "metrics.csv") as writer:
        for step in range(20, 201, 20):
            loss = float(2.3 * np.exp(-step / 100) + 1 - final)
            rows = {"train/loss": loss}
            if step % 100 == 0:
                rows["val/accuracy"] = final * step / 200
            if step == 200:
                rows |= {f"diagnostics/block{i}.norm1/output_rms": 1 + 0.1 * i for i in range(4)}
            writer.add(step, step // 100, step * 128, rows)
