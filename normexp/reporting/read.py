"""Reads the ended runs of studies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normexp.batching.sizes import SIZES
from normexp.config.rules import PARTS
from normexp.errors import UserError
from normexp.records.files import read_json
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE, find_study, list_runs, seed_of
from normexp.records.result import Result, read_result
from normexp.records.study import Refusal, Study, read_study
from normexp.reporting.model import RunRow

SEARCHED = ("", "-search")  # ends of the names of studies that hold the searches of a study
RECORDED_TWICE = (*SIZES, "trainer")  # in the recipe and beside it


@dataclass(frozen=True)
class RefusedCell:
    """A cell that a study asks for and that cannot be trained.

    norm: with its knobs, as it was typed
    settings: the other words of its title
    """

    study: str
    cell_id: str
    norm: str
    settings: str
    error: str


@dataclass(frozen=True)
class StudyRecords:
    """The records of one or more studies, as a report needs them.

    runs: in order of cells and seeds
    num_seeds: for each study, how many seeds have a result in any of its cells, readable or not
    num_unended: runs without a result: still training, or interrupted
    waiting: one line for each cell that has begun but has no ended run
    problems: one line for each result that cannot be read
    refused: cells without a folder, with the reason
    histories: of each study and of the study of its searches; without, no seeds are declared
    """

    runs: Sequence[RunRow]
    num_seeds: Mapping[str, int]
    num_unended: int = 0
    waiting: Sequence[str] = ()
    problems: Sequence[str] = ()
    refused: Sequence[RefusedCell] = ()
    histories: Mapping[str, Sequence[Study]] = field(default_factory=dict)


def read_studies(runs_dir: Path, names: Sequence[str]) -> StudyRecords:
    """Reads the studies, finished or still running.

    Raises:
        UserError: a study that does not exist, or that has no ended run.
    """
    runs: list[RunRow] = []
    seeds: dict[str, set[int | None]] = {}
    problems: list[str] = []
    unended: list[Path] = []
    histories = {name: _histories(runs_dir, name) for name in names}
    refused: list[RefusedCell] = []
    for name in names:
        root = find_study(runs_dir, name)
        ends = list(histories[name][0].refusals.values())
        refused += [_refused(name, end) for end in ends]
        ended, broken, begun = [], [], []
        seeds[name] = set()
        for run_dir in list_runs(root):
            if not (run_dir / RESULT_FILE).exists():
                begun.append(run_dir)
                continue
            seeds[name].add(seed_of(run_dir))
            try:
                ended.append(_read_run(name, run_dir))
            except UserError as error:
                broken.append(str(error))
        if not ended:
            raise UserError(_why_empty(name, root, begun, [*broken, *(end.error for end in ends)]))
        runs += ended
        problems += broken
        unended += begun
    counts = {name: len(known) for name, known in seeds.items()}
    cells = {run.directory.parent for run in runs}
    waiting = _waiting(unended, cells)
    return StudyRecords(runs, counts, len(unended), waiting, problems, refused, histories)


def _refused(study: str, end: Refusal) -> RefusedCell:
    words = end.title.split()
    name = next((word.partition("=")[2] for word in words if word.startswith("norm=")), "-")
    knobs = [word.removeprefix("norm.") for word in words if word.startswith("norm.")]
    norm = " ".join([name, *(knob for knob in knobs if not knob.startswith("_target_="))])
    rest = " ".join(word for word in words if not word.startswith(("norm=", "norm.")))
    return RefusedCell(study, end.cell, norm, rest, f"refused: {end.error}")


def _histories(runs_dir: Path, name: str) -> list[Study]:
    return [read_study(runs_dir / f"{name}{end}") for end in SEARCHED]


def _read_run(study: str, run_dir: Path) -> RunRow:
    result = read_result(run_dir)
    if not isinstance(result.config.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no config.batch_size; was it edited by hand?")
    return run_row(study, run_dir, result, _read_evaluation(run_dir))


def run_row(
    study: str, run_dir: Path, result: Result, evaluated: Mapping[str, float] | None = None
) -> RunRow:
    """evaluated: metrics of a later evaluation, which do not replace those of the training."""
    metrics = {**(evaluated or {}), **result.metrics}
    return RunRow(study, run_dir, result, _flat_config(result.config), metrics)


def _flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded config and its recipe with dotted keys."""
    recipe = config.get("recipe", {})
    beside = {key: value for key, value in config.items() if key != "recipe"}
    names = {
        group: _name_of(beside[group], recipe.get(group) or {})
        for group in PARTS
        if group in beside
    }
    known = {key: value for key, value in recipe.items() if key not in RECORDED_TWICE}
    return flatten(known) | flatten(beside) | names


def _name_of(choice: str, part: Mapping[str, Any]) -> str:
    """`group`; `MyNorm` for a user's own class; `resnet50` for one of torchvision's models."""
    if isinstance(part.get("name"), str):
        return part["name"]
    return (
        part["_target_"].rpartition(".")[2] if choice == "custom" and "_target_" in part else choice
    )


def _read_evaluation(run_dir: Path) -> dict[str, float]:
    """Metrics of evaluation.json: {"precise": {"test/loss": 1.0}} gives `test/loss@precise`."""
    path = run_dir / EVALUATION_FILE
    if not path.exists():
        return {}
    return {
        name if statistics == "running" else f"{name}@{statistics}": value
        for statistics, metrics in read_json(path).items()
        if isinstance(metrics, dict)
        for name, value in metrics.items()
        if "/" in name and isinstance(value, float) and math.isfinite(value)
    }


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"norm": {"eps": 1}} gives {"norm.eps": 1}; lists become tuples.

    A class of normexp is reduced to its name, because its module may change between two runs.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif key == "_target_" and str(value).startswith("normexp."):
            flat[f"{prefix}{key}"] = value.rpartition(".")[2]
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def _why_empty(name: str, root: Path, unended: list[Path], problems: list[str]) -> str:
    if problems:
        return f"study={name} has no readable result; the first problem: {problems[0]}"
    if unended:
        return (
            f"study={name} has no ended run yet, {len(unended)} in {root} have started; "
            "try again when the first has ended"
        )
    return f"study={name} is empty: {root} has no runs; train one with study={name}"


def _waiting(unended: Sequence[Path], ended: set[Path]) -> list[str]:
    begun = Counter(run_dir.parent for run_dir in unended)
    return [
        f"{cell.name}: {count} run{'s' * (count > 1)} begun, none ended"
        for cell, count in begun.items()
        if cell not in ended
    ]
