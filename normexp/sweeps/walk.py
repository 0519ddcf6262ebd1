"""The list of a command's cells, which each of its workers walks: what is done and what is left.

Imports no torch: ids are known from the config, so recorded cells are found by their folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from normexp.config.outcome import (
    Outcome,
    is_recorded,
    recorded_outcome,
    suggest_evaluation,
)
from normexp.config.spec import CellSpec, norm_and_data
from normexp.errors import UserError
from normexp.records.result import Status
from normexp.records.stacks import list_stacks
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import needs_whole_machine

# The most runs in a stack: on a CPU larger stacks gain little, and a grid of learning rates still
# keeps several workers busy. Counts requested runs, not missing ones, so that after an interruption
# the same command makes the same stacks.
MOST_RUNS = 16

Positions = tuple[int, ...]  # of cells in the list of a command


class Walk:
    """Goes through the cells of a command that lack something.

    A group of cells may become one stack; cells that are claimed together are a claim.

    Args:
        log: holds the cells of the command.
        left: the positions of each group to go through; all by default.
    """

    def __init__(self, log: StudyLog, left: Iterable[Positions] | None = None) -> None:
        self.log = log
        self.left = list(group_cells(log.cells) if left is None else left)

    def __iter__(self) -> Iterator[dict[int, CellSpec]]:
        """The cells to claim together, by position.

        Drops the groups that need nothing more.
        """
        for group in [*self.left]:
            cells = {position: self.log.cells[position] for position in group}
            missing = {position for position, cell in cells.items() if self._lacks(cell)}
            if not missing:
                self.left.remove(group)
                continue
            yield from (claim for claim in claims_of(cells) if missing & claim.keys())

    @property
    def is_over(self) -> bool:
        """True if no cell lacks anything that this command could train."""
        return next(iter(self), None) is None

    def outcome(self, position: int) -> Outcome:
        """The outcome of a cell by its records, if this process did not train it.

        `stopped` if it lacks something for no reason of its own.
        """
        cell = self.log.cells[position]
        if cell.config is None:
            return Outcome(Status.REFUSED, norm_and_data(cell), error=cell.error)
        if (end := self.log.end_of(cell)) is not None:
            return failed_outcome(cell, Status(end.status), end.error)
        try:
            if not is_recorded(cell):
                return recorded_outcome(cell, Status.STOPPED)
            suggest_evaluation(cell)
            return recorded_outcome(cell, Status.SKIPPED)
        except UserError as unreadable:
            return failed_outcome(cell, Status.REFUSED, str(unreadable))

    def _lacks(self, cell: CellSpec) -> bool:
        if cell.config is None or self.log.end_of(cell) is not None:
            return False
        try:
            return not is_recorded(cell)
        except UserError:  # an unreadable result, which is refused once the cell is claimed
            return True


def failed_outcome(cell: CellSpec, status: Status, error: str) -> Outcome:
    """The outcome of a cell that was refused or has failed."""
    if status is Status.FAILED and cell.config is not None and cell.directory.is_dir():
        return recorded_outcome(cell, status, error)
    return Outcome(status, norm_and_data(cell), error=error)


def claims_of(cells: Mapping[int, CellSpec]) -> list[dict[int, CellSpec]]:
    """The cells of a group in claims: those of each begun stack, and all others.

    Stacks that share a cell are claimed together.
    """
    ids = {cell.id for cell in cells.values()}
    begun: list[set[str]] = []  # ids of the cells of stacks that share none
    try:
        stacks = list_stacks(next(iter(cells.values())).directory.parent, ids)
    except UserError:  # which the claim of these cells raises again
        stacks = []
    for stack in stacks:
        members = {cell_id for cell_id, _ in stack.members}
        sharing = [other for other in begun if other & members]
        begun = [*(other for other in begun if not other & members), members.union(*sharing)]
    claimed = [*begun, ids.difference(*begun)]
    claims = [
        {position: cell for position, cell in cells.items() if cell.id in names}
        for names in claimed
    ]
    return [claim for claim in claims if claim]


def group_cells(cells: Sequence[CellSpec]) -> list[Positions]:
    """Groups cells that differ only in `lr`, and may be stacked; ordered by their first cells."""
    groups: list[list[int]] = []
    open_groups: dict[str, list[int]] = {}  # the last group with this shared config
    for index, cell in enumerate(cells):
        shared = _config_without_lr(cell)
        group = open_groups.get(shared or "")
        if group is not None and _has_room_for([cells[i] for i in group], cell):
            group.append(index)
            continue
        groups.append([index])
        if shared is not None:
            open_groups[shared] = groups[-1]
    return [tuple(group) for group in groups]


def _has_room_for(group: Sequence[CellSpec], cell: CellSpec) -> bool:
    rates = [other.lr for other in group]
    return cell.lr not in rates and (len(group) + 1) * len(cell.seeds) <= MOST_RUNS


def _config_without_lr(cell: CellSpec) -> str | None:
    """The config without `lr`, equal for cells that may be stacked; None for one that may not."""
    config = cell.config
    if config is None or not isinstance(config["lr"], int | float) or config["lr"] <= 0:
        return None
    trainer, loggers = config["trainer"], config["logger"] or {}
    if config["stack"] is False or config["dry_run"] or needs_whole_machine(trainer):
        return None
    if "tensorboard" in loggers:  # its curves are means over the stack
        return None
    shared = {key: value for key, value in config.items() if key != "lr"}
    return json.dumps([shared, dict(cell.choices)], sort_keys=True, default=str)
