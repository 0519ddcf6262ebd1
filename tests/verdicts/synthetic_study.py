"""Synthetic studies with known effects: in memory, or written as a training writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from normexp.training.config.slots import Slots
from normexp.training.records.metrics import MetricRow, write_metrics
from normexp.training.records.result import Measured, Result, Status, write_result
from normexp.training.studies.rows import row_of
from normexp.verdicts.compare import Comparison
from normexp.verdicts.report import Report, report_on
from normexp.verdicts.rows import Row, Rows

TIMING = {"step_ms": 5.0, "stack_size": 8.0, "samples_per_second": 25600.0, "train_seconds": 9.0}
RESULTS: dict[Row, Result] = {}  # of which `cell_of` made the rows
ENVIRONMENT = {"python": "3.11", "code_version": "one"}


def cell_of(
    norm: str,
    accuracies: Mapping[int, float | None] | Sequence[float | None],
    *,
    study: str = "synthetic",
    batch_size: int = 128,
    micro_batch_size: int | None = None,
    norm_batch_size: int | None = None,
    mixes_samples: bool | None = None,
    failed: Collection[int] = (),
    knobs: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    samples: Mapping[int, np.ndarray] | None = None,
    chance_accuracy: float | None = 0.1,
    optim: Mapping[str, Any] | None = None,
    model: str = "resnet",
    data: str = "cifar10",
    epochs: float = 3,
    lr: float = 0.1,
    defaults: Mapping[str, Any] | None = None,
    **typed: Any,
) -> list[Row]:
    """The runs of one cell.

    accuracies: in 0..1 by seed, None for a seed that diverged
    mixes_samples: True for batch unless given
    metrics: instead of those that follow from the accuracy
    samples: right or not for each test sample, by seed; its mean is the accuracy. Numbers are those
        of a text
    knobs, optim: values of the norm, and of the optimizer, that are no defaults
    typed: other values that are no defaults
    defaults: other settings than slots, that have their defaults
    """
    by_seed = accuracies if isinstance(accuracies, Mapping) else dict(enumerate(accuracies))
    mixes = norm == "batch" if mixes_samples is None else mixes_samples
    defines = {
        "norm": {"choice": norm, **(knobs or {})},
        "model": {"choice": model},
        "data": {"choice": data},
        "optim": {"choice": "sgd", **(optim or {})},
        **({"epochs": epochs} if epochs == round(epochs) != 3 else {}),
        **({"lr": lr} if lr != 0.1 else {}),
        **typed,
    }
    micro = micro_batch_size or batch_size
    derived = {
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "norm_batch_size": norm_batch_size or micro,
        "epochs": epochs,
        "lr": lr,
        **{key: typed[key] for key in ("steps",) if key in typed},
    }
    names = [norm, model, data, f"b{batch_size}", f"n{norm_batch_size}", f"m{micro}", lr, epochs]
    own = {**typed, **(knobs or {}), **(optim or {})}
    names += [f"{key}{value}" for key, value in sorted(own.items())]
    cell_id = re.sub(r"[/ {}':]", "_", "-".join(map(str, names)))
    all_defaults = {**(defaults or {})}
    for slot, value in asdict(Slots()).items():
        all_defaults[f"norm.{slot}"] = (knobs or {}).get(slot, value)
        all_defaults[slot] = all_defaults[f"norm.{slot}"]
    is_text = any(values.dtype != bool for values in (samples or {}).values())
    runs = []
    for seed, accuracy in by_seed.items():
        status = Status.DIVERGED if accuracy is None else Status.FINISHED
        status = Status.FAILED if seed in failed else status
        if status == Status.FINISHED:
            known = _metrics_of(accuracy or 0.0) if metrics is None else dict(metrics)
        measured = Measured(
            metrics=known if status == Status.FINISHED else {},
            diverged_at_step=40 if status == Status.DIVERGED else None,
            traits={"mixes_samples": mixes},
            chance_accuracy=chance_accuracy,
            data_set={"task": "language_modeling" if is_text else "classification"},
            timing=TIMING,
            environment=ENVIRONMENT,
        )
        error = "CUDA out of memory" if status == Status.FAILED else None
        own_samples = {"running": samples[seed]} if samples and seed in samples else {}
        run_dir = Path("runs", study, cell_id, f"seed-{seed}")
        result = Result(cell_id, seed, status, defines, derived, measured, error, all_defaults)
        row = row_of(study, run_dir, result, result.metrics, lambda found=own_samples: found)
        RESULTS[row] = result
        runs.append(row)
    return runs


def report_of_cells(*cells: Sequence[Row], **options: Any) -> Report:
    """The report of cells in memory; options: of Rows, and metric, reference."""
    names = ("asked", "commands", "confirmations", "searches", "planned", "refused")
    of_rows = {key: options.pop(key) for key in names if key in options}
    runs = [run for cell in cells for run in cell]
    rows = Rows(runs, **of_rows)
    studies = list(dict.fromkeys(run.study for run in runs))
    return report_on(rows, Path("runs"), studies, **options)


def find(report: Report, norm: str, against: str = "batch") -> Comparison:
    """The comparison of this name."""
    (one,) = [c for c in report.comparisons if (c.arm, c.against) == (norm, against)]
    return one


def write_cell(root: Path, norm: str, accuracies: Any, **more: Any) -> Path:
    """Writes the runs of `cell_of` and returns the folder of the cell."""
    runs = cell_of(norm, accuracies, **more)
    cell = root / runs[0].study / runs[0].directory.parent.name
    for run in runs:
        folder = cell / f"seed-{run.seed}"
        folder.mkdir(parents=True)
        _write_history(folder, run.metrics.get("test/accuracy", 0.5))
        write_result(folder, RESULTS[run])
    return cell


def write_study(root: Path, num_seeds: int = 8, sizes: Sequence[int] = (2, 8, 32, 128)) -> None:
    """batch loses 3 points from the largest size to the smallest, in equal parts per halving.

    At the largest size it equals layer and group. Seeds share an effect of twice the noise.
    """
    rng = np.random.default_rng(0)
    effect = rng.normal(0, 0.008, num_seeds)

    def draw(level: float) -> dict[int, float | None]:
        return dict(enumerate((level + effect + rng.normal(0, 0.004, num_seeds)).tolist()))

    largest, smallest = max(sizes), min(sizes)
    for size in sizes:
        lost = 0.03 * (np.log2(largest / size) / np.log2(largest / smallest))
        write_cell(root, "batch", draw(0.9 - lost), norm_batch_size=size)
    for norm in ("layer", "group"):
        write_cell(root, norm, draw(0.9))
    (root / "synthetic" / "study.jsonl").touch()


def _metrics_of(accuracy: float) -> dict[str, float]:
    return {
        "test/accuracy": accuracy,
        "val/accuracy": accuracy - 0.005,
        "test/loss": 1 - accuracy,
        "val/loss": 1 - accuracy,
        "val/accuracy@precise": accuracy - 0.004,
        "val/accuracy@batch32": accuracy - 0.01,
    }


def _write_history(folder: Path, final: float) -> None:
    rows = []
    for step in range(20, 201, 20):
        values = {"train/loss": float(2.3 * np.exp(-step / 100) + 1 - final)}
        if step % 100 == 0:
            values["val/accuracy"] = final * step / 200
        place = (step, step // 100, step * 128)
        rows += [MetricRow(*place, name, value) for name, value in values.items()]
    write_metrics(folder / "metrics.csv", rows)
