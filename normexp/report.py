"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from normexp.reporting.options import HELP, Options, parse_options
from normexp.studies.entry import run_entry


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 interrupted before it was written."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _report(words))


def _report(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(HELP)
        return 0
    options = parse_options(words)
    _write(options)
    if options.serve:
        _serve(options)
    return 0


def _write(options: Options) -> None:
    from normexp.reporting.report import build_report
    from normexp.reporting.terminal import print_report
    from normexp.reporting.write import write_report

    report = build_report(
        options.runs_dir, options.studies, metric=options.metric, tolerance=options.tolerance
    )
    folder = write_report(report)
    print_report(report)
    print(f"\nreport: {folder / 'index.html'}")


def _serve(options: Options) -> None:
    from normexp.reporting.report import report_directory
    from normexp.reporting.serve import serve_report

    studies = [options.runs_dir / name for name in options.studies]
    directory = report_directory(options.runs_dir, options.studies)
    try:
        serve_report(directory, studies, lambda: _write(options), stop=threading.Event())
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    sys.exit(main())
