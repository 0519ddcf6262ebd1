"""Synthetic studies with known effects, written as a training writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from normexp.records.history import CommandEntry, append_entries, read_history

from normexp.records.files import write_text
from normexp.records.metrics import MetricsWriter
from normexp.records.paths import list_seeds
from normexp.records.result import Result, write_result
from normexp.reporting.metric import RULE
from normexp.reporting.model import CellRow, Slice
from normexp.reporting.report import Report, read_report
from normexp.reporting.sentences import Answer

TIMING = {"step_ms": 5.0, "stack_size": 8.0, "samples_per_second": 25600.0, "train_seconds": 9.0}
ENVIRONMENT = {"python": "3.11", "code_version": "one"}


def write_cell(
    root: Path,
    norm: str,
    accuracies: Mapping[int, float | None],
    *,
    study: str = "synthetic",
    batch_size: int = 128,
    norm_batch_size: int | None = None,
    mixes_samples: bool | None = None,
    failed: Collection[int] = (),
    knobs: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    with_history: bool = False,
    result: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes the runs of one cell and returns its folder.

    accuracies: in 0..1 by seed, None for a seed that diverged
    mixes_samples: True for batch unless given
    metrics: instead of those that follow from the accuracy
    identity: parts of the recorded recipe, besides the knobs of the norm
    result, config: override fields of the result, and values of its config
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
        "recipe": {
            "norm": {"_target_": f"normexp.norms.{norm}.Norm", **(knobs or {})},
            **(identity or {}),
        },
    }
    size = norm_batch_size if mixes else None
    names = [norm, record["model"], record["data"], f"b{batch_size}", f"n{size}"]
    own = {**config, **(knobs or {}), **(identity or {})}
    names += [f"{key}{value}" for key, value in sorted(own.items())]
    cell = root / study / re.sub(r"[/ {}':]", "_", "-".join(map(str, names)))
    for seed, accuracy in accuracies.items():
        status = "failed" if seed in failed else "diverged" if accuracy is None else "finished"
        own = _metrics_of(accuracy) if metrics is None and accuracy is not None else metrics
        content: dict[str, Any] = {
            "metrics": dict(own or {}) if status == "finished" else {},
            "diverged_at_step": 40 if status == "diverged" else None,
            "error": "CUDA out of memory" if status == "failed" else None,
            "timing": TIMING,
            "environment": ENVIRONMENT,
            **(result or {}),
        }
        folder = cell / f"seed-{seed}"
        folder.mkdir(parents=True)
        if with_history:
            _write_history(folder, accuracy or 0.5)
        write_result(
            folder, Result(cell_id=cell.name, seed=seed, status=status, config=record, **content)
        )
    write_text(cell / "config.yaml", f"norm: {norm}\n")
    return cell


def write_study(
    root: Path,
    rng: np.random.Generator,
    *,
    drop: float = 0.03,
    num_seeds: int = 8,
    sizes: Collection[int] = (2, 8, 32, 128),
    level: Collection[str] = ("layer", "group"),
    study: str = "synthetic",
) -> None:
    """batch loses `drop` from the largest size to the smallest, in equal parts per halving.

    At the largest size it equals the norms in `level`. Seeds share an effect of twice the noise.
    """
    effect = rng.normal(0, 0.008, num_seeds)

    def draw(level: float) -> dict[int, float | None]:
        return dict(enumerate((level + effect + rng.normal(0, 0.004, num_seeds)).tolist()))

    (root / study).mkdir(parents=True)
    append_entries(root / study, [CommandEntry("c", ["normexp-train", "-m"], "one", 3, {})])
    largest, smallest = max(sizes), min(sizes)
    place: dict[str, Any] = {"study": study, "with_history": True}
    for size in sizes:
        share = np.log2(largest / size) / np.log2(largest / smallest)
        write_cell(root, "batch", draw(0.9 - drop * share), norm_batch_size=size, **place)
    for norm in level:
        write_cell(root, norm, draw(0.9), norm_batch_size=smallest, **place)
    declare(root, study)


def write_sizes(
    root: Path,
    values: Mapping[int, Mapping[int, float | None]],
    norm: str = "batch",
    *,
    axis: str = "norm_batch_size",
    **options: Any,
) -> list[Path]:
    """Writes a cell for each size with the accuracies of its seeds; options: of `write_cell`."""
    return [write_cell(root, norm, own, **{axis: size}, **options) for size, own in values.items()]


def declare(root: Path, *names: str, count: int = 0) -> None:
    """Declares all cells of the studies, unless a command did.

    With the seeds 0 to count - 1, or with those that they have.
    """
    for name in names:
        study = root / name
        if any(command.cells for command in read_history(study).commands if command.id != "d"):
            continue
        if (path := study / "study.jsonl").exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if '"id": "d"' not in line))
        known = {cell.name: seeds for cell in study.glob("*") if (seeds := list_seeds(cell))}
        cells = {cell: [("", list(range(count)) or seeds)] for cell, seeds in known.items()}
        if cells:
            command_id = "declared" if count else "d"
            command = CommandEntry(command_id, ["normexp-train", "-m"], "one", 3, cells, RULE)
            append_entries(study, [command])


def report_of(root: Path, *names: str, **options: Any) -> Report:
    """The report of the written studies, declared; options: metric and tolerance."""
    declare(root, *(names or ["synthetic"]))
    return read_report(root, names or ["synthetic"], **options)


def cells_of(root: Path, *names: str) -> Sequence[CellRow]:
    return report_of(root, *names).cells


def slices_of(root: Path, *names: str) -> Sequence[Slice]:
    return report_of(root, *names).slices


def answers_of(root: Path, *names: str, **options: Any) -> list[Answer]:
    """The answers about each slice, by budget."""
    sections = report_of(root, *names, **options).sections
    answers = [answer for section in sections for answer in section.answers]
    return [answer for answer in answers if len(answer.parts) == 1]


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
    with MetricsWriter(folder / "metrics.csv") as writer:
        for step in range(20, 201, 20):
            rows = {"train/loss": float(2.3 * np.exp(-step / 100) + 1 - final)}
            if step % 100 == 0:
                rows["val/accuracy"] = final * step / 200
            if step == 200:
                rows |= {f"diagnostics/block{i}.norm1/output_rms": 1 + 0.1 * i for i in range(4)}
            writer.add(step, step // 100, step * 128, rows)
