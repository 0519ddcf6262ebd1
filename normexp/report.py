"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normexp.cli import read_options, run_entry

if TYPE_CHECKING:
    from normexp.reporting.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 interrupted before it was written."""
    return run_entry("report", argv, _report)


def _report(words: list[str]) -> int:
    options = read_options("report", words)
    runs_dir, studies = Path(options["runs_dir"]), options["study"]

    from normexp.reporting.report import build_report, describe_counts
    from normexp.reporting.terminal import print_report
    from normexp.reporting.write import write_report

    def write() -> Report:
        metric, tolerance = options["metric"], options["tolerance"]
        report = build_report(runs_dir, studies, metric=metric, tolerance=tolerance)
        write_report(report)
        return report

    report = write()
    print_report(report)
    print(f"\nreport: {report.directory / 'index.html'}")
    if options["log"]:
        _log_to_wandb(report)
    if options["watch"]:
        folders = [runs_dir / name for name in studies]
        _watch(folders, lambda: print(f"{time.strftime('%T')} {describe_counts(write())}"))
    return 0


def _log_to_wandb(report: Report) -> None:
    """Logs a report to the W&B project of its runs; a watched one only at the start."""
    from normexp.cells.stack import find_wandb_target
    from normexp.reporting.to_wandb import log_to_wandb

    print(log_to_wandb(report, find_wandb_target([cell.directory for cell in report.cells])))


def _watch(folders: Sequence[Path], write: Callable[[], None]) -> None:
    """Writes the report again whenever a result changes, until Ctrl-C."""
    from normexp.reporting.serve import LOOK_EVERY, stamp_of

    before = stamp_of(folders)
    try:
        while True:
            time.sleep(LOOK_EVERY)
            now = stamp_of(folders)
            if now != before:
                before = now
                write()
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    sys.exit(main())
