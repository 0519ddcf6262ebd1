"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normexp.cli import run_entry
from normexp.reporting.options import HELP, Options, parse_options

if TYPE_CHECKING:
    from normexp.reporting.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 interrupted before it was written."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _report(words))


def _report(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(HELP)
        return 0
    options = parse_options(words)
    if "tensorboard" in options.log:
        from normexp.reporting.to_tensorboard import require_tensorboard

        require_tensorboard()
    from normexp.reporting.terminal import print_report

    report = _write(options)
    print_report(report)
    print(f"\nreport: {report.directory / 'index.html'}")
    _log(report, options)
    if options.serve:
        _serve(report, options)
    return 0


def _write(options: Options) -> Report:
    from normexp.reporting.report import build_report
    from normexp.reporting.write import write_report

    report = build_report(
        options.runs_dir, options.studies, metric=options.metric, tolerance=options.tolerance
    )
    write_report(report)
    return report


def _log(report: Report, options: Options) -> None:
    """To the trackers that were asked for; a report that is served is logged once, at its start."""
    if "tensorboard" in options.log:
        from normexp.reporting.to_tensorboard import log_to_tensorboard

        print(log_to_tensorboard(report))
    if "wandb" in options.log:
        from normexp.cells.trackers import find_wandb_target
        from normexp.reporting.to_wandb import log_to_wandb

        print(log_to_wandb(report, find_wandb_target([cell.directory for cell in report.cells])))


def _serve(report: Report, options: Options) -> None:
    from normexp.reporting.report import describe_counts
    from normexp.reporting.serve import serve_report

    def rebuild() -> None:
        print(f"{time.strftime('%H:%M:%S')} {describe_counts(_write(options))}", flush=True)

    studies = [options.runs_dir / name for name in options.studies]
    try:
        serve_report(report.directory, studies, rebuild, stop=threading.Event())
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    sys.exit(main())
