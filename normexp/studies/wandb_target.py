"""Where the runs of a study went on W&B, as its cells recorded it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from normexp.records.layout import CONFIG_FILE
from normexp.reporting.to_wandb import WandbTarget

DEFAULT = WandbTarget(project="normexp", entity=None)  # as conf/logger/wandb.yaml


def find_wandb_target(cell_dirs: Iterable[Path]) -> WandbTarget:
    """Project and entity of the first cell that was trained with logger=wandb, else the default.

    A config.yaml that cannot be read is passed over: it is not what the report stands on.
    """
    for cell_dir in cell_dirs:
        try:
            config = OmegaConf.load(cell_dir / CONFIG_FILE)
            project = OmegaConf.select(config, "logger.wandb.project")
            entity = OmegaConf.select(config, "logger.wandb.entity")
        except (OSError, YAMLError, OmegaConfBaseException):
            continue
        if project is not None:
            return WandbTarget(str(project), None if entity is None else str(entity))
    return DEFAULT
