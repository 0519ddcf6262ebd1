"""Trains runs of the benchmark for an entry or a verification; probes networks for claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from normexp.benchmark.protocol import WorkloadRecipe
from normexp.benchmark.table import TableCell, cells_below
from normexp.cli import parse_command
from normexp.config.rules import SLOT_KEYS
from normexp.errors import UserError

if TYPE_CHECKING:
    from normexp.config.spec import CellSpec, NormSpec


def train_grid(
    experiment: str,
    recipe: WorkloadRecipe,
    runs_dir: Path,
    words: Sequence[str],
    label: str,
    first_seed: int = 0,
) -> tuple[int, list[TableCell]]:
    """Trains what is missing of a grid; returns the exit code and its cells under `label`.

    Prints a table of outcomes, and of a single cell its failure alone.

    recipe: of `experiment`, as the words change it
    """
    from normexp.sweeps.sweep import print_states, raise_if_stopped, train_cells

    cells, words = compose_grid(experiment, runs_dir, words)
    outcomes = train_cells(cells, words)
    results = [result for outcome in outcomes for result in outcome.results]
    if len(cells) == 1 and results:
        raise_if_stopped(cells, outcomes)
        code = 0
    else:
        code = print_states(outcomes, words, cells)
    if invalid := next((result.invalid for result in results if result.invalid), None):
        raise UserError(f"{label} cannot stand in the table, its runs are INVALID: {invalid}")
    ids = {result.cell_id for result in results}
    known = cells_below(runs_dir, [recipe], first_seed)
    return code, [replace(cell, norm=label) for cell in known if cell.about["id"] in ids]


def compose_grid(
    experiment: str, runs_dir: Path, words: Sequence[str]
) -> tuple[list[CellSpec], list[str]]:
    """The cells of a grid, and the command that trains them."""
    from normexp.config.grid import compose_cells

    words = [f"experiment={experiment}", f"runs_dir={runs_dir}", *words]
    return compose_cells(parse_command(words)), ["normexp-benchmark", *words]


def print_cost(
    benchmark: str, workloads: Sequence[str], runs_dir: Path, words: Sequence[str]
) -> int:
    """Prints what an entry would train, as the dry run of one command; returns the exit code."""
    from normexp.sweeps.sweep import run_cells

    cells = [
        replace(cell, title=f"{workload} {cell.title}")
        for workload in workloads
        for cell in compose_grid(f"{benchmark}/{workload}", runs_dir, words)[0]
    ]
    return run_cells(cells, words)


def minutes_words(seconds: float) -> str:
    """`3.3` core-minutes."""
    return f"{seconds / 60:.0f}" if seconds > 600 else f"{seconds / 60:.1f}"


def is_dry(words: Sequence[str]) -> bool:
    return any(word.lower() == "dry_run=true" for word in words)


def is_of_norm(word: str) -> bool:
    """True for a word that sets the norm or one of its slots."""
    key = word.partition("=")[0].lstrip("+")
    return key.partition(".")[0] == "norm" or key in SLOT_KEYS


def norm_of_words(words: Sequence[str], config_dirs: Sequence[str] = ()) -> NormSpec:
    """The only norm that the words name.

    Raises:
        UserError: none, or several.
    """
    from normexp.config.grid import compose_norms
    from normexp.config.spec import Command

    of_norm = [word for word in words if word.lstrip("+").startswith(("norm=", "norm."))]
    of_card = [word for word in of_norm if "norm.view=" not in word]  # a card has (N, C, *)
    norms = compose_norms(Command(of_card, config_dirs=list(config_dirs)))
    if len(norms) != 1 or not any(word.startswith("norm=") for word in of_norm):
        raise UserError(
            "an entry is one norm: norm=NAME, or norm=custom norm._target_=my_file.MyNorm"
        )
    return norms[0]
