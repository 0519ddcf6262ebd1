"""What is compared, and what must be equal for that.

An arm is one value of the setting that is compared; runs equal in all other settings share a table.
First come the arms of the study's roles (norms); then each setting that separates their tables, in
tables of equal norms. Workloads and budgets have tables of their own and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from normexp.verdicts.cells import DIGESTS, CellRuns, setting_words
from normexp.verdicts.rows import comparable
from normexp.verdicts.settings import AXES
from normexp.words import as_typed

# Settings of an arm that say which code it is, not how it is set.
CODE = ("_target_", "source_digest", "version")
# The first norms of tables and figures.
ORDER = ("batch", "layer", "instance", "group", "rms", "layer2d", "none")

AS_SHIPPED = "as shipped"  # stands for a value that a cell does not set; null would be a value


def label_cells(cells: Sequence[CellRuns]) -> list[CellRuns]:
    """Adds labels, titles and the settings that separate tables, and sorts the cells by them."""
    keys = _separating_keys(cells)
    labels = _labels(cells)
    labelled = []
    for cell, label in zip(cells, labels, strict=True):
        task = dict(zip(cell.roles.task, cell.task, strict=True))
        values = {key: _value_of(key, cell, cells) for key in keys}
        knobs = sum(map(cell.roles.is_of_arm, cell.typed))
        labelled.append(replace(cell, arm=label, num_knobs=knobs, separating={**task, **values}))
    return _in_order(_with_titles(labelled))


def _value_of(key: str, cell: CellRuns, cells: Sequence[CellRuns]) -> Any:
    """A setting; if its records do not name it, as those of older versions, the default of others.

    Others: of the same group of settings, as `data` of data.order.
    """
    if key in cell.config or key in cell.defaults:
        return cell.value_of(key)
    group = key.partition(".")[0]
    alike = [other for other in cells if other.value_of(group) == cell.value_of(group)]
    others = [other for other in alike if key in other.defaults and key not in other.config]
    found = [other.defaults[key] for other in others]
    return found[0] if found and not _varies(found) else None


def _labels(cells: Sequence[CellRuns]) -> list[str]:
    """`group num_groups=4`: of each cell the name of its arm and its knobs.

    A label does not depend on what else the study has, so that it stays as the study grows. If
    two arms have one label but other code, all but the first asked for also show their code.
    """
    has_studies = len({cell.study for cell in cells}) > 1
    labels = [_label(cell, has_studies) for cell in cells]
    first: dict[str, dict[str, Any]] = {}
    for cell, label in sorted(zip(cells, labels, strict=True), key=lambda pair: pair[0].asked_at):
        first.setdefault(label, _code_of(cell))
    unique = []
    for cell, label in zip(cells, labels, strict=True):
        code = _code_of(cell).items()
        words = [setting_words(key, value) for key, value in code if first[label].get(key) != value]
        unique.append(" ".join([label, *words]))
    return unique


def _label(cell: CellRuns, has_studies: bool) -> str:
    words = [cell.arm_name]
    for key, value in _knobs_of(cell).items():
        if key not in CODE and value is not None:
            words.append(f"{key}={as_typed(value)}")
    if cell.invalid:
        words.append("INVALID")
    if has_studies:
        words.append(f"· {cell.study}")
    return " ".join(words)


def _knobs_of(cell: CellRuns) -> dict[str, Any]:
    """The settings of its arm that are no defaults, without the name of the arm."""
    keys = sorted(filter(cell.roles.is_knob, cell.typed))
    return {key.partition(".")[2]: cell.value_of(key) for key in keys}


def _code_of(cell: CellRuns) -> dict[str, Any]:
    return {key: value for key, value in _knobs_of(cell).items() if key in CODE}


def _separating_keys(cells: Sequence[CellRuns]) -> list[str]:
    """The keys for which some arm was run with several values, all sizes equal.

    A key that differs only between arms separates nothing: the arms share a table, which says that
    they are not compared. Only the budget with the fewest values counts, since epochs and steps
    follow from samples, differently where a batch size does not divide the data.
    """
    roles = cells[0].roles
    of_roles = {*roles.task, roles.arm, roles.tuned, *(AXES if roles.sizes else ())}
    values = {
        key: [cell.config.get(key, AS_SHIPPED) for cell in cells]
        for key in sorted({key for cell in cells for key in cell.config})
        if not roles.is_knob(key) and key not in of_roles
    }
    budgets = [
        key for key in roles.budgets if key in values and not {None, AS_SHIPPED} & {*values[key]}
    ]
    length = min(budgets, key=lambda key: len({*values[key]}), default="")
    places = [
        (cell.study, cell.arm_name, cell.task, cell.batch_size, cell.norm_batch_size)
        for cell in cells
    ]
    keys = []
    for key, of_cells in values.items():
        known = [*zip(of_cells, places, strict=True)]
        if key.startswith(DIGESTS):  # which a cell without an ended run does not know
            known = [pair for pair in known if pair[0] != AS_SHIPPED]
        if (key == length or key not in roles.budgets) and _varies(*zip(*known, strict=True)):
            keys.append(key)
    return keys


def _with_titles(cells: Sequence[CellRuns], always: str = "") -> list[CellRuns]:
    """Adds the model, the data, and what differs between tables of the same model and data.

    always: a setting that is named in any case
    """
    titled = []
    for cell in cells:
        of_task = [other for other in cells if other.task == cell.task]
        words = [" on ".join(cell.task)] if cell.task else []
        for key, value in cell.separating.items():
            if key in cell.roles.task:
                continue
            if key == always or _varies([other.separating[key] for other in of_task]):
                words.append(setting_words(key, value))
        titled.append(replace(cell, title=", ".join(words) or cell.study))
    return titled


# Other settings as arms


def compared_keys(cells: Sequence[CellRuns]) -> list[str]:
    """The settings that are compared besides the arm: those that separate its tables.

    What belongs to another of them, as `optim.momentum` to `optim`, is a knob of that one.
    """
    roles = cells[0].roles
    if roles.alone:
        return []
    no_arms = {*roles.task, *roles.budgets}
    keys = [
        key for key in cells[0].separating if key not in no_arms and not key.startswith(DIGESTS)
    ]
    return [key for key in keys if "." not in key or key.partition(".")[0] not in keys]


def family_of(cell: CellRuns, arm_keys: Sequence[str]) -> Hashable:
    """What a family has in common: the settings that no slice compares.

    Contents of data are left out: cells without an ended run count, too, and do not know them.

    arm_keys: the settings that some slice compares
    """
    common = {}
    for key, value in cell.separating.items():
        is_compared = any(key == arm or key.startswith(f"{arm}.") for arm in arm_keys)
        if not is_compared and not key.startswith(DIGESTS):
            common[key] = value
    return comparable(common)


def with_arm(cells: Sequence[CellRuns], key: str) -> list[CellRuns]:
    """The cells for tables in which this setting is compared, and the arm of before is equal."""
    relabelled, before = [], cells[0].roles.arm
    for cell in cells:
        roles = replace(cell.roles, arm=key, of_arm=(f"{key}.",), slots=())
        words, separating = [], {}
        for name, value in cell.separating.items():
            if not roles.is_of_arm(name):
                separating[name] = value
            elif name == key or value is not None:
                words.append(setting_words(name.rpartition(".")[2], value))
        separating[before] = cell.arm
        # A slot that a norm sets itself is as shipped.
        is_slot = key in cell.roles.slots
        is_shipped = is_slot and cell.value_of(key) == cell.value_of(f"{before}.{key}")
        knobs = 0 if is_shipped else sum(map(roles.is_of_arm, cell.typed))
        relabelled.append(
            replace(cell, roles=roles, arm=" ".join(words), num_knobs=knobs, separating=separating)
        )
    return _in_order(_with_titles(relabelled, always=before))


# Values and order


def _varies(values: Sequence[Any], places: Sequence[Hashable] | None = None) -> bool:
    """True if two values differ, or with places, if two values of one place do."""
    pairs = {*zip(places or [None] * len(values), map(comparable, values), strict=True)}
    return len(pairs) > len({place for place, _ in pairs})


def _in_order(cells: Sequence[CellRuns]) -> list[CellRuns]:
    """By data, model, settings, arm and sizes."""
    arms = order_arms({cell.arm: cell.arm_name for cell in cells})

    def order(cell: CellRuns) -> tuple[Any, ...]:
        settings = [_sortable(value) for value in cell.separating.values()]
        sizes = (cell.batch_size, cell.norm_batch_size)
        return (*cell.task[::-1], settings, arms.index(cell.arm), *sizes, cell.tuned or 0)

    return sorted(cells, key=order)


def order_arms(names: Mapping[str, str]) -> list[str]:
    """Labels of arms, those of ORDER first, then others by label; numbers sort by value.

    names: the name of each arm, by label
    """

    def rank(label: str) -> tuple[int, list[Any]]:
        name = names[label]
        pieces: list[Any] = re.split(r"(\d+(?:\.\d+)?)", label)  # every second piece is a number
        pieces[1::2] = map(float, pieces[1::2])
        return ORDER.index(name) if name in ORDER else len(ORDER), pieces

    return sorted(names, key=rank)


def _sortable(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))
