"""The tables of a report, each as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from normexp.reporting.cells import summarize
from normexp.reporting.frame import (
    Row,
    metric_names,
    paired_values,
    plain_rows,
    values_of,
)
from normexp.reporting.metric import (
    PREFERRED,
    Metric,
    choose_metric,
    describe_metric,
    format_interval,
)
from normexp.reporting.sentences import Answer
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.stats.family import ALPHA, p_value
from normexp.stats.interval import Interval, paired_difference
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
MEAN = "mean [95 % interval]"


@dataclass(frozen=True)
class Table:
    """Plain values under named columns; a missing value is shown as `-`, and empty in CSV.

    frame: has `columns`, and may have more
    numbers: columns for programs, in the CSV only: plain numbers beside `1.2 [0.6, 1.9]`
    aside: columns shown in files and opened cells only, because they do not fit on a page
    over: a heading over all columns but the first, in LaTeX
    bold: (row, column) of the values in bold
    """

    name: str
    title: str
    columns: list[str]
    frame: pd.DataFrame
    numbers: list[str] = field(default_factory=list)
    aside: Collection[str] = ()
    note: str = ""
    over: str = ""
    bold: Collection[tuple[int, str]] = ()

    @staticmethod
    def of_rows(
        name: str, title: str, columns: list[str], rows: Sequence[Row], note: str = ""
    ) -> Table:
        """A table from dicts by column; a row may lack columns."""
        frame = pd.DataFrame(rows, columns=columns, dtype=object)
        return Table(name, title, columns, frame, note=note)

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
        head, *body = (" & ".join(line) + r" \\" for line in lines)
        last = len(self.columns)
        over = [
            rf" & \multicolumn{{{last - 1}}}{{c}}{{{self.over}}} \\",
            rf"\cmidrule(lr){{2-{last}}}",
        ]
        lines = [
            *(f"% {text}" for text in (self.title, self.note) if text),
            rf"\begin{{tabular}}{{{'l' * last}}}",
            r"\toprule",
            *(over if self.over else []),
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
        found = {name: list(texts[name].unique()) for name in texts}
        same = {str(name): own[0] for name, own in found.items() if len(own) == 1 < len(texts)}
        named = {name: text for name, text in same.items() if text != "-"}
        return named, texts.drop(columns=list(same))


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
    cells: pd.DataFrame, runs: pd.DataFrame, metric: str | None, tolerance: float | None
) -> Table:
    """A row per cell: its sizes, the mean with its interval, and every count.

    Each cell shows the requested metric, or the first of PREFERRED that it has.
    """
    available = metric_names(runs)
    own = {cell: metric_names(group) for cell, group in runs.groupby("cell")}
    names = cells["cell"].map(
        lambda cell: choose_metric(own[cell], metric) or choose_metric(available, metric)
    )
    table = pd.concat(
        _with_mean(same, runs, describe_metric(name, tolerance))
        for name, same in cells.groupby(names.fillna(metric or PREFERRED[0]), sort=False)
    )
    columns = [
        *("norm", "model", "data", "setting", "batch size", "norm batch size", "lr", "metric"),
        *(MEAN, "n", "seeds", "diverged", "failed", "missing", "note", "directory"),
    ]
    frame = _name_sizes(table.loc[cells.index], "any").assign(directory=cells["cell"])
    return Table("cells", "Cells", columns, frame, NUMBERS, ["seeds", "directory"])


def _with_mean(cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """Adds the mean of the metric, as text and as NUMBERS, and a note."""
    values = values_of(runs[runs["cell"].isin(cells["cell"])], metric)
    table = summarize(cells, values, metric).assign(metric=metric.label)
    table = table.assign(
        **{MEAN: table["text"], "mean low": table["low"], "mean high": table["high"]}
    )
    return table.assign(note=[_note(row, metric) for row in plain_rows(table)])


def _name_sizes(table: pd.DataFrame, independent: str | None) -> pd.DataFrame:
    """Adds `batch size` and `norm batch size`, which is `independent` if samples do not mix."""
    size = table["norm_batch_size"].astype(object).where(table["mixes_samples"], independent)
    return table.assign(**{"batch size": table["batch_size"], "norm batch size": size})


def _note(row: Row, metric: Metric) -> str:
    """The warnings and exceptions that apply to a row."""
    told = {
        f"INVALID: {row['invalid']}": row["invalid"],
        f"failed: {row['error']}": row["error"],
        f"{row['early']} of {row['expected']} ended early": row["early"],
        f"no {metric.name} recorded": row["finished"] and not row["n"],
        "one seed: no interval": row["n"] == 1,
        "all seeds equal: no interval": row["n"] > 1 and row["low"] is None,
    }
    return "; ".join(text for text, applies in told.items() if applies)


def size_table(part: Slice) -> Table:
    """Norm x size: mean and interval; in bold the best of each size and all that tie with it."""
    metric, axis, sizes = part.metric, AXIS_WORDS[part.axis], [str(size) for size in part.sizes]
    table = summarize(part.points, part.values, metric)
    is_lost = table["count"].str.contains("/")
    table["shown"] = table["text"] + (" (" + table["count"] + ")").where(is_lost, "")
    frame = table.pivot(index="norm", columns="size", values="shown").reindex(part.norms)
    frame = frame.set_axis(sizes, axis=1).reset_index()
    best = {size: best_norms(part, size) for size in part.sizes}
    bold = {(part.norms.index(norm), str(size)) for size, norms in best.items() for norm in norms}
    pairs = [count for norms in best.values() for count in list(norms.values())[1:]]
    common = f" on {_range_words(pairs)} common seeds" if pairs else ""
    note = (
        f"{metric.label}, mean and 95 % interval over the seeds that finished, "
        f"n = {_range_words(table['n'])}. Bold: the best mean of each size, and those that a t "
        f"test paired by seed{common} does not tell from it at the 5 % level (Bonferroni over the "
        "norms at that size)."
    )
    if is_lost.any():
        note += (
            " (k/n): k of n seeds finished; × diverged, which is never in bold, ! failed, ? "
            "missing. A norm without two seeds in common with the best is not tested."
        )
    title = f"{part.heading}: {metric.label} by norm and {axis}"
    columns = ["norm", *sizes]
    return Table(f"by_size_{part.slug}", title, columns, frame, note=note, over=axis, bold=bold)


def _range_words(counts: Iterable[int]) -> str:
    """`8`, or `2 to 8`."""
    known = sorted(counts)
    return " to ".join(map(str, dict.fromkeys((known[0], known[-1]))))


def best_norms(part: Slice, size: int) -> dict[str, int]:
    """The norm with the best mean at a size, then all that a t test does not tell from it.

    By norm, the number of seeds in common with the best. Norms with fewer than two are left out,
    because they can be tested neither way; empty if fewer than two norms are left.
    """
    is_sound = part.points["invalid"].isna() & (part.points["diverged"] == 0)
    points = part.points[is_sound & (part.points["size"] == size)]
    cells = dict(zip(points["norm"], points["cell"], strict=True))
    means = part.values.mean() * (1 if part.metric.higher_is_better else -1)
    known = [norm for norm in cells if part.values[cells[norm]].count() > 1]
    best = max(known, key=lambda norm: means[cells[norm]], default=None)
    if best is None or len(known) < 2:
        return {}
    found = {best: int(part.values[cells[best]].count())}
    for norm in known:
        a, b = paired_values(cells[best], cells[norm], part.values)
        gap = paired_difference(a, b, step=part.step, limit=part.metric.limit)
        if norm != best and len(a) > 1 and (len(known) - 1) * p_value(gap) > ALPHA:
            found[norm] = len(a)
    return found


def sensitivity_table(answers: Sequence[Answer]) -> Table:
    """A row per norm and slice: the loss between two sizes, regret, threshold and slope."""
    columns = [
        *("norm", "setting", "size", "metric", "verdict", "from", "to", "worse by"),
        *("worse by, over test samples too", "best size", "regret at the smallest size"),
        *("threshold", "passed at size", "worse by, per halving", "n", "seeds"),
    ]
    rows = []
    for part, loss in [(answer.parts[0], loss) for answer in answers for loss in answer.losses]:
        setting = (loss.norm, part.heading, AXIS_WORDS[part.axis], part.metric.label, loss.kind)
        row = dict(zip(columns, setting, strict=False))
        if loss.contrast is not None:
            row |= _sensitivity_row(part.sensitivity(loss.norm), loss.over_samples, part.metric)
        rows.append(row)
    note = (
        "Worse by: how much worse the metric is at the smallest size than at the largest; negative "
        "if it is better. Regret: the same from the size of the best mean, with an interval that "
        "allows for its choice. Passed at size: where the loss from the largest size, joined by "
        "straight lines over the logarithm of the size, first exceeds the threshold; <2 if not "
        "down to 2. Diverged runs count as the worst run. Only the verdict is corrected for the "
        "number of differences."
    )
    return Table.of_rows("sensitivity", "Batch-size sensitivity", columns, rows, note)


def _sensitivity_row(found: Sensitivity, over: Interval | None, metric: Metric) -> Row:
    smallest, largest = found.sizes[0], found.sizes[-1]
    slope = format_interval(found.slope, metric.digits + 1)
    known = [size for size, loss in found.losses.items() if loss.estimate is not None]
    return {
        "from": largest,
        "to": smallest,
        "worse by": format_interval(found.drop, metric.digits),
        "worse by, over test samples too": over and format_interval(-over, metric.digits),
        "best size": found.best_size,
        "regret at the smallest size": format_interval(found.regret, metric.digits),
        "threshold": metric.tolerance_words,
        "passed at size": _threshold_words(found.threshold, min(known)) if known else None,
        "worse by, per halving": f"{slope} ({largest} to {smallest})" if slope != "-" else None,
        "n": found.drop.n,
        "seeds": found.num_seeds,
    }


def _threshold_words(found: Threshold, smallest: int) -> str:
    """`12 [5, 20]`; `<2` for an end below the sizes that were run; `12` without an interval."""
    size, low, high = (
        f"<{smallest}" if x is None else f"{x:.3g}" for x in (found.size, found.low, found.high)
    )
    return size if found.high is None else f"{size} [{low}, {high}]"


def comparison_table(answers: Sequence[Answer]) -> Table:
    """A row per norm, slice and reference; p is multiplied by the size of the family."""
    columns = [
        *("norm", "reference", "setting", "at", "difference (positive: better)"),
        *("over test samples too", "unit", "probability of improvement", "p in the family"),
        *("n", "verdict"),
    ]
    rows = []
    for answer in answers:
        part, metric = answer.parts[0], answer.parts[0].metric
        for one in answer.comparisons:
            if one.contrast is None:
                continue
            gap, chance = one.contrast.gap, one.contrast.improvement
            values = (
                *(one.norm, one.reference, answer.heading),
                f"{AXIS_WORDS[part.axis]} {part.sizes[0]}",
                format_interval(gap, metric.digits),
                one.over_samples and format_interval(one.over_samples, metric.digits),
                *(metric.unit, format_interval(chance, 2), one.p, gap.n, one.kind),
            )
            rows.append(dict(zip(columns, values, strict=True)))
    note = (
        "p in the family: of a t test paired by seed, times the number of verdicts of the report. "
        "Diverged runs count as the worst run; a difference that they could turn is open, "
        "whatever its p."
    )
    return Table.of_rows("comparisons", "Norms against the reference", columns, rows, note)


def run_table(cells: pd.DataFrame, runs: pd.DataFrame) -> Table:
    """Every ended run with all its metrics as recorded."""
    of_cell = ["norm", "model", "data", "setting", "batch size", "norm batch size"]
    columns = [
        *("study", *of_cell, "lr", "seed", "status", "diverged at step", "steps", "stopped"),
        *("error", "invalid", *metric_names(runs), "directory"),
    ]
    labels = _name_sizes(cells, None)[["cell", *of_cell]]
    own = runs.drop(columns=of_cell, errors="ignore")
    own = own.rename(columns={"diverged_at_step": "diverged at step"})
    return Table("runs", "Runs", columns, labels.merge(own, on="cell").reindex(columns=columns))
