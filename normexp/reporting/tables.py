"""The tables of a report: page, terminal, CSV, JSON and LaTeX print the same texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.config.words import format_count
from normexp.records.result import Status, flatten
from normexp.records.study import Refusal
from normexp.reporting.cells import CellRow, base_of, metric_names, order_norms
from normexp.reporting.compare import ADDED, DIFFERENCE, Causes, Comparison, Ranking, verdict_words
from normexp.reporting.metric import (
    PREFERRED,
    Metric,
    choose_metric,
    describe_metric,
    format_interval,
    format_mean,
    signed,
)
from normexp.reporting.runs import RunRow
from normexp.reporting.slices import AXIS_WORDS, Slice

BEST = "●"
NOTE = f"{BEST} may be the best: no other norm is shown to be better, which is no order among them."
ADDED_NOTE = (
    f"{ADDED} seeds were added after the first command: adding seeds until a verdict appears makes "
    "a false one more likely than 5 %."
)


@dataclass(frozen=True)
class Table:
    """Texts under named columns; an absent value is empty.

    name: of its files
    caption: its scope, said once above
    note: what its marks and verdicts mean, below
    has_latex: few columns, so it is written as LaTeX too
    """

    name: str
    caption: str
    frame: pd.DataFrame
    note: str = ""
    has_latex: bool = True


def table_of(name: str, caption: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Table:
    """A table from dicts by column; a row may lack columns, and empty columns are left out."""
    frame = pd.DataFrame([{key: show(value) for key, value in row.items()} for row in rows])
    frame = frame.fillna("")
    is_used = (frame != "").any() if len(frame) else []
    return Table(name, caption, frame.loc[:, is_used] if len(frame) else frame, **more)


def show(value: Any) -> str:
    """A value as text on one line."""
    if value is None or value != value:  # NaN
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def write_tables(folder: Path, tables: Iterable[Table]) -> None:
    """Writes each table as CSV, those for papers as LaTeX too, with booktabs rules."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        csv = table.frame.to_csv(index=False, lineterminator="\n")
        (folder / f"{table.name}.csv").write_text(csv, encoding="utf-8")
        if table.has_latex and len(table.frame):
            style = table.frame.style.format(escape="latex").format_index(escape="latex", axis=1)
            latex = style.hide(axis="index").to_latex(hrules=True)
            latex = latex.replace(BEST, r"$\bullet$").replace(ADDED, r"$\dagger$")
            head = "".join(f"% {text}\n" for text in (table.caption, table.note) if text)
            (folder / f"{table.name}.tex").write_text(head + latex, encoding="utf-8")


def mean_table(part: Slice) -> Table:
    """Each norm at each size: the means over seeds."""
    rows = []
    for norm, line in part.lines.items():
        row = {"norm": norm}
        for size in part.sizes:
            head = str(size) if len(part.sizes) > 1 else part.metric.label
            is_same = norm in part.independent and size != part.sizes[0]
            mean = line[size].mean_words if size in line else ""
            row[head] = "same" if is_same else mean
        row["lr"] = "; ".join(dict.fromkeys(grid.rate_words for grid in line.values()))
        row["lost"] = "; ".join(dict.fromkeys(grid.lost for grid in line.values() if grid.lost))
        row["n"] = "; ".join(dict.fromkeys(str(len(grid.seeds)) for grid in line.values()))
        rows.append(row)
    is_in_scope = all(len(grid.cells) == 1 and not grid.best.search for grid in part.grids)
    if len({row["lr"] for row in rows}) == 1 and is_in_scope:
        rows = [{key: value for key, value in row.items() if key != "lr"} for row in rows]
    along = f", by {AXIS_WORDS[part.axis]}" if len(part.sizes) > 1 else ""
    note = "Diverged runs and runs at chance count as chance level." * any(r["lost"] for r in rows)
    if any(cell.without_value(part.metric) for cell in part.cells):
        note = "A diverged run has no value of this metric and is missing from its mean."
    caption = f"{part.metric.label}{along}: {part.heading}"
    return table_of(f"means_{part.slug}", caption, rows, note=note)


def difference_table(
    part: Slice, comparisons: Sequence[Comparison], *, has_note: bool = True
) -> Table:
    """The comparisons along the sizes of a slice; without a note where a ranking follows."""
    own = [one for one in comparisons if one.part is part and one.is_along_sizes]
    rows = [one.row for one in own]
    note = [_family_note(part.metric, own)] if has_note else []
    for one in own:
        grid = one.first
        if base_of(grid.norm) == "batch" and one.verdict in ("tie", "undecided"):
            where = ", ".join(filter(None, (grid.best.budget, f"lr {grid.rate_words}")))
            note.append(f"No drop of batch norm is shown at {where}; "
                        "experiment=why_size_2 has a recipe that shows one.")  # fmt: skip
    return table_of(
        f"sizes_{part.slug}",
        f"{part.metric.label}, smallest against largest {AXIS_WORDS[part.axis]}",
        rows,
        note=" ".join(note),
    )


def _family_note(metric: Metric, comparisons: Sequence[Comparison]) -> str:
    size = max((one.family_size for one in comparisons), default=0)
    if not size:
        return ""
    words = format_count(size, "comparison")
    tie = f"tie: shown to be within {metric.tolerance:g} {metric.unit}".strip()
    added = f" {ADDED_NOTE}" if any(one.is_extended and one.verdict for one in comparisons) else ""
    return (
        f"Positive: the first is better. Verdicts: corrected for {words} (5 % per model, data and "
        f"budget); {tie}.{added}"
    )


def ranking_table(ranking: Ranking, comparisons: Sequence[Comparison]) -> Table:
    """Norms by their estimate, with a mark and a verdict against the reference."""
    part, rows = ranking.part, []
    for place in ranking.places:
        is_reference = place.norm == ranking.reference
        gap = "" if place.gap is None else signed(place.gap, part.metric)
        rows.append(
            {"norm": place.norm, "": BEST * bool(place.may_be_best)}
            | {part.metric.label: place.grid.mean_words if place.grid else "-", DIFFERENCE: gap}
            | {"verdict": "reference" if is_reference else verdict_words(place)}
            | {"why": place.why, "n": str(place.n)}
        )
    own = [one for one in comparisons if one.part is part]
    caption = f"{part.metric.label}{part.at_words}, against {ranking.reference}"
    note = f"{NOTE} {_family_note(part.metric, own)}".strip()
    return table_of(f"ranking_{part.slug}", caption, rows, note=note)


def workload_table(rankings: Sequence[Ranking]) -> Table:
    """Each norm in each slice: its mean, marked where it may be the best."""
    rows: dict[str, dict[str, Any]] = {}
    for norm in order_norms(place.norm for ranking in rankings for place in ranking.places):
        rows[norm] = {"norm": norm}
    for ranking in rankings:
        metric = ranking.part.metric
        for place in ranking.places:
            mean = place.grid.mean.estimate if place.grid else None
            shown = "-" if mean is None else f"{mean:.{metric.digits}f}"
            heading = f"{ranking.part.heading}: {metric.label}"
            rows[place.norm][heading] = f"{shown} {BEST * bool(place.may_be_best)}".strip()
    note = f"{NOTE} Each column is judged by itself; nothing is said over all of them."
    return table_of("workloads", "Norms by workload", [*rows.values()], note=note)


def causes_table(causes: Sequence[Causes]) -> Table:
    """Where the drops come from: three numbers each."""
    rows = [
        {"norm": one.norm, "drop": format_interval(one.drop, one.metric.digits)}
        | {name: format_interval(term, one.metric.digits) for name, term in one.terms.items()}
        | {"n": str(one.drop.n)}
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
        errors = [run.result.error for run in cell.runs if run.result.error]
        found = {
            "failed": (cell.count(Status.FAILED), *errors[:1]),
            "diverged": (cell.count(Status.DIVERGED),),
            "at chance": (len(cell.at_chance),),
            "missing": (cell.missing,),
            "INVALID": (len(cell.runs) if cell.invalid else 0, cell.invalid),
            "evaluated in batches": (
                len(cell.runs) * cell.mixes_in_evaluation,
                f"other samples of a batch move the output; metrics are of {cell.norm_batch_size}",
            ),
        }
        for what, (count, *why) in found.items():
            if count:
                seeds = f"{count} of {len(cell.wanted)}"
                row = {"cell": cell.directory.name, "what": what, "seeds": seeds}
                rows.append(row | {"why": why[0] if why else ""})
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
        values = cell.values(described).values()
        worst = (min if described.higher_is_better else max)(values, default=None)
        rows.append(
            _labels_of(cell)
            | {described.label: format_mean(cell.mean(described), described, values)}
            | {"worst seed": None if worst is None else f"{worst:.{described.digits}f}"}
            | {"finished": cell.count(Status.FINISHED)}
            | {str(lost): cell.count(lost) or None for lost in (Status.DIVERGED, Status.FAILED)}
            | {"missing": cell.missing or None}
            | {"id": cell.directory.name}
        )
    note = "One row per learning rate. Tuned numbers elsewhere are cross-validated: half of the "
    note += "seeds pick the learning rate, the others are scored."
    has_grids = len({cell.lr for cell in cells}) > 1
    return table_of("cells", "Cells", rows, note=note * has_grids, has_latex=False)


def _labels_of(cell: CellRow) -> dict[str, Any]:
    return {
        "norm": cell.norm,
        "settings": cell.title,
        "batch size": cell.batch_size,
        "norm batch size": cell.norm_batch_size if cell.mixes_samples else "any",
        "lr": cell.lr,
    }


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
