"""`python -m normexp.benchmark [norm=X]`: the shipped table of runs, with your norm in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.cli import entry, parse_command, read_options, split_options
from normexp.config.schema import in_identity
from normexp.errors import UserError
from normexp.norms.slots import SLOTS

if TYPE_CHECKING:
    from normexp.benchmark.table import Table, TableCell

FIXED = ("seed", "replicas", "study", "experiment")


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a failed training, 2, 130."""
    from normexp.benchmark.claims import claims_table, judge_claims
    from normexp.benchmark.table import BENCHMARK, WORKLOADS, read_table, shipped_path
    from normexp.reporting.page import write_report
    from normexp.reporting.report import report_on
    from normexp.reporting.terminal import print_report

    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    table, code = read_table(shipped_path(options["reference"])), 0
    name = table.about["benchmark"]
    if overrides:
        code, cells = _train(table, overrides, options)
        if not cells:  # a dry run, or nothing but failures
            return code
        table, name = table.with_entry(cells), f"{name}-{cells[0].norm}"
    runs_dir = Path(options["runs_dir"])
    report = report_on(table.records(WORKLOADS), runs_dir, [name], at_largest=True)
    if name == BENCHMARK:
        report = replace(report, declared=[claims_table(judge_claims(table))])
    write_report(report)
    print_report(report)
    print(f"report: {report.directory / 'index.html'}")
    return code


def _train(
    table: Table, overrides: list[str], options: dict[str, Any]
) -> tuple[int, list[TableCell]]:
    """Trains what is missing of the grid of each workload; the exit code and the cells.

    Raises:
        UserError: not one norm, a key that the rules fix, or runs that are INVALID.
    """
    from normexp.benchmark.table import WORKLOADS, cells_below, digest, recipes
    from normexp.config.cells import compose_cells
    from normexp.sweeps.sweep import run_cells

    benchmark, runs_dir = table.about["benchmark"], Path(options["runs_dir"])
    if table.about["rules"] != digest(benchmark):
        raise UserError(f"conf/experiment/{benchmark} is not what the table was trained with")
    for word in parse_command(overrides).overrides:
        key = word.partition("=")[0].lstrip("+~")
        is_of_norm = key.partition(".")[0] in ("norm", *SLOTS)
        if key in FIXED or (in_identity(key) and not is_of_norm):
            raise UserError(f"{word}: frozen by the rules; an entry sets its norm and its slots")
    if len([word for word in overrides if word.startswith("norm=") and "," not in word]) != 1:
        raise UserError("an entry is one norm: norm=NAME, or norm=my_package.MyNorm")
    known = [name for name in WORKLOADS if name in {cell.recipe for cell in table.cells}]
    code, entered = 0, []
    for workload in options["workloads"] or known:
        if workload not in known:
            raise UserError(f"workloads={workload}: the table has {', '.join(known)}")
        words = [f"experiment={benchmark}/{workload}", f"runs_dir={runs_dir}", *overrides]
        cells = compose_cells(parse_command(words))
        code = max(code, run_cells(cells, ["normexp-benchmark", *words]))
        ids = {cell.id for cell in cells}
        recipe = recipes(benchmark)[workload]
        entered += [one for one in cells_below(runs_dir, [recipe]) if one.about["id"] in ids]
    return code, entered
