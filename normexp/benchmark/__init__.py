"""`python -m normexp.benchmark [norm=X]`: the shipped study of runs, with your norm in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.cli import entry, parse_command, read_options, split_options
from normexp.errors import UserError
from normexp.training.config.keys import in_identity

if TYPE_CHECKING:
    from normexp.benchmark.reference import Reference
    from normexp.training.config.spec import CellSpec
    from normexp.verdicts.rows import Row

FIXED = ("seed", "replicas", "study", "experiment")


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a failed training, 2, 130."""
    from normexp.benchmark.claims import claims_table, judge_claims
    from normexp.benchmark.reference import BENCHMARK, read_reference
    from normexp.training.studies.report import describe_norm
    from normexp.verdicts.page import write_report
    from normexp.verdicts.report import report_on
    from normexp.verdicts.terminal import print_report

    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    if overrides:
        _check_rules(overrides)
    reference = read_reference(options["reference"])
    name, exit_code = reference.name, 0
    entry_runs: list[Row] = []
    if overrides:
        exit_code, cells = _train(reference, overrides, options)
        entry_runs = reference.runs_of(cells)
        if not entry_runs:  # a dry run, or nothing but refusals
            return exit_code
        name = f"{name}-{cells[0].choices['norm']}"
    rows = reference.rows_of(reference.workloads, entry_runs)
    runs_dir = Path(options["runs_dir"])
    report = report_on(rows, runs_dir, [name], at_largest=True, describe_norm=describe_norm)
    if name == BENCHMARK:
        report = replace(report, declared=[claims_table(judge_claims(reference))])
    write_report(report)
    print_report(report)
    print(f"report: {report.directory / 'index.html'}")
    return exit_code


def _check_rules(overrides: list[str]) -> None:
    """Raises UserError for words that do not choose one norm, or set a key that the rules fix."""
    from normexp.verdicts.settings import Roles

    norms = []
    for override in parse_command(overrides).overrides:
        key, word = override.key_or_group, override.input_line
        if key in FIXED or (in_identity(key) and not Roles().is_of_arm(key)):
            raise UserError(f"{word}: frozen by the rules; an entry sets its norm and its slots")
        if key == "norm":
            norms.append(override)
    if len(norms) != 1 or norms[0].is_sweep_override():
        raise UserError("an entry is one norm: norm=NAME, or norm=my_package.MyNorm")


def _train(
    reference: Reference, overrides: list[str], options: dict[str, Any]
) -> tuple[int, list[CellSpec]]:
    """Trains what is missing of the grid of each workload; the exit code and the cells.

    Raises:
        UserError: a workload that the reference lacks.
    """
    from normexp.training.config.command import compose_cells
    from normexp.training.sweeps.sweep import run_cells

    commands: list[tuple[str, ...]] = []
    for workload in options["workloads"] or reference.workloads:
        if workload not in reference.workloads:
            names = ", ".join(reference.workloads)
            raise UserError(f"workloads={workload}: the reference has {names}")
        experiment = f"experiment={reference.name}/{workload}"
        commands.append((experiment, f"runs_dir={options['runs_dir']}", *overrides))
    specs = {words: compose_cells(parse_command(words)) for words in commands}
    cells = [cell for of_command in specs.values() for cell in of_command]
    exit_codes = [
        run_cells(of_command, ["normexp-benchmark", *words]) for words, of_command in specs.items()
    ]
    return max(exit_codes), cells
