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

    What a run lacks is missing (NaN) in its row. Runs that cannot be read are logged as warnings.

    Raises:
        normexp.errors.UserError: no such study; names the nearest.
    """
    import pandas as pd

    from normexp.records.paths import find_study
    from normexp.records.result import read_runs

    rows, problems = read_runs(find_study(Path(runs_dir), name))
    for problem in problems:
        logging.getLogger(__name__).warning(problem)
    return pd.DataFrame(rows)
