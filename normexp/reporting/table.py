"""A table as CSV, Markdown and LaTeX, from one list of rows."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import Any

from normexp.reporting.rows import Row

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


@dataclass(frozen=True)
class Table:
    """Rows of plain values under named columns; None is shown as `-`, and empty in CSV.

    numbers: more columns, of the CSV alone: what a program reads instead of `1.2 [0.6, 1.9]`
    """

    name: str
    title: str
    columns: list[str]
    rows: list[Row]
    numbers: list[str] = field(default_factory=list)

    def to_csv(self) -> str:
        """Numbers with every digit; a leading apostrophe keeps spreadsheets from running text."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        columns = [*self.columns, *self.numbers]
        writer.writerow(columns)
        writer.writerows([_plain(row.get(column)) for column in columns] for row in self.rows)
        return text.getvalue()

    def to_markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[show(row.get(c)).replace("|", "\\|") for c in self.columns] for row in self.rows]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_latex(self) -> str:
        """A tabular with booktabs rules."""
        lines = [[show(row.get(c)) for c in self.columns] for row in self.rows]
        head, *body = [
            " & ".join(text.replace("\n", " ").translate(LATEX) for text in line) + r" \\"
            for line in [self.columns, *lines]
        ]
        inner = "\n".join([r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
        kind = "l" * len(self.columns)
        return f"% {self.title}\n\\begin{{tabular}}{{{kind}}}\n{inner}\n\\end{{tabular}}\n"


def show(value: Any) -> str:
    """A value as text on one line."""
    if value is None or value == "":
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def _plain(value: Any) -> Any:
    text = "" if value is None else value
    starts_formula = isinstance(text, str) and text[:1] in ("=", "+", "@", "\t", "\r")
    return f"'{text}" if starts_formula else text
