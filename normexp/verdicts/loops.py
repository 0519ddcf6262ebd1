"""Loops of tries and their confirmations, in which whole setups are compared with a baseline.

A study is a loop from its third command that brings something to compare: whoever looks at the
results between commands chooses the next try, the moment to stop and what to report by luck as
well. Correcting for the number of comparisons covers neither, so tries get validation numbers but
no verdicts. A confirmation trains the best of them and the baseline anew, on seeds that influenced
no choice, and has verdicts, on test data. The j-th of a study spends

    5 % x 6 / (pi^2 j^2)

which adds up to 5 % however many follow.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normexp.errors import UserError
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
from normexp.words import format_count, name_some

# Those that brought something to compare; with fewer, results were looked at twice at most.
NUM_COMMANDS = 3
TRY = "a try: confirm it on unused seeds"


def alpha_of(number: int) -> float:
    """What the confirmation of this number, from 1, spends of the 5 % of its study."""
    return ALPHA * 6 / (math.pi * number) ** 2


@dataclass(frozen=True)
class Contest:
    """A baseline and the setups that meet it, whatever they differ in: a loop or a confirmation.

    cells: each a setup: the baseline, then the others in the order in which they were asked for
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


def find_contests(cells: Sequence[CellRuns], *, are_planned: bool) -> list[Contest]:
    """The confirmations of a report, then the loops.

    cells: labelled
    are_planned: all tries were planned before the first, so there are no loops but confirmed ones
    """
    confirmed: dict[Confirmation, list[CellRuns]] = {}
    for cell in cells:
        if cell.confirmation:
            confirmed.setdefault(cell.confirmation, []).append(cell)
    folders = {cell.directory for of_one in confirmed.values() for cell in of_one}
    families, loops = _families(cells), []
    for family in families:
        is_confirmed = any(cell.directory in folders for cell in family)
        if is_confirmed or (not are_planned and is_loop(family)):
            loops.append(family)
    labels = _setup_labels(families) if loops else {}
    contests = []
    for confirmation, of_one in confirmed.items():
        if {*confirmation.cells} <= {cell.directory.name for cell in of_one}:  # none was removed
            contests.append(_contest(of_one, labels, confirmation.baseline, confirmation))
    return contests + [_contest(family, labels) for family in loops]


def loop_of(cells: Sequence[CellRuns], baseline: str | None) -> Contest:
    """All that a study has tried beside its baseline, at one model, data set and budget.

    cells: labelled
    baseline: an id, or a name as `find_contests` gives it; None: the first cell asked for

    Raises:
        UserError: no cell, or more than one, has this id or name.
    """
    families = _families(cells)
    labels = _setup_labels(families)
    tries = [cell for family in families for cell in family]
    first = min(tries, key=lambda cell: cell.asked_at)
    if baseline is not None:
        first = _named(baseline, tries, labels)
    (family,) = [family for family in families if first in family]
    return _contest(family, labels, first.directory.name)


def _named(baseline: str, tries: Sequence[CellRuns], labels: Mapping[Path, str]) -> CellRuns:
    named = [one for one in tries if baseline in (one.directory.name, labels[one.directory])]
    if not named:
        names = ", ".join(labels.values())
        raise UserError(
            f"baseline={baseline}: no cell of the study has this id or name; there are {names}"
        )
    if len(named) > 1:
        ids = ", ".join(one.directory.name for one in named)
        raise UserError(f"baseline={baseline}: several cells have this name; type an id: {ids}")
    return named[0]


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


def rank_tries(loop: Contest, metric: Metric) -> list[CellRuns]:
    """The tries that can be confirmed, the best mean first."""
    left_out = why_left_out(loop, metric)

    def score(cell: CellRuns) -> float:
        return metric.sign * over_seeds([*cell.values(metric).values()])[0]

    ranked = [cell for cell in loop.tries if cell.arm not in left_out]
    return sorted(ranked, key=score, reverse=True)


def why_left_out(loop: Contest, metric: Metric) -> dict[str, str]:
    """By name, why a try cannot be confirmed: `1 of 2 runs ended`."""
    reasons: dict[str, str] = {}
    kept: list[CellRuns] = []
    for cell in loop.tries:
        if reason := _why_incomplete(cell, metric):
            reasons[cell.arm] = reason
        elif different := unlike(cell, loop.baseline):
            reasons[cell.arm] = f"other {name_some(different)} than the baseline"
        elif twins := [other.arm for other in kept if _is_same_training(cell, other)]:
            reasons[cell.arm] = f"every metric is that of {twins[0]}"
        else:
            kept.append(cell)
    return reasons


def _why_incomplete(cell: CellRuns, metric: Metric) -> str:
    wanted = format_count(len(cell.wanted), "run")
    if cell.num_missing:
        return f"{len(cell.wanted) - cell.num_missing} of {wanted} ended"
    if cell.invalid:
        return f"INVALID: {cell.invalid}"
    num_values = len(cell.values(metric))
    return f"{num_values} of {wanted} with {metric.name}" if num_values < len(cell.wanted) else ""


def _is_same_training(first: CellRuns, second: CellRuns) -> bool:
    """True if all runs agree in every metric that both have, up to rounding."""
    if [run.seed for run in first.runs] != [run.seed for run in second.runs]:
        return False
    for run, other in zip(first.runs, second.runs, strict=True):
        ends = [(one.status, one.measured.get("diverged_at_step")) for one in (run, other)]
        shared = run.metrics.keys() & other.metrics.keys()
        pairs = [(run.metrics[name], other.metrics[name]) for name in shared]
        if ends[0] != ends[1] or not all(math.isclose(*pair, rel_tol=1e-6) for pair in pairs):
            return False
    return True


def metric_of(
    contest: Contest, wanted: str | Metric | None, tolerance: float | None
) -> Metric | None:
    """`wanted`, or a metric of test data for a confirmation and of validation for a loop.

    None: no run has it.
    """
    metric = choose_metric(metric_names(contest.cells), wanted, tolerance)
    if metric is None or wanted is not None or contest.confirmation:
        return metric
    return describe_metric(metric.selection_name, tolerance)


# Slices and tables


def slices_of(
    contests: Sequence[Contest], *, metric: str | Metric | None, tolerance: float | None
) -> list[Slice]:
    """A slice for each; those without the requested metric are left out."""
    slices = []
    for number, contest in enumerate(contests, start=1):
        described = metric_of(contest, metric, tolerance)
        if described is None:
            continue
        confirmation, first = contest.confirmation, contest.baseline
        name = f"confirmation {confirmation.number}" if confirmation else "tries"
        size = first.batch_size
        lines = {}
        for cell in contest.cells:
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


# Setups


def _families(cells: Sequence[CellRuns]) -> list[list[CellRuns]]:
    """The cells of each study, without confirmations, by model, data set and budget."""
    arm_keys = (cells[0].roles.arm, *compared_keys(cells))
    families: dict[Hashable, list[CellRuns]] = {}
    for cell in cells:
        if not cell.confirmation:
            key = (cell.study, family_of(cell, arm_keys))
            families.setdefault(key, []).append(cell)
    return [*families.values()]


def _setup_labels(families: Iterable[Sequence[CellRuns]]) -> dict[Path, str]:
    """By folder, the label of each setup; those of a family differ."""
    labels: dict[Path, str] = {}
    for family in families:
        ordered = sorted(family, key=lambda cell: cell.asked_at)
        of_family: dict[Path, str] = {}
        for cell in ordered:
            label = _label(cell, ordered[0])
            if label in of_family.values():
                label += f" {cell.directory.name.rpartition('-')[2]}"
            of_family[cell.directory] = label
        labels |= of_family
    return labels


def _label(cell: CellRuns, first: CellRuns) -> str:
    """Its arm, and all other settings in which it differs from the first that was asked for."""
    words = [cell.arm]
    for key, (value, _) in unlike(cell, first).items():
        if not key.startswith(DIGESTS):
            words.append(setting_words(key, value))
    larger = None
    for key in cell.roles.sizes:
        size = cell.config[key]
        if size != first.config[key] and size != larger:
            words.append(setting_words(key, size))
        larger = size
    return " ".join(words)


def _contest(
    cells: Sequence[CellRuns],
    labels: Mapping[Path, str],
    baseline: str = "",
    confirmation: Confirmation | None = None,
) -> Contest:
    """Cells relabelled as setups. baseline: an id; empty: the first cell that was asked for"""
    ordered = sorted(cells, key=lambda cell: (cell.directory.name != baseline, cell.asked_at))
    first = ordered[0]
    # Setups may differ in whatever was typed, but not in the contents of their data.
    typed = {key for cell in ordered for key in cell.typed if not key.startswith(DIGESTS)}
    of_arm = tuple(sorted(typed - {*first.roles.task}))
    roles = replace(first.roles, arm=SETUP, of_arm=of_arm, slots=())
    setups = []
    for cell in ordered:
        setup = replace(
            cell,
            roles=roles,
            arm=labels[cell.directory],
            num_knobs=int(cell is not first),
            search=None,
            separating={},
        )
        setups.append(setup)
    return Contest(setups, confirmation)
