"""The list of a command's cells, which each of its workers walks: what is done and what is left.

Imports no torch: ids are known from the config, so recorded cells are found by their folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from normexp.config.outcome import (
    Outcome,
    is_recorded,
    recorded_outcome,
    suggest_evaluation,
    trained_as,
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
    """Goes through the cells of a command that lack something, in groups that may be one stack.

    Args:
        log: holds the cells of the command.
        left: the positions of each group to go through; all by default.
    """

    def __init__(self, log: StudyLog, left: Iterable[Positions] | None = None) -> None:
        self.log = log
        self.left = list(group_cells(log.cells) if left is None else left)

    def __iter__(self) -> Iterator[tuple[Positions, list[CellSpec]]]:
        """What is claimed together: positions, and the cells to train for them, see `parts_of`.

        Drops the groups that need nothing more.
        """
        for group in [*self.left]:
            cells = [self.trained_as(position) for position in group]
            missing = [position for position in group if self._lacks(cells[group.index(position)])]
            if not missing:
                self.left.remove(group)
                continue
            for part in parts_of(cells):
                if any(group[index] in missing for index in part):
                    yield tuple(group[index] for index in part), [cells[index] for index in part]

    @property
    def is_over(self) -> bool:
        """True if no cell lacks anything that this command could train."""
        return next(iter(self), None) is None

    def trained_as(self, position: int) -> CellSpec:
        """The cell that is trained for the one at a position, see `AliasEntry`."""
        cell = self.log.cells[position]
        if cell.cfg is None:
            return cell
        return trained_as(cell, self.log.history(cell.directory.parent))

    def outcome(self, position: int) -> Outcome:
        """The outcome of a cell by its records, if this process did not train it.

        `stopped` if it lacks something for no reason of its own.
        """
        cell = self.trained_as(position)
        if cell.cfg is None:
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
        if cell.cfg is None or self.log.end_of(cell) is not None:
            return False
        try:
            return not is_recorded(cell)
        except UserError:  # an unreadable result, which is refused once the cell is claimed
            return True


def failed_outcome(cell: CellSpec, status: Status, error: str) -> Outcome:
    """The outcome of a cell that was refused or has failed."""
    if status is Status.FAILED and cell.cfg is not None and cell.directory.is_dir():
        return recorded_outcome(cell, status, error)
    return Outcome(status, norm_and_data(cell), error=error)


def parts_of(cells: Sequence[CellSpec]) -> list[list[int]]:
    """The indices of cells that must be claimed together: those of a begun stack, and all others.

    Stacks that share a cell are claimed together.
    """
    parts: list[set[str]] = []
    try:
        stacks = list_stacks(cells[0].directory.parent, [cell.id for cell in cells])
    except UserError:  # which the claim of these cells raises again
        stacks = []
    for stack in stacks:
        members = {cell_id for cell_id, _ in stack.members}
        shared = [part for part in parts if part & members]
        parts = [*(part for part in parts if not part & members), members.union(*shared)]
    begun = set().union(*parts)
    parts.append({cell.id for cell in cells} - begun)
    listed = [[index for index, cell in enumerate(cells) if cell.id in part] for part in parts]
    return [indices for indices in listed if indices]


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
    assert cell.cfg is not None
    rates = [other.cfg.lr for other in group if other.cfg is not None]
    return cell.cfg.lr not in rates and (len(group) + 1) * len(cell.seeds) <= MOST_RUNS


def _config_without_lr(cell: CellSpec) -> str | None:
    """The config without `lr`, equal for cells that may be stacked; None for one that may not."""
    cfg = cell.cfg
    if cfg is None or not isinstance(cfg.lr, int | float) or cfg.lr <= 0:
        return None
    if cfg.get("stack") is False or cfg.get("dry_run") or needs_whole_machine(cfg):
        return None
    if "tensorboard" in (cfg.get("logger") or {}):  # its curves are means over the stack
        return None
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    del plain["lr"]
    return json.dumps([plain, dict(cell.choices)], sort_keys=True, default=str)
