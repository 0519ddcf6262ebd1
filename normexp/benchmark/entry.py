"""`python -m normexp.benchmark norm=custom norm._target_=...`: a norm among the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.benchmark.protocol import BENCHMARK
from normexp.cli import entry, parse_command, read_options, split_options
from normexp.config.rules import SLOT_KEYS, in_identity
from normexp.errors import FAILED, UserError

if TYPE_CHECKING:
    from normexp.benchmark.table import Table


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a broken contract or a failed training, 2 the user's mistake, 130 stopped."""
    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    from normexp.benchmark.table import read_runs, read_table, shipped_path, write_table

    if options["write"] is not None:
        table = read_runs(Path(options["runs_dir"]), options["reference"])
        write_table(table, Path(options["write"]))
        print(f"{len(table.cells)} cells: {options['write']}")
        return 0
    reference = read_table(shipped_path(options["reference"]))
    if not overrides:
        print_reference(reference)
        return 0
    return _enter(reference, overrides, options)


def print_reference(table: Table) -> None:
    """Ranking, sensitivity and claims of a table; trains nothing."""
    from normexp.benchmark.claims import judge
    from normexp.benchmark.score import rank
    from normexp.benchmark.show import print_claims, print_standings

    about = table.about
    print(f"{about['benchmark']}, rules {about['rules']}, code {', '.join(about['commits'])}")
    standings = [rank(table, name) for name in table.recipes]
    print_standings([one for one in standings if one is not None])
    if table.about["benchmark"] == BENCHMARK:
        print_claims(judge(table))


def _enter(reference: Table, overrides: list[str], options: dict[str, Any]) -> int:
    """Contract, trainings of the protocol, and where the norm stands."""
    from normexp.benchmark.protocol import digest
    from normexp.benchmark.score import rank_all
    from normexp.config.grid import compose_cells, compose_norms

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
    norm_words = [word for word in overrides if word.lstrip("+").startswith(("norm=", "norm."))]
    for word in overrides:
        if _is_frozen(word.partition("=")[0].lstrip("+~")):
            raise UserError(f"{word}: frozen by the rules; an entry sets its norm and its slots")
    (norm,) = compose_norms(parse_command(norm_words))
    if not _keeps_contract(norm):
        return FAILED
    from normexp.sweeps.sweep import run_cells

    code = 0
    for workload in workloads:
        words = [f"experiment={name}/{workload}", f"runs_dir={options['runs_dir']}", *overrides]
        code = max(code, run_cells(compose_cells(parse_command(words)), ["benchmark", *words]))
    if "dry_run=true" in overrides:
        return code
    _print_standing(reference, norm.name.partition(" ")[0], options)
    return code


def _is_frozen(key: str) -> bool:
    """True for a key that defines a training, or names its runs, and is no part of a norm."""
    if key in ("seed", "replicas", "study", "experiment", "cells"):
        return True
    return in_identity(key) and key.partition(".")[0] != "norm" and key not in SLOT_KEYS


def _keeps_contract(norm: Any) -> bool:
    """Whether a norm keeps the contract; prints its card if not."""
    from normexp.batching.speed import suitable_threads
    from normexp.build import norm_target
    from normexp.checks.card import measure_card, print_cards
    from normexp.norms.slots import resolve
    from normexp.reporting.terminal import open_console

    target, reserved = norm_target(norm.config)
    with suitable_threads(0):
        card = measure_card(
            target.call,
            name=norm.name,
            target=target.path,
            eps=norm.config.eps,
            slots=resolve({}, reserved),
            contract_only=True,
        )
    if card.failures:
        print_cards(open_console(), [card])
        return False
    print(f"{norm.name}: the contract holds")
    return True


def _print_standing(reference: Table, norm: str, options: dict[str, Any]) -> None:
    from normexp.benchmark.claims import judge
    from normexp.benchmark.score import rank_all
    from normexp.benchmark.show import as_json, print_standings, standing_words
    from normexp.benchmark.table import Table, read_runs
    from normexp.records.files import write_json

    runs = read_runs(Path(options["runs_dir"]), reference.about["benchmark"])
    entered = [cell for cell in runs.cells if cell.norm == norm]
    others = tuple(cell for cell in reference.cells if cell.norm != norm)
    table = Table(reference.about, others).with_cells(entered)
    standings = [one for one in rank_all(table) if one.of(norm) is not None]
    print_standings(standings)
    print(f"\n{standing_words(standings, norm)}")
    path = Path(options["runs_dir"], f"{options['reference']}-{norm}.json")
    write_json(path, as_json(table, standings, judge(table)))
    print(f"as JSON: {path}")
