"""Loads the network of a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from yaml import YAMLError

from normexp.build import build_data, build_network, build_norm
from normexp.cells.naming import GROUPS
from normexp.cells.plan import plan_training
from normexp.config.compose import shipped_config, shipped_defaults
from normexp.errors import UserError
from normexp.records.paths import CONFIG_FILE, EMA_WEIGHTS_FILE, WEIGHTS_FILE, find_run, seed_dir
from normexp.records.result import read_run

GROUPS_TRAINED = ("norm", "model", "data", "optim", "trainer")
REMEDY = "remove the cell's folder and train it again"


def load_run(run_dir: Path, *, ema: bool = False) -> nn.Module:
    """The trained network of a run, in evaluation mode on the CPU.

    Rebuilds it from the cell's config.yaml; needs the data set, for its shapes.

    Args:
        ema: the averaged weights, with the running state that they were evaluated with.
        run_dir: `runs/<study>/<cell_id>/seed-<k>`, or the folder of a cell with a single seed.

    Raises:
        UserError: no such run, a folder of several seeds, no weights, or weights that do not fit.
    """
    cell_dir, seed = find_run(run_dir)
    cfg = load_config(cell_dir, read_run(seed_dir(cell_dir, seed)).config)
    cfg.model.weights = None  # those of the run replace the weights that it started from
    data = build_data(cfg)
    plan = plan_training(cfg, len(data.train))
    norm = build_norm(cfg, plan.sizes, data, num_steps=plan.num_steps, momentum=plan.norm_momentum)
    network = build_network(cfg, norm, data)(seed)
    file = EMA_WEIGHTS_FILE if ema else WEIGHTS_FILE
    load_weights(network, seed_dir(cell_dir, seed), precision=cfg.trainer.precision, file=file)
    return network.eval()


def load_config(cell_dir: Path, names: Mapping[str, Any]) -> DictConfig:
    """The resolved config of a cell; keys that are newer than its training have defaults.

    `names` are the recorded ones of what each group holds. Raises UserError for another file.
    """
    path = cell_dir / CONFIG_FILE
    try:
        cfg = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML; {REMEDY}") from error
    lacking = [key for key in GROUPS_TRAINED if key not in cfg]
    if not isinstance(cfg, DictConfig) or lacking:
        raise UserError(f"{path} has no {lacking[0]}; {REMEDY}")
    groups = {group: shipped_defaults(group, names[group]) or {} for group in GROUPS}
    newer = OmegaConf.merge(shipped_config(), groups)
    return DictConfig(OmegaConf.merge(newer, cfg))


def load_weights(
    network: nn.Module, run_dir: Path, *, precision: str, file: str = WEIGHTS_FILE
) -> None:
    """Loads the weights of a run into its network, in the precision of the training."""
    path = run_dir / file
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: the run has not ended, or was trained "
            + ("without ema=..." if file == EMA_WEIGHTS_FILE else "with save_weights=false")
        )
    if precision == "64-true":
        network.double()
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a torn or foreign file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} does not fit its config.yaml, or is torn ({reason}); train the run again"
        ) from error
