"""Writes a report's folder: page, figures and tables, once or whenever results appear; an index."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.progress import track

from normexp.errors import UserError
from normexp.records.result import EVALUATION_FILE, RESULT_FILE, list_studies
from normexp.reporting.page import (
    STUDY_COLUMNS,
    StudyRow,
    replace_folder,
    write_index,
    write_page,
)
from normexp.reporting.report import Report, read_report, to_json
from normexp.reporting.tables import write_tables
from normexp.reporting.terminal import open_console, print_report, text_table

LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page
PAGE = "index.html"
REPORT = "report.json"


def publish(runs_dir: Path, names: Sequence[str], *, watch: bool, **options: Any) -> None:
    """Writes and prints the report of the studies.

    With `watch`, writes it whenever results appear, also the first, until Ctrl-C; the page reloads
    itself.

    options: as of `read_report`

    Raises:
        UserError: a study that is missing or empty, a metric that no run has, a folder that cannot
            be written.
    """
    if not watch:
        report = read_report(runs_dir, names, **options)
        write_report(report)
        print_report(report)
        print(f"report: {report.directory / PAGE}")
        return
    print(f"watching {', '.join(names)} for results; Ctrl-C stops", flush=True)
    seen, report = set[tuple[str, int]](), None
    try:
        while True:
            if (stamp := _stamp(runs_dir, names)) != seen:
                seen, report = stamp, read_report(runs_dir, names, **options)
                write_report(report, RELOAD_EVERY)
                words = f"{report.counts}: {report.directory / PAGE}"
                print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
            time.sleep(LOOK_EVERY)
    except KeyboardInterrupt:
        if report is not None:
            write_report(report)  # the final page does not reload itself
        raise


def write_report(report: Report, reload_seconds: int | None = None) -> None:
    """Replaces the folder of a report."""

    def write(folder: Path) -> None:
        folder.mkdir()
        content = json.dumps(to_json(report), indent=1, allow_nan=False)
        (folder / REPORT).write_text(content, encoding="utf-8")
        write_tables(folder / "tables", report.tables)
        write_page(folder, report, reload_seconds)

    replace_folder(report.directory, write)


def publish_index(runs_dir: Path) -> None:
    """Writes and prints runs_dir/index.html: every study, linked to its page, the latest first.

    The report of each study is made anew unless it is newer than all of its results.

    Raises:
        UserError: a folder without studies, or one that cannot be written.
    """
    stamps = {name: _stamp(runs_dir, [name]) for name in list_studies(runs_dir)}
    latest = {name: max((time for _, time in stamps[name]), default=0) for name in stamps}
    rows = []
    newest_first = sorted(stamps, key=lambda name: -latest[name])
    for name in track(newest_first, "reading", console=Console(stderr=True), transient=True):
        folder = runs_dir / name / "report"
        try:
            if not (file := folder / REPORT).is_file() or file.stat().st_mtime_ns < latest[name]:
                write_report(read_report(runs_dir, [name]))
            content = json.loads(file.read_text(encoding="utf-8"))
            texts = (content["counts"], " ".join(one["headline"] for one in content["slices"]))
            page = f"{quote(name)}/report/{PAGE}"
        except UserError as error:
            page, texts = None, ("", str(error))
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(latest[name] / 1e9))
        rows.append(StudyRow(name, page, (date if latest[name] else "", *texts)))
    write_index(runs_dir / PAGE, f"studies in {runs_dir}", rows)
    table = [(row.study, *row.texts) for row in rows]
    open_console().print(text_table(("study", *STUDY_COLUMNS), table))
    print(f"index: {runs_dir / PAGE}")


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
