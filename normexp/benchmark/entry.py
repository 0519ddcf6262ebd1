"""`python -m normexp.benchmark norm=custom norm._target_=...`: a norm in the shipped table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.cli import entry, parse_command, read_options, split_options
from normexp.config.rules import KEYS, OPTIONS, SLOT_KEYS, in_identity, is_read, suggest
from normexp.errors import UserError

if TYPE_CHECKING:
    from normexp.benchmark.table import Table, TableCell

FIXED = ("seed", "replicas", "study", "experiment", "cells")


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a failed training, 2, 130."""
    from normexp.benchmark.report import BenchmarkReport
    from normexp.benchmark.show import print_report
    from normexp.benchmark.table import read_table, shipped_path

    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    reference = read_table(shipped_path(options["reference"]))
    if not overrides:
        if options["workloads"]:
            raise UserError("workloads: nothing reads it without norm=...")
        print_report(BenchmarkReport(reference))
        return 0
    code, cells = _train(reference, overrides, options)
    if cells:
        print_report(BenchmarkReport(reference.with_entry(cells), cells[0].norm))
    return code


def _train(
    reference: Table, overrides: list[str], options: dict[str, Any]
) -> tuple[int, list[TableCell]]:
    """Trains the grid of each workload; exit code and cells, none of a dry run."""
    from normexp.benchmark.trainings import is_dry, norm_of_words, print_cost, train_grid

    name, workloads = _workloads_of(reference, options)
    command = parse_command(overrides)
    for word in command.overrides:
        key = word.partition("=")[0].lstrip("+~")
        if not is_read(key) and key not in FIXED:
            hint = suggest(key, ["norm", *OPTIONS["benchmark"], *KEYS]) or "see --help"
            raise UserError(f"{word}: unknown key; {hint}")
        if _is_frozen(key):
            raise UserError(f"{word}: frozen by the rules; an entry sets its norm and its slots")
    norm = norm_of_words(command.overrides, command.config_dirs)
    runs_dir = Path(options["runs_dir"])
    if is_dry(overrides):
        return print_cost(name, workloads, runs_dir, overrides), []
    code, cells = 0, []
    for workload in workloads:
        recipe = reference.recipes[workload]
        more, trained = train_grid(f"{name}/{workload}", recipe, runs_dir, overrides, norm.name)
        code, cells = max(code, more), [*cells, *trained]
    return code, cells


def _workloads_of(reference: Table, options: dict[str, Any]) -> tuple[str, list[str]]:
    """The benchmark's name, and the workloads to enter.

    Raises:
        UserError: other rules than those of the reference, or a workload that it lacks.
    """
    from normexp.benchmark.protocol import digest
    from normexp.benchmark.score import rank_all

    name = reference.about["benchmark"]
    if reference.about["rules"] != digest(name):
        raise UserError(
            f"the rules in conf/experiment/{name} are not those of the reference "
            f"({digest(name)}, {reference.about['rules']}); an entry takes them unchanged"
        )
    known = [one.recipe.name for one in rank_all(reference)]
    workloads = options["workloads"] or known
    for workload in workloads:
        if workload not in known:
            raise UserError(f"workloads={workload}: the reference has {', '.join(known)}")
    return name, workloads


def _is_frozen(key: str) -> bool:
    """True for a key that defines a training, or names its runs, and is no part of a norm."""
    if key in FIXED:
        return True
    return in_identity(key) and key.partition(".")[0] != "norm" and key not in SLOT_KEYS
