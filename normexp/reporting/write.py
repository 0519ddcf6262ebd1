"""A report on disk: index.html, figures and tables, put in place of the last one as a whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from normexp.errors import UserError
from normexp.reporting.figures import Figure
from normexp.reporting.page import render_page
from normexp.reporting.report import Report

PNG_SCALE = 2.0  # pixels per point of the figure


def write_report(report: Report) -> Path:
    """Writes everything beside the report's folder, then swaps; returns the folder.

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
        _write_into(fresh, report)
        fresh.chmod(0o755)
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _write_into(folder: Path, report: Report) -> None:
    tables, figures = folder / "tables", folder / "figures"
    tables.mkdir()
    figures.mkdir()
    for table in report.tables:
        texts = {"csv": table.to_csv(), "md": table.to_markdown(), "tex": table.to_latex()}
        for ending, text in texts.items():
            (tables / f"{table.name}.{ending}").write_text(text, encoding="utf-8")
    drawn = [figure for section in report.sections for figure in section.figures]
    # Drawing and bundling happen outside Python's lock, so both cores of a laptop are of use.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        page = pool.submit(render_page, report)
        for finished in [pool.submit(_write_figure, figures, figure) for figure in drawn]:
            finished.result()
        (folder / "index.html").write_text(page.result(), encoding="utf-8")


def _write_figure(folder: Path, figure: Figure) -> None:
    import vl_convert

    svg = vl_convert.vegalite_to_svg(json.dumps(figure.spec))
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))


def _swap(fresh: Path, target: Path) -> None:
    """Puts `fresh` in the place of `target`; a reader sees the old report or the new one."""
    if not target.exists():
        os.replace(fresh, target)
        return
    old = Path(tempfile.mkdtemp(prefix=".report-", dir=target.parent))
    os.replace(target, old / "old")
    os.replace(fresh, target)
    shutil.rmtree(old)
