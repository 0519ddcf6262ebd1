"""`python -m normexp.evaluate run=runs/<study>/<cell_id>`: evaluates a finished cell again."""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options
from normexp.training.records.layout import find_cell


@entry("evaluate")
def main(words: list[str]) -> int:
    """Exit code: 0 evaluated, 2 the user's mistake, 130 interrupted."""
    options = read_options("evaluate", words)  # mistakes are refused before torch is imported
    cell_dir = find_cell(Path(options.pop("run")))
    if options["evaluate_with"] is None:
        batch = ["batch"] if options["evaluate_batch_sizes"] else []
        options["evaluate_with"] = ["running", "precise", *batch]

    from normexp.training.sweeps.machine import importing_torch

    with importing_torch():
        from normexp.training.cells.finished import evaluate_run
        from normexp.training.records.logs import messages_to_stderr

    with messages_to_stderr():
        evaluate_run(cell_dir, options | {"evaluate_every_epoch": False})
    return 0


if __name__ == "__main__":
    sys.exit(main())
