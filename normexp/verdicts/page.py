"""Writes a report's folder: figures, tables and one self-contained index.html."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from normexp.errors import UserError
from normexp.verdicts.figures import Figure, draw_figures, vl_convert
from normexp.verdicts.pictures import draw_pictures
from normexp.verdicts.report import Report, to_json
from normexp.verdicts.slices import Slice
from normexp.verdicts.tables import Table, table_of, write_tables

MISSING = "" if vl_convert else "no figures: vl-convert is missing; pip install vl-convert-python"
PNG_SCALE = 2.0  # pixels per point of the figure
SHOWN_ROWS = 1000  # further rows of a table are in its CSV
PAGE = "index.html"
REPORT = "report.json"
PAGES = Environment(
    loader=PackageLoader("normexp.verdicts", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


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


def _write_files(folder: Path, report: Report, reload_seconds: int | None) -> None:
    """Writes tables, figures, report.json and a page that loads nothing from anywhere."""
    (folder / "figures").mkdir(parents=True)
    content = json.dumps(to_json(report), indent=1, allow_nan=False)
    (folder / REPORT).write_text(content, encoding="utf-8")
    sections, figures = [], []
    for slice_ in report.slices:
        drawn = draw_figures(slice_, report.rankings_of(slice_))
        tables = report.tables_of(slice_)
        if slice_.arm_key == "norm":
            tables.append(norm_table(slice_, report.describe_norm))
        pictures = draw_pictures(slice_)
        for picture in pictures:
            (folder / "figures" / f"{picture.name}.png").write_bytes(picture.content)
        sections.append((slice_, tables, drawn, pictures))
        figures += drawn
    for figure in figures:
        _write_figure(folder / "figures", figure)
    of_slices = {table.name: table for _, tables, *_ in sections for table in tables}
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


def norm_table(slice_: Slice, describe_norm: Callable[[str], str]) -> Table:
    """What each norm does, and the time and memory of its training."""
    rows = []
    for norm, name in slice_.arm_names.items():
        runs = [run for cell in slice_.cells if cell.arm == norm for run in cell.runs]
        timings = [run.part("timing") for run in runs]
        together = sorted(
            {int(timing["stack_size"]) for timing in timings if "stack_size" in timing}
        )
        rows.append(
            {
                "norm": norm,
                "runs together": ", ".join(map(str, together)),
                "ms per step": _range_words(timings, "step_ms"),
                "peak memory (MB)": _range_words(timings, "peak_memory_mb"),
                "what it does": describe_norm(name),
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
    (folder / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    pd.DataFrame(figure.rows).to_csv(folder / f"{figure.name}.csv", index=False)
