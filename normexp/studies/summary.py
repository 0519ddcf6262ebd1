"""What a command prints when it has ended: the result with its spread, and where to go next."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from normexp.records.result import Result

if TYPE_CHECKING:
    from normexp.studies.runner import Outcome

SHOWN = ("test/accuracy", "test/bits_per_byte", "test/loss", "val/accuracy", "val/bits_per_byte")
MAIN = ("test/accuracy", "test/bits_per_byte", "test/loss")


def print_summary(outcome: Outcome) -> None:
    """Metrics of one cell over its seeds, its directory, and three commands worth typing."""
    console = Console(highlight=False)
    cell = outcome.cell
    if cell is None or not outcome.results:
        return
    if outcome.status == "failed":
        Console(stderr=True, highlight=False).print(f"failed: {outcome.error}", markup=False)
        return
    words = {"skipped": "already recorded", "finished": "trained"}
    count = len(outcome.results)
    console.print(f"\n{cell.title}: {words[outcome.status]}, n = {count} seeds", markup=False)
    if cell.invalid:
        console.print(f"INVALID, every number: {cell.invalid}", markup=False, soft_wrap=True)
    table = Table("metric", "mean", "sd over seeds", "lowest", "highest", "n", box=None)
    for name in shown_metrics(outcome.results):
        values = values_of(outcome.results, name)
        stamp = " INVALID" if cell.invalid else ""
        table.add_row(name + stamp, *_spread(values), str(len(values)))
    console.print(table)
    diverged = [result for result in outcome.results if result.status == "diverged"]
    for result in diverged:
        console.print(f"seed {result.seed} diverged at step {result.diverged_at_step}")
    seconds = max(result.timing.get("train_seconds", 0.0) for result in outcome.results)
    steps = outcome.results[0].timing.get("step_ms", 0.0)
    console.print(f"trained in {seconds:.1f} s, {steps:.2f} ms a step of the whole stack")
    console.print(f"run directory: {cell.directory}", markup=False, soft_wrap=True)
    console.print("next:")
    for command in next_commands(outcome):
        console.print(f"  {command}", markup=False, soft_wrap=True)


def shown_metrics(results: Sequence[Result]) -> list[str]:
    """The recorded metrics worth a row, each with its other evaluation statistics below it."""
    names = {name for result in results for name in result.metrics}
    return [name for base in SHOWN for name in sorted(names) if name.partition("@")[0] == base]


def next_commands(outcome: Outcome) -> list[str]:
    """Three commands that fit what was just trained."""
    assert outcome.cell is not None
    record = outcome.cell.record
    norm, data = record["norm"], f" data={record['data']}"
    own = [] if norm == "custom" else [norm]  # custom takes a target, which a list has no room for
    others = [name for name in ("batch", "layer", "instance", "group") if name != norm]
    return [
        f"python -m normexp.train -m norm={','.join(own + others)}{data}",
        f"python -m normexp.train -m norm=batch,group norm_batch_size=2,8,32{data}",
        "python -m normexp.train --help",
    ]


def print_closing_table(outcomes: Sequence[Outcome]) -> None:
    """One row per cell of a sweep; sizes that came to one cell share its row."""
    table = Table(
        "status", "norm", "batch", "micro", "norm batch", "result", "n", "where", box=None
    )
    shown_cells: set[str] = set()
    for outcome in outcomes:
        if outcome.cell is not None and outcome.cell.id in shown_cells:
            continue
        if outcome.cell is None:
            table.add_row(outcome.status, outcome.title, "", "", "", outcome.error, "", "")
            continue
        shown_cells.add(outcome.cell.id)
        record = outcome.cell.record
        sizes = [str(record[key] or "") for key in ("batch_size", "micro_batch_size")]
        norm_size = str(record["norm_batch_size"] or "") if record["mixes_samples"] else "any"
        name = next((n for n in MAIN if values_of(outcome.results, n)), "")
        values = values_of(outcome.results, name)
        shown = f"{name} {_mean_and_sd(values)}" if values else outcome.error
        if outcome.cell.invalid:
            shown = f"INVALID {shown}"
        row = [*sizes, norm_size, shown, str(len(values)), outcome.cell.id]
        table.add_row(outcome.status, record["norm"], *row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a log file has no edge
    console.print(table)


def values_of(results: Sequence[Result], name: str) -> list[float]:
    """A metric over the runs that have it; a missing value stays missing."""
    return [result.metrics[name] for result in results if name in result.metrics]


def _spread(values: list[float]) -> list[str]:
    deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
    return [f"{statistics.mean(values):.4f}", deviation, f"{min(values):.4f}", f"{max(values):.4f}"]


def _mean_and_sd(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} (sd {statistics.stdev(values):.4f})"
