"""What a cell is called and what is written of it: its identity and its plain record."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from normexp.data.dataset import Data
from normexp.norms.slots import SLOTS
from normexp.records.identity import source_digest
from normexp.studies.plan import Plan, num_devices_of

GROUPS = ("norm", "model", "data", "optim")
# Ways of saying what `Plan` has worked out; the identity holds what came out of them.
SPOKEN = ("epochs", "steps", "samples", "lr_rule", "base_batch_size")


def identity_of(
    cfg: DictConfig, data: Data, plan: Plan, slots: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that defines a training, for `records.canonical`: derived values, not spellings.

    Holds a digest of the data and of a custom module's source, so an edited one is a new cell.

    Args:
        slots: the slots that the model uses and that are not as they are unset, resolved.
    """
    config = plain(cfg)
    for part in _parts_with_target(config):
        digest = _source_digest_of(part["_target_"])
        if digest is not None:
            part["source_digest"] = digest
    config["data"]["digest"] = data.digest
    config = {key: value for key, value in config.items() if key not in (*SPOKEN, *SLOTS)}
    for key in SLOTS:
        config["norm"].pop(key, None)
    config |= slots
    config |= {"num_steps": plan.num_steps, "lr": plan.lr}
    # How many groups devices split statistics into: a share of a forward is a ghost sub-batch.
    config["norm_batch_size"] = plan.sizes.norm_batch_size
    if config.get("matmul_precision") == "high":  # as it was before there was a choice
        config.pop("matmul_precision")
    config["optim"].pop("default_lr")
    if plan.optimizer_momentum is not None:
        config["optim"]["momentum"] = plan.optimizer_momentum
    config["norm"].pop("half_life", None)
    if plan.norm_momentum is not None:
        config["norm"]["momentum"] = plan.norm_momentum
    return config


def record_of(
    cfg: DictConfig, choices: Mapping[str, str], plan: Plan, identity: dict[str, Any]
) -> dict[str, Any]:
    """Plain values for result.json: names as typed, sizes as trained, the whole identity below."""
    spoken = ("batch_size", "micro_batch_size", "lr_rule", "eps", "drop_last")
    return {
        **{group: choices[group] for group in GROUPS},
        **{key: cfg[key] for key in spoken},
        "norm_batch_size": plan.sizes.norm_batch_size,
        "devices": num_devices_of(cfg),
        "split": plan.sizes.label,
        "epochs": plan.num_steps / plan.steps_per_epoch,
        "num_steps": plan.num_steps,
        "lr": plan.lr,
        "max_grad_norm": cfg.max_grad_norm,
        "precision": cfg.trainer.precision,
        "matmul_precision": cfg.get("matmul_precision", "high"),
        "identity": identity,
    }


def _parts_with_target(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a config, at any depth, that names something to build."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree
        for value in tree.values():
            yield from _parts_with_target(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _parts_with_target(value)


def _source_digest_of(target: str) -> str | None:
    """Digest of the user's own file that a target comes from; None for installed packages."""
    try:
        file = inspect.getsourcefile(get_object(target))
    except TypeError:  # built in
        return None
    return None if file is None else source_digest(Path(file))


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The config as builtin values, resolved."""
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
