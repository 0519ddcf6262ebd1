"""`python -m normexp.benchmark [norm=X]`: the shipped study of runs, with your norm in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.cli import entry, parse_command, read_options, split_options
from normexp.config.keys import in_identity
from normexp.config.slots import SLOTS
from normexp.errors import UserError

if TYPE_CHECKING:
    from normexp.benchmark.reference import Reference
    from normexp.config.spec import CellSpec

FIXED = ("seed", "replicas", "study", "experiment")


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a failed training, 2, 130."""
    from normexp.benchmark.claims import claims_table, judge_claims
    from normexp.benchmark.reference import BENCHMARK, read_reference
    from normexp.reporting.page import write_report
    from normexp.reporting.report import report_on
    from normexp.reporting.terminal import print_report

    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    reference = read_reference(options["reference"])
    code, name, entry_runs = 0, reference.name, []
    if overrides:
        code, cells = _train(reference, overrides, options)
        entry_runs = reference.runs_of(cells)
        if not entry_runs:  # a dry run, or nothing but refusals
            return code
        name = f"{name}-{cells[0].choices['norm']}"
    records = reference.records_of(reference.workloads, entry_runs)
    report = report_on(records, Path(options["runs_dir"]), [name], at_largest=True)
    if name == BENCHMARK:
        report = replace(report, declared=[claims_table(judge_claims(reference))])
    write_report(report)
    print_report(report)
    print(f"report: {report.directory / 'index.html'}")
    return code


def _train(
    reference: Reference, overrides: list[str], options: dict[str, Any]
) -> tuple[int, list[CellSpec]]:
    """Trains what is missing of the grid of each workload; the exit code and the cells.

    Raises:
        UserError: not one norm, or a key that the rules fix.
    """
    from normexp.config.command import compose_cells
    from normexp.sweeps.sweep import run_cells

    for word in parse_command(overrides).overrides:
        key = word.partition("=")[0].lstrip("+~")
        is_of_norm = key.partition(".")[0] in ("norm", *SLOTS)
        if key in FIXED or (in_identity(key) and not is_of_norm):
            raise UserError(f"{word}: frozen by the rules; an entry sets its norm and its slots")
    studies: dict[tuple[str, ...], list[CellSpec]] = {}  # by the words that train them
    for workload in options["workloads"] or reference.workloads:
        if workload not in reference.workloads:
            known = ", ".join(reference.workloads)
            raise UserError(f"workloads={workload}: the reference has {known}")
        experiment = f"experiment={reference.name}/{workload}"
        words = (experiment, f"runs_dir={options['runs_dir']}", *overrides)
        studies[words] = compose_cells(parse_command(words))
    cells = [cell for known in studies.values() for cell in known]
    has_norm = any(word.startswith("norm=") for word in overrides)
    if not has_norm or len({cell.choices["norm"] for cell in cells}) > 1:
        raise UserError("an entry is one norm: norm=NAME, or norm=my_package.MyNorm")
    codes = [run_cells(own, ["normexp-benchmark", *words]) for words, own in studies.items()]
    return max(codes), cells
