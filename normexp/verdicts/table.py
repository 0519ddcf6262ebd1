"""Verdicts for runs made elsewhere: a table with a row per run becomes the rows of a report.

The part of a column is inferred from its values, never from its name:

- every value of a setting occurs, within each arm that has it, for at least two seeds, and
  settings tell the runs of one seed apart, or follow from those that do;
- no value of a measurement repeats, be it a time, a further metric or the name of a run;
- what has one value for each seed, and another for each other, is neither.

Measurements and what follows from the seed are left out, and a line says so.

A column that is none of these is refused until `by` or `ignore` names it: runs of several settings
that are taken for seeds of one, or an outcome that is taken for a setting, would give a wrong
verdict without a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.errors import UserError
from normexp.verdicts.metric import LOWER_IS_BETTER, Metric, describe_metric
from normexp.verdicts.report import Report, report_on
from normexp.verdicts.rows import Row, Rows, Status
from normexp.verdicts.settings import Roles
from normexp.words import as_typed, name_some, suggest


def read_table(path: Path) -> pd.DataFrame:
    """Reads a CSV with a header; the separator is found. Raises UserError, naming the file."""
    try:
        return pd.read_csv(path, sep=None, engine="python")
    except (OSError, ValueError, pd.errors.ParserError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read as a table: {reason}") from error


def compare(
    table: pd.DataFrame,
    *,
    arm: str,
    seed: str,
    metric: str,
    higher_is_better: bool | None = None,
    reference: Any = None,
    tune: str | None = None,
    choose_by: str | None = None,
    by: Sequence[str] = (),
    ignore: Sequence[str] = (),
    chance: float | None = None,
    tolerance: float | None = None,
    name: str = "table",
) -> Report:
    """Compares the arms of a table of runs, all verdicts of a table corrected together.

    Arms are compared where all other settings are equal. A setting that has several values within
    an arm, such as a data set, separates tables; one that differs between arms alone keeps them
    from being compared. A seed that one arm has and another lacks is a missing run, which gives no
    verdict.

    Args:
        table: a row per run.
        arm: the column whose values are compared, such as `optimizer`.
        seed: the column that tells the runs of a cell apart.
        metric: the column of outcomes. An infinite one is of a diverged run, an empty one of a run
            that failed.
        higher_is_better: None where the name says it, as in `test/accuracy` and `val_loss`.
        reference: the value of `arm` that the others are compared with; None: the first in the
            table.
        tune: a setting, such as `lr`, whose best value is found for each arm by cross-fitting: half
            of the seeds choose, the others are scored.
        choose_by: the metric that chooses the value of `tune`; None: `metric` itself.
        by, ignore: settings, and columns that say nothing, where values do not show it.
        chance: what a diverged run counts as, in the unit of the column; None: its arm gets no
            verdict.
        tolerance: smaller differences are a tie, in the unit of the column; None: 1 percentage
            point of an accuracy, else 0.
        name: of the report.

    Raises:
        UserError: a column that is missing, or may be a setting or a measurement; one seed or one
            arm alone; a seed that stands twice; a text among numbers; a metric whose direction is
            not known; an accuracy that is none.
    """
    if choose_by and not tune:
        raise UserError(f"choose_by={choose_by} chooses among values of a setting; add tune=COLUMN")
    chosen = [column for column in (tune, choose_by) if column]
    table = table.reset_index(drop=True).rename(columns=str)
    _check_names(table, [arm, seed, metric, *chosen, *by, *ignore])
    table = table.drop(columns=list(ignore))
    if table.duplicated().any():
        raise UserError(f"row {_row_number(table.duplicated())} repeats an earlier row; remove it")
    _check_parts(table, {"arm": arm, "seed": seed})
    for column in (metric, *chosen):
        table[column] = _numbers(table[column])
    if tune and table[tune].isna().any():
        raise UserError(f"tune={tune}: row {_row_number(table[tune].isna())} is empty")
    metrics = [metric, *([choose_by] if choose_by else [])]
    described = _describe(metric, table[metric], higher_is_better, chance, tolerance)
    if choose_by:
        upwards = _improves_upwards(
            choose_by, f"choose_by={choose_by}", "name the column ..._loss or ..._accuracy"
        )
        chooser = replace(describe_metric("metric"), name=choose_by, higher_is_better=upwards)
        described = replace(described, chosen_by=chooser)
    elif tune:
        described = replace(described, chosen_by=described)
    cell = [arm, *([tune] if tune else [])]
    columns = _sort_columns(table, cell, seed, by, metrics)
    _refuse_doubled_seeds(table, columns, seed)
    _refuse_outcomes(table, columns, seed, by)
    rows = _rows_of(table, columns, seed, metrics, name)
    rows.roles = Roles(
        arm=arm, of_arm=(), slots=(), alone=True, tuned=tune, sizes=(), task=(), budgets=()
    )
    first = _value(table[arm].iloc[0]) if reference is None else reference
    report = report_on(rows, Path(), [name], metric=described, reference=str(first))
    if not report.comparisons:
        names = ", ".join(columns.settings)
        raise UserError(f"no two values of {arm} have equal settings ({names}); ignore=[...] some")
    return report


def _check_names(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Raises UserError for a name that no column or that several have, or that is given twice."""
    for number, name in enumerate(names):
        if name not in table:
            hint = suggest(name, map(str, table)) or f"the columns are {name_some(map(str, table))}"
            hint = f"type several as [{name}]" if "," in name else hint
            raise UserError(f"{name}: no such column; {hint}")
        if name in names[:number]:
            raise UserError(f"{name}: one column cannot play two parts")
    if table.columns.has_duplicates:
        raise UserError(f"{table.columns[table.columns.duplicated()][0]}: two columns of this name")


def _check_parts(table: pd.DataFrame, parts: Mapping[str, str]) -> None:
    """Raises UserError for a column of arms or seeds with an empty cell, or with one value."""
    for part, column in parts.items():
        if table[column].isna().any():
            raise UserError(f"{part}={column}: row {_row_number(table[column].isna())} is empty")
        if table[column].nunique() < 2:
            value = table[column].iloc[0] if len(table) else "none"
            raise UserError(f"{part}={column}: one value, {value}; two are the fewest to compare")


def _row_number(marks: pd.Series) -> int:
    """The first row that is marked, the header being row 1."""
    return int(marks.to_numpy().argmax()) + 2


def _numbers(column: pd.Series) -> pd.Series:
    """Raises UserError for a text that is no number."""
    numbers = pd.to_numeric(column, errors="coerce")
    is_text = numbers.isna() & column.notna()
    if is_text.any():
        number = _row_number(is_text)
        raise UserError(f"{column.name}: row {number} has {column.iloc[number - 2]!r}, no number")
    return numbers.astype(float)


@dataclass(frozen=True)
class _Columns:
    """What columns are found to be.

    of_cell: what makes a cell: the arm, what is tuned, and the settings
    settings: what separates tables, or keeps arms from being compared
    notes: lines on columns that are left out
    """

    of_cell: list[str]
    settings: list[str]
    notes: list[str]


def _sort_columns(
    table: pd.DataFrame, cell: list[str], seed: str, by: Sequence[str], known: Sequence[str]
) -> _Columns:
    """What the columns are by their values. Raises UserError for those that are unclear.

    cell: the arm, and what is tuned
    by, known: columns that are settings, and others that have a part
    """
    arms, seeds = table[cell[0]], table[seed]
    settings, unclear = [*by], []
    left_out: dict[str, list[str]] = {"no value repeats": [], "they follow from the seed": []}
    for name in map(str, table.columns):
        if name in (*cell, seed, *by, *known):
            continue
        values = table[name].map(_value)
        if values.nunique() == 1:
            settings.append(name)
        elif values.groupby(seeds).nunique().max() == 1 and values.nunique() == seeds.nunique():
            left_out["they follow from the seed"].append(name)
        elif seeds.groupby([arms, values]).nunique().min() > 1:
            settings.append(name)
        elif table[name].nunique() == table[name].count():
            left_out["no value repeats"].append(name)
        else:
            unclear.append(name)
    if unclear:
        raise _unclear(unclear, "some values stand for one seed of an arm, others for several")
    notes = []
    for why, names in left_out.items():
        if names:
            notes.append(f"left out, since {why}: {', '.join(names)}")
    return _Columns([*cell, *settings], settings, notes)


def _refuse_outcomes(table: pd.DataFrame, columns: _Columns, seed: str, by: Sequence[str]) -> None:
    """Raises UserError for what may be an outcome, as the `state` of a tracker is.

    As a setting it would take runs out of the comparison. A setting tells the runs of most seeds
    apart, or follows from settings that do, or from the arm.
    """
    varied = [name for name in columns.settings if table[name].map(_value).nunique() > 1]
    arm, *rest = cell = [name for name in columns.of_cell if name not in columns.settings]
    values = table[[*cell, *varied, seed]].map(_value)
    keys = _keys_of(values, [*cell, seed], varied, by)
    unclear: dict[str, None] = {}
    for name in varied:
        others = [key for key in keys if key != name]
        if name in keys:
            is_clear = (values.groupby([*cell, seed, *others])[name].nunique() > 1).mean() >= 0.5
        else:
            is_clear = _follows(values, name, [arm]) or _follows(values, name, [*rest, *keys])
        if is_clear or name in by:
            continue
        unclear[name] = None
        for key in others:  # if `name` would do in its place, one of the two is a setting
            instead = [name, *(other for other in others if other != key)]
            if key not in by and not values.duplicated([*cell, seed, *instead]).any():
                unclear[key] = None
    if unclear:
        raise _unclear([*unclear], "it varies from seed to seed, or with the arm at a setting")


def _keys_of(
    values: pd.DataFrame, run: list[str], settings: Sequence[str], by: Sequence[str]
) -> list[str]:
    """The fewest settings by which, with the columns of a `run`, no row is twice; `by` stays."""
    keys = list(settings)
    for name in reversed(settings):
        others = [key for key in keys if key != name]
        if name not in by and not values.duplicated([*run, *others]).any():
            keys = others
    return keys


def _follows(values: pd.DataFrame, name: str, others: list[str]) -> bool:
    """True if a column has one value wherever others are equal."""
    return bool(others) and values.groupby(others)[name].nunique().max() == 1


def _unclear(names: Sequence[str], why: str) -> UserError:
    ignored = names[0] if len(names) == 1 else "..."
    return UserError(
        f"{', '.join(names)}: a setting or a measurement? {why}; name settings in by=[...], others "
        f"in ignore=[{ignored}]; if it says which runs crashed, empty their outcomes, too"
    )


def _value(value: Any) -> Hashable:
    """A value of a table: `null` if it is missing, a whole number for 2.0."""
    if pd.isna(value):
        return "null"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_doubled_seeds(table: pd.DataFrame, columns: _Columns, seed: str) -> None:
    keys = [table[column].map(_value) for column in (*columns.of_cell, seed)]
    is_doubled = table.groupby(keys, sort=False)[seed].transform("size") > 1
    if not is_doubled.any():
        return
    number = _row_number(is_doubled)
    cell = ", ".join(f"{key.name}={key.iloc[number - 2]}" for key in keys)
    raise UserError(
        f"{cell}: stands twice, first in row {number}; if these runs differ in a setting, name its "
        "column in by=[...], else remove one"
    )


def _rows_of(
    table: pd.DataFrame, columns: _Columns, seed: str, metrics: Sequence[str], name: str
) -> Rows:
    """The runs; of each cell all seeds are asked for that any cell of its settings has."""
    rows = Rows(notes=columns.notes)
    seeds: Any = table[seed].map(_value)
    if not all(isinstance(value, int) for value in seeds):
        seeds = seeds.map(str)  # so that they can be sorted
    seeds_of_settings: dict[tuple[Hashable, ...], set[Any]] = {}
    places = []
    for (_, line), run_seed in zip(table.iterrows(), seeds, strict=True):
        config = {column: _value(line[column]) for column in columns.of_cell}
        # One text for each cell: values are quoted where they hold more than words.
        cell_id = ",".join(f"{key}={as_typed(value)}" for key, value in config.items())
        equal = tuple(config[column] for column in columns.settings)
        seeds_of_settings.setdefault(equal, set()).add(run_seed)
        places.append((cell_id, equal))
        outcome = line[metrics[0]]
        status = Status.FINISHED if math.isfinite(outcome) else Status.DIVERGED
        if pd.isna(outcome):
            status = Status.FAILED
        rows.runs.append(
            Row(
                study=name,
                cell_id=cell_id,
                seed=run_seed,
                status=status,
                config=config,
                metrics={key: line[key] for key in metrics if math.isfinite(line[key])},
                typed=config,
                directory=Path(name, cell_id.replace("/", "_"), f"seed-{run_seed}"),
                error="no value" if status == Status.FAILED else None,
            )
        )
    for cell_id, equal in places:
        rows.asked[name, cell_id] = [sorted(seeds_of_settings[equal])]
    return rows


def _kinds_of(name: str) -> tuple[bool, bool]:
    """Whether the name of a metric says that it is an accuracy, and that lower is better."""
    is_accuracy, is_loss = (
        any(re.search(rf"(?<![a-z]){word}(?![a-z])", name.lower()) for word in words)
        for words in (["accuracy"], LOWER_IS_BETTER)
    )
    return is_accuracy, is_loss


def _improves_upwards(name: str, typed: str, remedy: str) -> bool:
    """True if higher is better. Raises UserError if the name of the metric does not say."""
    is_accuracy, is_loss = _kinds_of(name)
    if is_accuracy == is_loss:
        raise UserError(f"{typed}: which way does it improve? {remedy}")
    return is_accuracy


def _describe(
    name: str,
    values: pd.Series,
    higher_is_better: bool | None,
    chance: float | None,
    tolerance: float | None,
) -> Metric:
    """The metric as the report shows it; `chance` and `tolerance` in the unit of its column.

    Raises:
        UserError: its direction is not known, or an accuracy lies outside of 0 to 1 or 100 %.
    """
    if higher_is_better is None:
        remedy = "set higher_is_better=true, or higher_is_better=false"
        higher_is_better = _improves_upwards(name, f"metric={name}", remedy)
    is_accuracy, is_loss = _kinds_of(name)
    metric = describe_metric("metric")
    if is_accuracy and not is_loss:
        metric = replace(describe_metric("accuracy"), label=f"{name} (%)")
        finite = values[values.map(math.isfinite)]
        limit = 100.0 if finite.max() > 1 else 1.0
        metric = replace(metric, scale=100 / limit)
        is_outside = (finite < 0) | (finite > limit)
        if is_outside.any():
            raise UserError(f"metric={name}: {finite[is_outside].iloc[0]:g} is no accuracy")
        if chance is not None and not 0 <= chance <= limit:
            raise UserError(f"chance={chance:g}: must be 0 to {limit:g}, as {name} is")
    else:
        metric = replace(metric, label=name)
    if tolerance is not None:
        metric = replace(metric, tolerance=metric.scale * tolerance)
    return replace(
        metric,
        name=name,
        higher_is_better=higher_is_better,
        chance_level=None if chance is None else metric.scale * chance,
    )
