"""`python -m normexp.evaluate run=runs/<study>/<cell_id>`: evaluates a finished cell again.

With `model=... model.weights=FILE data=...` in place of `run`: why that network evaluates worse
than it trains.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from normexp.cli import entry, parse_command, read_options
from normexp.config.process import importing_torch
from normexp.errors import UserError
from normexp.records.paths import find_cell


@entry("evaluate")
def main(words: list[str]) -> int:
    """Exit code: 0 evaluated, 2 the user's mistake, 130 interrupted."""
    if any(word.startswith(("model=", "model.")) for word in words):
        return _diagnose(words)
    options = read_options("evaluate", words)  # mistakes are refused before torch is imported
    cell_dir = find_cell(Path(options.pop("run")))
    if options["evaluate_with"] is None:
        batch = ["batch"] if options["evaluate_batch_sizes"] else []
        options["evaluate_with"] = ["running", "precise", *batch]

    with importing_torch():
        from normexp.cells.finished import evaluate_run
        from normexp.records.logs import messages_to_stderr

    with messages_to_stderr():
        evaluate_run(cell_dir, options | {"evaluate_every_epoch": False})
    return 0


def _diagnose(words: list[str]) -> int:
    """Prints the diagnosis of a network with weights from a file."""
    from normexp.config.cells import compose_cells

    command = parse_command(words)
    if run := [word for word in command.overrides if word.startswith("run=")]:
        raise UserError(f"{run[0]}: its own model is evaluated; drop it, or drop model=...")
    specs = compose_cells(replace(command, multirun=True))
    if len(specs) > 1:
        raise UserError(
            f"{len(specs)} cells: a diagnosis is of one network; give each key one value"
        )

    with importing_torch():
        from normexp.cells.diagnosed import diagnose_weights
        from normexp.records.logs import messages_to_stderr

    with messages_to_stderr():
        print(diagnose_weights(specs[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
