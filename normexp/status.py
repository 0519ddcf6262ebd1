"""`python -m normexp.status study=NAME`: the ended, missing and failed runs of a study."""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options
from normexp.errors import UserError


@entry("status")
def main(words: list[str]) -> int:
    """Exit code: 0 shown, 2 the user's mistake, such as a study that is not there."""
    options = read_options("status", words)

    from normexp.training.records.layout import find_study
    from normexp.training.records.study import read_study
    from normexp.training.studies.terminal import print_status

    study_dir = find_study(Path(options["runs_dir"]), options["study"])
    if study_dir.is_file():
        raise UserError(
            f"study={study_dir.stem} was shipped and has ended; normexp.report shows it"
        )
    print_status(read_study(study_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
