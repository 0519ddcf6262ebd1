"""The cells of a study: their labels, and the settings that must be equal to compare them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from normexp.batching.sizes import SIZES
from normexp.config.rules import as_typed
from normexp.norms.slots import SLOTS, Slots
from normexp.records.history import CommandEntry, History
from normexp.reporting.model import CellRow, Config, RunRow, comparable, compared, differences
from normexp.reporting.read import StudyRecords
from normexp.reporting.style import order_norms
from normexp.stats.interval import smallest_step

# Config keys that belong to the norm, so they may differ between norms that are compared.
NORM_KEYS = ("norm", *SLOTS)
# The length of a training in three units; labels use the one with the fewest distinct values.
BUDGET = ("epochs", "num_steps", "samples")
# These may follow from the sizes and the budget (steps, a half-life), so they separate cells only
# where sizes and budget are equal.
DERIVED = (*BUDGET, "optim.momentum")
# Defaults of keys that are recorded only if they differ from them.
UNRECORDED = {**asdict(Slots()), "val_every_epochs": 1}


def build_cells(records: StudyRecords) -> list[CellRow]:
    """The cells of the studies with their labels, ordered by data, model, budget, norm and sizes.

    Cells of a study that recorded equal recipes are one, whatever their ids.
    """
    by_folder: dict[Any, list[RunRow]] = {}
    for run in records.runs:
        by_folder.setdefault(run.directory.parent, []).append(run)
    cells = _merge([_measured(runs, records.num_seeds) for runs in by_folder.values()])
    for study, histories in records.histories.items():
        cells = _declared(cells, study, histories)
    has_studies = len(records.num_seeds) > 1
    cells = [
        replace(
            cell,
            norm=cell.name + (f" · {cell.study}" if has_studies else ""),
        )
        for cell in _with_steps(cells)
    ]
    budget = _budget_key(cells)
    cells = _with_settings(cells, budget)
    cells = [
        replace(cell, norm=cell.norm + words, base=cell.name + words)
        for cell, words in zip(cells, _knob_words(cells), strict=True)
    ]
    rank = {norm: place for place, norm in enumerate(order_norms(cell.norm for cell in cells))}

    def order(cell: CellRow) -> tuple[Any, ...]:
        length = cell.config.get(budget)
        sizes = (cell.batch_size, cell.norm_batch_size)
        length = float("inf") if length is None else length
        return (cell.data, cell.model, length, rank[cell.norm], *sizes, cell.lr or 0)

    return sorted(cells, key=order)


def _measured(runs: Sequence[RunRow], num_seeds: Mapping[str, int]) -> CellRow:
    """A cell without what depends on the other cells."""
    first, config = runs[0], _with_budget(runs[0].config)
    batch_size = config["batch_size"]
    micro = config.get("micro_batch_size") or batch_size
    norm, model, data = (str(config.get(key) or "-") for key in ("norm", "model", "data"))
    return CellRow(
        study=first.study,
        directory=first.directory.parent,
        runs=runs,
        config=config,
        name=norm,
        model=model,
        data=data,
        lr=config.get("lr"),
        batch_size=batch_size,
        micro_batch_size=micro,
        norm_batch_size=config.get("norm_batch_size") or micro,
        mixes_samples=config.get("mixes_samples") is not False,
        expected=num_seeds[first.study],
    )


def _declared(cells: Sequence[CellRow], study: str, histories: Sequence[History]) -> list[CellRow]:
    """Adds what the first command for each cell of a study declared, and the searched keys."""
    searches = [entry for history in histories for entry in history.searches.values()]
    searched = {key for entry in searches for key in entry.keys}
    history = histories[0] if histories else History()
    rounds = _rounds_of(history)
    asked = history.asked_seeds(history.commands)
    over = _seeds_over([cell for cell in cells if cell.study == study], history)
    unended, count = [], 0  # per round, cumulative
    for _, declared in rounds:
        count += sum(
            not seeds <= over.get(name, set()) and name not in history.errors
            for name, seeds in declared.items()
        )
        unended.append(count)

    def of_cell(cell: CellRow) -> CellRow:
        lengths = [len(entry.points) for entry in searches if entry.norm in ("", cell.name)]
        cell = replace(cell, searched=frozenset(searched), num_points=max(lengths, default=0))
        ids = {cell.directory.name, *cell.same_as}
        wanted = {seed for name in ids for seed in asked.get(name, ())}
        if wanted:
            cell = replace(cell, expected=len(wanted | {run.seed for run in cell.runs}))
        for number, (command, declared) in enumerate(rounds):
            if seeds := {seed for name in ids for seed in declared.get(name, ())}:
                return replace(
                    cell,
                    declared=frozenset(seeds),
                    round=number,
                    unended=unended[number],
                    rule=command.rule,
                )
        return cell

    return [of_cell(cell) if cell.study == study else cell for cell in cells]


def _seeds_over(cells: Sequence[CellRow], history: History) -> dict[str, set[int]]:
    """The seeds that have ended, by id: also those that failed for good, or were refused.

    A command that is typed again takes nothing of that back: it tries refused cells again, and
    failed runs as often as `max_attempts` allows.
    """
    attempts: dict[str, int] = {}  # that the commands allow
    for command in history.commands:
        for name in command.cells:
            attempts[name] = max(attempts.get(name, 0), command.max_attempts)
    over: dict[str, set[int]] = {}
    for end in history.ends:
        over.setdefault(end.cell, set()).update(end.seeds)
    for cell in cells:
        names = {cell.directory.name, *cell.same_as}
        most = max((attempts.get(name, 0) for name in names), default=0)
        again = {run.seed for run in cell.runs if 0 < run.result.attempts < most} - cell.ended
        for name in names:
            over[name] = over.get(name, set()) | {run.seed for run in cell.runs}
            over[name] -= again
    return over


def _rounds_of(history: History) -> list[tuple[CommandEntry, dict[str, set[int]]]]:
    """The commands that name a cell that no earlier one does, with the seeds of these cells.

    If a cell of a forgotten command is asked for again, all of its cells count that had results by
    then. Those that nobody asks for stay unended, so that nobody selects norms by their results.
    """
    named: set[str] = set()
    asked = {name for command in history.commands for name in command.cells}
    rounds = []
    for command, cells in history.declarations:
        names = {*cells} - named
        if names & asked:
            rounds.append((command, {name: command.seeds_of(name) for name in sorted(names)}))
            named |= names
    return rounds


def _with_steps(cells: Sequence[CellRow]) -> list[CellRow]:
    """Adds the smallest difference that recorded values could have, by metric.

    An accuracy on N recorded test samples moves in steps of 1 / N. Where N is not recorded, as of
    the validation split, this is the `smallest_step` of all cells of the data set.
    """
    by_data: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        values = by_data.setdefault(cell.data, {})
        for run in cell.runs:
            for name, value in run.metrics.items():
                values.setdefault(name, []).append(value)
    guessed = {
        data: {name: smallest_step(known) for name, known in values.items()}
        for data, values in by_data.items()
    }
    counted = []
    for cell in cells:
        steps = dict(guessed[cell.data])
        num_samples = next(filter(None, (run.num_test_samples for run in cell.runs)), 0)
        tested = [name for name in steps if name.partition("@")[0] == "test/accuracy"]
        steps |= dict.fromkeys(tested, 1 / num_samples) if num_samples else {}
        counted.append(replace(cell, steps=steps))
    return counted


def _with_budget(config: Config) -> Config:
    """Adds `samples`, the training samples seen, and turns whole floats of a budget into ints."""
    steps = config.get("num_steps")
    samples = {} if steps is None else {"samples": steps * config["batch_size"]}
    known = {**config, **samples}
    whole = {
        key: int(value)
        for key in BUDGET
        if isinstance(value := known.get(key), float) and value.is_integer()
    }
    return {**known, **whole}


def _merge(cells: Sequence[CellRow]) -> list[CellRow]:
    """One cell for each recipe of a study; of runs with one seed, that of the first cell counts.

    Sizes are compared as they take effect: the norm batch size of a norm that does not mix samples
    has none.
    """
    by_recipe: dict[Hashable, list[CellRow]] = {}
    for cell in cells:
        config = {**compared(cell.config), "norm_batch_size": cell.statistics_size}
        config["micro_batch_size"] = cell.micro_batch_size
        recipe = {(key, comparable(value)) for key, value in config.items()}
        by_recipe.setdefault((cell.study, frozenset(recipe)), []).append(cell)
    merged = []
    for first, *others in by_recipe.values():
        runs = {run.seed: run for cell in (*others[::-1], first) for run in cell.runs}
        names = [cell.directory.name for cell in others]
        merged.append(replace(first, runs=[runs[seed] for seed in sorted(runs)], same_as=names))
    return merged


def _budget_key(cells: Sequence[CellRow]) -> str:
    """The key of BUDGET with the fewest values; of equals that of whole numbers, then epochs."""
    values = {key: [cell.config.get(key) for cell in cells] for key in BUDGET}
    known = {
        key: {value for value in column if value is not None} for key, column in values.items()
    }

    def rank(key: str) -> tuple[int, bool]:
        return len(known[key]), any(isinstance(value, float) for value in known[key])  # 12 is int

    return min((key for key in BUDGET if known[key]), key=rank, default=BUDGET[0])


def _with_settings(cells: Sequence[CellRow], budget: str) -> list[CellRow]:
    """Adds what says which cells are comparable: settings, setting, title and budget."""
    keys = _setting_keys(cells, budget)
    # `model.width` distinguishes only cells with the same model.
    groups = {key: _part_of(key) for key in keys if key not in ("model", "data")}
    labelled = []
    for cell, words in zip(cells, _tell_apart(cells, groups, ", "), strict=True):
        length = cell.config.get(budget)
        labelled.append(
            replace(
                cell,
                settings={key: cell.config.get(key) for key in keys},
                setting=words.removeprefix(", "),
                title=f"{cell.model} on {cell.data}{words}",
                budget="" if length is None else f"{budget}={length}",
                budget_keys=frozenset(BUDGET),
            )
        )
    return labelled


def _part_of(key: str) -> Callable[[CellRow], Any]:
    """By cell, the value of the key's part, as `model` of `model.width`; None: not applicable."""
    part, dot, _ = key.partition(".")
    return lambda cell: cell.config.get(part) if dot and part in cell.config else ""


def _setting_keys(cells: Sequence[CellRow], budget: str) -> list[str]:
    """The config keys that separate cells; budget: the key in which lengths are counted."""
    keys = sorted(
        {
            key
            for cell in cells
            for key in compared(cell.config)
            if key not in (*SIZES, "lr") and not _is_norm_key(key)
        }
    )
    studies = {
        cell.study: [other for other in cells if other.study == cell.study] for cell in cells
    }
    if len(studies) > 1:  # what differs between studies alone does not separate their cells
        within = {key for same in studies.values() for key in keys if _num_values(same, key) > 1}
        keys = [key for key in keys if key in within or _num_values(cells, key) == 1]
    chosen = [key for key in keys if key not in DERIVED]
    for key in dict.fromkeys((budget, *DERIVED)):
        if key in keys and _norms_that_vary(cells, _value_of(key), _place_by(chosen)):
            chosen.append(key)
    return sorted(chosen)


def disagreements(
    first: CellRow, second: CellRow, *, are_rates_searched: bool = False
) -> dict[str, tuple[Any, Any]]:
    """By key, the values for which two cells must not be compared.

    These are all differences but those of the norm (with the slots of its YAML), of the sizes (with
    what follows from the batch size) and of searched keys.

    are_rates_searched: both were chosen from the same learning rates
    """
    has_one_norm = first.name == second.name
    searched = {*first.searched, *second.searched, *(["lr"] if are_rates_searched else [])}

    def may_differ(key: str) -> bool:
        if key in (*SIZES, *searched):
            return True
        if key in SLOTS:
            return all(_slot_of(cell, key) == _slot_of_norm(cell, key) for cell in cells)
        if _is_norm_key(key):
            is_knob = has_one_norm and first.norm == second.norm
            return not is_knob or (key == "norm.momentum" and _has_one_half_life(first, second))
        if first.batch_size == second.batch_size:
            return False
        if key in BUDGET:
            return any(key in first.config and key not in different for key in BUDGET)
        rules = {cell.config.get("lr_rule") for cell in cells}
        follows = {
            "optim.momentum": ("momentum_aware",),
            "lr": ("linear", "sqrt", "momentum_aware"),
        }
        return len(rules) == 1 and rules <= {*follows.get(key, ())}

    cells = (first, second)
    different = differences(
        *(replace(cell, config={**UNRECORDED, **cell.config}) for cell in cells)
    )
    return {key: values for key, values in different.items() if not may_differ(key)}


def _has_one_half_life(first: CellRow, second: CellRow) -> bool:
    """True if the running averages forget equally many samples at two batch sizes."""
    values = [(cell.config.get("norm.momentum"), cell.batch_size) for cell in (first, second)]
    rates = [math.log1p(-m) / size for m, size in values if isinstance(m, float) and 0 < m < 1]
    return len(rates) == 2 and math.isclose(*rates, rel_tol=1e-6)


def _slot_of(cell: CellRow, slot: str) -> Any:
    return cell.config.get(slot, UNRECORDED[slot])


def _slot_of_norm(cell: CellRow, slot: str) -> Any:
    """The slot that the YAML of the cell's norm sets, or its default."""
    return cell.config.get(f"norm_slots.{slot}", UNRECORDED[slot])


def _is_norm_key(key: str) -> bool:
    return key.partition(".")[0] in NORM_KEYS


def _num_values(cells: Sequence[CellRow], key: str) -> int:
    return len({comparable(cell.config.get(key)) for cell in cells})


def _value_of(key: str) -> Callable[[CellRow], Hashable]:
    return lambda cell: comparable(cell.config.get(key))


def _place_by(keys: Sequence[str]) -> Callable[[CellRow], Hashable]:
    """Equal for cells of equal sizes with equal values of these keys."""
    keys = tuple(keys)
    values = [_value_of(key) for key in keys]
    return lambda cell: (*(of(cell) for of in values), cell.batch_size, cell.norm_batch_size)


def _norms_that_vary(
    cells: Sequence[CellRow],
    value: Callable[[CellRow], Hashable],
    place: Callable[[CellRow], Hashable],
) -> set[str]:
    """The norms that have two cells with the same place and different values."""
    seen: dict[tuple[str, Hashable], set[Hashable]] = {}
    for cell in cells:
        seen.setdefault((cell.norm, place(cell)), set()).add(value(cell))
    return {norm for (norm, _), values in seen.items() if len(values) > 1}


def _knob_words(cells: Sequence[CellRow]) -> list[str]:
    """What follows the name of a norm in its label: differing knobs, INVALID, the protocol."""
    keys = sorted({key for cell in cells for key in cell.config if _is_norm_key(key)})
    groups: dict[str, Callable[[CellRow], Any]] = {key: lambda cell: cell.norm for key in keys}
    if "norm.momentum" in groups:  # it may follow from the size
        place = _place_by(sorted(cells[0].settings))
        free = _norms_that_vary(cells, _value_of("norm.momentum"), place)
        groups["norm.momentum"] = lambda cell: cell.norm if cell.norm in free else None
    words = _tell_apart(cells, groups, " ")
    words = [
        label + (" INVALID" if cell.invalid is not None else "")
        for cell, label in zip(cells, words, strict=True)
    ]
    named = [
        replace(cell, norm=cell.norm + label) for cell, label in zip(cells, words, strict=True)
    ]
    both = _norms_that_vary(
        named,
        lambda cell: cell.protocol,
        lambda cell: (settings_key(cell), cell.batch_size, cell.lr, cell.statistics_size),
    )
    return [
        label + (f" {cell.protocol}" if cell.norm in both else "")
        for cell, label in zip(named, words, strict=True)
    ]


def settings_key(cell: CellRow) -> Hashable:
    """Equal for cells that may be compared."""
    return tuple(comparable(value) for value in cell.settings.values())


def _tell_apart(
    cells: Sequence[CellRow], groups: Mapping[str, Callable[[CellRow], Any]], mark: str
) -> list[str]:
    """For each cell, the mark and `key=value` for every key that varies within its group.

    groups: by key, in order, the group of each cell; None: the key is left out
    """
    words = [""] * len(cells)
    for key, group_of in groups.items():
        groups_of_key: dict[Hashable, list[int]] = {}
        for place, cell in enumerate(cells):
            if (group := group_of(cell)) is not None:
                groups_of_key.setdefault(group, []).append(place)
        for places in groups_of_key.values():
            if _num_values([cells[place] for place in places], key) < 2:
                continue
            for place in places:
                value = cells[place].config.get(key)
                value = UNRECORDED.get(key) if value is None else value
                words[place] += f"{mark}{key.removeprefix('norm.')}={as_typed(value)}"
    return words
