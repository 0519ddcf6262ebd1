"""A report on disk and in the terminal, once or again whenever its studies have new results."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import escape, glob
from pathlib import Path

from normexp.errors import UserError
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE
from normexp.reporting.export import log_to_wandb
from normexp.reporting.figures import Figure
from normexp.reporting.page import render_page
from normexp.reporting.report import Report, build_report
from normexp.reporting.terminal import print_report

PNG_SCALE = 2.0  # pixels per point of the figure
LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page


def publish(
    runs_dir: Path,
    names: Sequence[str],
    *,
    metric: str | None = None,
    tolerance: float | None = None,
    watch: bool = False,
    log_wandb: bool = False,
) -> None:
    """Writes and prints the report of the studies.

    With `watch`, writes it again whenever results appear, until Ctrl-C, and the page reloads
    itself. W&B gets the first report.

    Raises:
        UserError: a study that is missing or empty, a metric that no run has, a folder that cannot
            be written, or W&B refuses.
    """

    def write(reload_seconds: int | None) -> Report:
        report = build_report(runs_dir, names, metric=metric, tolerance=tolerance)
        write_report(report, reload_seconds=reload_seconds)
        return report

    report = write(RELOAD_EVERY if watch else None)
    print_report(report)
    print(f"\nreport: {report.directory / 'index.html'}")
    if log_wandb:
        print(log_to_wandb(report))
    if watch:
        print("watching for new results; Ctrl-C stops", flush=True)
        with suppress(KeyboardInterrupt):
            _watch(lambda: _stamp(runs_dir, names), lambda: write(RELOAD_EVERY))
        print()
        write(None)  # the final page does not reload itself


def _watch(look: Callable[[], object], write: Callable[[], Report]) -> None:
    """Writes the report whenever `look` returns something new; never returns."""
    seen = look()
    while True:
        time.sleep(LOOK_EVERY)
        now = look()
        if now != seen:
            seen = now
            try:
                print(f"{time.strftime('%H:%M:%S')} {write().counts}", flush=True)
            except UserError as error:  # as without any ended run; the last page stands
                print(f"normexp: {error}", flush=True)


def write_report(report: Report, *, reload_seconds: int | None = None) -> Path:
    """Writes the report beside its folder, then swaps the two; returns the folder.

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
        _write_into(fresh, report, reload_seconds)
        fresh.chmod(0o755)
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _write_into(folder: Path, report: Report, reload_seconds: int | None) -> None:
    tables, figures = folder / "tables", folder / "figures"
    tables.mkdir()
    figures.mkdir()
    for table in report.tables:
        texts = {"csv": table.to_csv(), "md": table.to_markdown(), "tex": table.to_latex()}
        for ending, text in texts.items():
            (tables / f"{table.name}.{ending}").write_text(text, encoding="utf-8")
    # Drawing and bundling release Python's lock, so threads use all cores.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        page = pool.submit(render_page, report, reload_seconds=reload_seconds)
        for written in [pool.submit(_write_figure, figures, figure) for figure in report.figures]:
            written.result()
        (folder / "index.html").write_text(page.result(), encoding="utf-8")


def _write_figure(folder: Path, figure: Figure) -> None:
    import vl_convert

    svg = vl_convert.vegalite_to_svg(json.dumps(figure.spec))
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))


def _swap(fresh: Path, target: Path) -> None:
    """Replaces `target` by `fresh`: a reader sees the old report or the new one."""
    if not target.exists():
        os.replace(fresh, target)
        return
    old = Path(tempfile.mkdtemp(prefix=".report-", dir=target.parent))
    os.replace(target, old / "old")
    os.replace(fresh, target)
    shutil.rmtree(old)


def _stamp(runs_dir: Path, names: Sequence[str]) -> set[tuple[str, int]]:
    """Every result and evaluation of the studies with the time it was written."""
    found = set()
    for name in names:
        for file in (RESULT_FILE, EVALUATION_FILE):
            # Not Path.glob, which raises if a folder disappears meanwhile.
            for path in glob(f"{escape(str(runs_dir / name))}/*/seed-*/{file}"):
                with suppress(FileNotFoundError):  # just removed by a rerun
                    found.add((path, os.stat(path).st_mtime_ns))
    return found
