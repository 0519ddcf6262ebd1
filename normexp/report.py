"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from normexp.cli import entry, read_options

DRAWING_MODULES = ("altair", "vl_convert")


@entry("report")
def main(words: list[str]) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 after Ctrl-C, which ends a watch."""
    options = read_options("report", words)

    try:
        from normexp.reporting.publish import publish
    except ModuleNotFoundError as error:
        if error.name not in DRAWING_MODULES:
            raise
        _publish_tables(options, missing=error.name)
        return 0
    publish(
        Path(options["runs_dir"]),
        options["study"],
        metric=options["metric"],
        tolerance=options["tolerance"],
        reference=options["reference"],
        watch=options["watch"],
    )
    return 0


def _publish_tables(options: dict[str, Any], missing: str) -> None:
    """Prints the report and writes its tables, on a machine that can draw no figures."""
    from normexp.reporting.report import read_report
    from normexp.reporting.tables import write_tables
    from normexp.reporting.terminal import print_report

    keys = ("metric", "tolerance", "reference")
    options_of_report = {key: options[key] for key in keys}
    report = read_report(Path(options["runs_dir"]), options["study"], **options_of_report)
    write_tables(report.directory / "tables", report.tables)
    print_report(report)
    print(f"\ntables: {report.directory / 'tables'}")
    print(
        f"normexp: {missing} is not installed: tables only, no page and no figures; run the report "
        "where altair and vl-convert-python are installed",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
