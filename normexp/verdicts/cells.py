"""The cells of a study, and the settings that must be equal to compare two of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normexp.verdicts.interval import Interval, mean
from normexp.verdicts.metric import FEW_SEEDS, Metric
from normexp.verdicts.rows import (
    Config,
    Confirmation,
    PlannedCell,
    Row,
    Rows,
    SearchRecord,
    Status,
    comparable,
)
from normexp.verdicts.settings import BUDGETS, Roles
from normexp.words import as_typed

DIGESTS = "digests."  # keys that are compared only if both cells have them
LOST = ("failed", "diverged", "at chance", "missing")  # what a run may be


@dataclass(frozen=True, eq=False)
class CellRuns:
    """A cell with its ended runs, in order of seeds.

    directory: runs/<study>/<cell_id>
    defaults: the settings that `config` lacks, because they have their defaults
    typed: the part of `config` that was asked for
    asked_at: its place among all cells that were asked for
    wanted: the seeds that the study asks for
    is_extended: some of its seeds were added by a later command
    command: the number of the command that first asked for it; None if none did
    confirmation: the one that trained these runs; None for the tries themselves
    search: the search that chose its learning rate or other values
    separating: values that must be equal for cells to share a table
    title: model, data, and the settings in which tables of the same model and data differ
    arm: the label of what is compared: of a norm the name, the knobs that are no defaults, and the
        study if there are several
    num_knobs: how many settings of its arm are typed; of several cells, that with the fewest is as
        shipped
    """

    study: str
    directory: Path
    runs: Sequence[Row]
    config: Config
    defaults: Config
    typed: Config
    asked_at: int
    mixes_samples: bool
    wanted: frozenset[int]
    roles: Roles = Roles()
    is_extended: bool = False
    command: int | None = None
    confirmation: Confirmation | None = None
    search: SearchRecord | None = None
    separating: Config = field(default_factory=dict)
    title: str = ""
    arm: str = ""
    num_knobs: int = 0

    @property
    def arm_name(self) -> str:
        return str(self.value_of(self.roles.arm))

    @property
    def task(self) -> tuple[str, ...]:
        """The model and the data."""
        return tuple(str(self.config.get(key)) for key in self.roles.task)

    @property
    def tuned(self) -> float | None:
        """The value of the setting that is tuned, such as the learning rate; None if unknown."""
        return self.config.get(self.roles.tuned) if self.roles.tuned else None

    @property
    def batch_size(self) -> int:
        """0 without sizes."""
        return self.config["batch_size"] if self.roles.sizes else 0

    @property
    def norm_batch_size(self) -> int:
        """The effective size; 0 without sizes."""
        return self.config["norm_batch_size"] if self.roles.sizes else 0

    @property
    def searched(self) -> frozenset[str]:
        """The keys whose values a search chose."""
        return self.search.keys if self.search else frozenset()

    @property
    def num_missing(self) -> int:
        return len(self.wanted - {run.seed for run in self.runs})

    @property
    def lost(self) -> dict[str, int]:
        """How many runs are lost in each way of LOST: they count as chance level, or not at all."""
        counts = Counter(str(run.status) for run in self.runs)
        counts["at chance"] = sum(run.is_at_chance for run in self.runs)
        counts["missing"] = self.num_missing
        return {what: counts[what] for what in LOST if counts[what]}

    @property
    def invalid(self) -> str | None:
        """Why its numbers must not be compared."""
        reasons = (run.measured.get("invalid") for run in self.runs)
        return next(filter(None, reasons), None)

    @property
    def budget(self) -> str:
        """`epochs=12`, or `steps=300`: the first of BUDGETS that is a whole number."""
        for key in BUDGETS:
            length = self.config.get(key)
            if length is not None and length == int(length):
                return setting_words(key, length)
        return ""

    def value_of(self, key: str) -> Any:
        """The value of a key that defines its training, also where it is a default."""
        return self.config.get(key, self.defaults.get(key))

    def values(self, metric: Metric) -> dict[int, float]:
        """The metric as shown, by seed; diverged runs count as chance level."""
        values = {run.seed: run.value(metric) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}

    def without_value(self, metric: Metric) -> int:
        """The number of diverged runs, if the metric has no chance level."""
        return sum(run.status == Status.DIVERGED and run.value(metric) is None for run in self.runs)

    def step(self, metric: Metric) -> float | None:
        """The smallest difference between two test accuracies; None if not known."""
        count = max((run.num_test_samples for run in self.runs), default=0)
        is_count = metric.name.partition("@")[0] == "test/accuracy"
        return metric.scale / count if count and is_count else None


def mean_of_seeds(values: Sequence[float], step: float | None, metric: Metric) -> Interval:
    """The mean, for the same test samples, with its interval over seeds.

    Few seeds have no interval: it would be far wider than their values, which are shown instead.
    """
    interval = mean(values, step=step, bounds=metric.bounds)
    if interval.low is None or interval.n <= FEW_SEEDS:
        return replace(interval, low=None, high=None)
    return replace(interval, low=max(interval.low, metric.least))


def build_cells(rows: Rows) -> list[CellRuns]:
    """The cells, without labels: those with ended runs, then others that were asked for.

    The runs of a confirmation are cells of their own.
    """
    by_cell: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run in rows.runs:
        if not any(confirmation.has(run) for confirmation in rows.confirmations):
            by_cell[run.study, run.cell_id].append(run)
    places = {place: number for number, place in enumerate({**rows.asked, **by_cell})}
    cells = [_ended_cell(runs, rows, places[place]) for place, runs in by_cell.items()]
    cells += _planned_cells(rows, cells, places)
    return [*cells, *_confirmed_cells(rows, cells)]


def _confirmed_cells(rows: Rows, tries: Sequence[CellRuns]) -> Iterator[CellRuns]:
    """The cells of the confirmations, also those without an ended run."""
    by_id = {(cell.study, cell.directory.name): cell for cell in tries}
    for confirmation in rows.confirmations:
        for cell_id in confirmation.cells:
            runs = [run for run in rows.runs if run.cell_id == cell_id and confirmation.has(run)]
            if cell := by_id.get((confirmation.study, cell_id)):
                yield replace(
                    cell,
                    runs=sorted(runs, key=lambda run: run.seed),
                    wanted=confirmation.seeds,
                    is_extended=False,
                    confirmation=confirmation,
                )


def _ended_cell(runs: Sequence[Row], rows: Rows, asked_at: int) -> CellRuns:
    place = runs[0].study, runs[0].cell_id
    first = min(runs, key=lambda run: run.status == Status.FAILED)  # a failed run may lack settings
    recorded = [run.seed for run in runs]
    by_command = rows.asked.get(place) or [recorded]
    ended = {run.seed for run in runs if run.status != Status.FAILED}
    return CellRuns(
        study=first.study,
        directory=first.directory.parent,
        runs=sorted(runs, key=lambda run: run.seed),
        config=first.config,
        defaults=first.defaults,
        typed=first.typed,
        asked_at=asked_at,
        mixes_samples=first.mixes_samples,
        roles=rows.roles,
        wanted=frozenset(recorded).union(*by_command),
        is_extended=not ended <= {*by_command[0]},
        command=rows.commands.get(place),
        search=rows.searches.get(place),
    )


# Cells without an ended run


def _planned_cells(
    rows: Rows, ended: Sequence[CellRuns], places: Mapping[tuple[str, str], int]
) -> list[CellRuns]:
    """Cells that were asked for and have no runs: they count in the families of the study."""
    with_runs = {cell.study for cell in ended}
    cells = []
    for planned in rows.planned:
        place = places.get((planned.study, planned.cell_id), len(places))
        cells.append(_planned_cell(planned, rows, place))
    cells = [cell for cell in cells if cell.study in with_runs]
    # A norm that is declared to mix no samples is asked for once, whatever the sizes.
    mixing = {cell.arm_name: cell.mixes_samples for cell in ended}
    sizes: dict[str, set[int]] = defaultdict(set)
    for cell in cells:
        sizes[cell.arm_name].add(cell.norm_batch_size)
    return [
        replace(cell, mixes_samples=mixing.get(cell.arm_name, len(sizes[cell.arm_name]) > 1))
        for cell in cells
    ]


def _planned_cell(planned: PlannedCell, rows: Rows, asked_at: int) -> CellRuns:
    place = planned.study, planned.cell_id
    by_command = rows.asked.get(place) or [planned.seeds]
    return CellRuns(
        study=planned.study,
        directory=planned.directory,
        runs=(),
        config=planned.config,
        defaults=planned.defaults,
        typed=planned.config,
        asked_at=asked_at,
        mixes_samples=True,
        roles=rows.roles,
        wanted=frozenset[int]().union(*by_command),
        command=rows.commands.get(place),
        search=rows.searches.get(place),
    )


# Differences between cells


def unlike(
    first: CellRuns, second: CellRuns, *, searched: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The values that keep two cells from being compared, by key.

    These are all differences in what was typed, except in the arm (with the slots of a norm's
    YAML), in the sizes and in keys that were searched for both. Values that follow from equal words
    may differ, such as a learning rate by `lr_rule`.
    """
    typed = [cell.typed for cell in (first, second)]
    ignored = {*first.roles.sizes, *searched, *(first.searched & second.searched)}
    budgets = first.roles.budgets
    for key in budgets:
        length = first.config.get(key)
        if length is not None and length == second.config.get(key):
            ignored |= {*budgets}  # the others follow from it, rounded
    different = {}
    for key in sorted({*typed[0], *typed[1]} - ignored):
        a, b = first.value_of(key), second.value_of(key)
        if comparable(typed[0].get(key)) == comparable(typed[1].get(key)):
            continue
        part = key.removeprefix(DIGESTS)
        if comparable(a) == comparable(b) or _belongs_to_arms(part, first, second):
            continue
        if part != key and None in (a, b):
            continue
        different[key] = (a, b)
    return different


def _belongs_to_arms(key: str, first: CellRuns, second: CellRuns) -> bool:
    """True for a key of what is compared, and for a slot that is as the YAMLs of norms set it."""
    roles = first.roles
    if key in roles.slots:
        own = f"{roles.arm}.{key}"
        return all(cell.value_of(key) == cell.value_of(own) for cell in (first, second))
    return roles.is_of_arm(key) and first.arm != second.arm


def settings_key(cell: CellRuns) -> Hashable:
    """Equal for cells that share a table."""
    return comparable(cell.separating)


def setting_words(key: str, value: Any) -> str:
    """`epochs=12`."""
    return f"{key}={value_words(value)}"


def value_words(value: Any) -> str:
    """A value as typed, a float with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else as_typed(value)


def metric_names(cells: Iterable[CellRuns]) -> list[str]:
    """The metrics that any of the runs has."""
    return sorted({name for cell in cells for run in cell.runs for name in run.metrics})
