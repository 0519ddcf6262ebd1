"""Reads studies as rows for verdicts: their ended runs, and what their commands asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from normexp.errors import UserError
from normexp.training.records.archive import Archive
from normexp.training.records.journal import (
    CommandEntry,
    Entry,
    Request,
    confirmations_of,
    read_entries,
)
from normexp.training.records.layout import (
    METRICS_FILE,
    PICTURE_FILE,
    RESULT_FILE,
    find_study,
    search_dir,
    seed_dir,
)
from normexp.training.records.metrics import read_metrics
from normexp.training.records.result import (
    PLACES,
    Result,
    first_spellings,
    flatten,
    places_of,
    read_evaluation,
)
from normexp.training.records.samples import read_samples
from normexp.training.records.study import read_study
from normexp.verdicts.rows import (
    Config,
    Confirmation,
    PlannedCell,
    Point,
    RefusedCell,
    Row,
    Rows,
    SearchRecord,
    comparable,
)
from normexp.words import format_count


def read_studies(runs_dir: Path, names: Sequence[str]) -> Rows:
    """The rows of studies, finished or still running.

    Raises:
        UserError: a study that does not exist, or that has no ended run.
    """
    rows = Rows()
    for name in names:
        root = find_study(runs_dir, name)
        if root.is_file():
            add_archive(rows, Archive(root))
        else:
            _add_folder(rows, name, root)
    return rows


def _add_folder(rows: Rows, name: str, root: Path) -> None:
    """Adds the ended runs of a folder, and what was asked of it."""
    study, runs, problems = read_study(root), [], []
    for _, cell in sorted(study.cells.items()):
        problems += cell.problems
        for result in cell.results:
            try:
                runs.append(row_of_folder(name, seed_dir(cell.directory, result.seed), result))
            except UserError as error:
                problems.append(str(error))
    ended = {run.directory.parent for run in runs}
    for cell in study.cells.values():
        if cell.directory in ended or cell.refused:
            continue
        asked = cell.request
        if asked.settings:
            planned = PlannedCell(
                name, cell.id, cell.directory, [*cell.states], asked.settings, asked.defaults
            )
            rows.planned.append(planned)
        if cell.directory.is_dir() and not (asked.settings and runs):
            begun = format_count(len(cell.states), "run")
            problems.append(f"{cell.id}: {begun} begun, none ended")
    refused = [RefusedCell(refusal.title, refusal.error) for refusal in study.refusals.values()]
    problems = list(dict.fromkeys(problems))  # all runs of an old schema give the same line
    if not runs:
        reasons = [*problems, *(f"refused: {cell.error}" for cell in refused)]
        if not reasons:
            raise UserError(
                f"study={name} is empty: {root} has no runs; train one with study={name}"
            )
        raise UserError(f"study={name} has no readable result; the first problem: {reasons[0]}")
    rows.runs += runs
    rows.refused += refused
    rows.problems += problems
    _add_commands(rows, name, study.commands, read_entries(search_dir(root)))


def add_archive(rows: Rows, archive: Archive) -> None:
    """Adds a study that ships as a zip."""
    folder, study = archive.path.with_suffix(""), archive.path.stem
    for result in archive.results():
        run_dir = seed_dir(folder / result.cell_id, result.seed)
        load_samples = partial(archive.samples, result.cell_id, result.seed)
        rows.runs.append(row_of(study, run_dir, result, result.metrics, load_samples))
    _add_commands(rows, study, archive.entries, archive.search_entries)


def row_of_folder(study: str, run_dir: Path, result: Result) -> Row:
    """The row of a run whose files are in a folder. Raises UserError for a result without sizes."""
    if not isinstance(result.settings.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no batch_size; was it edited by hand?")
    metrics = {**read_evaluation(run_dir), **result.metrics}  # the training's take precedence
    return row_of(study, run_dir, result, metrics, partial(read_samples, run_dir))


def row_of(
    study: str,
    run_dir: Path,
    result: Result,
    metrics: Mapping[str, float],
    load_samples: Callable[[], Mapping[str, np.ndarray]] = dict,
) -> Row:
    """The row of a result. metrics: also those of later evaluations"""
    measured = asdict(result.measured)
    del measured["metrics"]
    return Row(
        study=study,
        cell_id=result.cell_id,
        seed=result.seed,
        status=result.status,
        config=result.settings,
        metrics=metrics,
        defaults=result.values,
        typed=flatten(result.defines),
        measured=flatten(measured),
        directory=run_dir,
        error=result.error,
        load_samples=load_samples,
        load_history=partial(read_metrics, run_dir / METRICS_FILE),
        load_picture=partial(_read_picture, run_dir / PICTURE_FILE),
    )


def _read_picture(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


# --- What was asked for --------------------------------------------------------------------------


def _add_commands(
    rows: Rows, study: str, entries: Iterable[Entry], search_entries: Iterable[Entry]
) -> None:
    """Adds what the commands of a study asked for. search_entries: lines of NAME-search."""
    commands = [entry for entry in entries if isinstance(entry, CommandEntry)]
    confirmed: dict[str, set[int]] = defaultdict(set)  # by cell, the seeds of all confirmations
    for number, found in enumerate(confirmations_of(commands), start=1):
        finalists, seeds = tuple(found.finalists), frozenset(found.seeds)
        rows.confirmations.append(Confirmation(study, number, found.baseline, finalists, seeds))
        for cell in found.cells:
            confirmed[cell] |= seeds
    for number, command in enumerate(commands):
        for cell, asked in command.cells.items():
            if seeds := sorted({*asked.seeds} - confirmed[cell]):
                rows.asked.setdefault((study, cell), []).append(seeds)
                rows.commands.setdefault((study, cell), number)
    trials = [entry for entry in search_entries if isinstance(entry, CommandEntry)]
    if not trials and study.endswith("-search"):  # its own cells are points of a search
        return
    for command in commands:
        if command.searched:
            for cell, search in _searches_of(command, trials).items():
                rows.searches[study, cell] = search


def _searches_of(command: CommandEntry, trials: Sequence[CommandEntry]) -> dict[str, SearchRecord]:
    """The search that chose each cell of a command. trials: the commands of NAME-search."""

    def shared_words(request: Request) -> tuple[str, ...]:
        """The words that all points of its search share."""
        searched = tuple(f"{key}=" for key in command.searched)
        return tuple(word for word in request.words if not word.startswith(searched))

    keys = [key.lstrip("+") for key in command.searched]
    points: dict[tuple[str, ...], set[Point]] = defaultdict(set)
    for trial in trials:
        if trial.command == command.command:
            for request in trial.cells.values():
                values = tuple((key, comparable(request.values.get(key))) for key in keys)
                point = Point(values, tuple(sorted({*request.seeds})))
                points[shared_words(request)].add(point)
    return {
        cell: SearchRecord(frozenset(keys), frozenset(points[shared_words(request)]))
        for cell, request in command.cells.items()
    }


# --- The same contents under several paths -------------------------------------------------------


def join_paths(rows: Rows) -> Rows:
    """Rows in which the same contents have one path, that of the first run.

    Cells of a study that differ in their paths alone become one, with the seeds of all.
    """
    paths = first_spellings(run.typed for run in rows.runs)
    if not paths:
        return rows
    by_cell: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run in rows.runs:
        by_cell[run.study, run.cell_id].append(run)
    first_ids: dict[tuple[str, Any], str] = {}  # by study and what defines the training
    new_ids: dict[tuple[str, str], str] = {}
    joined: dict[tuple[str, str, int], Row] = {}
    renamed: dict[str, dict[Any, Any]] = {key: {} for key in PLACES}
    for (study, cell_id), runs in by_cell.items():
        # A run that failed early does not know its contents.
        known = max((places_of(run.typed) for run in runs), key=len)
        new_paths = {key: paths[key, digest] for key, digest in known}
        for key, path in new_paths.items():
            renamed[key] |= {run.config[key]: path for run in runs}
        changed = [_with_paths(run, new_paths) for run in runs]
        defines = max((run.typed for run in changed), key=len)
        content = comparable(defines) if new_paths else cell_id
        first_id = first_ids.setdefault((study, content), cell_id)
        new_ids[study, cell_id] = first_id
        for run in changed:
            joined.setdefault((study, first_id, run.seed), replace(run, cell_id=first_id))
    planned = []
    for cell in rows.planned:
        config = dict(cell.config)
        for key, new in renamed.items():
            if config.get(key) in new:
                config[key] = new[config[key]]
        planned.append(replace(cell, config=config))
    renamed_rows = _with_ids(rows, new_ids, by_cell)
    return replace(renamed_rows, runs=[*joined.values()], planned=planned)


def _with_ids(
    rows: Rows,
    new_ids: Mapping[tuple[str, str], str],
    runs: Mapping[tuple[str, str], Sequence[Row]],
) -> Rows:
    """Rows in which what was asked for has other ids of cells, in the order of the commands.

    new_ids, runs: by study and cell id
    """
    asked: dict[tuple[str, str], list[list[int]]] = {}
    commands: dict[tuple[str, str], int] = {}
    for place in dict.fromkeys((*rows.asked, *runs)):
        new_place = (place[0], new_ids.get(place, place[1]))
        of_cell = rows.asked.get(place) or [[run.seed for run in runs[place]]]
        asked[new_place] = [*asked.get(new_place, []), *of_cell]
        if place in rows.commands:
            commands.setdefault(new_place, rows.commands[place])
    confirmations = []
    for found in rows.confirmations:
        baseline, *finalists = (new_ids.get((found.study, id_), id_) for id_ in found.cells)
        confirmations.append(replace(found, baseline=baseline, finalists=tuple(finalists)))
    return replace(rows, asked=asked, commands=commands, confirmations=confirmations)


def _with_paths(run: Row, paths: Config) -> Row:
    """A run with other values of these keys."""
    of_typed = {key: path for key, path in paths.items() if key in run.typed}
    of_config = {key: path for key, path in paths.items() if key in run.config}
    return replace(run, typed={**run.typed, **of_typed}, config={**run.config, **of_config})
