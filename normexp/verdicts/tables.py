"""The tables of a report: page, terminal, CSV, JSON and LaTeX print the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import order_arms
from normexp.verdicts.causes import Causes
from normexp.verdicts.cells import LOST, CellRuns, metric_names
from normexp.verdicts.compare import ADDED, DIFFERENCE, Comparison, Ranking
from normexp.verdicts.ladder import Ladder
from normexp.verdicts.metric import (
    BEST,
    PREFERRED,
    Estimate,
    Metric,
    choose_metric,
    describe_metric,
)
from normexp.verdicts.rows import RefusedCell, Row, Status
from normexp.verdicts.slices import AXIS_WORDS, Slice
from normexp.words import format_count

NOTE = f"{BEST} may be the best: no other is shown to be better. Marked entries are not ranked."
ADDED_NOTE = (
    f"{ADDED} seeds were added after the first command: adding seeds until a verdict appears makes "
    "a false one more likely than 5 %."
)
LEAST = "least difference [95 %]"
PROSE = ("why", "lost", "search", "claim")  # columns that wrap, and that a paper's table lacks
BRACKETS = "In brackets: 95 % intervals, or the individual values of three or fewer seeds."
LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {BEST: "Bold:", ADDED: r"\dag{}", "·": r"\textperiodcentered{}"}
)


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    name: the name of its files
    caption: the scope, printed once above
    values: numbers, estimates, texts and None
    note: what its marks and verdicts mean, printed below
    has_latex: few columns, so it is written as LaTeX too
    """

    name: str
    caption: str
    values: pd.DataFrame
    note: str = ""
    has_latex: bool = True

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows as texts; an absent value is empty."""
        return self.values.map(show)

    @property
    def numbers(self) -> pd.DataFrame:
        """The rows for programs: an estimate and its bounds have a column each."""
        rows = []
        for row in self.values.to_dict("records"):
            numbers: dict[str, Any] = {}
            for name, value in row.items():
                head = str(name).removesuffix(" [95 %]")
                numbers |= value.named(head) if isinstance(value, Estimate) else {head: value}
            rows.append(numbers)
        return pd.DataFrame(rows, dtype=object)

    @property
    def latex(self) -> str:
        r"""A floating table for a paper, which needs `\usepackage{booktabs}`.

        Numbers of a column have the same decimals and stand right, so they are aligned.
        """
        columns: dict[tuple[str, int], list[str]] = {}
        styles, has_best = "", False
        for name, column in self.values.items():
            if name in PROSE:
                continue
            head = str(name).translate(LATEX)
            estimates = [value for value in column if isinstance(value, Estimate)]
            has_best = has_best or any(estimate.is_best for estimate in estimates)
            decimals = max((estimate.decimals for estimate in estimates), default=0)
            pairs = [_latex_of(value, decimals) for value in column]
            columns[head, 0] = [number for number, _ in pairs]
            if estimates:
                columns[head, 1] = [brackets for _, brackets in pairs]
                styles += r"r@{\ }l"
            else:
                styles += "r" if all(isinstance(value, float | int) for value in column) else "l"
        notes = [BRACKETS] if "@" in styles else []
        notes += [NOTE] if has_best and NOTE not in self.note else []
        caption = " ".join([f"{self.caption[:1].upper()}{self.caption[1:]}.", *notes, self.note])
        style = pd.DataFrame(columns).style.hide(axis="index").hide(axis="columns", level=1)
        return style.to_latex(
            hrules=True,
            column_format=styles,
            multicol_align="c",
            caption=caption.strip().translate(LATEX),
            label=f"tab:{self.name}",
            position_float="centering",
        )


def _latex_of(value: Any, decimals: int) -> tuple[str, str]:
    """A value, or a number and what stands in brackets behind it."""
    if not isinstance(value, Estimate):
        return show(value).translate(LATEX), ""
    number, *others = [f"${number}$" for number in value.numbers(decimals)] or ["-"]
    brackets = value.joined(["", *others]).strip()
    return rf"{{\boldmath{number}}}" if value.is_best else number, brackets


def table_of(name: str, caption: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Table:
    """A table from dicts by column; a row may lack columns, and empty columns are left out."""
    values = pd.DataFrame(rows, dtype=object)
    is_used = [any(map(show, values[column])) for column in values]
    return Table(name, caption, values.loc[:, is_used], **more)


def show(value: Any) -> str:
    """A value as text on one line."""
    if value is None or value != value:  # NaN
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def write_tables(folder: Path, tables: Iterable[Table]) -> None:
    """Writes each table as CSV, those for papers as LaTeX too."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        csv = table.numbers.to_csv(index=False, lineterminator="\n")
        (folder / f"{table.name}.csv").write_text(csv, encoding="utf-8")
        if table.has_latex:
            (folder / f"{table.name}.tex").write_text(table.latex, encoding="utf-8")


def mean_table(slice_: Slice, rankings: Sequence[Ranking]) -> Table:
    """Each arm at each size: the means over seeds, marked where arms are compared."""
    metric, has_sizes = slice_.metric, len(slice_.sizes) > 1
    best = {(arm, ranking.size) for ranking in rankings for arm in ranking.best}
    tuned = slice_.cells[0].roles.tuned or "lr"
    rows = []
    for arm, line in slice_.lines.items():
        row: dict[str, Any] = {slice_.arm_key: arm}
        for size in slice_.sizes:
            head = str(size) if has_sizes else metric.label
            row[head] = None
            if size in line:
                is_repeated = arm in slice_.independent and size != slice_.sizes[0]
                row[head] = line[size].estimate(
                    is_best=(arm, size) in best, words="same" if is_repeated else ""
                )
        row[tuned] = _joined(side.tuned for side in line.values())
        row["search"] = _joined(side.search_words for side in line.values())
        row["lost"] = _joined(side.lost for side in line.values())
        row["n"] = _joined(len(side.seeds) for side in line.values())
        rows.append(row)
    if len({row[tuned] for row in rows}) == 1 and not any(row["search"] for row in rows):
        for row in rows:
            row[tuned] = None  # the scope says the learning rate
    note = ""
    if any(cell.without_value(metric) for cell in slice_.cells):
        note = "A diverged run has no value of this metric and is missing from its mean."
    elif any(row["lost"] for row in rows):
        note = "Diverged runs and runs at chance count as chance level, failed runs not at all."
    along = f", by {AXIS_WORDS[slice_.axis]}" if has_sizes else ""
    caption = f"{metric.label}{along}: {slice_.heading}"
    return table_of(f"means_{slice_.slug}", caption, rows, note=note)


def _joined(values: Iterable[Any]) -> Any:
    """The value that all have, or else the different values as a text."""
    different = [value for value in dict.fromkeys(values) if value not in ("", None)]
    return different[0] if len(different) == 1 else "; ".join(map(show, different))


def difference_table(
    slice_: Slice, comparisons: Sequence[Comparison], *, has_note: bool = True
) -> Table:
    """The comparisons along the sizes of a slice; without a note where a ranking follows."""
    along = [comparison for comparison in comparisons if comparison.is_along_sizes]
    caption = f"{slice_.metric.label}, smallest against largest {AXIS_WORDS[slice_.axis]}"
    rows = [comparison.row for comparison in along]
    note = _family_note(slice_.metric, along) if has_note else ""
    return table_of(f"sizes_{slice_.slug}", caption, rows, note=note)


def _family_note(metric: Metric, comparisons: Sequence[Comparison]) -> str:
    """What the verdicts of a table mean."""
    size = max((comparison.family_size for comparison in comparisons), default=0)
    if not size:
        return ""
    count = format_count(size, "comparison")
    share = f"at least {100 * (1 - comparisons[0].slice.alpha):.4g} % of such studies"
    note = "Positive: the first is better. "
    note += f"Verdicts are corrected for {count}, so that {share} contain no false one."
    if metric.tolerance:
        within = f"{metric.tolerance:g} {metric.unit}".rstrip()
        note += f" Tie: shown to be within {within}."
    has_marks = any(comparison.mark for comparison in comparisons)
    return f"{note} {ADDED_NOTE}" if has_marks else note


def ranking_table(rankings: Sequence[Ranking], comparisons: Sequence[Comparison]) -> Table:
    """Arms by their estimate at each size, with a mark and a verdict against the reference."""
    slice_, rows = rankings[0].slice, []
    label, has_sizes = slice_.metric.label, len(rankings) > 1
    for ranking in rankings:
        for place in ranking.places:
            row: dict[str, Any] = {AXIS_WORDS[slice_.axis]: ranking.size} if has_sizes else {}
            row |= {slice_.arm_key: place.arm, label: "-", DIFFERENCE: None}
            if place.side:
                row[label] = place.side.estimate(is_best=bool(place.may_be_best))
                row["verdict"] = "reference"
                row["why"] = place.side.lost
                row["n"] = len(place.side.seeds)
            if place.comparison:
                row |= place.comparison.row
                del row["against"]
            rows.append(row)
    at = f", by {AXIS_WORDS[slice_.axis]}" if has_sizes else slice_.at_words(rankings[0].size)
    references = " or ".join(dict.fromkeys(ranking.reference for ranking in rankings))
    caption = f"{label}{at}, against {references}"
    notes = [NOTE] if slice_.has_marks else []
    note = " ".join([*notes, _family_note(slice_.metric, comparisons)]).strip()
    return table_of(f"ranking_{slice_.slug}", caption, rows, note=note)


def workload_table(rankings: Sequence[Ranking]) -> Table:
    """Each arm in each slice: its mean, marked where it may be the best."""
    names: dict[str, str] = {}
    rankings = [ranking for ranking in rankings if ranking.slice.is_main]
    for ranking in rankings:
        names |= ranking.slice.arm_names
    arm = rankings[0].slice.arm_key if rankings else ""
    rows: dict[str, dict[str, Any]] = {name: {arm: name} for name in order_arms(names)}
    for ranking in rankings:
        heading = f"{ranking.slice.heading}{ranking.slice.at_words(ranking.size)}"
        for place in ranking.places:
            if place.side:
                mean = place.side.estimate(is_best=bool(place.may_be_best))
                rows[place.arm][f"{heading}: {ranking.slice.metric.label}"] = mean
    if len({ranking.slice.slug for ranking in rankings}) < 2:
        rows = {}
    note = f"{NOTE} Each column is judged by itself; nothing is said over all of them."
    return table_of("workloads", f"{arm.capitalize()}s by workload", [*rows.values()], note=note)


def ladder_table(ladders: Sequence[Ladder]) -> Table:
    """Whether the sign of each difference holds at all values of a number."""
    rows = []
    for ladder in ladders:
        first = ladder.comparisons[0]
        size = f"{AXIS_WORDS[first.slice.axis]} {first.sizes[0]}"
        at = [size] if len(first.slice.sizes) > 1 else []
        at += [first.slice.fixed] if first.slice.fixed else []
        rows.append(
            {
                "arm": first.arm,
                "against": first.against,
                "at": ", ".join(at),
                "over": f"{ladder.key} {', '.join(f'{rung:g}' for rung in ladder.rungs)}",
                LEAST: Estimate(ladder.least, first.slice.metric.digits, is_signed=True),
                "verdict": ladder.verdict,
                "why": ladder.why,
            }
        )
    note = (
        "Better or worse: at every value, as the table of each says, so nothing further is tested. "
        "The least difference is that of the value where it is smallest."
    )
    return table_of("ladders", "Does the sign hold at every value?", rows, note=note)


def causes_table(causes: Sequence[Causes]) -> Table:
    """Where each drop comes from, in three numbers."""
    rows = []
    for of_drop in causes:
        row: dict[str, Any] = {"norm": of_drop.arm}
        for name, term in {"drop": of_drop.drop, **of_drop.terms}.items():
            row[name] = Estimate(term, of_drop.metric.digits)
        rows.append(row | {"n": of_drop.drop.n})
    note = (
        "training noise: noisy statistics left worse weights, however evaluated; own share: in "
        "training a sample shapes its own statistics, in evaluation it does not; averages: running "
        "averages miss the population. They add up to the drop. Intervals over seeds, 95 % each."
    )
    return table_of("causes", "Where a drop comes from", rows, note=note)


def lost_table(cells: Sequence[CellRuns], refused: Sequence[RefusedCell]) -> Table:
    """What was refused, failed, diverged, ended at chance, is missing or in doubt, and why."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if not cell.runs:
            continue
        reasons = dict.fromkeys(cell.lost, "")
        if "failed" in reasons:
            reasons["failed"] = next(run.error for run in cell.runs if run.error)
        if cell.invalid:
            reasons["INVALID"] = cell.invalid
        if any(run.measured.get("traits.mixes_samples_in_evaluation") for run in cell.runs):
            reasons["evaluated in batches"] = (
                f"other samples of a batch move the output; metrics are of {cell.norm_batch_size}"
            )
        for what, why in reasons.items():
            count = cell.lost.get(what, len(cell.runs))
            row = {"cell": cell.directory.name, "confirmation": None, "what": what, "seeds": count}
            if cell.confirmation:
                row["confirmation"] = cell.confirmation.number
            rows.append(row | {"of": len(cell.wanted), "why": why})
    for refusal in refused:
        why = f"refused: {refusal.error}"
        rows.append({"cell": refusal.title, "what": "refused", "why": why})
    caption = "What was refused or failed, diverged, ended at chance or is in doubt"
    return table_of("lost", caption, rows, has_latex=False)


def cell_table(
    cells: Sequence[CellRuns],
    metric: str | Metric | None,
    tolerance: float | None,
    *,
    is_tuned: bool = False,
) -> Table:
    """A row per cell: its sizes, the mean with its interval, the worst seed, and every count.

    is_tuned: numbers of other tables are cross-fitted
    """
    rows = []
    for cell in cells:
        wanted = metric.name if isinstance(metric, Metric) else metric
        found = choose_metric(metric_names([cell]), metric, tolerance)
        described = found or describe_metric(wanted or PREFERRED[0], tolerance)
        side = ArmAtSize(cell.arm, [cell], described)
        values = side.values.values()
        worst = min(values, key=lambda value: described.sign * value, default=None)
        row = {
            cell.roles.arm: cell.arm,
            "settings": cell.title,
            "batch size": cell.batch_size or None,
            "norm batch size": (cell.norm_batch_size or None) if cell.mixes_samples else "any",
            cell.roles.tuned or "lr": cell.tuned,
            described.label: side.estimate(),
            "worst seed": None if worst is None else f"{worst:.{described.digits}f}",
            "finished": sum(run.status == Status.FINISHED for run in cell.runs),
        }
        row |= {what: cell.lost.get(what) for what in LOST}
        rows.append(row | {"id": cell.directory.name})
    note = ""
    if is_tuned:
        tuned = "learning rate" if cells[0].roles.tuned == "lr" else cells[0].roles.tuned
        note = (
            f"One row per {tuned}. Tuned numbers elsewhere are cross-fitted: half of the "
            f"seeds pick the {tuned}, the others are scored."
        )
    return table_of("cells", "Cells", rows, note=note, has_latex=False)


def run_frame(runs: Sequence[Row]) -> pd.DataFrame:
    """A row per run: its settings, what was measured, as `timing.step_ms`, and its metrics.

    Settings are those in which any run differs from the defaults, and sizes are effective. A
    missing metric is NaN, any other missing value None.
    """
    keys = sorted({key for run in runs for key in run.config})
    rows = []
    for run in runs:
        rows.append(
            {"study": run.study, "directory": str(run.directory), "cell_id": run.cell_id}
            | {"seed": run.seed, "status": str(run.status), "error": run.error}
            | {key: run.value_of(key) for key in keys}
            | dict(run.measured)
            | dict(run.metrics)
        )
    frame = pd.DataFrame(rows, dtype=object)
    metrics = {name for run in runs for name in run.metrics}
    return frame.where(frame.notna(), None).astype(dict.fromkeys(sorted(metrics), float))
