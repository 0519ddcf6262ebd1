"""What the agent of a W&B sweep asks of a command: to log to the run that the agent has begun.

The agent waits for the metrics of that run, also where the proposed point is recorded already.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from normexp.errors import UserError
from normexp.training.config.spec import CellSpec
from normexp.training.records.layout import RESULT_FILE, WANDB_ID_FILE, seed_dir
from normexp.training.records.logs import messages_to_stderr
from normexp.training.sweeps.machine import importing_torch

logger = logging.getLogger(__name__)


def asked_run(cells: Sequence[CellSpec]) -> str:
    """The id of the W&B run that the agent of a sweep has begun for this command; empty for none.

    Raises:
        UserError: a command of several runs, which W&B would join to that one.
    """
    run_id = os.environ.get("WANDB_RUN_ID", "")
    logged = [cell for cell in cells if "wandb" in cell.config["logger"]]
    num_runs = sum(len(cell.seeds) for cell in logged)
    if run_id and num_runs > 1:
        raise UserError(
            f"WANDB_SWEEP_ID is set: the agent of a W&B sweep asks for one run, and this command "
            f"has {num_runs}; add replicas=1, and leave the choice of values to the sweep"
        )
    return run_id if num_runs else ""


def log_recorded(cells: Sequence[CellSpec], run_id: str) -> None:
    """Logs the ended run of a command to the agent's W&B run, unless its training did so."""
    for cell in cells:
        if "wandb" not in cell.config["logger"]:
            continue
        for seed in cell.seeds:
            run_dir = seed_dir(cell.directory, seed)
            id_file = run_dir / WANDB_ID_FILE
            logged_to = id_file.read_text() if id_file.is_file() else ""
            if logged_to == run_id or not (run_dir / RESULT_FILE).is_file():
                continue
            with messages_to_stderr():
                with importing_torch():
                    from normexp.training.cells.module import log_record
                logger.info("already recorded: the sweep's W&B run %s gets the record", run_id)
                log_record(cell, seed, "wandb")
