"""Confirms the best tries of a study: trains them and the baseline on unused seeds, and reports."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normexp.errors import FAILED, UserError
from normexp.training.cells.stack import has_ended
from normexp.training.config.choices import parse_overrides
from normexp.training.config.command import study_words
from normexp.training.config.recorded import recorded_spec
from normexp.training.config.spec import CellSpec
from normexp.training.records.journal import (
    CommandEntry,
    ConfirmRequest,
    confirmations_of,
    read_entries,
)
from normexp.training.records.layout import (
    CONFIRM_LOCK,
    find_study,
    list_cells,
    list_seeds,
    search_dir,
)
from normexp.training.records.locks import file_lock, holder_of
from normexp.training.records.result import Result, Status
from normexp.training.records.study import CellState, read_study
from normexp.training.studies.report import publish_report, read_report
from normexp.training.studies.rows import read_studies
from normexp.training.studies.terminal import print_closing_table
from normexp.training.sweeps.sweep import raise_if_stopped, run_cells, train_cells
from normexp.verdicts.arms import label_cells
from normexp.verdicts.cells import build_cells
from normexp.verdicts.loops import Contest, alpha_of, loop_of, metric_of, rank_tries, why_left_out
from normexp.words import format_count


def confirm(options: Mapping[str, Any], words: Sequence[str]) -> int:
    """Trains what a confirmation lacks and prints the report of its study; returns the exit code.

    options: of the entry

    Raises: as `train_finalists`
    """
    if options["dry_run"]:
        _, specs = _prepare(_folder_of(options), options)
        return run_cells(specs, words)
    trained = train_finalists(options, words)
    has_failed = any(state.status in ("failed", "refused") for state in trained)
    if has_failed:
        print_closing_table(trained)
    publish_report(read_report(Path(options["runs_dir"]), [options["study"]]))
    return FAILED if has_failed else 0


def train_finalists(options: Mapping[str, Any], words: Sequence[str]) -> list[CellState]:
    """Trains what a confirmation lacks.

    options: of the entry

    Raises:
        UserError: no such study or baseline, too few tries, a try that has changed since, or
            another process that confirms this study.
        Halted, KeyboardInterrupt: as `train_cells`.
    """
    study_dir = _folder_of(options)
    # Two confirmations at once would both take the same seeds for unused.
    path = study_dir / CONFIRM_LOCK
    with file_lock(path) as is_alone:
        if not is_alone:
            holder = holder_of(path) or "another process"
            raise UserError(f"study={study_dir.name} is being confirmed by {holder}")
        confirms, specs = _prepare(study_dir, options)
        trained = train_cells(specs, words, confirms=confirms)
        raise_if_stopped(specs, trained)
        return trained


def _folder_of(options: Mapping[str, Any]) -> Path:
    study_dir = find_study(Path(options["runs_dir"]), options["study"])
    if study_dir.is_file():
        raise UserError(f"study={study_dir.stem} was shipped; confirm a study of your own")
    return study_dir


def _prepare(study_dir: Path, options: Mapping[str, Any]) -> tuple[ConfirmRequest, list[CellSpec]]:
    """The confirmation that is due, unfinished or new, and its cells; prints what it compares."""
    cells = label_cells(build_cells(read_studies(study_dir.parent, [study_dir.name])))
    loop = loop_of(cells, options["baseline"])
    earlier = confirmations_of(read_entries(study_dir))
    confirms = _unfinished(study_dir, earlier, loop, options)
    if confirms is None:
        confirms = _plan(study_dir, loop, options)
    states = read_study(study_dir).cells
    _refuse_without_runs(confirms, states, study_dir)
    specs = [_spec_of(states[cell], confirms.seeds, options) for cell in confirms.cells]
    number = [*earlier, confirms].index(confirms) + 1
    print(_words(confirms, number, loop))
    return confirms, specs


def _words(confirms: ConfirmRequest, number: int, loop: Contest) -> str:
    names = {cell.directory.name: cell.arm for cell in loop.cells}
    finalists = ", ".join(names.get(cell, cell) for cell in confirms.finalists)
    seeds = f"seeds {confirms.seeds[0]} to {confirms.seeds[-1]}"
    alpha = f"{100 * alpha_of(number):.1f} %"
    return (
        f"confirmation {number}: {finalists} against {loop.baseline.arm}, {seeds}; "
        f"it spends {alpha}"
    )


# --- What is confirmed ----------------------------------------------------------------------------


def _unfinished(
    study_dir: Path, earlier: Sequence[ConfirmRequest], loop: Contest, options: Mapping[str, Any]
) -> ConfirmRequest | None:
    """The last confirmation, if it lacks runs and these options ask for it again."""
    if not earlier:
        return None
    last = earlier[-1]
    runs = [(cell, seed) for cell in last.cells for seed in last.seeds]
    has_all = all(has_ended(study_dir, *run) for run in runs)
    return None if has_all or not _is_same_request(last, loop, options) else last


def _is_same_request(confirms: ConfirmRequest, loop: Contest, options: Mapping[str, Any]) -> bool:
    sizes = (len(confirms.finalists), len(confirms.seeds))
    is_same = confirms.baseline == loop.baseline.directory.name
    return is_same and sizes == (options["best"], options["replicas"])


def _plan(study_dir: Path, loop: Contest, options: Mapping[str, Any]) -> ConfirmRequest:
    """The best tries, on unused seeds; if they were confirmed before, that confirmation.

    Says which tries are left out.

    Raises:
        UserError: fewer tries than asked for.
    """
    metric = metric_of(loop, None, None)
    ranked = rank_tries(loop, metric) if metric else []
    for name, why in why_left_out(loop, metric).items() if metric else ():
        print(f"left out: {name} ({why})")
    baseline, best = loop.baseline.directory.name, options["best"]
    if len(ranked) < best:
        measured = f" and {metric.name}" if metric else ""
        raise UserError(
            f"best={best}: besides its baseline, {baseline}, study={study_dir.name} has "
            f"{format_count(len(ranked), 'cell')} with all runs{measured}"
        )
    finalists = [cell.directory.name for cell in ranked[:best]]
    for confirms in confirmations_of(read_entries(study_dir)):
        if _is_same_request(confirms, loop, options) and {*confirms.finalists} == {*finalists}:
            return confirms
    first = 1 + max(_used_seeds(study_dir))
    return ConfirmRequest(baseline, finalists, [*range(first, first + options["replicas"])])


def _used_seeds(study_dir: Path) -> set[int]:
    """Every seed that a study, or its search, has trained or asked for."""
    used: set[int] = set()
    for folder in (study_dir, search_dir(study_dir)):
        for entry in read_entries(folder):
            if isinstance(entry, CommandEntry):
                used.update(seed for request in entry.cells.values() for seed in request.seeds)
        used.update(seed for cell in list_cells(folder) for seed in list_seeds(cell))
    return used


def _refuse_without_runs(
    confirms: ConfirmRequest, states: Mapping[str, CellState], study_dir: Path
) -> None:
    """Raises UserError if a cell has no ended run, whose config tells how to train it."""
    for cell in confirms.cells:
        state = states.get(cell)
        if state and _ended(state):
            continue
        remedy = "confirm others, with another baseline=, best= or replicas="
        asked = None if state is None or state.refused else state.request
        seeds = sorted({*asked.seeds} - {*confirms.seeds}) if asked else []
        if asked and asked.words and seeds:
            of_seeds = [f"seed={seeds[0]}", f"replicas={len(seeds)}"]
            again = shlex.join([*asked.words, *study_words(study_dir), *of_seeds])
            remedy = f"train it: python -m normexp.train {again}; or {remedy}"
        raise UserError(f"{cell}: no run of it has ended, so it cannot be confirmed; {remedy}")


def _ended(state: CellState) -> list[Result]:
    return [result for result in state.results if result.status is not Status.FAILED]


def _spec_of(state: CellState, seeds: Sequence[int], options: Mapping[str, Any]) -> CellSpec:
    """The cell of a try as it was trained, with other seeds.

    Raises:
        UserError: its code or its files have changed since.
    """
    folder = state.directory.parent
    changes = {"study": folder.name, "runs_dir": str(folder.parent), "fail_fast": False}
    changes |= {"seed": seeds[0], "replicas": len(seeds)}
    changes |= {key: options[key] for key in ("workers", "dry_run")}
    spec = recorded_spec(state.directory, _ended(state)[0], changes)
    spec = replace(spec, overrides=parse_overrides(state.request.words))
    if spec.id != state.id:
        raise UserError(
            f"{state.id}: its code or its files have changed since it was tried, and its config "
            f"now means {spec.id}; restore them, or try it again"
        )
    return spec
