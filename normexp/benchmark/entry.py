"""`python -m normexp.benchmark norm=custom norm._target_=...`: a norm among the reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.cli import entry, parse_command, read_options, split_options
from normexp.config.process import importing_torch
from normexp.config.rules import KEYS, OPTIONS, SLOT_KEYS, in_identity, is_read, suggest
from normexp.errors import FAILED, UserError

if TYPE_CHECKING:
    from normexp.benchmark.report import BenchmarkReport
    from normexp.benchmark.table import Table
    from normexp.checks.card import Card


FIXED = ("seed", "replicas", "study", "experiment", "cells")


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a broken contract, a failed training or what does not come again, 2, 130."""
    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    _refuse_contradiction(overrides, options)
    from normexp.benchmark.table import read_table, shipped_path

    if options["write"] is not None:
        _write_reference(Path(options["write"]), options)
        return 0
    reference = read_table(shipped_path(options["reference"]))
    if options["verify"] is not None:
        with importing_torch():
            from normexp.benchmark.verify import verify
        return verify(reference, overrides, options)
    if overrides:
        return _enter(reference, overrides, options)
    from normexp.benchmark.report import BenchmarkReport

    _publish(BenchmarkReport(reference), Path(options["runs_dir"]))
    return 0


def _refuse_contradiction(overrides: list[str], options: dict[str, Any]) -> None:
    """Raises UserError for words of two of the four commands: show, enter, verify, write."""
    from normexp.benchmark.trainings import is_of_norm

    wanted = [key for key in ("verify", "write", "submit") if options[key] is not None]
    if len(wanted) > 1:
        raise UserError(f"{wanted[0]} and {wanted[1]} are two commands; give one of them")
    if options["write"] is not None and overrides:
        raise UserError(f"{overrides[0]}: write=... trains nothing, and takes no such key")
    given = {key for key, value in options.items() if value is not None}
    if overrides:
        given.add("norm")
    for key, reader in (("salt", "verify"), ("first_seed", "write"), ("workloads", "norm")):
        if options[key] and reader not in given:
            raise UserError(f"{key}: nothing reads it without {reader}=...")
    if options["submit"] is not None and not overrides:
        raise UserError("submit: name the norm to enter, as norm=custom norm._target_=...")
    if options["verify"] is None:
        return
    for word in filter(is_of_norm, overrides):
        raise UserError(f"{word}: verify=... takes the norm of the submission; drop this word")
    for word in overrides:
        if _is_frozen(word.partition("=")[0].lstrip("+~")):
            raise UserError(f"{word}: frozen by the rules; verify=... takes keys such as workers=2")
    if options["salt"] is None:
        raise UserError("salt is missing: give a text that the author could not know, as salt=...")
    if not Path(options["verify"]).is_dir():
        raise UserError(f"verify={options['verify']}: no such folder")


def _write_reference(path: Path, options: dict[str, Any]) -> None:
    """Writes the runs of the reference as a table, with the cost of each norm."""
    from normexp.benchmark.protocol import BENCHMARK
    from normexp.benchmark.table import read_runs, read_table, write_table

    table = read_runs(Path(options["runs_dir"]), options["reference"], options["first_seed"])
    with importing_torch():
        from normexp.benchmark.cost import with_costs
    from normexp.benchmark.trainings import measure_traits

    table = with_costs(table, read_table(path) if path.is_file() else None)
    if options["reference"] == BENCHMARK:
        table = replace(table, traits=measure_traits(BENCHMARK))
    write_table(table, path)
    print(f"{len(table.cells)} cells: {path}")


def _publish(report: BenchmarkReport, runs_dir: Path) -> None:
    """Prints a report, and writes its page and report.json below the folder of the runs."""
    from normexp.benchmark.show import print_report

    print_report(report)
    try:
        from normexp.benchmark.page import write_page
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert"):
            raise
        print(f"\nnormexp: {error.name} is not installed: no page", file=sys.stderr)
        return
    name = report.table.about["benchmark"]
    if report.norm is not None:
        name += f"-{report.norm.replace(' ', '-')}"
    print(f"\nreport: {write_page(report, runs_dir / name / 'report')}")


# --- An entry ------------------------------------------------------------------------------------


def _enter(reference: Table, overrides: list[str], options: dict[str, Any]) -> int:
    """Contract, trainings of the protocol, cost, and where the norm stands."""
    from normexp.benchmark.report import BenchmarkReport
    from normexp.benchmark.table import Table
    from normexp.benchmark.trainings import (
        is_dry,
        is_of_norm,
        norm_of_words,
        print_cost,
        train_grid,
    )
    from normexp.config.spec import config_dir_words

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
    if options["submit"] is not None and command.config_dirs:
        raise UserError("submit: a submission names its class; use norm=custom norm._target_=...")
    with importing_torch():  # after mistakes are refused
        from normexp.benchmark.cost import machine, measure_costs
        from normexp.build import measure_norm
    card = measure_norm(norm, contract_only=True)
    if not _keeps_contract(card):
        return FAILED
    if is_dry(overrides):
        return print_cost(name, workloads, Path(options["runs_dir"]), overrides)
    code, cells = 0, []
    for workload in workloads:
        recipe = reference.recipes[workload]
        grid = (f"{name}/{workload}", recipe, Path(options["runs_dir"]), overrides, norm.name)
        code_of_grid, trained = train_grid(*grid)
        code, cells = max(code, code_of_grid), [*cells, *trained]
    if not cells:  # nothing but failures
        return code
    words = [word for word in overrides if is_of_norm(word)]
    norm_words = {norm.name: [*config_dir_words(command.config_dirs), *words]}
    costs = {
        workload: dict(measure_costs(name, workload, norm_words))
        for workload in dict.fromkeys(cell.recipe for cell in cells)
    }
    entered = Table({**reference.about, "machine": machine()}, tuple(cells), costs)
    if options["submit"] is not None:
        target = str(norm.values["_target_"])
        _submit(Path(options["submit"]), norm.name, words, target, entered, reference, card)
    _publish(
        BenchmarkReport(reference.with_entry(entered), norm.name),
        Path(options["runs_dir"]),
    )
    return code


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


def _keeps_contract(card: Card) -> bool:
    """Prints the card if it does not."""
    from normexp.checks.card import print_cards
    from normexp.reporting.terminal import open_console

    if card.failures:
        print_cards(open_console(), [card])
        return False
    print(f"{card.name}: the contract holds")
    return True


def _submit(
    folder: Path,
    norm: str,
    words: Sequence[str],
    target: str,
    entered: Table,
    reference: Table,
    card: Card,
) -> None:
    """Writes a submission; its report is that of the table as it is written there."""
    from normexp.benchmark.submission import CARD_FILE, REPORT_FILE, report_of, write_submission
    from normexp.checks.card import as_json
    from normexp.records.files import write_json, write_text

    submission = write_submission(folder, norm, words, target, entered)
    write_text(folder / CARD_FILE, as_json([card]) + "\n")
    write_json(folder / REPORT_FILE, report_of(submission, reference))
    print(f"submission: {folder}")
