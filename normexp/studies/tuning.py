"""Runs searches on validation, then fresh seeds at the best point of each."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from normexp.errors import UserError
from normexp.records.index import read_index
from normexp.studies.cell import Cell, prepare_cell
from normexp.studies.kept_data import keeping_data
from normexp.studies.notes import collected_notes
from normexp.studies.outcome import Composed, Outcome
from normexp.studies.runner import STOPPED, is_interrupted, train_cells
from normexp.studies.session import Session
from normexp.studies.tuning_objective import choose_objective
from normexp.studies.tuning_plan import SearchPlan
from normexp.studies.tuning_pruning import median_thresholds, read_by_epoch
from normexp.studies.tuning_search import Search, Trial
from normexp.studies.tuning_storage import open_storage
from normexp.studies.tuning_table import Row, print_table, tell

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def tune(plans: Sequence[SearchPlan], words: Sequence[str]) -> int:
    """Searches until each plan has its trials, trains the report's seeds, prints; the exit code.

    The searches of a grid take turns: what each wants to try next is trained together.

    Raises:
        UserError: a storage that is locked or unreadable, or a metric that the task lacks.
        KeyboardInterrupt: the user stopped it; the same line goes on.
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
    others = set(read_index(Path(base.runs_dir) / base.study)) - {cell.digest for cell in cells}
    rows = [
        Row(search, search.best(), reported.get(search.name), _reported_before(search, others))
        for search in searches
    ]
    print_table(rows)
    return 1 if failed or any(not row.is_reported for row in rows) else 0


def name_searches(plans: Sequence[SearchPlan], storage: BaseStorage) -> list[Search]:
    """The different searches among `plans`: sizes that come to one cell share one search.

    A search is named after the identity of a cell in its space, so that an edited norm or other
    data is another search.
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
    """The first cell of the space that can be trained; UserError of the first where none can."""
    refusal: UserError | None = None
    for point in plan.space.probes():
        composed = plan.report_cell(point)
        try:
            if composed.cfg is None:
                raise UserError(composed.error)
            with collected_notes():
                return prepare_cell(composed.cfg, composed.choices)
        except UserError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _search(searches: Sequence[Search], words: Sequence[str], session: Session) -> tuple[int, bool]:
    """Trains what the searches propose until none proposes more.

    Returns:
        How many trials failed, and whether that ended the searches early, under fail_fast.
    """
    failed, fails_fast = 0, searches[0].plan.base.fail_fast
    while wanted := [(search, trial) for search in searches for trial in search.propose()]:
        cells = [_cell_of(search, trial) for search, trial in wanted]
        outcomes = train_cells(cells, words, session=session)
        for (search, trial), outcome in zip(wanted, outcomes, strict=True):
            if outcome.status != "stopped":  # else it goes on with the next command
                failed += _tell(search, trial, outcome)
        if is_interrupted(cells, outcomes):
            raise KeyboardInterrupt(STOPPED)
        if fails_fast and any(outcome.status == "failed" for outcome in outcomes):
            print(
                "fail_fast: nothing more is searched, and no fresh seeds are trained",
                file=sys.stderr,
            )
            return failed, True
    return failed, False


def _cell_of(search: Search, trial: Trial) -> Composed:
    pruning = search.plan.base.tune.pruning and not search.is_whole
    thresholds = median_thresholds(search.trials()) if pruning else {}
    return search.plan.search_cell(trial.point, search.objective.name, thresholds)


def _tell(search: Search, trial: Trial, outcome: Outcome) -> bool:
    """Records what a trial came to; whether it failed.

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
    """Earlier bests, of a command with fewer trials, whose fresh seeds are in the report's study.

    A report finds them beside those of the best, as another learning rate of the same norm.

    Args:
        others: the digests of all cells in that study that are not the result of this command.
    """
    if not others:
        return []
    return [t for t in search.bests()[:-1] if search.plan.report_cell(t.point).digest in others]


def _list(plans: Sequence[SearchPlan]) -> int:
    """What a command would search; nothing is written."""
    from optuna.storages import InMemoryStorage

    for search in name_searches(plans, InMemoryStorage()):
        seeds = search.plan.search_seeds
        print(
            f"{search.plan.title}: {search.target} trials of {search.plan.space.describe()}, "
            f"each with seeds {seeds[0]} to {seeds[-1]}, by {search.objective.name}"
        )
    return 0
