"""The page of a report: figures as files, and one self-contained index.html, swapped in at once."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from normexp.errors import UserError
from normexp.records.files import write_text
from normexp.reporting.charts import Figure
from normexp.reporting.figures import draw_figures, draw_ranking

if TYPE_CHECKING:
    from normexp.reporting.report import Report

PACKAGE = "normexp.reporting"
PNG_SCALE = 2.0  # pixels per point of the figure
STUDY_COLUMNS = ("last result", "size", "what its report says")
SHOWN_ROWS = 1000  # of a table; the others are in its CSV


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes to a temporary folder, then swaps it in: readers see old or new files.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".report-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    try:
        write(fresh / "new")
        with suppress(FileNotFoundError):
            os.replace(target, fresh / "old")
        os.replace(fresh / "new", target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_page(folder: Path, report: Report, reload_seconds: int | None = None) -> None:
    """Writes index.html and the files of its figures; the page loads nothing from anywhere.

    reload_seconds: after which the page shows itself anew; None: never
    """
    sections = []
    for part in report.slices:
        ranking = next((one for one in report.rankings if one.part is part), None)
        sections.append((part, report.tables_of(part), draw_figures(part, ranking)))
    over = [draw_ranking(report.over_slices, "all")] if report.over_slices else []
    figures = [*over, *(figure for _, _, drawn in sections for figure in drawn)]
    (folder / "figures").mkdir(parents=True)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda figure: _write_figure(folder / "figures", figure), figures))
    shown = {table.name for _, tables, _ in sections for table in tables}
    others = [table for table in report.tables if table.name not in shown]
    specs = json.dumps({figure.name: figure.spec for figure in figures}, allow_nan=False)
    page = _template("page.html.j2").render(
        report=report,
        sections=sections,
        over=over,
        others=others,
        shown_rows=SHOWN_ROWS,
        reload_seconds=reload_seconds,
        specs=Markup(specs.replace("<", "\\u003c")),
        bundle=Markup(_bundle()),
        css=_asset("page.css"),
        js=_asset("page.js"),
    )
    (folder / "index.html").write_text(page, encoding="utf-8")


@dataclass(frozen=True)
class StudyRow:
    """A study in the list of all: name, page (None if it has none), date, size and headline."""

    study: str
    page: str | None
    texts: Sequence[str]


def write_index(path: Path, title: str, rows: Sequence[StudyRow]) -> None:
    """Replaces the page that lists studies."""
    columns = ("study", *STUDY_COLUMNS)
    page = _template("index.html.j2").render(
        title=title, columns=columns, rows=rows, css=_asset("page.css")
    )
    write_text(path, page)


def _template(name: str) -> Template:
    loader = PackageLoader(PACKAGE, ".")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _write_figure(folder: Path, figure: Figure) -> None:
    spec = json.dumps(figure.spec, allow_nan=False)
    svg = vl_convert.vegalite_to_svg(spec)
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
    pd.DataFrame(figure.rows).to_csv(folder / f"{figure.name}.csv", index=False)


def _asset(name: str) -> Markup:
    return Markup(files(PACKAGE).joinpath(name).read_text(encoding="utf-8"))


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets window.vegaEmbed."""
    # The stub lacks the default of the argument `snippet`.
    bundle: str = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    return bundle.replace("</script", "<\\/script")
