"""`python -m normexp.benchmark norm=custom norm._target_=...`: a norm among the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.benchmark.protocol import BENCHMARK
from normexp.cli import entry, parse_command, read_options, split_options
from normexp.config.rules import SLOT_KEYS, in_identity
from normexp.errors import FAILED, UserError

if TYPE_CHECKING:
    from normexp.benchmark.table import Table, TableCell
    from normexp.config.spec import NormSpec


@entry("benchmark")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 a broken contract, a failed training or what does not come again, 2, 130."""
    option_words, overrides = split_options("benchmark", words)
    options = read_options("benchmark", option_words)
    from normexp.benchmark.table import read_runs, read_table, shipped_path, write_table

    if options["write"] is not None:
        table = read_runs(Path(options["runs_dir"]), options["reference"], options["first_seed"])
        write_table(table, Path(options["write"]))
        print(f"{len(table.cells)} cells: {options['write']}")
        return 0
    reference = read_table(shipped_path(options["reference"]))
    if options["verify"] is not None:
        return _verify(reference, overrides, options)
    if overrides:
        return _enter(reference, overrides, options)
    print_reference(reference)
    return 0


def print_reference(table: Table) -> None:
    """Ranking, sensitivity and claims of a table; trains nothing."""
    from normexp.benchmark.claims import judge
    from normexp.benchmark.score import rank
    from normexp.benchmark.show import print_claims, print_standings

    about = table.about
    print(f"{about['benchmark']}, rules {about['rules']}, code {', '.join(about['commits'])}")
    standings = [rank(table, name) for name in table.recipes]
    print_standings([one for one in standings if one is not None])
    if about["benchmark"] == BENCHMARK:
        print_claims(judge(table))


# --- An entry ------------------------------------------------------------------------------------


def _enter(reference: Table, overrides: list[str], options: dict[str, Any]) -> int:
    """Contract, trainings of the protocol, and where the norm stands."""
    from normexp.benchmark.protocol import digest
    from normexp.benchmark.score import rank_all
    from normexp.config.grid import compose_norms
    from normexp.config.spec import Command

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
    command = parse_command(overrides)
    for word in command.overrides:
        if _is_frozen(word.partition("=")[0].lstrip("+~")):
            raise UserError(f"{word}: frozen by the rules; an entry sets its norm and its slots")
    of_norm = [w for w in command.overrides if w.lstrip("+").startswith(("norm=", "norm."))]
    of_card = [word for word in of_norm if "norm.view=" not in word]  # a card has (N, C, *)
    norms = compose_norms(Command(of_card, config_dirs=command.config_dirs))
    if len(norms) != 1 or not any(word.startswith("norm=") for word in of_norm):
        raise UserError(
            "an entry is one norm: norm=NAME, or norm=custom norm._target_=my_file.MyNorm"
        )
    if options["submit"] is not None and command.config_dirs:
        raise UserError("submit: a submission names its class; use norm=custom norm._target_=...")
    norm = norms[0]
    card = _measure(norm)
    if not _keeps_contract(norm, card):
        return FAILED
    if "dry_run=true" in overrides:
        _print_cost(reference, workloads)
    code, entered = _train(name, workloads, Path(options["runs_dir"]), overrides, norm.name)
    if entered:
        content = _print_standing(reference, norm.name, entered, options)
        if options["submit"] is not None:
            _submit(Path(options["submit"]), norm, overrides, entered, reference, card, content)
    return code


def _train(
    benchmark: str, workloads: Sequence[str], runs_dir: Path, overrides: Sequence[str], label: str
) -> tuple[int, list[TableCell]]:
    """Trains what is missing of each workload; returns the exit code and the norm's own cells."""
    from normexp.benchmark.table import read_runs
    from normexp.config.grid import compose_cells
    from normexp.sweeps.sweep import print_outcomes, train_cells

    code, ids = 0, set[str]()
    for workload in workloads:
        words = [f"experiment={benchmark}/{workload}", f"runs_dir={runs_dir}", *overrides]
        cells = compose_cells(parse_command(words))
        outcomes = train_cells(cells, ["normexp-benchmark", *words])
        code = max(code, print_outcomes(cells, outcomes, words))
        results = [result for outcome in outcomes for result in outcome.results]
        if invalid := next((result.invalid for result in results if result.invalid), None):
            raise UserError(f"{label} cannot stand in the table, its runs are INVALID: {invalid}")
        ids |= {result.cell_id for result in results}
    if not ids:  # a dry run, or nothing but failures
        return code, []
    table = read_runs(runs_dir, benchmark)
    return code, [replace(cell, norm=label) for cell in table.cells if cell.about["id"] in ids]


def _print_cost(table: Table, workloads: Sequence[str]) -> None:
    """What a run took where the table was made."""
    for workload in workloads:
        known = table.recipes[workload]
        cells = table.rates_of(workload, known.reference)
        seconds = sum(cell.about["seconds"] for cell in cells) / len(cells)
        runs = known.num_seeds * len(known.rates)
        sizes = " and ".join(map(str, known.norm_batch_sizes))
        print(f"{workload}: {runs} runs at norm batch {sizes} each, or once if samples do not mix;")
        print(f"  with {known.reference}, one took {seconds:.1f} s of a busy core")


def _is_frozen(key: str) -> bool:
    """True for a key that defines a training, or names its runs, and is no part of a norm."""
    if key in ("seed", "replicas", "study", "experiment", "cells"):
        return True
    return in_identity(key) and key.partition(".")[0] != "norm" and key not in SLOT_KEYS


def _measure(norm: NormSpec) -> Any:
    """The contract of a norm, as a card."""
    from normexp.batching.speed import suitable_threads
    from normexp.build import norm_target
    from normexp.checks.card import measure_card
    from normexp.norms.slots import resolve

    target, reserved = norm_target(norm)
    with suitable_threads(0):
        return measure_card(
            target.call,
            name=norm.name,
            target=target.path,
            eps=norm.eps,
            slots=resolve({}, reserved),
            contract_only=True,
        )


def _keeps_contract(norm: NormSpec, card: Any) -> bool:
    """Prints the card if it does not."""
    from normexp.checks.card import print_cards
    from normexp.reporting.terminal import open_console

    if card.failures:
        print_cards(open_console(), [card])
        return False
    print(f"{norm.name}: the contract holds")
    return True


def _print_standing(
    reference: Table, norm: str, entered: Sequence[TableCell], options: dict[str, Any]
) -> dict[str, Any]:
    """Prints the ranking with an entry, and returns it as plain values."""
    from normexp.benchmark.claims import judge
    from normexp.benchmark.score import rank_all
    from normexp.benchmark.show import as_json, print_standings, standing_words
    from normexp.benchmark.table import Table
    from normexp.records.files import write_json

    others = tuple(cell for cell in reference.cells if cell.norm != norm)
    table = Table(reference.about, others).with_cells(entered)
    standings = [one for one in rank_all(table) if one.of(norm) is not None]
    print_standings(standings)
    print(f"\n{standing_words(standings, norm)}")
    claims = judge(table) if table.about["benchmark"] == BENCHMARK else []
    content = as_json(table, standings, claims)
    path = Path(
        options["runs_dir"], f"{reference.about['benchmark']}-{norm.replace(' ', '-')}.json"
    )
    write_json(path, content)
    print(f"as JSON: {path}")
    return content


def _submit(
    folder: Path,
    norm: NormSpec,
    overrides: Sequence[str],
    entered: Sequence[TableCell],
    reference: Table,
    card: Any,
    content: dict[str, Any],
) -> None:
    from normexp.benchmark.submission import write_submission
    from normexp.checks.card import as_json
    from normexp.records.files import write_json, write_text

    words = [word for word in overrides if _is_of_norm(word)]
    target = str(norm.values["_target_"])
    about = dict(reference.about)
    write_submission(folder, norm.name, words, target, entered, about)
    write_text(folder / "card.json", as_json([card]) + "\n")
    write_json(folder / "report.json", content)
    print(f"submission: {folder}")


def _is_of_norm(word: str) -> bool:
    key = word.partition("=")[0].lstrip("+")
    return key.partition(".")[0] == "norm" or key in SLOT_KEYS


# --- Verification --------------------------------------------------------------------------------


def _verify(reference: Table, overrides: list[str], options: dict[str, Any]) -> int:
    """Trains a canary and all runs of one workload of a submission again; lists what differs.

    Words that are left, such as workers=2, go to the trainings. It runs submitted code.
    """
    from normexp.benchmark.submission import choose, differences, read_submission, source_on_path

    if options["salt"] is None:
        raise UserError("salt is missing: give a text that the author could not know, as salt=...")
    submission, problems = read_submission(Path(options["verify"]))
    for word in submission.words:
        if not _is_of_norm(word):
            raise UserError(f"verify: {word} is no word of a norm, and an entry sets nothing else")
    unknown = [
        name
        for name in submission.workloads
        if name not in reference.recipes
        or not reference.rates_of(name, reference.recipes[name].reference)
    ]
    if unknown or not submission.workloads:
        names = ", ".join(unknown) or "no runs"
        raise UserError(f"verify: the reference has no complete runs for it: {names}")
    if submission.benchmark != reference.about["benchmark"]:
        raise UserError(f"verify: made for {submission.benchmark}; give reference=...")
    if problems:
        return _verdict(submission.norm, problems)
    workload = choose(options["salt"], submission)
    runs_dir = Path(options["runs_dir"])
    known = reference.recipes[workload]
    grid = reference.rates_of(workload, known.reference)
    canary = grid[len(grid) // 2]
    first = [f"norm={known.reference}", f"lr={canary.lr:g}", "norm_batch_size=null"]
    first += ["replicas=1", *overrides]
    _, again = _train(submission.benchmark, [workload], runs_dir, first, known.reference)
    problems = [f"canary: {problem}" for problem in differences([canary], again)]
    if problems:
        print("This machine or this code does not repeat the reference; nothing else was trained.")
        return _verdict(submission.norm, problems)
    claimed = [cell for cell in submission.table.cells if cell.recipe == workload]
    with source_on_path(submission):
        words = [*submission.words, *overrides]
        _, again = _train(submission.benchmark, [workload], runs_dir, words, submission.norm)
    print(f"trained again: {workload}, {len(claimed)} cells")
    return _verdict(submission.norm, differences(claimed, again))


def _verdict(norm: str, problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"  {problem}")
    print(f"{norm}: {'not verified' if problems else 'verified'}")
    return FAILED if problems else 0
