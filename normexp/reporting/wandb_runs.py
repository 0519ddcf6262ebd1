"""Writes the W&B run of a command that a W&B agent started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normexp.config.outcome import Outcome
from normexp.config.spec import CellSpec
from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE, seed_dir
from normexp.records.result import DONE, Result, hyperparameters
from normexp.reporting.metric import describe_metric


def _start(mode: str, **words: Any) -> Any:
    """A silent W&B run; `auto` is online if logged in."""
    import wandb

    from normexp.training.recorder import resolve_mode  # torch

    settings = wandb.Settings(silent=True, console="off")
    return wandb.init(mode=resolve_mode(mode), settings=settings, **words)  # type: ignore[arg-type]


# A W&B agent allows one run for each command that it starts. The run is written from the records
# after the cell has ended, even if nothing was left to train: an agent may propose a point twice.


def log_to_agent(cell: CellSpec, outcome: Outcome) -> None:
    """Writes the agent's run: mean curves over the seeds, and the final means as its summary.

    If a run of the cell failed or is missing, writes no means and marks the run as failed: a mean
    over the other seeds would not be comparable with other cells.
    """
    if outcome.directory is None or not outcome.results:
        return
    logger = None if cell.config is None else cell.config["logger"].get("wandb")
    study = outcome.directory.parent
    run = _start(
        "auto" if logger is None else logger["mode"],
        dir=study,
        name=outcome.cell_id,
        config={
            **hyperparameters(outcome.description, study=study.name),
            "seeds": [result.seed for result in outcome.results],
        },
    )
    is_whole = outcome.status in DONE
    if is_whole:
        rows = mean_rows(outcome.directory, outcome.results)
        for step, row in rows.items():
            run.log(row, step=step)
        # The last row is the summary.
        run.log(mean_metrics(outcome.results), step=max(rows, default=0))
    run.finish(exit_code=0 if is_whole else 1)


def mean_rows(directory: Path, results: Sequence[Result]) -> dict[int, dict[str, float]]:
    """By optimizer step, in order: the mean of each metric over the seeds that have it there.

    If a seed diverged, evaluation losses are left out: the mean of the others would look too good.
    """
    by_step: dict[int, dict[str, list[float]]] = {}
    for result in results:
        path = seed_dir(directory, result.seed) / METRICS_FILE
        for row in read_metrics(path) if path.is_file() else []:
            by_step.setdefault(row.step, {}).setdefault(row.name, []).append(row.value)
    hides = any(result.status != "finished" for result in results)
    return {
        step: {
            name: sum(values) / len(values)
            for name, values in by_step[step].items()
            if not hides or name.startswith("train/") or describe_metric(name).higher_is_better
        }
        for step in sorted(by_step)
    }


def mean_metrics(results: Sequence[Result]) -> dict[str, float]:
    """The final means over seeds. A diverged seed counts as accuracy 0 and removes mean losses."""
    finished = [result for result in results if result.status == "finished"]
    lost = len(results) - len(finished)
    means = {"seeds": float(len(results)), "diverged_seeds": float(lost)}
    for name in sorted({name for result in results for name in result.metrics}):
        values = [result.metrics[name] for result in finished if name in result.metrics]
        if not lost or describe_metric(name).higher_is_better:
            means[name] = sum(values) / len(results)
    return means
