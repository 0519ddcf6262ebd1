"""The tables of a report, each as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from io import StringIO
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
    Metric,
    choose_metric,
    describe_metric,
    format_interval,
)
from normexp.reporting.sentences import Answer, Claim
from normexp.reporting.slices import AXIS_WORDS, Slice
from normexp.stats.family import ALPHA, p_value
from normexp.stats.interval import Interval, iqm, mean, median, paired_difference, smallest_step
from normexp.stats.sensitivity import Sensitivity, Threshold

LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "×": r"$\times$",
        "±": r"$\pm$",
        "·": r"$\cdot$",
    }
)
NUMBERS = [f"{name}{end}" for name in ("mean", "median", "IQM") for end in ("", " low", " high")]


@dataclass(frozen=True)
class Table:
    """Plain values under named columns; a missing one is shown as `-`, and empty in CSV.

    frame: has `columns`, and may have more
    numbers: columns only of the CSV, for programs, instead of `1.2 [0.6, 1.9]`
    aside: columns only of the files and of an opened cell, since they do not fit on a page
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

    @property
    def rows(self) -> list[Row]:
        return plain_rows(self.frame)

    def to_csv(self) -> str:
        """Numbers with every digit; a leading apostrophe keeps spreadsheets from running text."""
        columns, text = [*self.columns, *self.numbers], StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in plain_rows(self.frame, columns):
            writer.writerow([_without_formula(value) for value in row.values()])
        return text.getvalue()

    def to_markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += self._marked(
            [[text.replace("|", "\\|") for text in line] for line in self.texts()], "**{}**"
        )
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return f"{self.title}\n\n{table}" + (f"\n{self.note}\n" if self.note else "")

    def to_latex(self) -> str:
        """A tabular with booktabs rules."""
        head, *body = [
            [text.translate(LATEX) for text in line] for line in [self.columns, *self.texts()]
        ]
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
            " & ".join(head) + r" \\",
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in self._marked(body, r"\textbf{{{}}}")),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def _marked(self, lines: list[list[str]], mark: str) -> list[list[str]]:
        """The rows as texts, with `mark` around what is best."""
        return [
            [
                mark.format(text) if (row, column) in self.bold else text
                for column, text in zip(self.columns, line, strict=True)
            ]
            for row, line in enumerate(lines)
        ]

    def texts(self) -> list[list[str]]:
        """The shown cells, row by row."""
        return self.frame[self.columns].map(show).to_numpy().tolist()

    def split(self) -> tuple[dict[str, str], pd.DataFrame]:
        """What is the same in every row, and the texts of the other columns."""
        texts = self.frame[[name for name in self.columns if name not in self.aside]].map(show)
        found = {name: list(texts[name].unique()) for name in texts}
        same = {str(name): own[0] for name, own in found.items() if len(own) == 1 < len(texts)}
        named = {name: text for name, text in same.items() if text != "-"}
        return named, texts.drop(columns=list(same))


def show(value: Any) -> str:
    """A value as text on one line."""
    if value is None or value == "" or value != value:  # NaN
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def cell_table(
    cells: pd.DataFrame, runs: pd.DataFrame, metric: str | None, tolerance: float | None
) -> Table:
    """A row per cell: its sizes, the mean with interval, median, IQM, and every count.

    Each cell shows the requested metric, otherwise its first preferred metric.
    """
    available = set(metric_names(runs))
    own = {cell: set(metric_names(group)) for cell, group in runs.groupby("cell")}
    names = cells["cell"].map(
        lambda cell: choose_metric(own[cell], metric) or choose_metric(available, metric)
    )
    parts = [
        _cell_rows(same, runs, describe_metric(name, tolerance))
        for name, same in cells.groupby(names.fillna("val/loss"), sort=False)
    ]
    columns = [
        *("norm", "model", "data", "setting", "batch size", "norm batch size", "lr", "metric"),
        *("mean [95 % interval]", "median [95 % interval]", "IQM [95 % interval]"),
        *("n", "seeds", "diverged", "failed", "missing", "note", "directory"),
    ]
    aside = [*columns[9:11], "seeds", "directory"]
    return Table("cells", "Cells", columns, pd.concat(parts).loc[cells.index], NUMBERS, aside)


def size_table(part: Slice) -> Table:
    """Norm x size: mean and interval, the best of each size in bold with all that tie with it."""
    metric, sizes = part.metric, [str(size) for size in part.sizes]
    table = summarize(part.points, part.values, metric)
    lost = table["count"].where(table["count"].str.contains("/"), "")
    table["shown"] = table["text"] + lost.map(lambda count: f" ({count})" if count else "")
    frame = table.pivot(index="norm", columns="size", values="shown").reindex(part.norms)
    frame = frame.set_axis(sizes, axis=1).reset_index()
    place = {norm: row for row, norm in enumerate(part.norms)}
    bold = {(place[norm], str(size)) for size in part.sizes for norm in best_norms(part, size)}
    counts = dict.fromkeys(f"{n:g}" for n in sorted(table["n"]))
    note = (
        f"{metric.label}, mean and 95 % interval over seeds, n = {' or '.join(counts)}. Bold: the "
        "best mean of each size, and those that a t test paired by seed does not tell from it at "
        "the 5 % level (Bonferroni over the norms at that size)."
    )
    if lost.any():
        note += " (k/n ×d): k of n seeds finished, d diverged, which is never in bold."
    title = f"{part.heading}: {metric.label} by norm and {AXIS_WORDS[part.axis]}"
    name = f"by_size_{part.slug}"
    return Table(
        name, title, ["norm", *sizes], frame, note=note, over=AXIS_WORDS[part.axis], bold=bold
    )


def best_norms(part: Slice, size: int) -> list[str]:
    """The norm of the best mean at a size, and those not told from it; none without a test."""
    is_sound = part.points["invalid"].isna() & (part.points["diverged"] == 0)
    points = part.points[is_sound & (part.points["size"] == size)]
    cells = dict(zip(points["norm"], points["cell"], strict=True))
    means = part.values.mean() * (1 if part.metric.higher_is_better else -1)
    known = [norm for norm in cells if part.values[cells[norm]].count() > 1]
    best = max(known, key=lambda norm: means[cells[norm]], default=None)
    if best is None or len(known) < 2:
        return []

    def p(norm: str) -> float:
        pairs = paired_values(cells[best], cells[norm], part.values)
        return p_value(paired_difference(*pairs, step=part.step, limit=part.metric.limit))

    return [norm for norm in known if norm == best or (len(known) - 1) * p(norm) > ALPHA]


def sensitivity_table(answers: Sequence[Answer]) -> Table:
    """A row per norm and slice: the drop between two sizes, regret, threshold and slope."""
    columns = [
        *("norm", "setting", "size", "metric", "verdict", "from", "to", "drop"),
        *("drop over test samples too", "best size", "regret at the smallest size"),
        *("threshold", "passed at size", "loss per halving", "n", "seeds"),
    ]
    rows = []
    for answer in answers:
        part = answer.parts[0]
        for loss in answer.losses:
            setting = [loss.norm, part.heading, AXIS_WORDS[part.axis], part.metric.label, loss.kind]
            row = dict(zip(columns, setting, strict=False))
            if loss.contrast is not None:
                row |= _sensitivity_row(loss, part.sensitivity(loss.norm), part.metric)
            rows.append(row)
    frame = pd.DataFrame(rows, columns=columns, dtype=object)
    return Table("sensitivity", "Batch-size sensitivity", columns, frame)


def comparison_table(answers: Sequence[Answer]) -> Table:
    """A row per norm, slice and reference, with the p that counts: times the size of the family."""
    rows = [
        {
            "norm": one.norm,
            "reference": one.reference,
            "setting": answer.heading,
            "at": f"{AXIS_WORDS[part.axis]} {part.sizes[0]}",
            "difference (positive: better)": format_interval(one.contrast.gap, part.metric.digits),
            "over test samples too": _over_samples(one.over_samples, part.metric),
            "unit": part.metric.unit,
            "probability of improvement": format_interval(one.contrast.improvement, 2),
            "p in the family": one.p,
            "n": one.contrast.gap.n,
            "verdict": one.kind,
        }
        for answer in answers
        for part in answer.parts
        for one in answer.comparisons
        if one.contrast is not None
    ]
    columns = [
        *("norm", "reference", "setting", "at", "difference (positive: better)"),
        *("over test samples too", "unit", "probability of improvement", "p in the family"),
        *("n", "verdict"),
    ]
    frame = pd.DataFrame(rows, columns=columns, dtype=object)
    return Table("comparisons", "Norms against the reference", columns, frame)


def run_table(cells: pd.DataFrame, runs: pd.DataFrame) -> Table:
    """Every ended run with all its metrics as recorded."""
    labels = [
        "cell",
        "norm",
        "model",
        "data",
        "setting",
        "batch_size",
        "norm_batch_size",
        "mixes_samples",
    ]
    recorded = ["study", "cell", "lr", "seed", "status", "diverged_at_step", "steps", "stopped"]
    recorded += ["error", "invalid"]
    metrics = metric_names(runs)
    known = [name for name in recorded if name in runs]
    frame = cells[labels].merge(runs[[*known, *metrics, "directory"]], on="cell")
    frame["norm_batch_size"] = frame["norm_batch_size"].astype(object)
    frame.loc[~frame["mixes_samples"], "norm_batch_size"] = None
    renamed = {"batch_size": "batch size", "norm_batch_size": "norm batch size"}
    frame = frame.rename(columns=renamed | {"diverged_at_step": "diverged at step"})
    columns = [
        *("study", "norm", "model", "data", "setting", "batch size", "norm batch size", "lr"),
        *("seed", "status", "diverged at step", "steps", "stopped", "error", "invalid"),
        *(*metrics, "directory"),
    ]
    return Table("runs", "Runs", columns, frame.reindex(columns=columns))


def _cell_rows(cells: pd.DataFrame, runs: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    values = values_of(runs[runs["cell"].isin(cells["cell"])], metric)
    table = summarize(cells, values, metric)
    steps = {data: smallest_step(values[own["cell"]]) for data, own in cells.groupby("data")}
    rows = []
    for row in plain_rows(table):
        own = values[row["cell"]].dropna()
        found = {
            name: statistic(own, step=steps[row["data"]], bounds=metric.bounds)
            for name, statistic in {"mean": mean, "median": median, "IQM": iqm}.items()
        }
        rows.append(
            {
                "batch size": row["batch_size"],
                "norm batch size": row["norm_batch_size"] if row["mixes_samples"] else "any",
                "metric": metric.label,
                "mean [95 % interval]": row["text"],
                "median [95 % interval]": _with_level(found["median"], metric),
                "IQM [95 % interval]": _with_level(found["IQM"], metric),
                "note": _note(row, found["mean"], metric),
                "directory": row["cell"],
            }
            | {
                f"{name}{end}": value
                for name, one in found.items()
                for end, value in {"": one.estimate, " low": one.low, " high": one.high}.items()
            }
        )
    added = pd.DataFrame(rows, cells.index, dtype=object)
    return table.drop(columns=added.columns.intersection(table.columns)).join(added)


def _note(row: Row, interval: Interval, metric: Metric) -> str:
    """The warnings and exceptions that apply to a row."""
    notes = [f"INVALID: {row['invalid']}"] if row["invalid"] else []
    if row["error"]:
        notes.append(f"failed: {row['error']}")
    if row["early"]:
        notes.append(f"{row['early']} of {row['expected']} ended early")
    if row["finished"] and not interval.n:
        notes.append(f"no {metric.name} recorded")
    if interval.n == 1:
        notes.append("one seed: no interval")
    elif interval.n and interval.low is None:
        notes.append("all seeds equal: no interval")
    return "; ".join(notes)


def _sensitivity_row(loss: Claim, found: Sensitivity, metric: Metric) -> Row:
    smallest, largest = found.sizes[0], found.sizes[-1]
    over = loss.over_samples
    slope = format_interval(found.slope, metric.digits + 1)
    return {
        "from": largest,
        "to": smallest,
        "drop": format_interval(found.drop, metric.digits),
        "drop over test samples too": _over_samples(over and -over, metric),
        "best size": found.best_size,
        "regret at the smallest size": format_interval(found.regret, metric.digits),
        "threshold": metric.tolerance_words,
        "passed at size": _threshold_words(found.threshold, smallest),
        "loss per halving": f"{slope} ({largest} to {smallest})",
        "n": found.drop.n,
        "seeds": found.num_seeds,
    }


def _threshold_words(found: Threshold, smallest: int) -> str:
    """`12 [5, 20]`; `<2` for an end that is not reached between the sizes that were run.

    Without an interval, as of one seed, the size alone.
    """
    if found.size is None and found.high is None:
        return f"<{smallest}"
    if found.size is not None and found.high is None:
        return f"{found.size:.3g}"
    size, low, high = (
        f"<{smallest}" if x is None else f"{x:.3g}" for x in (found.size, found.low, found.high)
    )
    return f"{size} [{low}, {high}]"


def _over_samples(interval: Interval | None, metric: Metric) -> str | None:
    return None if interval is None else format_interval(interval, metric.digits)


def _with_level(interval: Interval, metric: Metric) -> str:
    """The median of 5 values has an interval of 93.75 %, and says so."""
    differs = interval.low is not None and abs(interval.level - 0.95) > 0.0005
    note = f" ({interval.level:.1%})".replace("%", " %") if differs else ""
    return format_interval(interval, metric.digits) + note


def _without_formula(value: Any) -> Any:
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "@", "\t", "\r")
    return f"'{value}" if is_formula else value
