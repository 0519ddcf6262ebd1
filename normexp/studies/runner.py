"""Runs the cells of a command one after another: what is recorded is not trained again."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from normexp.errors import UserError
from normexp.records.environment import code_version, describe_environment
from normexp.records.layout import (
    EVALUATION_FILE,
    LOCK_FILE,
    LOG_FILE,
    RESULT_FILE,
    seed_dir,
    stack_dir,
)
from normexp.records.lock import StackLock
from normexp.records.reader import read_result
from normexp.records.result import Result
from normexp.records.study_file import append_command
from normexp.records.writer import ensure_writable, write_result
from normexp.studies.cell import Cell, prepare_cell
from normexp.studies.notes import collected_notes, notes_to_stderr
from normexp.studies.stack import train_stack
from normexp.studies.summary import print_closing_table, print_summary
from normexp.studies.validate import validate
from normexp.tasks.checkpoint import Interrupted

logger = logging.getLogger(__name__)

ComposedCell = tuple[DictConfig, Mapping[str, str]]
GRID_KEYS = ("batch_size", "micro_batch_size", "norm_batch_size", "lr", "seed", "replicas")
CellStatus = Literal["finished", "skipped", "refused", "failed"]


@dataclass
class Outcome:
    """What became of one cell of a command."""

    status: CellStatus
    title: str
    cell: Cell | None = None
    results: list[Result] = field(default_factory=list)
    error: str = ""


@dataclass
class Command:
    """What was typed, for study.yaml: once in each study that it writes to."""

    words: list[str]
    grid: dict[str, list[Any]]
    recorded: set[Path] = field(default_factory=set)

    def record(self, study_dir: Path) -> None:
        if study_dir not in self.recorded:
            append_command(study_dir, self.words, self.grid, code_version())
            self.recorded.add(study_dir)


def run_cells(configs: Sequence[ComposedCell], words: Sequence[str]) -> int:
    """Trains what is missing of each cell and prints what came out; returns the exit code.

    A single cell that is refused raises its UserError; in a sweep it is a row of the closing table.
    """
    command = Command(list(words), grid_of(configs))
    with notes_to_stderr():
        if len(configs) == 1:
            outcome = _run_one(*configs[0], command)
            print_summary(outcome)
            outcomes = [outcome]
        else:
            outcomes = [_run_of_sweep(cfg, choices, command) for cfg, choices in configs]
            print_closing_table(outcomes)
    bad = any(outcome.status in ("refused", "failed") for outcome in outcomes)
    return 1 if bad else 0


def _run_of_sweep(cfg: DictConfig, choices: Mapping[str, str], command: Command) -> Outcome:
    try:
        validate(cfg)
        outcome = _run_one(cfg, choices, command)
    except UserError as error:
        outcome = Outcome("refused", _title(choices), error=str(error))
    except Exception as error:  # of foreign code; the other cells go on
        logger.exception("%s", _title(choices))
        outcome = Outcome("failed", _title(choices), error=f"{type(error).__name__}: {error}")
    print_line(outcome)
    return outcome


def _title(choices: Mapping[str, str]) -> str:
    return f"{choices['norm']} on {choices['data']}"


def _run_one(cfg: DictConfig, choices: Mapping[str, str], command: Command) -> Outcome:
    with collected_notes() as notes:
        cell = prepare_cell(cfg, choices)
    seeds = list(range(cfg.seed, cfg.seed + cfg.replicas))
    ended, missing = recorded_runs(cell, seeds)
    if cfg.dry_run:
        print(
            f"{cell.id}: {len(missing)} runs to do, {len(ended)} done, "
            f"{cell.plan.num_steps} steps each"
        )
        return Outcome("skipped", cell.title, cell, ended)
    if not missing:
        _tell_of_evaluation(cell, seeds)
        return Outcome("skipped", cell.title, cell, ended)
    ensure_writable(cell.study_dir)
    cell.directory.mkdir(parents=True, exist_ok=True)
    command.record(cell.study_dir)
    lock = StackLock(cell.directory / LOCK_FILE)
    with lock as held:
        if not held:
            raise UserError(
                f"{cell.directory}: process {lock.holder()} is training this cell; wait for it"
            )
        ended, missing = recorded_runs(cell, seeds)  # again: another process may have ended some
        trained = [result for stack in contiguous(missing) for result in _train(cell, stack, notes)]
    errors = [result.error for result in trained if result.error is not None]
    results = sorted(ended + trained, key=lambda result: result.seed)
    error = f"{errors[0]} (see {cell.directory}/stacks/*/{LOG_FILE})" if errors else ""
    return Outcome("failed" if errors else "finished", cell.title, cell, results, error)


def _train(cell: Cell, seeds: list[int], notes: list[str]) -> list[Result]:
    """One stack; its failure is recorded and does not stop what comes after."""
    try:
        return train_stack(cell, seeds, notes)
    except UserError:
        raise
    except Interrupted:
        logger.info("%s: the same line goes on from here", cell.id)
        raise KeyboardInterrupt from None
    except Exception as error:
        return _record_failure(cell, seeds, error)


def _tell_of_evaluation(cell: Cell, seeds: Sequence[int]) -> None:
    """Runs that were recorded without an evaluation that is asked for now can be given one."""
    paths = [seed_dir(cell.directory, seed) / EVALUATION_FILE for seed in seeds]
    if cell.evaluation.adds and not all(path.is_file() for path in paths):
        asked = ",".join(cell.evaluation.statistics)
        logger.info(
            "recorded without other statistics; they can be added: "
            "python -m normexp.evaluate run=%s evaluate_with=[%s]",
            cell.directory,
            asked,
        )


def recorded_runs(cell: Cell, seeds: Sequence[int]) -> tuple[list[Result], list[int]]:
    """Results of the runs that have ended, and the seeds that are still to train."""
    ended, missing = [], []
    for seed in seeds:
        path = seed_dir(cell.directory, seed) / RESULT_FILE
        result = read_result(path) if path.is_file() else None
        if result is None or result.status == "failed":
            missing.append(seed)
        else:
            ended.append(result)
    return ended, missing


def grid_of(configs: Sequence[ComposedCell]) -> dict[str, list[Any]]:
    """The values that a command spans, of the keys that a study usually varies."""
    rows = [{**choices, **{key: cfg[key] for key in GRID_KEYS}} for cfg, choices in configs]
    return {key: list(dict.fromkeys(row[key] for row in rows)) for key in rows[0]}


def contiguous(seeds: Sequence[int]) -> list[list[int]]:
    """Runs of consecutive seeds: a stack is named after its first and last."""
    groups: list[list[int]] = []
    for seed in seeds:
        if groups and groups[-1][-1] == seed - 1:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    return groups


def _record_failure(cell: Cell, seeds: Sequence[int], error: Exception) -> list[Result]:
    """Results with the error in one line; the traceback goes to the stack's log."""
    reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    log = stack_dir(cell.directory, seeds[0], seeds[-1]) / LOG_FILE
    with open(log, "a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    environment = describe_environment()
    results = [
        Result(cell.id, seed, "failed", cell.record, {}, environment, error=reason)
        for seed in seeds
    ]
    for result in results:
        write_result(seed_dir(cell.directory, result.seed), result)
    return results


def print_line(outcome: Outcome) -> None:
    """One line as soon as a cell of a sweep has ended."""
    note = f": {outcome.error}" if outcome.error else ""
    print(f"{outcome.status:<9} {outcome.title}{note}", file=sys.stderr)
