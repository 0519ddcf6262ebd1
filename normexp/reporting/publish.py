"""Writes a report's folder: page, figures and tables, once or whenever new results appear."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from typing import NoReturn

from normexp.errors import UserError
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE
from normexp.reporting.page import replace_folder, write_page
from normexp.reporting.report import Report, read_report, to_json
from normexp.reporting.tables import write_tables
from normexp.reporting.terminal import print_report

LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page


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

    def write(reload_seconds: int | None) -> Report:
        options = {"metric": metric, "tolerance": tolerance, "reference": reference}
        report = read_report(runs_dir, names, **options)
        write_report(report, reload_seconds)
        return report

    if watch:
        _wait_for_result(runs_dir, names)
    seen = _stamp(runs_dir, names)
    report = write(RELOAD_EVERY if watch else None)
    print_report(report)
    print(f"report: {report.directory / 'index.html'}")
    if watch:
        print("watching for new results; Ctrl-C stops", flush=True)
        try:
            _watch(runs_dir, names, seen, lambda: write(RELOAD_EVERY))
        except KeyboardInterrupt:
            print()
            write(None)  # the final page does not reload itself
            raise


def write_report(report: Report, reload_seconds: int | None = None) -> None:
    """Replaces the folder of a report."""

    def write(folder: Path) -> None:
        folder.mkdir()
        content = json.dumps(to_json(report), indent=1, allow_nan=False)
        (folder / "report.json").write_text(content, encoding="utf-8")
        write_tables(folder / "tables", report.tables)
        write_page(folder, report, reload_seconds)

    replace_folder(report.directory, write)


def _wait_for_result(runs_dir: Path, names: Sequence[str]) -> None:
    if not _stamp(runs_dir, names):
        print(f"waiting for the first result of {', '.join(names)}; Ctrl-C stops", flush=True)
    while not _stamp(runs_dir, names):
        time.sleep(LOOK_EVERY)


def _watch(
    runs_dir: Path, names: Sequence[str], seen: set[tuple[str, int]], write: Callable[[], Report]
) -> NoReturn:
    """Writes whenever the studies have a result that is not in `seen`."""
    while True:
        time.sleep(LOOK_EVERY)
        before, seen = seen, _stamp(runs_dir, names)
        if seen == before:
            continue
        try:
            print(f"{time.strftime('%H:%M:%S')} {write().counts}", flush=True)
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
