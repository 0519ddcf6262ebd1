"""Verdicts for runs made elsewhere: a table with a row per run becomes the rows of a report.

The part of a column is inferred from its values, never from its name:

- every value of a setting occurs, within each arm that has it, for at least two seeds;
- no value of a measurement repeats, be it a time, a further metric or the name of a run;
- what follows from the seed is neither, and is left out.

A column that is none of these is refused until `by` or `ignore` names it: runs of several settings
that are taken for seeds of one would give a wrong verdict without a word.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.errors import UserError
from normexp.verdicts.metric import LOWER_IS_BETTER, Metric, describe_metric
from normexp.verdicts.report import Report, report_on
from normexp.verdicts.rows import Row, Rows, Status
from normexp.verdicts.settings import Roles
from normexp.words import name_some, suggest


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

    Arms are compared where all other settings are equal, paired by seed. A setting that has several
    values within an arm, such as a data set, separates tables; one that differs between arms alone
    keeps them from being compared. A seed that one arm has and another lacks is a missing run,
    which gives no verdict.

    Args:
        table: a row per run.
        arm: the column whose values are compared, such as `optimizer`.
        seed: the column that is equal for runs that are paired.
        metric: the column of outcomes. An infinite one is of a diverged run, an empty one of a run
            that failed.
        higher_is_better: None where the name says it, as in `test/accuracy` and `val_loss`.
        reference: the value of `arm` that the others are compared with; None: the first in the
            table.
        tune: a setting, such as `lr`, whose best value is found for each arm by cross-fitting: half
            of the seeds choose, the others are scored.
        choose_by: the metric that chooses the value of `tune`; None: `metric` itself.
        by, ignore: settings, and columns that say nothing, where values do not show it.
        chance: what a diverged run counts as, in the unit of the metric; None: its arm gets no
            verdict.
        tolerance: smaller differences are a tie, in the unit of the metric; None: 1 percentage
            point of an accuracy, else 0.
        name: of the report.

    Raises:
        UserError: a column that is missing, or may be a setting or a measurement; one seed or one
            arm alone; a seed that stands twice; a metric whose direction is not known.
    """
    chosen = [column for column in (tune, choose_by) if column]
    _check_names(table, [arm, seed, metric, *chosen, *by, *ignore])
    for column, what in ((arm, "arm"), (seed, "seed")):
        if table[column].isna().any():
            raise UserError(f"{what}={column}: row {_row_number(table[column].isna())} is empty")
        if table[column].nunique() < 2:
            value = table[column].iloc[0] if len(table) else "none"
            raise UserError(f"{what}={column}: one value, {value}; two are the fewest to compare")
    table = table.assign(**{column: _numbers(table[column]) for column in {metric, *chosen[1:]}})
    if choose_by is None and tune is not None:
        choose_by = metric
    roles = Roles(arm=arm, of_arm=(), tuned=tune, sizes=(), task=(), budgets=())
    with_parts = {arm, seed, metric, choose_by, tune, *by, *ignore}
    if table.duplicated().any():
        raise UserError(f"row {_row_number(table.duplicated())} repeats an earlier row; remove it")
    others = [column for column in table if column not in with_parts]
    settings, measured = _sort_columns(table[others], table, arm, seed)
    settings = [*by, *settings]
    of_cell = [arm, *([tune] if tune else []), *settings]
    _refuse_doubled_seeds(table, of_cell, seed)
    rows = _rows_of(table, of_cell, settings, seed, [metric, *chosen[1:]], name)
    rows.roles = roles
    if measured:
        names = ", ".join(measured)
        rows.notes.append(f"taken for measurements, since no value repeats: {names}")
    described = _describe(metric, table[metric], higher_is_better, choose_by, chance, tolerance)
    first = _value(table[arm].iloc[0]) if reference is None else reference
    report = report_on(rows, Path(), [name], metric=described, reference=str(first))
    if not report.comparisons:
        names = ", ".join(settings)
        raise UserError(f"no two values of {arm} have equal settings ({names}); ignore=[...] some")
    return report


def _check_names(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Raises UserError for a name that no column has, or that two arguments give."""
    for number, name in enumerate(names):
        if name not in table:
            hint = suggest(name, map(str, table)) or f"the columns are {name_some(map(str, table))}"
            raise UserError(f"{name}: no such column; {hint}")
        if name in names[:number]:
            raise UserError(f"{name}: one column cannot play two parts")


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


def _sort_columns(
    others: pd.DataFrame, table: pd.DataFrame, arm: str, seed: str
) -> tuple[list[str], list[str]]:
    """Which of the other columns are settings, and which are measurements.

    Raises:
        UserError: for all columns that may be either.
    """
    settings, measured, unclear = [], [], []
    for name in others:
        values = others[name].map(_value)
        if values.nunique() == 1:
            settings.append(name)
        elif values.groupby(table[seed]).nunique().max() == 1:
            continue  # it follows from the seed
        elif table[seed].groupby([table[arm], values]).nunique().min() > 1:
            settings.append(name)
        elif others[name].nunique() == others[name].count():
            measured.append(name)
        else:
            unclear.append(name)
    if unclear:
        names = ",".join(unclear)
        raise UserError(
            f"{', '.join(unclear)}: a setting or a measurement? some values stand for one seed of "
            f"an arm, others for several; name settings in by=[...], others in ignore=[{names}]"
        )
    return settings, measured


def _value(value: Any) -> Hashable:
    """A value of a table: `null` if it is missing, a whole number for 2.0."""
    if pd.isna(value):
        return "null"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_doubled_seeds(table: pd.DataFrame, of_cell: Sequence[str], seed: str) -> None:
    keys = [table[column].map(_value) for column in (*of_cell, seed)]
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
    table: pd.DataFrame,
    of_cell: Sequence[str],
    settings: Sequence[str],
    seed: str,
    metrics: Sequence[str],
    name: str,
) -> Rows:
    """The runs; of each cell all seeds are asked for that any cell of its settings has."""
    rows = Rows()
    seeds_of_settings: dict[tuple[Hashable, ...], set[Any]] = {}
    places = []
    for _, line in table.iterrows():
        config = {column: _value(line[column]) for column in of_cell}
        cell_id = "-".join(str(value) for value in config.values())
        equal = tuple(config[column] for column in settings)
        run_seed: Any = _value(line[seed])
        seeds_of_settings.setdefault(equal, set()).add(run_seed)
        places.append((cell_id, equal))
        outcome = line[metrics[0]]
        status = Status.FINISHED if math.isfinite(outcome) else Status.DIVERGED
        if pd.isna(outcome):
            status = Status.FAILED
        values = {column: line[column] for column in metrics if math.isfinite(line[column])}
        error = "no value" if status == Status.FAILED else None
        rows.runs.append(
            Row(
                *(name, cell_id, run_seed, status, config, values),
                typed=config,
                directory=Path(name, cell_id, f"seed-{run_seed}"),
                error=error,
            )
        )
    for cell_id, equal in places:
        rows.asked[name, cell_id] = [sorted(seeds_of_settings[equal])]
    return rows


def _describe(
    name: str,
    values: pd.Series,
    higher_is_better: bool | None,
    choose_by: str | None,
    chance: float | None,
    tolerance: float | None,
) -> Metric:
    """The metric as the report shows it. Raises UserError if its direction is not known."""
    is_accuracy = "accuracy" in name.lower()
    if higher_is_better is None:
        higher_is_better = is_accuracy
        if not is_accuracy and not any(word in name.lower() for word in LOWER_IS_BETTER):
            raise UserError(
                f"metric={name}: which way does it improve? set higher_is_better=true or false"
            )
    metric = describe_metric("accuracy" if is_accuracy else "metric", tolerance)
    is_percent = is_accuracy and values[values.map(math.isfinite)].max() > 1
    return replace(
        metric,
        name=name,
        label=f"{name} (%)" if is_accuracy else name,
        higher_is_better=higher_is_better,
        scale=1.0 if is_percent else metric.scale,
        chosen_by=choose_by,
        chance_level=chance,
    )
