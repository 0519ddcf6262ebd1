"""The tables of a report: page, terminal, CSV, JSON and LaTeX print the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.records.journal import Refusal
from normexp.records.result import Status, flatten
from normexp.reporting.cells import LOST, CellRow, base_of, metric_names, order_norms
from normexp.reporting.compare import ADDED, DIFFERENCE, Causes, Comparison, Ranking
from normexp.reporting.metric import (
    BEST,
    PREFERRED,
    Estimate,
    Metric,
    choose_metric,
    describe_metric,
)
from normexp.reporting.runs import RunRow
from normexp.reporting.slices import AXIS_WORDS, Grid, Slice
from normexp.words import format_count

NOTE = f"{BEST} may be the best: no other norm is shown to be better, which is no order among them."
ADDED_NOTE = (
    f"{ADDED} seeds were added after the first command: adding seeds until a verdict appears makes "
    "a false one more likely than 5 %."
)
PROSE = ("why", "lost", "search", "claim")  # columns that wrap, and that a paper's table lacks
BRACKETS = "In brackets: 95 % intervals, or of three seeds or fewer their values."
LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {BEST: "Bold:", ADDED: r"\dag{}", "·": r"\textperiodcentered{}"}
)


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    name: of its files
    caption: its scope, said once above
    values: numbers, estimates, texts and None
    note: what its marks and verdicts mean, below
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
        columns, styles = dict[tuple[str, int], Sequence[str]](), ""
        for name, column in self.values.items():
            if name in PROSE:
                continue
            head, known = str(name).translate(LATEX), [x for x in column if isinstance(x, Estimate)]
            decimals = max((one.decimals for one in known), default=0)
            numbers, brackets = zip(*(_latex_of(value, decimals) for value in column), strict=True)
            columns[head, 0] = numbers
            if known:
                columns[head, 1] = brackets
                styles += r"r@{\ }l"
            else:
                styles += "r" if all(isinstance(value, float | int) for value in column) else "l"
        notes = [BRACKETS] if "@" in styles else []
        has_best = any("boldmath" in text for texts in columns.values() for text in texts)
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
    shown = rf"{{\boldmath{number}}}" if value.is_best else number
    return shown, value.joined(["", *others]).strip()


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


def mean_table(part: Slice, ranking: Ranking | None) -> Table:
    """Each norm at each size: the means over seeds."""
    rows = []
    best = ranking.best if ranking else []
    for norm, line in part.lines.items():
        row: dict[str, Any] = {"norm": norm}
        for size in part.sizes:
            head = str(size) if len(part.sizes) > 1 else part.metric.label
            is_same = norm in part.independent and size != part.sizes[0]
            row[head] = None
            if size in line:
                is_best = norm in best and size == part.at
                row[head] = line[size].estimate(is_best=is_best, words="same" if is_same else "")
        row["lr"] = _joined(grid.lr for grid in line.values())
        row["search"] = _joined(grid.search_words for grid in line.values())
        row["lost"] = _joined(grid.lost for grid in line.values())
        row["n"] = _joined(len(grid.seeds) for grid in line.values())
        rows.append(row)
    if len({row["lr"] for row in rows}) == 1 and not any(row["search"] for row in rows):
        rows = [row | {"lr": None} for row in rows]  # the scope says it
    note = "Diverged runs and runs at chance count as chance level." * any(r["lost"] for r in rows)
    if any(cell.without_value(part.metric) for cell in part.cells):
        note = "A diverged run has no value of this metric and is missing from its mean."
    along = f", by {AXIS_WORDS[part.axis]}" if len(part.sizes) > 1 else ""
    caption = f"{part.metric.label}{along}: {part.heading}"
    return table_of(f"means_{part.slug}", caption, rows, note=note)


def _joined(values: Iterable[Any]) -> Any:
    """The value that all have; of several each one once, as a text."""
    once = [value for value in dict.fromkeys(values) if value not in ("", None)]
    return once[0] if len(once) == 1 else "; ".join(map(show, once))


def difference_table(
    part: Slice, comparisons: Sequence[Comparison], *, has_note: bool = True
) -> Table:
    """The comparisons along the sizes of a slice; without a note where a ranking follows."""
    own = [one for one in comparisons if one.part is part and one.is_along_sizes]
    notes = [_family_note(part.metric, own)] if has_note else []
    for one in own:
        grid = one.first
        if base_of(grid.norm) == "batch" and one.verdict in ("tie", "undecided"):
            where = ", ".join(filter(None, (grid.best.budget, f"lr {show(grid.lr)}")))
            notes.append(f"No drop of batch norm is shown at {where}; "
                         "experiment=why_size_2 has a recipe that shows one.")  # fmt: skip
    caption = f"{part.metric.label}, smallest against largest {AXIS_WORDS[part.axis]}"
    rows = [one.row for one in own]
    return table_of(f"sizes_{part.slug}", caption, rows, note=" ".join(notes))


def _family_note(metric: Metric, comparisons: Sequence[Comparison]) -> str:
    size = max((one.family_size for one in comparisons), default=0)
    if not size:
        return ""
    words = format_count(size, "comparison")
    tie = f"tie: shown to be within {metric.tolerance:g} {metric.unit}".strip()
    added = f" {ADDED_NOTE}" * any(one.mark for one in comparisons)
    return (
        f"Positive: the first is better. Verdicts: corrected for {words} (5 % per model, data and "
        f"budget); {tie}.{added}"
    )


def ranking_table(ranking: Ranking, comparisons: Sequence[Comparison]) -> Table:
    """Norms by their estimate, with a mark and a verdict against the reference."""
    part, rows = ranking.part, []
    for place in ranking.places:
        row: dict[str, Any] = {"norm": place.norm, part.metric.label: "-", DIFFERENCE: None}
        if place.grid:
            row[part.metric.label] = place.grid.estimate(is_best=bool(place.may_be_best))
            row |= {"verdict": "reference", "why": place.grid.lost, "n": len(place.grid.seeds)}
        if place.comparison:
            row |= place.comparison.row
            del row["against"]
        rows.append(row)
    own = [one for one in comparisons if one.part is part]
    caption = f"{part.metric.label}{part.at_words}, against {ranking.reference}"
    note = f"{NOTE} {_family_note(part.metric, own)}".strip()
    return table_of(f"ranking_{part.slug}", caption, rows, note=note)


def workload_table(rankings: Sequence[Ranking]) -> Table:
    """Each norm in each slice: its mean, marked where it may be the best."""
    norms = order_norms(place.norm for ranking in rankings for place in ranking.places)
    rows: dict[str, dict[str, Any]] = {norm: {"norm": norm} for norm in norms}
    for ranking in rankings:
        head = f"{ranking.part.heading}: {ranking.part.metric.label}"
        for place in ranking.places:
            if place.grid:
                rows[place.norm][head] = place.grid.estimate(is_best=bool(place.may_be_best))
    note = f"{NOTE} Each column is judged by itself; nothing is said over all of them."
    return table_of("workloads", "Norms by workload", [*rows.values()], note=note)


def causes_table(causes: Sequence[Causes]) -> Table:
    """Where the drops come from: three numbers each."""
    rows = [
        {"norm": one.norm, "drop": Estimate(one.drop, one.metric.digits)}
        | {name: Estimate(term, one.metric.digits) for name, term in one.terms.items()}
        | {"n": one.drop.n}
        for one in causes
    ]
    note = (
        "training noise: noisy statistics left worse weights, however evaluated; own share: in "
        "training a sample shapes its own statistics, in evaluation it does not (norm=eval_norm); "
        "averages: running averages miss the population (evaluate_with=[precise]). They add up to "
        "the drop. Intervals over seeds, 95 % each."
    )
    return table_of("causes", "Where a drop comes from", rows, note=note)


def lost_table(cells: Sequence[CellRow], refused: Sequence[Refusal]) -> Table:
    """What was refused, failed, diverged, ended at chance, is missing or in doubt, and why."""
    rows: list[dict[str, Any]] = []
    for cell in (cell for cell in cells if cell.runs):
        reasons = dict.fromkeys(cell.lost, "")
        if "failed" in reasons:
            reasons["failed"] = next(run.result.error for run in cell.runs if run.result.error)
        if cell.invalid:
            reasons["INVALID"] = cell.invalid
        traits = [run.result.measured.traits for run in cell.runs]
        if any(one.get("mixes_samples_in_evaluation") for one in traits):
            reasons["evaluated in batches"] = (
                f"other samples of a batch move the output; metrics are of {cell.norm_batch_size}"
            )
        for what, why in reasons.items():
            count = cell.lost.get(what, len(cell.runs))
            row = {"cell": cell.directory.name, "what": what, "seeds": count}
            rows.append(row | {"of": len(cell.wanted), "why": why})
    for one in refused:
        rows.append({"cell": one.title, "what": "refused", "why": f"refused: {one.error}"})
    caption = f"Lost or in doubt: {format_count(len(rows), 'line')}"
    return table_of("lost", caption, rows, has_latex=False)


def cell_table(cells: Sequence[CellRow], metric: str | None, tolerance: float | None) -> Table:
    """A row per cell: its sizes, the mean with its interval, the worst seed, and every count."""
    rows = []
    for cell in cells:
        name = metric or choose_metric(metric_names([cell])) or PREFERRED[0]
        described = describe_metric(name, tolerance)
        grid = Grid(cell.norm, [cell], described)
        worst = (min if described.higher_is_better else max)(grid.values.values(), default=None)
        rows.append(
            {
                "norm": cell.norm,
                "settings": cell.title,
                "batch size": cell.batch_size,
                "norm batch size": cell.norm_batch_size if cell.mixes_samples else "any",
                "lr": cell.lr,
                described.label: grid.estimate(),
                "worst seed": None if worst is None else f"{worst:.{described.digits}f}",
                "finished": sum(run.status == Status.FINISHED for run in cell.runs),
                **{what: cell.lost.get(what) for what in LOST},
                "id": cell.directory.name,
            }
        )
    note = "One row per learning rate. Tuned numbers elsewhere are cross-validated: half of the "
    note += "seeds pick the learning rate, the others are scored."
    has_grids = len({cell.lr for cell in cells}) > 1
    return table_of("cells", "Cells", rows, note=note * has_grids, has_latex=False)


def run_frame(runs: Sequence[RunRow]) -> pd.DataFrame:
    """A row per run: its settings, what was measured, as `timing.step_ms`, and its metrics.

    Settings are those in which any run differs from the defaults, and sizes are effective. A
    missing metric is NaN, any other missing value None.
    """
    keys = sorted({key for run in runs for key in run.config})
    rows = []
    for run in runs:
        result, measured = run.result, asdict(run.result.measured)
        del measured["metrics"]
        rows.append(
            {"study": run.study, "directory": str(run.directory), "cell_id": result.cell_id}
            | {"seed": run.seed, "status": str(run.status), "error": result.error}
            | {key: run.value_of(key) for key in keys}
            | flatten(measured)
            | dict(run.metrics)
        )
    frame = pd.DataFrame(rows, dtype=object)
    metrics = {name for run in runs for name in run.metrics}
    return frame.where(frame.notna(), None).astype(dict.fromkeys(sorted(metrics), float))
