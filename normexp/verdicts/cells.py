"""The cells of a study: their labels, and the settings that must be equal to compare them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normexp.verdicts.interval import Interval, mean
from normexp.verdicts.metric import FEW_SEEDS, Metric
from normexp.verdicts.rows import (
    Config,
    PlannedCell,
    Row,
    Rows,
    SearchRecord,
    Status,
    comparable,
)
from normexp.verdicts.settings import BUDGETS, Roles
from normexp.words import as_typed

ORDER = (
    "batch",
    "layer",
    "instance",
    "group",
    "rms",
    "layer2d",
    "none",
)  # the first norms of figures
DIGESTS = "digests."  # keys that are compared only if both cells have them
LOST = ("failed", "diverged", "at chance", "missing")  # what a run may be
FOLLOWS = ("norm.momentum", "micro_batch_size")  # these may follow from the norm batch size


@dataclass(frozen=True, eq=False)
class CellRow:
    """A cell with its ended runs, in order of seeds.

    directory: runs/<study>/<cell_id>
    defaults: the settings that `config` lacks, because they have their defaults
    wanted: the seeds that the study asks for
    is_extended: some of its seeds were added by a later command
    search: the search that chose its learning rate or other values
    separating: values that must be equal for cells to share a table
    title: model, data, and the settings in which tables of the same model and data differ
    norm: the label of its norm: the name, the knobs in which cells of that norm differ, and the
        study if there are several
    """

    study: str
    directory: Path
    runs: Sequence[Row]
    config: Config
    defaults: Config
    mixes_samples: bool
    wanted: frozenset[int]
    roles: Roles = Roles()
    is_extended: bool = False
    search: SearchRecord | None = None
    separating: Config = field(default_factory=dict)
    title: str = ""
    norm: str = ""

    @property
    def norm_name(self) -> str:
        return str(self.config.get(self.roles.arm))

    @property
    def task(self) -> tuple[str, ...]:
        """The model and the data."""
        return tuple(str(self.config.get(key)) for key in self.roles.task)

    @property
    def lr(self) -> float | None:
        """The learning rate, or another setting that is tuned; None if not recorded."""
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
    def num_knobs(self) -> int:
        """How many settings of its arm differ from the defaults."""
        return sum(map(self.roles.is_of_arm, self.config))

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


def build_cells(rows: Rows) -> list[CellRow]:
    """The cells with their labels, ordered by data, model, settings, norm and sizes."""
    by_cell: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run in rows.runs:
        by_cell[run.study, run.cell_id].append(run)
    cells = [_ended_cell(runs, rows) for runs in by_cell.values()]
    cells += _planned_cells(rows, cells)
    cells = _with_labels(_with_titles(cells))
    norms = order_norms({cell.norm: cell.norm_name for cell in cells})

    def order(cell: CellRow) -> tuple[Any, ...]:
        settings = [_sortable(value) for value in cell.separating.values()]
        sizes = (cell.batch_size, cell.norm_batch_size)
        return (*cell.task[::-1], settings, norms.index(cell.norm), *sizes, cell.lr or 0)

    return sorted(cells, key=order)


def _ended_cell(runs: Sequence[Row], rows: Rows) -> CellRow:
    place = runs[0].study, runs[0].cell_id
    first = min(runs, key=lambda run: run.status == Status.FAILED)  # a failed run may lack settings
    recorded = [run.seed for run in runs]
    by_command = rows.asked.get(place) or [recorded]
    ended = {run.seed for run in runs if run.status != Status.FAILED}
    return CellRow(
        study=first.study,
        directory=first.directory.parent,
        runs=sorted(runs, key=lambda run: run.seed),
        config=first.config,
        defaults=first.defaults,
        mixes_samples=first.mixes_samples,
        roles=rows.roles,
        wanted=frozenset(recorded).union(*by_command),
        is_extended=not ended <= {*by_command[0]},
        search=rows.searches.get(place),
    )


# Cells without an ended run


def _planned_cells(rows: Rows, ended: Sequence[CellRow]) -> list[CellRow]:
    """Cells that were asked for and have no runs: they count in the families of the study."""
    with_runs = {cell.study for cell in ended}
    cells = [_planned_cell(planned, rows) for planned in rows.planned]
    cells = [cell for cell in cells if cell.study in with_runs]
    # A norm that is declared to mix no samples is asked for once, whatever the sizes.
    mixing = {cell.norm_name: cell.mixes_samples for cell in ended}
    sizes: dict[str, set[int]] = defaultdict(set)
    for cell in cells:
        sizes[cell.norm_name].add(cell.norm_batch_size)
    return [
        replace(cell, mixes_samples=mixing.get(cell.norm_name, len(sizes[cell.norm_name]) > 1))
        for cell in cells
    ]


def _planned_cell(planned: PlannedCell, rows: Rows) -> CellRow:
    return CellRow(
        study=planned.study,
        directory=planned.directory,
        runs=(),
        config=planned.config,
        defaults=planned.defaults,
        mixes_samples=True,
        roles=rows.roles,
        wanted=frozenset(planned.seeds),
        search=rows.searches.get((planned.study, planned.cell_id)),
    )


# Settings and labels


def _with_titles(cells: Sequence[CellRow]) -> list[CellRow]:
    """Adds titles, and the settings that separate tables."""
    keys = _separating_keys(cells)
    complete = []
    for cell in cells:
        of_task = [other for other in cells if other.task == cell.task]
        values = {key: cell.value_of(key) for key in keys}
        words = [" on ".join(cell.task)] if cell.task else []
        for key, value in values.items():
            if _varies([other.config.get(key) for other in of_task]):
                words.append(setting_words(key, value))
        separating = {**dict(zip(cell.roles.task, cell.task, strict=True)), **values}
        complete.append(replace(cell, separating=separating, title=", ".join(words) or cell.study))
    return complete


def _separating_keys(cells: Sequence[CellRow]) -> list[str]:
    """The keys for which some norm was run with several values.

    A key that differs only between norms separates nothing: the norms share a table, which says
    that they are not compared. Only the budget with the fewest values counts, since epochs and
    steps follow from samples, differently where a batch size does not divide the data.
    """
    roles = cells[0].roles
    with_roles = {*roles.sizes, roles.tuned, *roles.task}
    values = {
        key: [cell.config.get(key) for cell in cells]
        for key in sorted({key for cell in cells for key in cell.config})
        if not roles.is_of_arm(key) and key not in with_roles
    }
    budgets = [key for key in roles.budgets if key in values and None not in values[key]]
    length = min(budgets, key=lambda key: len({*values[key]}), default="")
    places = [
        (cell.study, cell.norm_name, cell.task, cell.batch_size, cell.norm_batch_size)
        for cell in cells
    ]
    return [
        key
        for key, of_cells in values.items()
        if (key == length or key not in roles.budgets) and _varies(of_cells, places)
    ]


def _with_labels(cells: Sequence[CellRow]) -> list[CellRow]:
    """Adds the label of each norm."""
    by_name: dict[str, list[CellRow]] = defaultdict(list)
    for cell in cells:
        by_name[cell.norm_name].append(cell)
    knobs = {name: _varying_knobs(same) for name, same in by_name.items()}
    has_studies = len({cell.study for cell in cells}) > 1
    labelled = []
    for cell in cells:
        words = [cell.norm_name]
        for key in knobs[cell.norm_name]:
            value = cell.value_of(key)
            if value is not None:
                words.append(f"{key.removeprefix(f'{cell.roles.arm}.')}={as_typed(value)}")
        if cell.invalid:
            words.append("INVALID")
        if has_studies:
            words.append(f"· {cell.study}")
        labelled.append(replace(cell, norm=" ".join(words)))
    return labelled


def _varying_knobs(cells: Sequence[CellRow]) -> list[str]:
    """The keys of a norm in which its cells differ."""
    roles = cells[0].roles
    keys = sorted({key for cell in cells for key in cell.config if roles.is_of_arm(key)})
    places = [
        (cell.batch_size, cell.norm_batch_size, cell.lr, settings_key(cell)) for cell in cells
    ]
    varying = []
    for key in (*keys, "micro_batch_size"):
        values = [cell.value_of(key) for cell in cells]
        if _varies(values, places if key in FOLLOWS else None):
            varying.append(key)
    return varying


def _varies(values: Sequence[Any], places: Sequence[Hashable] | None = None) -> bool:
    """True if two values differ, or with places, if two values of one place do."""
    pairs = {*zip(places or [None] * len(values), map(comparable, values), strict=True)}
    return len(pairs) > len({place for place, _ in pairs})


def order_norms(names: Mapping[str, str]) -> list[str]:
    """Labels of norms, those of ORDER first, then others by label; numbers sort by value.

    names: the name of each norm, by label
    """

    def rank(label: str) -> tuple[int, list[Any]]:
        name = names[label]
        pieces: list[Any] = re.split(r"(\d+(?:\.\d+)?)", label)  # every second piece is a number
        pieces[1::2] = map(float, pieces[1::2])
        return ORDER.index(name) if name in ORDER else len(ORDER), pieces

    return sorted(names, key=rank)


# Differences between cells


def unlike(
    first: CellRow, second: CellRow, *, searched: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The values that keep two cells from being compared, by key.

    These are all differences in what was typed, except in the norm (with the slots of its YAML), in
    the sizes and in keys that were searched for both. Values that follow from equal words may
    differ, such as a learning rate by `lr_rule`.
    """
    typed = [cell.runs[0].typed for cell in (first, second)]
    ignored = {*first.roles.sizes, *searched, *(first.searched & second.searched)}
    budgets = first.roles.budgets
    for key in budgets:
        length = first.config.get(key)
        if length is not None and length == second.config.get(
            key
        ):  # the others follow from it, rounded
            ignored |= {*budgets}
    different = {}
    for key in sorted({*typed[0], *typed[1]} - ignored):
        a, b = first.value_of(key), second.value_of(key)
        if comparable(typed[0].get(key)) == comparable(typed[1].get(key)):
            continue
        part = key.removeprefix(DIGESTS)
        if comparable(a) == comparable(b) or _belongs_to_norms(part, first, second):
            continue
        if part != key and None in (a, b):
            continue
        different[key] = (a, b)
    return different


def _belongs_to_norms(key: str, first: CellRow, second: CellRow) -> bool:
    """True for a key of the norms, and for a slot that is as their YAMLs set it."""
    if key in first.roles.of_arm:  # a slot
        return all(cell.value_of(key) == cell.value_of(f"norm.{key}") for cell in (first, second))
    return first.roles.is_of_arm(key) and first.norm != second.norm


def settings_key(cell: CellRow) -> Hashable:
    """Equal for cells that share a table."""
    return comparable(cell.separating)


def setting_words(key: str, value: Any) -> str:
    """`epochs=12`."""
    return f"{key}={value_words(value)}"


def value_words(value: Any) -> str:
    """A value as typed, a float with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else as_typed(value)


def _sortable(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))


def metric_names(cells: Iterable[CellRow]) -> list[str]:
    """The metrics that any of the runs has."""
    return sorted({name for cell in cells for run in cell.runs for name in run.metrics})
