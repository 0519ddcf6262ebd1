"""Writes a report's folder: figures, tables and one self-contained index.html; an index of all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.progress import track

from normexp.config.groups import group_choices
from normexp.config.help import norm_words
from normexp.errors import UserError
from normexp.records.files import write_text
from normexp.records.layout import list_studies
from normexp.reporting.compare import ADDED
from normexp.reporting.figures import Figure, draw_figures, vl_convert
from normexp.reporting.report import Report, read_report, to_json
from normexp.reporting.slices import Slice
from normexp.reporting.tables import ADDED_NOTE, Table, table_of, write_tables
from normexp.reporting.terminal import open_console, print_report, text_table

MISSING = "" if vl_convert else "no figures: vl-convert is missing; pip install vl-convert-python"
PNG_SCALE = 2.0  # pixels per point of the figure
COLUMNS = ("study", "last result", "size", "what its report says")
SHOWN_ROWS = 1000  # further rows of a table are in its CSV
LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page
PAGE = "index.html"
REPORT = "report.json"
PAGES = Environment(
    loader=PackageLoader("normexp.reporting", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def publish(runs_dir: Path, names: Sequence[str], *, watch: bool, **options: Any) -> None:
    """Writes and prints the report of the studies.

    With `watch`, writes it whenever results appear, also the first, until Ctrl-C; the page reloads
    itself.

    options: as of `read_report`

    Raises:
        UserError: a study that is missing or empty, a metric that no run has, a folder that cannot
            be written.
    """
    if watch:
        _watch(runs_dir, names, options)
    report = read_report(runs_dir, names, **options)
    print_report(report)
    if try_to_write(report):
        print(f"report: {report.directory / PAGE}")
        if MISSING:
            print(MISSING)


def _watch(runs_dir: Path, names: Sequence[str], options: Mapping[str, Any]) -> NoReturn:
    print(f"watching {', '.join(names)} for results; Ctrl-C stops", flush=True)
    seen, report = 0, None
    try:
        while True:
            newest = _newest(runs_dir, names)
            if newest > seen:
                seen = newest
                report = read_report(runs_dir, names, **options)
                write_report(report, RELOAD_EVERY)
                now = time.strftime("%H:%M:%S")
                print(f"{now} {report.counts}: {report.directory / PAGE}", flush=True)
            time.sleep(LOOK_EVERY)
    except KeyboardInterrupt:
        if report is not None:
            write_report(report)  # the final page does not reload itself
        raise


def try_to_write(report: Report) -> bool:
    """Writes a report, or prints why it cannot: its folder may be read-only."""
    try:
        write_report(report)
    except UserError as error:
        print(f"no page: {error}", file=sys.stderr)
        return False
    return True


def write_report(report: Report, reload_seconds: int | None = None) -> None:
    """Replaces the folder of a report: readers see the old files or the new ones.

    reload_seconds: after which the page shows itself anew; None: never

    Raises:
        UserError: the folder cannot be written.
    """
    target = report.directory
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".report-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    try:
        _write_files(fresh / "new", report, reload_seconds)
        with suppress(FileNotFoundError):
            os.replace(target, fresh / "old")
        os.replace(fresh / "new", target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def publish_index(runs_dir: Path) -> None:
    """Writes and prints runs_dir/index.html: every study, linked to its page, the latest first.

    The report of each study is made anew unless it is newer than all of its results.

    Raises:
        UserError: a folder without studies, or one that cannot be written.
    """
    latest = {name: _newest(runs_dir, [name]) for name in list_studies(runs_dir)}
    newest_first = sorted(latest, key=lambda name: -latest[name])
    rows = []
    for name in track(newest_first, "reading", console=Console(stderr=True), transient=True):
        page, counts, headlines = _summary_of(runs_dir, name, latest[name])
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(latest[name] / 1e9))
        rows.append((page, [name, date if latest[name] else "", counts, headlines]))
    note = ADDED_NOTE if any(ADDED in texts[-1] for _, texts in rows) else ""
    title = f"studies in {runs_dir}"
    index = PAGES.get_template("index.html.j2").render(
        title=title, columns=COLUMNS, rows=rows, note=note
    )
    open_console().print(text_table(COLUMNS, [texts for _, texts in rows]))
    if note:
        print(note)
    try:
        write_text(runs_dir / PAGE, index)
        print(f"index: {runs_dir / PAGE}")
    except OSError as error:
        print(f"no page: {runs_dir / PAGE} cannot be written ({error.strerror})", file=sys.stderr)


def _summary_of(runs_dir: Path, name: str, latest: int) -> tuple[str | None, str, str]:
    """The address of a study's page, None without one; its counts; and its headlines.

    The report is made anew unless it is newer than `latest`.
    """
    file = runs_dir / name / "report" / REPORT
    page: str | None = f"{quote(name)}/report/{PAGE}"
    try:
        if file.is_file() and file.stat().st_mtime_ns >= latest:
            content = json.loads(file.read_text(encoding="utf-8"))
        else:
            report = read_report(runs_dir, [name])
            content = to_json(report)
            page = page if try_to_write(report) else None
    except UserError as error:
        return None, "", str(error)
    return page, content["counts"], " ".join(slice_["headline"] for slice_ in content["slices"])


def _newest(runs_dir: Path, names: Sequence[str]) -> int:
    """The time in ns of the last result or evaluation of the studies; 0 if there is none."""
    times = [0]
    for name in names:
        # Path.glob raises if a folder disappears meanwhile.
        study = escape(str(runs_dir / name))
        for path in [*glob(f"{study}/*/seed-*/*.json"), *glob(f"{study}.zip")]:
            with suppress(FileNotFoundError):  # a rerun has just removed it
                times.append(os.stat(path).st_mtime_ns)
    return max(times)


def _write_files(folder: Path, report: Report, reload_seconds: int | None) -> None:
    """Writes tables, figures, report.json and a page that loads nothing from anywhere."""
    (folder / "figures").mkdir(parents=True)
    content = json.dumps(to_json(report), indent=1, allow_nan=False)
    (folder / REPORT).write_text(content, encoding="utf-8")
    sections, figures = [], []
    for slice_ in report.slices:
        drawn = draw_figures(slice_, report.ranking_of(slice_))
        sections.append((slice_, [*report.tables_of(slice_), norm_table(slice_)], drawn))
        figures += drawn
    for figure in figures:
        _write_figure(folder / "figures", figure)
    of_slices = {table.name: table for _, tables, _ in sections for table in tables}
    others = {table.name: table for table in report.tables if table.name not in of_slices}
    write_tables(folder / "tables", [*of_slices.values(), *others.values()])
    page = PAGES.get_template("page.html.j2").render(
        report=report,
        sections=sections,
        others=others,
        shown_rows=SHOWN_ROWS,
        reload_seconds=reload_seconds,
        specs={figure.name: figure.spec for figure in figures},
        bundle=_bundle() if figures else "",
        missing=MISSING,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets window.vegaEmbed."""
    return vl_convert.javascript_bundle()


def norm_table(slice_: Slice) -> Table:
    """What each norm does, and the time and memory of its training."""
    shipped, rows = group_choices("norm"), []
    for norm, name in slice_.norm_names.items():
        runs = [run for cell in slice_.cells if cell.norm == norm for run in cell.runs]
        timings = [run.result.measured.timing for run in runs]
        together = sorted(
            {int(timing["stack_size"]) for timing in timings if "stack_size" in timing}
        )
        rows.append(
            {
                "norm": norm,
                "runs together": ", ".join(map(str, together)),
                "ms per step": _range_words(timings, "step_ms"),
                "peak memory (MB)": _range_words(timings, "peak_memory_mb"),
                "what it does": norm_words(name)[0] if name in shipped else "",
            }
        )
    note = (
        "Time and memory of runs trained together are divided by their number: each costs less "
        "than a run alone. Time is as noisy as the machine."
    )
    return table_of(
        f"norms_{slice_.slug}", "Norms and their cost", rows, note=note, has_latex=False
    )


def _range_words(timings: Sequence[Mapping[str, float]], key: str) -> str:
    """The least and the most over runs: `9.1 to 13.4`; empty if not recorded."""
    values = [timing[key] / timing.get("stack_size", 1) for timing in timings if key in timing]
    if not values:
        return ""
    ends = [f"{value:.1f}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _write_figure(folder: Path, figure: Figure) -> None:
    spec = json.dumps(figure.spec, allow_nan=False)
    svg = vl_convert.vegalite_to_svg(spec)
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
    pd.DataFrame(figure.rows).to_csv(folder / f"{figure.name}.csv", index=False)
