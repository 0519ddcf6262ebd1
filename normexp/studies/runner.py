"""Runs the cells of a command: in this process, or a sweep in workers. No torch in a sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from normexp.errors import UserError
from normexp.studies.disk import full_disk
from normexp.studies.display import Display
from normexp.studies.grouping import group_cells
from normexp.studies.in_turn import run_in_turn
from normexp.studies.outcome import Composed, Outcome
from normexp.studies.placement import places_for, shared_value
from normexp.studies.session import Session
from normexp.studies.summary import print_closing_table, print_plan, print_summary
from normexp.studies.sweep import Sweep, WorkersFail
from normexp.studies.validate import validate_keys
from normexp.studies.wandb_agent import is_under_agent, log_to_agent, refuse_many_cells

COMMAND_KEYS = ("study", "workers", "fail_fast", "retry_failed", "max_attempts", "dry_run")
STOPPED = "stopped; the same line goes on from here"


def run_cells(cells: Sequence[Composed], words: Sequence[str]) -> int:
    """Trains what is missing of each cell and prints what came out; returns the exit code.

    Raises:
        UserError: all cells are refused for one reason; else that is a row of the closing table.
        KeyboardInterrupt: the user stopped it; the same line goes on.
    """
    refuse_many_cells(cells)
    try:
        outcomes = train_cells(cells, words)
        if is_under_agent():
            log_to_agent(cells[0], outcomes[0])
    except (OSError, WorkersFail) as error:
        message = full_disk(error, None) or (str(error) if isinstance(error, WorkersFail) else None)
        if message is None:
            raise
        print(f"normexp: {message}", file=sys.stderr)
        return 1
    halted = next((outcome for outcome in outcomes if outcome.halts), None)
    reasons = {outcome.error if outcome.status == "refused" else "" for outcome in outcomes}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise UserError(reason)
    if shared_value([cell.cfg for cell in cells if cell.cfg is not None], "dry_run"):
        print_plan(cells, outcomes)
    elif len(cells) == 1 and halted is None:
        print_summary(outcomes[0], words)
    elif len(cells) > 1:
        print_closing_table(cells, outcomes)
    if halted is not None:
        print(f"normexp: {halted.error}", file=sys.stderr)
    elif is_interrupted(cells, outcomes):
        raise KeyboardInterrupt(STOPPED)
    return 1 if any(outcome.status in ("refused", "failed") for outcome in outcomes) else 0


def is_interrupted(cells: Sequence[Composed], outcomes: Sequence[Outcome]) -> bool:
    """Whether the user stopped a command before its end, and not a failure under `fail_fast`."""
    statuses = {outcome.status for outcome in outcomes}
    fails_fast = any(cell.cfg is not None and cell.cfg.fail_fast for cell in cells)
    return "stopped" in statuses and not (fails_fast and "failed" in statuses)


def train_cells(
    cells: Sequence[Composed],
    words: Sequence[str],
    *,
    workers: int | None = None,
    session: Session | None = None,
) -> list[Outcome]:
    """Trains what is missing of each cell; outcomes in the order of the cells. For Python callers.

    Args:
        words: the command, as study.yaml records it.
        workers: how many cells at once, in place of the config's key.
        session: of a command that calls this several times.
    """
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    for cfg in cfgs:
        validate_keys(cfg, COMMAND_KEYS)
    fail_fast = bool(shared_value(cfgs, "fail_fast"))
    dry_run = bool(shared_value(cfgs, "dry_run"))
    tasks = group_cells(cells)
    places = places_for(cfgs, len(cells), workers) if len(cells) > 1 else []
    warm = None if session is None else session.idle
    log = (session or Session()).log_of(cells, words, writes=not dry_run)
    display = Display([cell.title for cell in cells], len(places))
    with display:
        log.check()
        if places:
            sweep = Sweep(cells, places, log, display, fail_fast=fail_fast, tasks=tasks, warm=warm)
            outcomes = sweep.run()
        else:
            outcomes = run_in_turn(cells, tasks, log, display, fail_fast=fail_fast)
        for cell, outcome in zip(cells, outcomes, strict=True):
            if not outcome.cell_id:  # it may have been refused before the study was there
                log.settle(cell, outcome)
    return outcomes
