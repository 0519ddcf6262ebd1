"""The tables of a report, each as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.reporting.metric import (
    APART_WORDS,
    PREFERRED,
    Metric,
    choose_metric,
    describe_metric,
    format_interval,
    format_mean,
)
from normexp.reporting.model import AXIS_WORDS, CellRow, RunRow, Slice, metric_names
from normexp.reporting.ranking import Ranking
from normexp.reporting.ratios import NOTE
from normexp.reporting.read import RefusedCell, flatten
from normexp.reporting.report import Report
from normexp.reporting.rows import (
    Row,
    count_words,
    frame_of,
    mean_rows,
    plain_rows,
)
from normexp.reporting.sentences import Answer, listed
from normexp.reporting.style import order_norms
from normexp.reporting.verdict import Comparison
from normexp.stats.sensitivity import Sensitivity, Threshold

LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "|": r"\textbar{}",
        "×": r"$\times$",
        "±": r"$\pm$",
        "·": r"$\cdot$",
    }
)
NUMBERS = ["mean", "mean low", "mean high"]
MOST_COLUMNS = 8  # of a table for papers, without that of the norms
MEAN = "mean [95 % interval]"
EACH_RATE = (
    "Each row is a learning rate by itself. Where rates are tuned, the values of a norm elsewhere "
    "in the report are of seeds that did not choose its rate."
)


@dataclass(frozen=True)
class Table:
    """Plain values under named columns; a missing value is shown as `-`, and empty in CSV.

    frame: has `columns`, and may have more
    numbers: columns for programs, in the CSV only: plain numbers beside `1.2 [0.6, 1.9]`
    aside: columns shown in files and opened cells only, because they do not fit on a page
    over: headings over the columns after the first, each with its number of columns, in LaTeX
    under: the heads of all columns below these, in LaTeX; without, the names of the columns
    bold: (row, column) of the values in bold
    is_for_papers: few columns, so it is written as LaTeX too
    """

    name: str
    title: str
    columns: list[str]
    frame: pd.DataFrame
    numbers: list[str] = field(default_factory=list)
    aside: Collection[str] = ()
    note: str = ""
    over: Sequence[tuple[str, int]] = ()
    under: Sequence[str] = ()
    bold: Collection[tuple[int, str]] = ()
    is_for_papers: bool = False

    @staticmethod
    def of_rows(
        name: str, title: str, columns: list[str], rows: Sequence[Row], note: str = ""
    ) -> Table:
        """A table from dicts by column; a row may lack columns."""
        return Table(name, title, columns, frame_of(rows, columns), note=note)

    @property
    def rows(self) -> list[Row]:
        return plain_rows(self.frame)

    def to_csv(self) -> str:
        return to_csv(self.frame[[*self.columns, *self.numbers]])

    def to_markdown(self) -> str:
        head, *body = self._lines(str.maketrans({"|": "\\|"}), "**{}**")
        lines = [head, ["---"] * len(head), *body]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return f"{self.title}\n\n{table}" + (f"\n{self.note}\n" if self.note else "")

    def to_latex(self) -> str:
        """A tabular with booktabs rules."""
        lines = self._lines(LATEX, r"\textbf{{{}}}")
        if self.under:
            lines[0] = [head.translate(LATEX) for head in self.under]
        head, *body = (" & ".join(line) + r" \\" for line in lines)
        last, over, start = len(self.columns), [], 2
        if self.over:
            titles = (
                rf"\multicolumn{{{n}}}{{c}}{{{text.translate(LATEX)}}}" for text, n in self.over
            )
            over = [rf" & {' & '.join(titles)} \\"]
        for text, n in self.over:
            over += [rf"\cmidrule(lr){{{start}-{start + n - 1}}}"] if text else []
            start += n
        lines = [
            *(f"% {text}" for text in (self.title, self.note) if text),
            rf"\begin{{tabular}}{{{'l' * last}}}",
            r"\toprule",
            *over,
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def _lines(self, escapes: Mapping[int, str], mark: str) -> list[list[str]]:
        """Head and rows, escaped, with `mark` around the values in bold."""
        texts = self.texts().map(lambda text: text.translate(escapes))
        body = [
            [
                mark.format(text) if (row, column) in self.bold else text
                for column, text in zip(self.columns, line, strict=True)
            ]
            for row, line in enumerate(texts.to_numpy())
        ]
        return [[name.translate(escapes) for name in self.columns], *body]

    def texts(self) -> pd.DataFrame:
        """The columns as shown."""
        return self.frame[self.columns].map(show)

    def split(self) -> tuple[dict[str, str], pd.DataFrame]:
        """Columns with one value in all rows, as a dict, and the texts of the other columns."""
        texts = self.texts().drop(columns=[*self.aside])
        distinct = {name: list(texts[name].unique()) for name in texts}
        same = {
            str(name): values[0]
            for name, values in distinct.items()
            if len(values) == 1 < len(texts)
        }
        named = {name: text for name, text in same.items() if text != "-"}
        return named, texts.drop(columns=list(same))


def tables_of(report: Report) -> list[Table]:
    """Every table of a report."""
    answers = [answer for section in report.sections for answer in section.answers]
    cells = cell_table(report.cells, report.metric, report.tolerance, report.refused)
    notes = [EACH_RATE] if any(part.is_tuned for part in report.slices) else []
    notes += [f"Seeds apart: {APART_WORDS}."] if cells.frame["seeds apart"].notna().any() else []
    return [
        *paper_tables(report.slices, best_of(report.rankings)),
        sensitivity_table(answers),
        comparison_table(answers),
        untested_table(report),
        replace(cells, note=" ".join(notes)),
        run_table(report.cells),
    ]


def write_tables(folder: Path, tables: Iterable[Table]) -> None:
    """Writes each table as CSV and Markdown, those for papers as LaTeX too."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        texts = {"csv": table.to_csv(), "md": table.to_markdown()}
        texts |= {"tex": table.to_latex()} if table.is_for_papers else {}
        for ending, text in texts.items():
            (folder / f"{table.name}.{ending}").write_text(text, encoding="utf-8")


def to_csv(frame: pd.DataFrame) -> str:
    """CSV with every digit; an apostrophe keeps spreadsheets from running text as a formula."""

    def without_formula(value: Any) -> Any:
        is_formula = isinstance(value, str) and value[:1] in ("=", "+", "@", "\t", "\r")
        return f"'{value}" if is_formula else value

    rows = [list(map(without_formula, row.values())) for row in plain_rows(frame)]
    safe = pd.DataFrame(rows, columns=list(frame), dtype=object)
    return safe.to_csv(index=False, lineterminator="\n")


def show(value: Any) -> str:
    """A value as text on one line."""
    if value is None or value == "" or value != value:  # NaN
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def cell_table(
    cells: Sequence[CellRow],
    metric: str | None,
    tolerance: float | None,
    refused: Sequence[RefusedCell] = (),
) -> Table:
    """A row per cell: its sizes, the mean with its interval, and every count; refused cells last.

    Each cell shows the requested metric, or the first of PREFERRED that it has.
    """
    available = metric_names(cells)
    by_metric: dict[str, list[CellRow]] = {}
    for cell in cells:
        name = choose_metric(metric_names([cell]), metric) or choose_metric(available, metric)
        by_metric.setdefault(name or metric or PREFERRED[0], []).append(cell)
    rows: dict[CellRow, Row] = {}
    for name, same in by_metric.items():
        rows |= _rows_of(same, describe_metric(name, tolerance))
    columns = [
        *("norm", "model", "data", "setting", "batch size", "norm batch size", "lr", "metric"),
        *(MEAN, "worst seed", "seeds apart", "n", "seeds", "diverged", "failed", "missing"),
        *("note", "directory"),
    ]
    shown = [rows[cell] for cell in cells]
    budgets = {cell.budget for cell in cells}
    shown += [_refused_row(cell, shown, budgets) for cell in refused]
    frame = frame_of(shown, [*columns, *NUMBERS, "count"])
    return Table("cells", "Cells", columns, frame, NUMBERS, ["seeds", "directory"])


def _refused_row(cell: RefusedCell, rows: Sequence[Row], budgets: Collection[str]) -> Row:
    """What the title of a refused cell says, and what all cells that ran have in common."""
    pairs = (word.partition("=") for word in cell.settings.split())
    words = {key: value for key, _, value in pairs}
    row: Row = {"norm": cell.norm, "count": "0", "note": cell.error}
    row["norm batch size"] = words.pop("norm_batch_size", None)
    for name in ("model", "data", "batch size", "lr", "metric"):
        values = {other[name] for other in rows}
        typed = words.pop(name.replace(" ", "_"), None)
        row[name] = values.pop() if len(values) == 1 and typed is None else typed
    settings = [f"{key}={value}" for key, value in words.items()]
    row["setting"] = ", ".join(word for word in settings if {word} != budgets)
    return row


def _rows_of(cells: Sequence[CellRow], metric: Metric) -> dict[CellRow, Row]:
    """The rows of cells that share a metric."""
    rows = mean_rows(cells, metric)
    for cell, row in rows.items():
        row |= _labels_of(cell, independent="any") | {"metric": metric.label, "lr": cell.lr}
        row |= {MEAN: row["text"], "mean low": row["low"], "mean high": row["high"]}
        row["note"] = _note(cell, row, metric)
    return rows


def _labels_of(cell: CellRow, *, independent: str | None) -> Row:
    """What names a cell; its norm batch size is `independent` if samples do not mix."""
    return {
        "norm": cell.norm,
        "model": cell.model,
        "data": cell.data,
        "setting": cell.setting,
        "batch size": cell.batch_size,
        "norm batch size": cell.norm_batch_size if cell.mixes_samples else independent,
    }


def _note(cell: CellRow, row: Row, metric: Metric) -> str:
    """The warnings and exceptions that apply to a row."""
    notes = {
        f"INVALID: {cell.invalid}": cell.invalid,
        f"failed: {cell.error}": cell.error,
        f"{cell.early} of {cell.expected} ended early": cell.early,
        f"no {metric.name} recorded": cell.finished and not row["n"],
        "one seed: no interval": row["n"] == 1,
        "all seeds equal: no interval": row["n"] > 1 and row["low"] is None,
        f"the same recipe as {', '.join(cell.same_as)}": cell.same_as,
    }
    return "; ".join(text for text, applies in notes.items() if applies)


def best_of(rankings: Iterable[Ranking]) -> dict[Slice, set[str]]:
    """By slice, the norms that may be the best at its smallest size; none where any of them may."""
    best: dict[Slice, set[str]] = {}
    for ranking in rankings:
        if len(ranking.best) < len(ranking.ranked):
            best.setdefault(ranking.part, set()).update(ranking.best)
    return best


def paper_tables(slices: Sequence[Slice], best: Mapping[Slice, set[str]]) -> list[Table]:
    """Norms by data sets, models, budgets and sizes: one table for each metric.

    best: see `best_of`
    """
    by_metric: dict[str, list[Slice]] = {}
    for part in slices:
        by_metric.setdefault(part.metric.name, []).append(part)
    return [_paper_table(same, best) for same in by_metric.values()]


def _paper_table(slices: Sequence[Slice], best: Mapping[Slice, set[str]]) -> Table:
    metric = slices[0].metric
    sizes_of = _sizes_shown(slices)
    rows: dict[str, Row] = {norm: {} for norm in order_norms(n for p in slices for n in p.norms)}
    columns, over, under, bold = ["norm"], [], ["norm"], []
    for part, heading in zip(slices, _headings(slices), strict=True):
        sizes, has_sizes = sizes_of[part], len(part.sizes) > 1
        axis = AXIS_WORDS[part.axis]
        over.append((f"{heading}, {axis}".removeprefix(", ") if has_sizes else "", len(sizes)))
        under += map(str, sizes) if has_sizes else [heading or metric.label]
        for size in sizes:
            column = ", ".join(filter(None, (heading, f"{axis} {size}" if has_sizes else "")))
            columns.append(column or metric.label)
            for norm, line in part.lines.items():
                if size in line:
                    rows[norm][columns[-1]] = _paper_text(part, line[size])
            if size == part.sizes[0]:
                bold += [(list(rows).index(norm), columns[-1]) for norm in best.get(part, ())]
    frame = frame_of([{"norm": norm} | row for norm, row in rows.items()], columns)
    kind = metric.name.replace("/", "_").replace("@", "_")
    note = (
        f"{metric.label}: mean and 95 % interval over the seeds that finished. × diverged, "
        f"! failed, ? missing. {_search_note(slices)}"
        "Bold: one of these is the best of its column, by the tests of the report, which are at "
        "the smallest size; without bold, any may be."
    )
    title = f"{metric.label} by norm"
    return Table(
        f"paper_{kind}",
        title,
        columns,
        frame,
        note=note,
        over=over if any(text for text, _ in over) else (),
        under=under,
        bold=bold,
        is_for_papers=len(columns) <= 1 + MOST_COLUMNS,
    )


def _sizes_shown(slices: Sequence[Slice]) -> Mapping[Slice, Sequence[int]]:
    """All sizes if they fit into MOST_COLUMNS; else the smallest and the largest, or one."""
    ends = {part: list(dict.fromkeys((part.sizes[0], part.sizes[-1]))) for part in slices}
    choices = ({part: part.sizes for part in slices}, ends)
    fitting = (one for one in choices if sum(map(len, one.values())) <= MOST_COLUMNS)
    return next(fitting, {part: part.sizes[:1] for part in slices})


def _paper_text(part: Slice, cell: CellRow) -> str:
    """`97.9 [97.4, 98.4]`, with the counts where runs are lost; † for a best rate at an edge."""
    metric, tuned = part.metric, part.tuned(cell)
    text = format_mean(part.mean(cell), metric)
    text += " †" if tuned is not None and tuned.is_at_edge else ""
    count = count_words(cell, len(cell.values(metric)))
    invalid = " INVALID" if cell.invalid else ""
    return f"{text}{invalid} ({count})" if "/" in count else text + invalid


def _search_note(slices: Sequence[Slice]) -> str:
    words = [part.search_words(cell) for part in slices for _, cell in part.points]
    known = dict.fromkeys(text.partition(",")[0] for text in words if text)
    if not known:
        return ""
    edge = "† best rate at an edge of the grid. " * any("edge" in text for text in words)
    return (
        f"Learning rates: {listed(list(known))}; of a complete grid some seeds choose and the "
        f"others report, averaged over all splits. {edge}"
    )


def _headings(slices: Sequence[Slice]) -> list[str]:
    """What tells each slice from the others; empty for a single one."""
    words = [
        list(filter(None, (part.model, part.data, *part.first.setting.split(", "), part.fixed)))
        for part in slices
    ]
    shared = set[str].intersection(*map(set, words))
    return [", ".join(word for word in of_part if word not in shared) for of_part in words]


def sensitivity_table(answers: Sequence[Answer]) -> Table:
    """A row per norm and slice: the loss between two sizes, regret, threshold and slope."""
    columns = [
        *("norm", "setting", "size", "metric", "verdict", "from", "to", "worse by"),
        *("best size", "regret at the smallest size"),
        *("threshold", "passed at size", "worse by, per halving", "n", "seeds"),
    ]
    rows = []
    for part, loss in [(answer.parts[0], loss) for answer in answers for loss in answer.losses]:
        setting = (loss.norm, part.heading, AXIS_WORDS[part.axis], part.metric.label, loss.kind)
        row = dict(zip(columns, setting, strict=False))
        if loss.comparison is not None:
            row |= _sensitivity_row(part.sensitivity(loss.norm), loss.comparison)
        rows.append(row)
    note = (
        "Worse by: how much worse the metric is at the smallest size than at the largest; negative "
        "if it is better. Regret: the same from the size of the best mean, where that is not the "
        "largest, with an interval that allows for its choice. Passed at size: between which "
        "adjacent sizes the loss from the largest first exceeds the threshold, [and its bounds "
        "do]; <2 if not down to 2. "
        "Diverged runs count as the worst run. Only the verdict is corrected for the "
        "number of differences."
    )
    return Table.of_rows("sensitivity", "Batch-size sensitivity", columns, rows, note)


def _sensitivity_row(sensitivity: Sensitivity, comparison: Comparison) -> Row:
    metric = comparison.part.metric
    smallest, largest = sensitivity.sizes[0], sensitivity.sizes[-1]
    slope = format_interval(sensitivity.slope, metric.digits + 1)
    known = [size for size, loss in sensitivity.losses.items() if loss.estimate is not None]
    return {
        "from": largest,
        "to": smallest,
        "worse by": format_interval(-comparison.gap, metric.digits),
        "best size": sensitivity.best_size,
        "regret at the smallest size": format_interval(sensitivity.regret, metric.digits)
        if sensitivity.best_size != largest
        else None,  # what it is worse by
        "threshold": metric.tolerance_words,
        "passed at size": _threshold_words(sensitivity.threshold, min(known)) if known else None,
        "worse by, per halving": f"{slope} ({largest} to {smallest})" if slope != "-" else None,
        "n": sensitivity.drop.n,
        "seeds": sensitivity.num_seeds,
    }


def _threshold_words(threshold: Threshold, smallest: int) -> str:
    """`8 to 32 [2, 32]`, with where the bounds pass; `<2`: below the sizes that were run."""
    below = f"<{smallest}"
    between = below if threshold.between is None else "{} to {}".format(*threshold.between)
    if threshold.high is None:
        return between
    return f"{between} [{threshold.low or below}, {threshold.high}]"


def comparison_table(answers: Sequence[Answer]) -> Table:
    """A row per norm, slice and reference; p is multiplied by the size of the family."""
    columns = [
        *("norm", "reference", "setting", "at", "difference (positive: better)"),
        *("test samples", "unit", "probability of improvement", "p in the family"),
        *("n", "verdict"),
    ]
    rows = []
    for answer in answers:
        part, metric = answer.parts[0], answer.parts[0].metric
        for claim in answer.comparisons:
            comparison = claim.comparison
            if comparison is None:
                continue
            gap = comparison.gap
            values = (
                *(claim.norm, claim.reference, answer.heading),
                f"{AXIS_WORDS[part.axis]} {part.sizes[0]}",
                format_interval(gap, metric.digits),
                comparison.num_samples or None,
                metric.unit,
                format_interval(comparison.improvement, 2),
                *(_p_words(comparison.p), gap.n, claim.kind),
            )
            rows.append(dict(zip(columns, values, strict=True)))
    note = (
        "Test samples: that the interval allows for; without, it is for these samples. p in the "
        "family: of a t test paired by seed, times the number of tests of the report. "
        "Diverged runs count as the worst run; a difference that they could turn is open, "
        "whatever its p."
    )
    return Table.of_rows("comparisons", "Norms against the reference", columns, rows, note)


def _p_words(p: float | None) -> str | None:
    """`0.012`, `<0.001`."""
    if p is None:
        return None
    return f"{p:.2g}" if p >= 0.001 else "<0.001"


def untested_table(report: Report) -> Table:
    """A row per interval outside the family."""
    columns = ["where", "what", "details"]
    rows = [
        {"where": heading, "what": claim.claim, "details": claim.details}
        for heading, claim in report.untested
    ]
    note = "Each interval is 95 % alone, so one in twenty excludes a true equality by chance."
    note += f" {NOTE}" if report.over_data else ""
    return Table.of_rows("not_tested", "Not tested", columns, rows, note)


def run_table(cells: Sequence[CellRow]) -> Table:
    """Every ended run with all its metrics as recorded."""
    names = metric_names(cells)
    columns = [
        *("study", "norm", "model", "data", "setting", "batch size", "norm batch size", "lr"),
        *("seed", "status", "diverged at step", "steps", "stopped", "error", "invalid"),
        *(*names, "directory"),
    ]
    rows = [
        _labels_of(cell, independent=None)
        | run_fields(run)
        | {"diverged at step": run.result.diverged_at_step, "lr": cell.lr}
        | dict(run.metrics)
        for cell in cells
        for run in cell.runs
    ]
    return Table("runs", "Runs", columns, frame_of(rows, columns))


def run_fields(run: RunRow) -> Row:
    """What is recorded of a run besides its config, metrics, timing and environment."""
    result = run.result
    return {
        "study": run.study,
        "cell": str(run.directory.parent),
        "cell_id": result.cell_id,
        "seed": result.seed,
        "status": result.status,
        "diverged_at_step": result.diverged_at_step,
        "error": result.error,
        "steps": result.steps,
        "stopped": result.stopped,
        "attempts": result.attempts if result.status == "failed" else None,
        "invalid": result.invalid,
        "num_parameters": result.num_parameters,
        "directory": str(run.directory),
    }


def run_frame(runs: Sequence[RunRow]) -> pd.DataFrame:
    """A row per run: `run_fields`, the config, metrics, `timing.*` and `environment.*`.

    A missing metric is NaN, any other missing value None.
    """
    rows = [
        run_fields(run)
        | dict(run.config)
        | dict(run.metrics)
        | flatten({"timing": run.result.timing, "environment": run.result.environment})
        for run in runs
    ]
    frame = pd.DataFrame(rows, dtype=object)
    metrics = {name for run in runs for name in run.metrics}
    return frame.where(frame.notna(), None).astype(dict.fromkeys(sorted(metrics), float))
