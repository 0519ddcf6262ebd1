"""Loops of tries and their confirmations, in which whole setups are compared with a baseline.

A study is a loop from its third command that brings something to compare: whoever looks at the
results between commands chooses the next try, the moment to stop and what to report by luck as
well. Correcting for the number of comparisons covers neither, so the tries have numbers, on
validation, and no verdicts. A confirmation trains the best of them and the baseline anew, on seeds
by which nothing was chosen, and has verdicts, on test data. The j-th of a study spends

    5 % x 6 / (pi^2 j^2)

which adds up to 5 % however many follow.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import compared_keys, family_of
from normexp.verdicts.cells import (
    DIGESTS,
    CellRuns,
    metric_names,
    setting_words,
    settings_key,
    unlike,
)
from normexp.verdicts.compare import DIFFERENCE, Comparison
from normexp.verdicts.family import ALPHA
from normexp.verdicts.metric import Metric, choose_metric, describe_metric, over_seeds
from normexp.verdicts.rows import Confirmation
from normexp.verdicts.settings import SETUP
from normexp.verdicts.slices import Slice
from normexp.verdicts.tables import Table, table_of

NUM_COMMANDS = 3  # that brought something to compare: fewer are read once or twice
TRY = "a try: confirm it on unused seeds"


def alpha_of(number: int) -> float:
    """What the confirmation of this number, from 1, spends of the 5 % of its study."""
    return ALPHA * 6 / (math.pi * number) ** 2


@dataclass(frozen=True)
class Setups:
    """Whole setups, each a cell, whatever they differ in: a loop, or a confirmation.

    cells: the baseline, then the others in the order in which they were asked for
    confirmation: None for a loop
    """

    cells: Sequence[CellRuns]
    confirmation: Confirmation | None = None

    @property
    def baseline(self) -> CellRuns:
        return self.cells[0]

    @property
    def tries(self) -> Sequence[CellRuns]:
        return self.cells[1:]


def find_setups(cells: Sequence[CellRuns], *, are_planned: bool) -> list[Setups]:
    """The confirmations of a report, then the loops.

    cells: labelled
    are_planned: all tries were planned before the first, so there are no loops but confirmed ones
    """
    confirmed: dict[Confirmation, list[CellRuns]] = {}
    for cell in cells:
        if cell.confirmation:
            confirmed.setdefault(cell.confirmation, []).append(cell)
    found = []
    for confirmation, of_one in confirmed.items():
        if {*confirmation.cells} <= {cell.directory.name for cell in of_one}:  # none was removed
            found.append(_setups(of_one, confirmation.baseline, confirmation))
    folders = {cell.directory for of_one in confirmed.values() for cell in of_one}
    for family in _families(cells):
        is_confirmed = any(cell.directory in folders for cell in family)
        if is_confirmed or (not are_planned and is_loop(family)):
            found.append(_setups(family))
    return found


def setups_of(cells: Sequence[CellRuns], baseline: str | None) -> Setups:
    """All that a study has tried beside its baseline, at one model, data set and budget.

    baseline: an id or a label; None: the first cell that was asked for

    Raises:
        KeyError: no cell has this id or label.
    """
    tries = [cell for cell in cells if not cell.confirmation]
    named = [cell for cell in tries if baseline in (None, cell.arm, cell.directory.name)]
    if not named:
        raise KeyError(baseline)
    first = min(named, key=lambda cell: cell.asked_at)
    (family,) = [family for family in _families(cells) if first in family]
    return _setups(family, first.directory.name)


def is_loop(cells: Iterable[CellRuns]) -> bool:
    """True if NUM_COMMANDS commands brought more than a size or a learning rate.

    cells: of one family
    """
    first_commands: dict[Hashable, int] = {}
    for cell in cells:
        if cell.command is not None:
            place = (cell.arm, settings_key(cell))
            first = first_commands.setdefault(place, cell.command)
            first_commands[place] = min(first, cell.command)
    return len({*first_commands.values()}) >= NUM_COMMANDS


def rank_tries(setups: Setups, metric: Metric) -> list[CellRuns]:
    """The tries that can be confirmed, the best mean first; one of equal trainings is left out.

    So is a try with failed or missing runs, with other data, or with INVALID numbers.
    """
    ranked: dict[Hashable, tuple[float, CellRuns]] = {}
    for cell in setups.tries:
        values = cell.values(metric)
        is_whole = bool(values) and cell.wanted <= values.keys()
        if is_whole and not cell.invalid and not unlike(cell, setups.baseline):
            mean, _ = over_seeds([*values.values()])
            training = tuple((run.seed, run.metrics.get(metric.name)) for run in cell.runs)
            ranked.setdefault(training, (metric.sign * mean, cell))
    return [cell for _, cell in sorted(ranked.values(), key=lambda pair: -pair[0])]


def metric_of(
    setups: Setups, wanted: str | Metric | None, tolerance: float | None
) -> Metric | None:
    """`wanted`, or a metric of test data for a confirmation and of validation for a loop.

    None: no run has it.
    """
    metric = choose_metric(metric_names(setups.cells), wanted, tolerance)
    if metric is None or wanted is not None or setups.confirmation:
        return metric
    return describe_metric(metric.selection_name, tolerance)


# Slices and tables


def slices_of(
    found: Sequence[Setups], *, metric: str | Metric | None, tolerance: float | None
) -> list[Slice]:
    """A slice for each; those without the requested metric are left out."""
    slices = []
    for number, setups in enumerate(found, start=1):
        described = metric_of(setups, metric, tolerance)
        if described is None:
            continue
        confirmation, first = setups.confirmation, setups.baseline
        name = f"confirmation {confirmation.number}" if confirmation else "tries"
        size = first.batch_size
        lines = {}
        for cell in setups.cells:
            lines[cell.arm] = {size: ArmAtSize(cell.arm, [cell], described, size)}
        slices.append(
            Slice(
                title=", ".join(filter(None, (" on ".join(first.task), name))),
                fixed="",
                slug=f"{number:02d}_{name.replace(' ', '_')}",
                axis="norm_batch_size",
                sizes=[size],
                metric=described,
                lines=lines,
                independent=frozenset(),
                compared_at=[size],
                is_main=False,
                family=(SETUP, number),
                alpha=alpha_of(confirmation.number) if confirmation else ALPHA,
                no_verdict="" if confirmation else TRY,
                has_marks=False,  # each is compared with the baseline alone
            )
        )
    return slices


def tries_table(slice_: Slice, comparisons: Sequence[Comparison]) -> Table:
    """The ledger of a loop: each try, failed ones too, with what it measured on validation."""
    by_arm = {comparison.first.arm: comparison for comparison in comparisons}

    def place(side: ArmAtSize) -> tuple[bool, float]:
        """The baseline first, then the best; tries without a value last."""
        mean = side.mean.estimate
        return side.arm in by_arm, math.inf if mean is None else -slice_.metric.sign * mean

    numbers = {side.arm: number for number, side in enumerate(slice_.arms_at_sizes)}
    rows = []
    for side in sorted(slice_.arms_at_sizes, key=place):
        comparison = by_arm.get(side.arm)
        row: dict[str, Any] = {"try": numbers[side.arm] if comparison else "baseline"}
        row |= {SETUP: side.arm, slice_.metric.label: side.estimate()}
        row[DIFFERENCE] = comparison.row[DIFFERENCE] if comparison else None
        row |= {"n": len(side.seeds), "lost": side.lost, "id": side.best.directory.name}
        rows.append(row)
    caption = f"{slice_.metric.label}, {slice_.heading}: the best first, against the baseline"
    note = (
        "No verdicts: the best of many tries is better by luck, too, and intervals do not know how "
        "many there were."
    )
    return table_of(f"tries_{slice_.slug}", caption, rows, note=note)


# The cells of setups


def _families(cells: Sequence[CellRuns]) -> list[list[CellRuns]]:
    """The cells of each study, without confirmations, by model, data set and budget."""
    arm_keys = (cells[0].roles.arm, *compared_keys(cells))
    families: dict[Hashable, list[CellRuns]] = {}
    for cell in cells:
        if not cell.confirmation:
            key = (cell.study, family_of(cell, arm_keys))
            families.setdefault(key, []).append(cell)
    return [*families.values()]


def _setups(
    cells: Sequence[CellRuns], baseline: str = "", confirmation: Confirmation | None = None
) -> Setups:
    """Cells relabelled as setups. baseline: an id; empty: the first cell that was asked for"""
    ordered = sorted(cells, key=lambda cell: (cell.directory.name != baseline, cell.asked_at))
    first = ordered[0]
    # Setups may differ in whatever was typed, but not in the contents of their data.
    typed = {key for cell in ordered for key in cell.typed if not key.startswith(DIGESTS)}
    of_arm = tuple(sorted(typed - {*first.roles.task}))
    roles = replace(first.roles, arm=SETUP, of_arm=of_arm, slots=())
    labels: dict[str, CellRuns] = {}
    for cell in ordered:
        label = _label(cell, first)
        if label in labels:
            label += f" {cell.directory.name.rpartition('-')[2]}"
        labels[label] = replace(
            cell,
            roles=roles,
            arm=label,
            num_knobs=int(cell is not first),
            search=None,
            separating={},
        )
    return Setups([*labels.values()], confirmation)


def _label(cell: CellRuns, baseline: CellRuns) -> str:
    """Its arm, and all other settings in which it differs from the baseline."""
    words = [cell.arm]
    for key, (value, _) in unlike(cell, baseline).items():
        if not key.startswith(DIGESTS):
            words.append(setting_words(key, value))
    larger = None
    for key in cell.roles.sizes:
        size = cell.config[key]
        if size != baseline.config[key] and size != larger:
            words.append(setting_words(key, size))
        larger = size
    return " ".join(words)
