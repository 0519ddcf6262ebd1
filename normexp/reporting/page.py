"""index.html: one file that holds the report and everything it takes to show it.

Whatever comes from a config, a file name or an error message goes through `escape` or, as data,
through JSON without a `<`; the page's policy allows it to load nothing from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from normexp.reporting.compare import Change
from normexp.reporting.figures import Figure
from normexp.reporting.overall import Overall
from normexp.reporting.report import Report, Section, describe_counts
from normexp.reporting.style import order_norms
from normexp.reporting.table import Table, show

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'"
)
LONG = ("note", "seeds", "setting", "error")  # may wrap; a path is left on one line
SHOWN_ROWS = 3000


def render_page(report: Report) -> str:
    """The page as text."""
    title = escape(f"normexp: {report.title}")
    here = Path(__file__).parent
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{(here / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
<p class="faint">{escape(describe_counts(report))}</p>
{_filters(report)}
{_list("Files that could not be read", report.problems, "problems")}
{_list("Cells without an ended run", report.waiting, "note")}
{"".join(map(_verdict, report.overall))}
{"".join(map(_section, report.sections))}
{"".join(map(_change, report.changes))}
{"".join(map(_table, (t for t in report.tables if t.name != "runs")))}
{_runs(report)}
</main>
<script type="application/json" id="report">{_data(report)}</script>
<script type="module">{_bundle()}</script>
<script type="module">{(here / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets window.vegaEmbed."""
    import vl_convert

    # The stub asks for a snippet that the function itself has a default for.
    bundle: str = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    return bundle.replace("</script", "<\\/script")


def _data(report: Report) -> str:
    figures = {figure.name: figure.spec for part in report.sections for figure in part.figures}
    content = {"figures": figures, "tables": {t.name: t.to_csv() for t in report.tables}}
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")


def _verdict(verdict: Overall | Section) -> str:
    said = [*verdict.losses, *verdict.comparisons]
    sentences = "".join(_sentence(one.text, one.kind) for one in said)
    note = f'<p class="note">{escape(verdict.note)}</p>' if verdict.note else ""
    return f'<h2>{escape(verdict.heading)}</h2><ul class="verdict">{sentences}</ul>{note}'


def _section(section: Section) -> str:
    cell = section.part.cells[0]
    return (
        f'<section data-model="{escape(cell.model)}" data-data="{escape(cell.data)}">'
        f"{_verdict(section)}"
        f'<div class="figures">{"".join(map(_figure, section.figures))}</div></section>\n'
    )


def _sentence(text: str, kind: str) -> str:
    return f'<li class="{escape(kind.replace(" ", "-"))}">{escape(text)}</li>'


def _figure(figure: Figure) -> str:
    name, label = escape(figure.name), escape(figure.title)
    return (
        f'<figure><div class="chart" data-figure="{name}" role="img" aria-label="{label}">'
        f"<div></div></div>"
        f"<figcaption>{escape(figure.caption)}</figcaption>"
        f'<div class="bar"><button data-rows="{name}">data (CSV)</button>'
        f'<button data-image="svg">SVG</button><button data-image="png">PNG</button></div></figure>'
    )


def _filters(report: Report) -> str:
    cells = report.cells
    sizes = {str(size) for section in report.sections for size in section.part.sizes}
    groups = {
        "norm": order_norms(cell.norm for cell in cells),
        "model": sorted({cell.model for cell in cells}),
        "data": sorted({cell.data for cell in cells}),
        "size": sorted(sizes, key=int),
    }
    return f'<form class="filters">{"".join(_group(k, v) for k, v in groups.items())}</form>'


def _group(key: str, values: Iterable[str]) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" checked autocomplete="off" data-filter="{key}" '
        f'data-value="{escape(value)}"> {escape(value)}</label>'
        for value in values
    )
    return f"<fieldset><legend>{key}</legend>{boxes}</fieldset>"


def _list(title: str, lines: list[str], kind: str) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>{title}</h2><ul class="{kind}">{items}</ul>'


def _change(change: Change) -> str:
    groups = {"Config": change.config, "Environment": change.environment, "Cells": change.alone}
    blocks = "".join(
        f"<h3>{name}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for name, lines in groups.items()
        if lines
    )
    words = blocks or "<p>Nothing differs in config or environment.</p>"
    return f"<h2>What differs: {escape(change.before)} and {escape(change.after)}</h2>{words}"


def _runs(report: Report) -> str:
    table = next(table for table in report.tables if table.name == "runs")
    return f"<details><summary>All {len(table.rows)} runs</summary>{_table(table)}</details>"


def _table(table: Table) -> str:
    head = "".join(f"<th><button>{escape(column)}</button></th>" for column in table.columns)
    body = "".join(_row(row, table.columns) for row in table.rows[:SHOWN_ROWS])
    cut = len(table.rows) - SHOWN_ROWS
    if not table.rows:
        return f'<h2>{escape(table.title)}</h2><p class="note">No rows.</p>\n'
    more = f'<p class="note">{cut} more rows are in the CSV.</p>' if cut > 0 else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="bar">'
        f'<button data-table="{escape(table.name)}">data (CSV)</button></div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{more}\n"
    )


def _row(row: dict[str, Any], columns: list[str]) -> str:
    marked = row.get("status") == "failed" or "INVALID" in str(row.get("note", ""))
    tags = {"norm": "norm", "model": "model", "data": "data", "size": "filter size"}
    attributes = "".join(
        f' data-{key}="{escape(str(row[column]))}"' for key, column in tags.items() if column in row
    )
    cells = "".join(
        f'<td class="long">{escape(show(row.get(c)))}</td>'
        if c in LONG
        else f"<td>{escape(show(row.get(c)))}</td>"
        for c in columns
    )
    return f"<tr{attributes}{' class=bad' if marked else ''}>{cells}</tr>"
