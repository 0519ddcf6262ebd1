"""index.html: the report as one file that holds everything needed to show it."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normexp.reporting.report import Report
from normexp.reporting.style import order_norms
from normexp.reporting.tables import Table

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
LONG_COLUMNS = ("note", "seeds", "setting", "error")  # may wrap; a path stays on one line
SHOWN_ROWS = 3000


def render_page(report: Report, *, reload_seconds: int | None = None) -> str:
    """The page as text. With `reload_seconds` it reloads itself while its study is running.

    Everything from configs, file names and error messages is escaped by the template or, as data,
    is JSON without a `<`.
    """
    environment = Environment(
        loader=PackageLoader("normexp.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        report=report,
        reload_seconds=reload_seconds,
        filters=_filters(report),
        tables=[_shown(table) for table in report.tables],
        long_columns=LONG_COLUMNS,
        policy=Markup(POLICY),
        css=_asset("page.css"),
        js=_asset("page.js"),
        bundle=_bundle(),
        data=_data(report),
    )


def _asset(name: str) -> Markup:
    return Markup(files("normexp.reporting").joinpath(name).read_text(encoding="utf-8"))


@cache
def _bundle() -> Markup:
    """Vega, Vega-Lite and vega-embed as one script that sets window.vegaEmbed."""
    import vl_convert

    # The stub asks for a snippet, which the function itself has a default for.
    bundle: str = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    return Markup(bundle.replace("</script", "<\\/script"))


def _data(report: Report) -> Markup:
    figures = {figure.name: figure.spec for figure in report.figures}
    content = {"figures": figures, "tables": {t.name: t.to_csv() for t in report.tables}}
    return Markup(json.dumps(content, allow_nan=False).replace("<", "\\u003c"))


def _filters(report: Report) -> dict[str, list[str]]:
    sizes = {
        str(size) for one in report.sections for part in one.answer.parts for size in part.sizes
    }
    return {
        "norm": order_norms(report.cells["norm"]),
        "model": sorted(report.cells["model"].unique()),
        "data": sorted(report.cells["data"].unique()),
        "size": sorted(sizes, key=int),
    }


def _shown(table: Table) -> dict[str, Any]:
    """A table as the template needs it: texts, and the tags that filters hide rows by."""
    rows = [
        {
            "texts": texts,
            "is_bad": row.get("status") == "failed" or "INVALID" in str(row.get("note")),
            "tags": {key: row[key] for key in ("norm", "model", "data") if key in row},
        }
        for row, texts in zip(table.rows[:SHOWN_ROWS], table.texts(), strict=False)
    ]
    cut = max(0, len(table.frame) - SHOWN_ROWS)
    return {
        "name": table.name,
        "title": table.title,
        "columns": table.columns,
        "rows": rows,
        "cut": cut,
    }
