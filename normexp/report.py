"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdicts of a study.

Without a study: a page that lists all studies. Runs that were made elsewhere come as a CSV, with a
row per run: `python -m normexp.report runs.csv arm=optimizer seed=seed metric=val/accuracy`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from normexp.cli import entry, read_options
from normexp.errors import UserError

OF_STUDIES = ("study", "runs_dir", "watch", "tries")
OF_TABLES = ("arm", "seed", "higher_is_better", "tune", "by", "ignore", "chance")
OF_BOTH = ("metric", "choose_by", "tolerance", "reference")


@entry("report")
def main(words: list[str]) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 after Ctrl-C, which ends a watch."""
    tables = [word for word in words if "=" not in word and word.endswith(".csv")]
    if len(tables) == 1:
        words = [word for word in words if word not in tables]
        _refuse(words, OF_STUDIES, f"{tables[0]} is a table of runs, not a study")
        return _report_on_table(Path(tables[0]), read_options("report", words))
    _refuse(words, OF_TABLES, "only a CSV has columns; name one, as in normexp.report runs.csv ...")
    options = read_options("report", words)

    unread = [word for word in words if not word.startswith(("study=", "runs_dir="))]
    if options["study"] is None and unread:
        raise UserError(f"{unread[0]}: set study=... too; without it, all studies are listed")

    from normexp.training.studies.report import (
        publish_index,
        publish_report,
        read_report,
        watch_studies,
    )

    if options["study"] is None:
        publish_index(Path(options["runs_dir"]))
        return 0

    place = Path(options["runs_dir"]), options["study"]
    asked = {key: options[key] for key in (*OF_BOTH, "tries")}
    if options["watch"]:
        watch_studies(*place, **asked)
    publish_report(read_report(*place, **asked))
    return 0


def _refuse(words: list[str], keys: tuple[str, ...], why: str) -> None:
    for word in words:
        if word.partition("=")[0] in keys:
            raise UserError(f"{word}: {why}")


def _report_on_table(path: Path, options: dict[str, Any]) -> int:
    from dataclasses import replace

    from normexp.training.studies.report import publish_report
    from normexp.verdicts.table import compare, read_table

    for key in ("arm", "seed", "metric"):
        if options[key] is None:
            raise UserError(f"{key} is missing: {key}=COLUMN")
    asked = {key: options[key] for key in (*OF_TABLES, *OF_BOTH)}
    asked |= {key: asked[key] or [] for key in ("by", "ignore")}
    report = compare(read_table(path), name=path.name, **asked)
    publish_report(replace(report, folder=path.with_name(f"{path.stem}_report")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
