"""Runs searches on validation data, then trains fresh seeds at the best point of each."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.cells.cell import Cell, keeping_data, prepare_cell
from normexp.cells.logs import collected_messages
from normexp.config.spec import CellSpec, Outcome
from normexp.errors import UserError
from normexp.records.history import read_history
from normexp.reporting.metric import choose_metric, describe_metric, format_interval
from normexp.search.objective import choose_objective
from normexp.search.points import SearchPlan
from normexp.search.pruning import median_thresholds, read_by_epoch
from normexp.search.search import Search, Trial
from normexp.search.storage import open_storage
from normexp.stats import mean
from normexp.sweeps.sweep import STOPPED, Session, is_interrupted, train_cells

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

WIDTH = 200  # columns of a log file


@dataclass(frozen=True)
class Row:
    """A search, its best trial and the outcome of the fresh seeds; None if missing.

    Attributes:
        reported_before: earlier best trials with fresh seeds of their own in the same study.
    """

    search: Search
    best: Trial | None
    outcome: Outcome | None
    reported_before: Sequence[Trial] = ()

    @property
    def is_reported(self) -> bool:
        return self.outcome is not None and self.outcome.status in ("finished", "skipped")


def tell(search: Search, trial: Trial, value: float | None, error: str) -> None:
    """Prints a line on stderr when a trial has ended."""
    best = search.best()
    shown = "stopped early" if value is None else f"{search.objective.name} {value:.4f}"
    if error:
        shown = f"failed: {error}"
    so_far = "" if best is None else f" (best {best.value:.4f} at {_words(best.point)})"
    place = f"trial {len(search.ended())}/{search.target}"
    print(f"{search.plan.title}  {place}  {_words(trial.point)}  {shown}{so_far}", file=sys.stderr)


def print_table(rows: Sequence[Row]) -> None:
    """Prints the best value of each search, warnings, and commands that repeat the best."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    objectives = {row.search.objective.name: row.search.objective for row in rows}
    validation = " or ".join(objective.metric.label for objective in objectives.values())
    table = Table("search", "best", "trials", f"{validation}, search seeds", box=None)
    table.add_column("fresh seeds, mean [95 % interval]")
    table.add_column("n")
    for row in rows:
        table.add_row(*map(Text, [row.search.plan.title, *_cells(row)]))
    console.print(table)
    for row in rows:
        for line in _warnings(row):
            console.print(line, markup=False, soft_wrap=True)
    lines = [row.search.plan.command(row.best.point) for row in rows if row.best is not None]
    if lines:
        console.print("to repeat the best:")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _cells(row: Row) -> list[str]:
    counts = Counter(trial.state for trial in row.search.ended())
    marks = {"pruned": "stopped early", "fail": "failed"}
    notes = [f"{counts[state]} {word}" for state, word in marks.items() if counts[state]]
    trials = ", ".join([str(len(row.search.ended())), *notes])
    if row.best is None or row.best.value is None:
        return ["none finished", trials, "-", "-", "0"]
    metric = row.search.objective.metric
    value = f"{metric.scale * row.best.value:.{metric.digits}f}"
    return [_words(row.best.point), trials, value, *_reported(row)]


def _reported(row: Row) -> list[str]:
    if row.outcome is None or not row.is_reported:
        return [row.outcome.error if row.outcome is not None else "-", "0"]
    available = {name for result in row.outcome.results for name in result.metrics}
    name = choose_metric(available, None)
    if name is None:
        return ["all diverged", "0"]
    metric = describe_metric(name)
    finished = [r for r in row.outcome.results if r.status == "finished" and name in r.metrics]
    values = [metric.scale * result.metrics[name] for result in finished]
    interval = mean(values, bounds=metric.bounds)
    stamp = "INVALID " if row.outcome.invalid else ""
    lost = len(row.outcome.results) - len(finished)
    count = f"{len(finished)}, {lost} diverged" if lost else str(len(finished))
    return [f"{stamp}{metric.label} {format_interval(interval, metric.digits)}", count]


def _warnings(row: Row) -> list[str]:
    if row.best is None:
        return [f"{row.search.plan.title}: no trial has a value; see the lines above"]
    plan = row.search.plan
    earlier = [
        f"{plan.title}: study={plan.base.study} also has the fresh seeds of {_words(trial.point)}, "
        "an earlier best trial; the result above does not include them"
        for trial in row.reported_before
    ]
    return earlier + [
        f"{plan.title}: the best {d.key}={row.best.point[d.key]} lies at the edge of "
        f"{d.describe()}; a wider range may be better"
        for d in plan.space.edges(row.best.point)
    ]


def _words(point: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in point.items())


def tune(plans: Sequence[SearchPlan], words: Sequence[str]) -> int:
    """Searches, trains fresh seeds at the best points, prints a table; returns the exit code.

    The searches of a grid take turns: their next trials are trained together.

    Raises:
        UserError: a storage that is locked or unreadable, or a metric that the task lacks.
        KeyboardInterrupt: the user stopped the search; the same command continues.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = plans[0].base
    folder = Path(base.runs_dir) / plans[0].search_study
    if base.dry_run:
        return _list(plans)
    with keeping_data(), Session() as session:
        with open_storage(base.tune.storage, folder) as storage:
            searches = name_searches(plans, storage)
            failed, is_cut = _search(searches, words, session)
        bests = [(search, search.best()) for search in searches if not is_cut]
        found = [(search, best) for search, best in bests if best is not None]
        cells = [search.plan.report_cell(best.point) for search, best in found]
        outcomes = train_cells(cells, words, session=session) if cells else []
        if is_interrupted(cells, outcomes):
            raise KeyboardInterrupt(STOPPED)
    reported = {s.name: outcome for (s, _), outcome in zip(found, outcomes, strict=True)}
    others = set(read_history(Path(base.runs_dir) / base.study).cells) - {
        cell.digest for cell in cells
    }
    rows = [
        Row(search, search.best(), reported.get(search.name), _reported_before(search, others))
        for search in searches
    ]
    print_table(rows)
    return 1 if failed or any(not row.is_reported for row in rows) else 0


def name_searches(plans: Sequence[SearchPlan], storage: BaseStorage) -> list[Search]:
    """Returns the different searches of `plans`; sizes that mean the same cell share a search.

    A search is named after the identity of a cell in its space, so an edited norm or other data
    starts another search.
    """
    searches: dict[str, Search] = {}
    for plan in plans:
        cell = _prepare_one(plan)
        objective = choose_objective(plan.base.tune.metric, cell.data)
        defined = {
            "identity": cell.identity,
            "space": plan.space.describe(),
            "seeds": [plan.search_seeds[0], len(plan.search_seeds)],
            "metric": objective.name,
        }
        text = json.dumps(defined, sort_keys=True, default=str)
        name = f"{cell.record['norm']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        if name not in searches:
            searches[name] = Search(plan, name, objective, storage)
    return list(searches.values())


def _prepare_one(plan: SearchPlan) -> Cell:
    """Returns a cell of the space that can be trained. Raises the first UserError if none can."""
    refusal: UserError | None = None
    for point in plan.space.probes():
        composed = plan.report_cell(point)
        try:
            if composed.cfg is None:
                raise UserError(composed.error)
            with collected_messages():
                return prepare_cell(composed.cfg, composed.choices)
        except UserError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _search(searches: Sequence[Search], words: Sequence[str], session: Session) -> tuple[int, bool]:
    """Trains the trials that the searches propose until none proposes more.

    Returns:
        The number of failed trials, and True if fail_fast ended the searches.
    """
    failed, fails_fast = 0, searches[0].plan.base.fail_fast
    while wanted := [(search, trial) for search in searches for trial in search.propose()]:
        cells = [_cell_of(search, trial) for search, trial in wanted]
        outcomes = train_cells(cells, words, session=session)
        for (search, trial), outcome in zip(wanted, outcomes, strict=True):
            if outcome.status != "stopped":  # the next command continues a stopped trial
                failed += _tell(search, trial, outcome)
        if is_interrupted(cells, outcomes):
            raise KeyboardInterrupt(STOPPED)
        if fails_fast and any(outcome.status == "failed" for outcome in outcomes):
            print(
                "fail_fast: the search ends here, and no fresh seeds are trained",
                file=sys.stderr,
            )
            return failed, True
    return failed, False


def _cell_of(search: Search, trial: Trial) -> CellSpec:
    pruning = search.plan.base.tune.pruning and not search.is_whole
    thresholds = median_thresholds(search.trials()) if pruning else {}
    return search.plan.search_cell(trial.point, search.objective.name, thresholds)


def _tell(search: Search, trial: Trial, outcome: Outcome) -> bool:
    """Records the outcome of a trial; returns True if it failed.

    Raises:
        UserError: another process trains it, or the disk is full.
    """
    if outcome.status == "busy":
        raise UserError(f"process {outcome.holder} trains {outcome.cell_id}; wait for it")
    if outcome.halts:
        raise UserError(outcome.error)
    seeds = search.plan.search_seeds
    errors = [result.error for result in outcome.results if result.error is not None]
    error = outcome.error or (errors[0] if errors else "")
    value, by_epoch = None, {}
    if not error and outcome.directory is not None:
        by_epoch = read_by_epoch(outcome.directory, seeds, search.objective)
        if len(outcome.results) == len(seeds):
            value = search.objective.of_results(outcome.results)
    search.tell(trial, value, by_epoch, pruned=not error)
    tell(search, trial, value, error)
    return bool(error)


def _reported_before(search: Search, others: Set[str]) -> list[Trial]:
    """Returns trials that were best earlier and have fresh seeds in the report's study.

    A report shows these seeds too, as another learning rate of the same norm.

    Args:
        others: the digests of the cells in that study that this command did not train.
    """
    if not others:
        return []
    return [t for t in search.bests()[:-1] if search.plan.report_cell(t.point).digest in others]


def _list(plans: Sequence[SearchPlan]) -> int:
    """Prints a dry run: what the command would search. Writes nothing."""
    from optuna.storages import InMemoryStorage

    for search in name_searches(plans, InMemoryStorage()):
        seeds = search.plan.search_seeds
        print(
            f"{search.plan.title}: {search.target} trials of {search.plan.space.describe()}, "
            f"each with seeds {seeds[0]} to {seeds[-1]}, by {search.objective.name}"
        )
    return 0
