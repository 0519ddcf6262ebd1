"""Weights & Biases, whose runs of a stack live side by side in one process."""

from __future__ import annotations

import logging
import netrc
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning.loggers import WandbLogger

logger = logging.getLogger(__name__)


class WandbRunLogger(WandbLogger):
    """A WandbLogger that ends its W&B run, which the next run of the process would else join."""

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.experiment.finish(exit_code=int(status != "success"))


def wandb_logger(
    *,
    save_dir: str,
    run_dir: str,
    name: str,
    version: str,
    labels: Sequence[str],
    notes: str | None,
    project: str,
    entity: str | None = None,
    group: str | None = None,
    offline: bool | None = None,
) -> WandbLogger:
    """Logs a run to a W&B run of its own.

    Args:
        save_dir: for W&B's own files.
        run_dir: keeps the W&B id of the run, so that a resumed run continues in W&B.
        name, version: of the cell and the seed.
        group: None: `name`, since W&B's grouping shows mean and spread over seeds.
        offline: None: if W&B would find no API key.
    """
    import wandb

    offline = is_logged_out() if offline is None else offline
    if offline:
        logger.info("W&B is offline; upload its runs later: wandb sync %s/offline-run-*", save_dir)
    id_file = Path(run_dir, "wandb-id")
    if not id_file.is_file():
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(secrets.token_hex(8))
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        mode="offline" if offline else "online",
        project=project,
        entity=entity,
        group=group or name,
        name=f"{name}/{version}",
        tags=labels,
        notes=notes,
        dir=Path(save_dir).parent,  # to which it adds a folder wandb
        id=id_file.read_text(),
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off"),
    )
    return WandbRunLogger(experiment=run)


def is_logged_out() -> bool:
    """True if W&B would find no API key: not in the environment, nor in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return False
    try:
        return not any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return True
