"""Writes a report's folder: page, figures and tables, once or whenever new results appear."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from glob import escape, glob
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normexp.errors import UserError
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE
from normexp.reporting.charts import Figure
from normexp.reporting.curves import seed_chart
from normexp.reporting.details import cell_details
from normexp.reporting.figures import draw_figures
from normexp.reporting.read import SEARCHED
from normexp.reporting.report import Report, read_report, to_json
from normexp.reporting.sentences import Answer, Section
from normexp.reporting.style import assign_styles, order_norms
from normexp.reporting.tables import Table, tables_of, to_csv, write_tables
from normexp.reporting.terminal import print_report
from normexp.reporting.tuning import draw_tuning

PNG_SCALE = 2.0  # pixels per point of the figure
LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
SHOWN_ROWS = 3000


@dataclass(frozen=True)
class Drawing:
    """A report drawn up: its tables and figures.

    sections: each section with its answers, and the figures of each, the main one first
    tuning: the curves of the searches that belong to the studies
    """

    report: Report
    tables: Sequence[Table]
    sections: Sequence[tuple[Section, Sequence[tuple[Answer, Sequence[Figure]]]]]
    tuning: Sequence[Figure]

    @property
    def figures(self) -> list[Figure]:
        drawn = [figures for _, answers in self.sections for _, figures in answers]
        return [figure for figures in (*drawn, self.tuning) for figure in figures]

    @property
    def cells(self) -> Table:
        return next(table for table in self.tables if table.name == "cells")


def draw(report: Report) -> Drawing:
    """Draws every table and figure of a report."""
    styles = assign_styles(cell.norm for cell in report.cells)

    def figures_of(answer: Answer) -> list[Figure]:
        return draw_figures(answer.parts[0], styles)

    sections = [
        (section, [(answer, figures_of(answer)) for answer in section.answers])
        for section in report.sections
    ]
    searched = [report.runs_dir / f"{name}{end}" for name in report.studies for end in SEARCHED]
    return Drawing(report, tables_of(report), sections, draw_tuning(searched))


def publish(
    runs_dir: Path,
    names: Sequence[str],
    *,
    metric: str | None,
    tolerance: float | None,
    watch: bool,
    reference: str | None = None,
) -> None:
    """Writes and prints the report of the studies.

    With `watch`, waits for the first result and writes it again whenever results appear, until
    Ctrl-C; the page reloads itself.

    Raises:
        UserError: a study that is missing or empty, a metric that no run has, a folder that cannot
            be written.
    """

    def write(reload_seconds: int | None) -> Drawing:
        options = {"metric": metric, "tolerance": tolerance, "reference": reference}
        drawing = draw(read_report(runs_dir, names, **options))
        _write_report(drawing, reload_seconds)
        return drawing

    if watch and not _wait_for_result(runs_dir, names):
        return
    seen = _stamp(runs_dir, names)
    drawing = write(RELOAD_EVERY if watch else None)
    print_report(drawing.report, drawing.cells)
    print(f"\nreport: {drawing.report.directory / 'index.html'}")
    if watch:
        print("watching for new results; Ctrl-C stops", flush=True)
        with suppress(KeyboardInterrupt):
            _watch(runs_dir, names, seen, lambda: write(RELOAD_EVERY))
        print()
        write(None)  # the final page does not reload itself


def _wait_for_result(runs_dir: Path, names: Sequence[str]) -> bool:
    """True once a study has a result; False if Ctrl-C was first."""
    if not _stamp(runs_dir, names):
        print(f"waiting for the first result of {', '.join(names)}; Ctrl-C stops", flush=True)
    with suppress(KeyboardInterrupt):
        while not _stamp(runs_dir, names):
            time.sleep(LOOK_EVERY)
        return True
    print()
    return False


def _watch(
    runs_dir: Path, names: Sequence[str], seen: set[tuple[str, int]], write: Callable[[], Drawing]
) -> NoReturn:
    """Writes whenever the studies have a result that is not in `seen`."""
    while True:
        time.sleep(LOOK_EVERY)
        before, seen = seen, _stamp(runs_dir, names)
        if seen == before:
            continue
        try:
            print(f"{time.strftime('%H:%M:%S')} {write().report.counts}", flush=True)
        except UserError as error:  # as without any ended run; the last page stands
            print(f"normexp: {error}", flush=True)


def _stamp(runs_dir: Path, names: Sequence[str]) -> set[tuple[str, int]]:
    """Every result and evaluation of the studies with the time it was written."""
    stamps = set()
    for name in names:
        for file in (RESULT_FILE, EVALUATION_FILE):
            # Not Path.glob, which raises if a folder disappears meanwhile.
            for path in glob(f"{escape(str(runs_dir / name))}/*/seed-*/{file}"):
                with suppress(FileNotFoundError):  # just removed by a rerun
                    stamps.add((path, os.stat(path).st_mtime_ns))
    return stamps


def _write_report(drawing: Drawing, reload_seconds: int | None) -> None:
    """Writes the report to a temporary folder, then swaps it in: readers see old or new files.

    Raises:
        UserError: the folder cannot be written.
    """
    target = drawing.report.directory
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".report-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    try:
        _write_into(fresh / "new", drawing, reload_seconds)
        with suppress(FileNotFoundError):
            os.replace(target, fresh / "old")
        os.replace(fresh / "new", target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_into(folder: Path, drawing: Drawing, reload_seconds: int | None) -> None:
    figures = folder / "figures"
    (figures / "paper").mkdir(parents=True)
    content = json.dumps(to_json(drawing.report), indent=1, allow_nan=False)
    (folder / "report.json").write_text(content, encoding="utf-8")
    write_tables(folder / "tables", drawing.tables)
    # Drawing and bundling release Python's lock, so threads use all cores.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        bundle = pool.submit(_bundle)
        drawn = pool.map(partial(_write_figure, figures), drawing.figures)
        images = {
            figure.name: b64encode(svg.encode()).decode()
            for figure, svg in zip(drawing.figures, drawn, strict=True)
        }
        page = _render_page(drawing, images, bundle.result(), reload_seconds)
    (folder / "index.html").write_text(page, encoding="utf-8")


def _write_figure(folder: Path, figure: Figure) -> str:
    """Writes the files of a figure; returns its SVG."""
    (folder / f"{figure.name}.csv").write_text(to_csv(figure.table), encoding="utf-8")
    svg = ""
    for place, spec in ((folder / "paper", figure.for_paper), (folder, figure.spec)):
        svg = vl_convert.vegalite_to_svg(json.dumps(spec))
        (place / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
        (place / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
    return svg


# The page


def _render_page(
    drawing: Drawing, images: Mapping[str, str], bundle: str, reload_seconds: int | None
) -> str:
    """A self-contained index.html; it reloads itself if `reload_seconds` is set.

    images: the SVG of each figure in base 64, for printing

    Texts from configs, file names and error messages are escaped by the template, or are JSON
    without `<`.
    """
    tables = [table for table in drawing.tables if table.name != "runs"]  # a cell opens its runs
    content = {
        "figures": {figure.name: figure.spec for figure in drawing.figures},
        "tables": {table.name: table.to_csv() for table in tables}
        | {figure.name: to_csv(figure.table) for figure in drawing.figures},
        "cells": cell_details(drawing.report.cells),
        "seeds": seed_chart(),
    }
    environment = Environment(
        loader=PackageLoader("normexp.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        report=drawing.report,
        sections=drawing.sections,
        side_by_side=_side_by_side,
        tuning=drawing.tuning,
        reload_seconds=reload_seconds,
        filters=_filters(drawing.report),
        images=images,
        tables=tables,
        shown_rows=SHOWN_ROWS,
        policy=Markup(POLICY),
        bundle=Markup(bundle),
        data=Markup(json.dumps(content, allow_nan=False).replace("<", "\\u003c")),
        css=_asset("page.css"),
        js=_asset("page.js"),
    )


def _side_by_side(
    answers: Sequence[tuple[Answer, Sequence[Figure]]],
) -> list[list[tuple[Answer, Figure]]]:
    """Rows of the figures after the main one: of several budgets, a row for each kind."""
    rest = [(answer, figure) for answer, figures in answers for figure in figures[1:]]
    if len(answers) == 1:
        return [rest]
    kinds = dict.fromkeys(figure.kind for _, figure in rest)
    return [[one for one in rest if one[1].kind == kind] for kind in kinds]


def _asset(name: str) -> Markup:
    return Markup(files("normexp.reporting").joinpath(name).read_text(encoding="utf-8"))


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets window.vegaEmbed."""
    # The stub lacks the default of the argument `snippet`.
    bundle: str = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    return bundle.replace("</script", "<\\/script")


def _filters(report: Report) -> dict[str, list[str]]:
    """The values of each filter; a filter with a single value is left out."""
    values = {
        "norm": order_norms(cell.norm for cell in report.cells),
        "model": sorted({cell.model for cell in report.cells}),
        "data": sorted({cell.data for cell in report.cells}),
        "size": list(map(str, sorted({size for part in report.slices for size in part.sizes}))),
    }
    return {key: known for key, known in values.items() if len(known) > 1}
