"""Which normalization layer, and how much does it depend on the batch size?

From Python: `load` gives a trained network, `load_study` a table of runs. Neither imports torch
before it is called.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

__all__ = ["load", "load_study"]


def load(run_dir: str | Path) -> nn.Module:
    """The trained network of a run directory `runs/<study>/<cell_id>/seed-<k>`.

    A plain module in evaluation mode on the CPU. It takes what its data set's `model_inputs`
    returns: images (N, C, H, W) as float32, normalised, or tokens (N, T).

    Raises:
        normexp.errors.UserError: no such run, several seeds, no weights, or ones that do not fit.
    """
    from normexp.cells.load import load_run

    return load_run(Path(run_dir))


def load_study(name: str, runs_dir: str | Path = "runs") -> pd.DataFrame:
    """A row for every ended run of a study: cell_id, seed, status, config, metrics, timing.

    Nested keys are joined by dots (`norm.num_groups`, `timing.step_ms`); what a run lacks is NaN or
    None in its row. Runs that cannot be read, or have not ended, are logged as warnings.

    Raises:
        normexp.errors.UserError: no such study (names the nearest), or one without an ended run.
    """
    from normexp.reporting.frame import read_studies

    records = read_studies(Path(runs_dir), [name])
    for problem in [*records.problems, *records.waiting]:
        logging.getLogger(__name__).warning(problem)
    return records.runs.infer_objects()
