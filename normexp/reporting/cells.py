"""The cells of a study: their labels, and the settings that must be equal to compare them."""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normexp.config.sizes import SIZES
from normexp.records.result import Status, flatten
from normexp.reporting.metric import FEW_SEEDS, Metric
from normexp.reporting.runs import SLOTS, Config, Records, RunRow, SearchRecord
from normexp.stats.interval import Interval, mean
from normexp.words import as_typed

ORDER = ("batch", "layer", "instance", "group", "rms", "layer2d", "none")  # first in figures
# Config keys that belong to the norm, so they may differ between norms that are compared.
NORM_KEYS = ("norm", *SLOTS)
# The length of a training; it separates cells by the one with the fewest distinct values. Epochs
# and steps follow from samples, differently where a batch size does not divide the data.
BUDGET = ("samples", "epochs", "steps")
DIGESTS = "digests."  # of what was loaded: compared where both are known
LOST = ("failed", "diverged", "at chance", "missing")  # of runs
FOLLOWS = ("norm.momentum", "micro_batch_size")  # may follow from the norm batch size


@dataclass(frozen=True, eq=False)
class CellRow:
    """A cell with its ended runs, in order of seeds.

    directory: runs/<study>/<cell_id>
    norm: its label: the name, the knobs in which cells of that norm differ, and the study if there
        are several
    lr: None if not recorded
    norm_batch_size: effective, never None
    settings: values that must be equal for cells to share a table
    title: model, data, and the settings in which tables of the same model and data differ
    wanted: the seeds that the study asks for
    value_of: the value of a key that defines its training, also where it is a default
    is_extended: some of its seeds were added by a later command
    search: that chose its learning rate or other values
    """

    study: str
    directory: Path
    runs: Sequence[RunRow]
    config: Config
    norm: str
    model: str
    data: str
    lr: float | None
    batch_size: int
    norm_batch_size: int
    mixes_samples: bool
    wanted: frozenset[int]
    value_of: Callable[[str], Any]
    is_extended: bool = False
    search: SearchRecord | None = None
    settings: Config = field(default_factory=dict)
    title: str = ""

    @property
    def searched(self) -> frozenset[str]:
        """The keys whose values a search chose."""
        return self.search.keys if self.search else frozenset()

    @property
    def is_prepared(self) -> bool:
        """False if its runs failed before its data were known."""
        return not self.runs or any("epochs" in run.result.derived for run in self.runs)

    @property
    def missing(self) -> int:
        return len(self.wanted - {run.seed for run in self.runs})

    @property
    def lost(self) -> dict[str, int]:
        """The number of runs that count as chance level, or not at all, by what became of them.

        At chance are those that name classes no better than always the most frequent one.
        """
        statuses = Counter(str(run.status) for run in self.runs)
        statuses["at chance"] = sum(run.is_at_chance for run in self.runs)
        statuses["missing"] = self.missing
        return {what: statuses[what] for what in LOST if statuses[what]}

    @property
    def invalid(self) -> str | None:
        """Why its numbers must not be compared."""
        reasons = (run.result.measured.invalid for run in self.runs)
        return next(filter(None, reasons), None)

    @property
    def budget(self) -> str:
        """`epochs=12`, or `steps=300`."""
        known = [(key, self.config.get(key)) for key in BUDGET]
        whole = [pair for pair in known if pair[1] is not None and pair[1] == int(pair[1])]
        return setting_words(*whole[0]) if whole else ""

    def values(self, metric: Metric) -> dict[int, float]:
        """The metric as shown, by seed; diverged runs count as chance level."""
        return {run.seed: value for run in self.runs if (value := run.value(metric)) is not None}

    def without_value(self, metric: Metric) -> int:
        """The number of runs that diverged under a metric that has no chance level."""
        lost = [run for run in self.runs if run.status == Status.DIVERGED]
        return sum(run.value(metric) is None for run in lost)

    def step(self, metric: Metric) -> float | None:
        """The smallest difference that test accuracies could have; None: not known."""
        count = max((run.num_test_samples for run in self.runs), default=0)
        is_count = metric.name.partition("@")[0] == "test/accuracy"
        return metric.scale / count if count and is_count else None


def mean_of_seeds(values: Sequence[float], step: float | None, metric: Metric) -> Interval:
    """The mean, for the same test samples, with its interval over seeds.

    Of a few seeds an interval would be far wider than they are, so the seeds are shown instead.
    """
    known = mean(values, step=step, bounds=metric.bounds)
    return replace(known, low=None, high=None) if known.n <= FEW_SEEDS else known


def build_cells(records: Records) -> list[CellRow]:
    """The cells with their labels, ordered by data, model, settings, norm and sizes."""
    by_folder: dict[Any, list[RunRow]] = {}
    for run in records.runs:
        by_folder.setdefault((run.study, run.directory.parent), []).append(run)
    cells = [_cell_of(runs, records) for runs in by_folder.values()]
    cells += _planned_cells(records, cells)
    cells = _with_norms(_with_settings(cells))
    rank = {norm: place for place, norm in enumerate(order_norms(cell.norm for cell in cells))}

    def order(cell: CellRow) -> tuple[Any, ...]:
        settings = [_sortable(value) for value in cell.settings.values()]
        sizes = (cell.batch_size, cell.norm_batch_size)
        return (cell.data, cell.model, settings, rank[cell.norm], *sizes, cell.lr or 0)

    return sorted(cells, key=order)


def _cell_of(runs: Sequence[RunRow], records: Records) -> CellRow:
    place = runs[0].study, runs[0].directory.parent.name
    first = min(runs, key=lambda run: run.status == Status.FAILED)  # may have failed too early
    known = [run.seed for run in runs]
    asked = records.asked.get(place) or [known]
    ended = {run.seed for run in runs if run.status != Status.FAILED}
    return CellRow(
        **_named_values(first.config),
        study=first.study,
        directory=first.directory.parent,
        runs=sorted(runs, key=lambda run: run.seed),
        mixes_samples=first.result.measured.traits.get("mixes_samples") is not False,
        wanted=frozenset(known).union(*asked),
        value_of=first.value_of,
        is_extended=not ended <= set(asked[0]),
        search=records.searches.get(place),
    )


def _named_values(config: Config) -> dict[str, Any]:
    names = {key: str(config.get(key)) for key in ("norm", "model", "data")}
    numbers = {key: config.get(key) for key in ("lr", "batch_size", "norm_batch_size")}
    return {**names, **numbers, "config": config}


def _planned_cells(records: Records, known: Sequence[CellRow]) -> list[CellRow]:
    """A cell without runs for each one that was asked for: families are those of the whole study.

    What its title does not say is as in the most similar cell of its study.
    """
    cells = []
    for study, state in records.planned:
        words = (word.partition("=") for word in state.title.split())
        typed = {key.lstrip("+"): _typed_value(text) for key, _, text in words}

        def likeness(cell: CellRow, typed: Config = typed) -> int:
            return sum(comparable(cell.config.get(key)) == comparable(typed[key]) for key in typed)

        alike = max((c for c in known if c.study == study), key=likeness, default=None)
        if alike is not None:
            config = _with_typed(alike.config, typed)
            planned = CellRow(
                **_named_values(config),
                study=study,
                directory=state.directory,
                runs=(),
                mixes_samples=True,
                wanted=frozenset(state.states),
                value_of=config.get,
                search=records.searches.get((study, state.id)),
            )
            cells.append(planned)
    # A norm that is known to mix no samples was asked for once, whatever the sizes.
    mixing = {cell.norm: cell.mixes_samples for cell in known}
    sizes = Counter(norm for norm, _ in {(cell.norm, cell.norm_batch_size) for cell in cells})
    return [
        replace(cell, mixes_samples=mixing.get(cell.norm, sizes[cell.norm] > 1)) for cell in cells
    ]


def _with_typed(config: Config, typed: Config) -> dict[str, Any]:
    """The settings of a cell with other words; a norm's own values go with it."""
    is_same = config.get("norm") == typed.get("norm")
    has_budget = not typed.keys().isdisjoint(BUDGET)  # the others follow from the typed one
    kept = {
        key: value
        for key, value in config.items()
        if (is_same or not is_norm_key(key)) and not (has_budget and key in BUDGET)
    }
    for key, whole in zip(SIZES[1:], SIZES, strict=False):
        kept[key] = typed.get(whole, kept[whole])
        typed = {key: kept[key], **typed}
    return {**kept, **typed}


def _typed_value(text: str) -> Any:
    """A number, a list or a truth value, or the text."""
    with suppress(ValueError, SyntaxError):
        return literal_eval(text)
    return text


def _with_settings(cells: Sequence[CellRow]) -> list[CellRow]:
    """Adds settings and titles.

    A key separates cells if a norm was run with several values of it. One that differs only between
    norms does not, and the table then says that they are not compared.
    """
    named = {*SIZES, "lr", "model", "data"}
    known = [cell for cell in cells if cell.is_prepared] or cells
    keys = {key for cell in known for key in cell.config}
    counts = {key: {comparable(cell.config.get(key)) for cell in known} for key in BUDGET}
    lengths = [key for key in BUDGET if comparable(None) not in counts[key]]
    length = min(lengths, key=lambda key: len(counts[key]), default="")
    places = [
        (cell.study, cell.norm, cell.model, cell.data, cell.batch_size, cell.norm_batch_size)
        for cell in known
    ]
    separating = [
        key
        for key in sorted(keys - named)
        if not is_norm_key(key)
        and (key == length or key not in BUDGET)
        and _varies([cell.config.get(key) for cell in known], places)
    ]
    labelled = []
    for cell in cells:
        place = (cell.model, cell.data)
        others = [one for one in known if (one.model, one.data) == place] or [cell]
        # A cell that failed too early to have them stands with the first of the others.
        source = cell if cell.is_prepared else others[0]
        values = {key: source.value_of(key) for key in separating}
        words = [
            setting_words(key, value)
            for key, value in values.items()
            if _varies([other.config.get(key) for other in others])
        ]
        title = ", ".join([f"{cell.model} on {cell.data}", *words])
        settings = {"model": cell.model, "data": cell.data, **values}
        labelled.append(replace(cell, settings=settings, title=title))
    return labelled


def _varies(values: Sequence[Any], places: Sequence[Hashable] | None = None) -> bool:
    """True if two values differ; with places, if two of one place do."""
    known: dict[Hashable, Hashable] = {}
    pairs = zip(places or [None] * len(values), map(comparable, values), strict=True)
    return any(known.setdefault(place, value) != value for place, value in pairs)


def _with_norms(cells: Sequence[CellRow]) -> list[CellRow]:
    """Adds to the label of each norm the knobs in which its cells differ."""
    groups: dict[str, list[CellRow]] = {}
    for cell in cells:
        groups.setdefault(cell.norm, []).append(cell)
    labelled, has_studies = [], _varies([cell.study for cell in cells])
    for name, same in groups.items():
        keys = sorted({key for cell in same for key in cell.config if is_norm_key(key)})
        places = [(cell.batch_size, cell.norm_batch_size, cell.lr, settings_key(cell))
                  for cell in same]  # fmt: skip
        varying = []
        for key in (*keys, "micro_batch_size"):
            if _varies([cell.value_of(key) for cell in same], places if key in FOLLOWS else None):
                varying.append(key)
        for cell in same:
            words = [
                f"{key.removeprefix('norm.')}={as_typed(cell.value_of(key))}" for key in varying
            ]
            words += ["INVALID"] if cell.invalid else []
            words += ["·", cell.study] if has_studies else []
            labelled.append(replace(cell, norm=" ".join([name, *words])))
    return labelled


def unlike(
    first: CellRow, second: CellRow, *, searched: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """By key, the values for which two cells must not be compared.

    These are all differences in what was asked for, but those of the norm (with the slots of its
    YAML), of the sizes and of keys that were searched for both. What follows from equal words may
    differ, as a learning rate by `lr_rule`, or epochs where a batch size does not divide the data.
    """
    asked = [flatten(cell.runs[0].result.defines) for cell in (first, second)]
    free = {*SIZES, *searched, *(first.searched & second.searched)}
    lengths = [(first.config.get(key), second.config.get(key)) for key in BUDGET]
    if any(a is not None and a == b for a, b in lengths):  # one length in other words
        free |= {*BUDGET}
    different = {}
    for key in sorted({*asked[0], *asked[1]} - free):
        a, b = first.value_of(key), second.value_of(key)
        is_asked = comparable(asked[0].get(key)) != comparable(asked[1].get(key))
        is_known = None not in (a, b) or not key.startswith(DIGESTS)
        is_other = is_asked and is_known and comparable(a) != comparable(b)
        if is_other and not _belongs_to_norms(key, first, second):
            different[key] = (a, b)
    return different


def _belongs_to_norms(key: str, first: CellRow, second: CellRow) -> bool:
    """True for what two norms may differ in: their own keys, and slots that their YAMLs set."""
    if key in SLOTS:
        own = [cell.value_of(f"norm.{key}") for cell in (first, second)]
        of_norms = [SLOTS[key] if value is None else value for value in own]
        return of_norms == [cell.value_of(key) for cell in (first, second)]
    return is_norm_key(key) and first.norm != second.norm


def settings_key(cell: CellRow) -> Hashable:
    """Equal for cells that share a table."""
    return tuple((key, comparable(value)) for key, value in cell.settings.items())


def setting_words(key: str, value: Any) -> str:
    """`epochs=12`."""
    return f"{key}={value_words(value)}"


def value_words(value: Any) -> str:
    """A value as typed, a float with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else as_typed(value)


def is_norm_key(key: str) -> bool:
    return key.partition(".")[0] in NORM_KEYS


def comparable(value: Any) -> Hashable:
    """A key that is equal for equal values: 1 is 1.0, and true is no number."""
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    if isinstance(value, Mapping):
        return tuple((key, comparable(item)) for key, item in sorted(value.items()))
    return (isinstance(value, bool), value)


def _sortable(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))


def metric_names(cells: Iterable[CellRow]) -> list[str]:
    """The metrics that any of the runs has."""
    return sorted({name for cell in cells for run in cell.runs for name in run.metrics})


def order_norms(labels: Iterable[str]) -> list[str]:
    """Norms of ORDER first, then others by name; numbers in names sort by value."""

    def rank(label: str) -> tuple[int, list[Any]]:
        base = base_of(label)
        pieces: list[Any] = re.split(r"(\d+(?:\.\d+)?)", label)  # every second one is a number
        pieces[1::2] = map(float, pieces[1::2])
        return ORDER.index(base) if base in ORDER else len(ORDER), pieces

    return sorted(set(labels), key=rank)


def base_of(label: str) -> str:
    """The norm in a label: `group` of `group num_groups=4` and of `group · before`."""
    return re.split(r"[ ·]", label)[0]
