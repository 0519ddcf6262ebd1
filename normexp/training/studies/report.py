"""Reports of studies: read, written as pages, watched, and listed in an index."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from rich.console import Console
from rich.progress import track

from normexp.errors import UserError
from normexp.training.config.groups import group_choices
from normexp.training.config.help import norm_words
from normexp.training.records.files import write_text
from normexp.training.records.layout import list_studies
from normexp.training.studies.rows import join_paths, read_studies
from normexp.verdicts.compare import ADDED
from normexp.verdicts.page import MISSING, PAGE, PAGES, REPORT, write_report
from normexp.verdicts.report import Report, report_on, to_json
from normexp.verdicts.tables import ADDED_NOTE
from normexp.verdicts.terminal import open_console, print_report, print_rows

COLUMNS = ("study", "last result", "size", "what its report says")
LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page


def read_report(runs_dir: Path, studies: Sequence[str], **options: Any) -> Report:
    """Reads the studies and compares their cells. options: of `report_on`.

    Raises:
        UserError: a study that is missing or empty, a metric or a reference that no run has.
    """
    rows = join_paths(read_studies(runs_dir, studies))
    return report_on(rows, runs_dir, studies, describe_norm=describe_norm, **options)


def describe_norm(name: str) -> str:
    """A phrase on a shipped norm; empty for another."""
    return norm_words(name)[0] if name in group_choices("norm") else ""


def publish_report(report: Report) -> None:
    """Prints a report, and writes its page."""
    print_report(report)
    if try_to_write(report):
        print(f"report: {report.directory / PAGE}")
        if MISSING:
            print(MISSING)


def watch_studies(runs_dir: Path, names: Sequence[str], **options: Any) -> NoReturn:
    """Writes the report of the studies whenever results appear, also the first, until Ctrl-C.

    Its page reloads itself. Arguments and errors as of `read_report`; a UserError also for a folder
    that cannot be written.
    """
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
    print_rows(open_console(), COLUMNS, [texts for _, texts in rows])
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
