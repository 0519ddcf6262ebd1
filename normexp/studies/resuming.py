"""The networks of a stack as it begins: to go on from its checkpoint where that fits, else new."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from normexp.batching.replicas import Replicas
from normexp.studies.assembly import build_recipe, build_replicas
from normexp.studies.cell import Cell
from normexp.studies.outcome import one_line

logger = logging.getLogger(__name__)

# What is read as a training resumes: by Lightning, and under `normexp` by the task.
PARTS = {"pytorch-lightning_version", "state_dict", "optimizer_states", "lr_schedulers", "loops"}
OWN_PARTS = {"losses", "train_seconds", "validated_at", "is_stacked", "final"}
REPLICAS = "replicas."  # what the task's state_dict calls them


def resumed_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> Replicas:
    """One new network per seed, in the form of the checkpoint where there is one that fits.

    One that does not fit is set aside, so that the stack starts over.
    """
    found = fitting_replicas(cell, seeds, checkpoint)
    if found is None:
        return build_replicas(cell, seeds)
    replicas, done = found
    logger.info("%s continues from step %d of %d", cell.title, done, cell.plan.num_steps)
    return replicas


def fitting_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> tuple[Replicas, int] | None:
    """New networks that a checkpoint fits, and its step; None without one, or once set aside."""
    content = read_checkpoint(checkpoint)
    if content is None:
        return None
    replicas = build_replicas(cell, seeds, is_stacked=content["normexp"]["is_stacked"])
    if _shapes(content["state_dict"]) != _shapes(replicas.state_dict(prefix=REPLICAS)):
        set_aside(checkpoint, "it is of other networks")
        return None
    if not _fits(content["optimizer_states"], build_recipe(cell).optimizer_of(replicas)):
        set_aside(checkpoint, "it is of another optimizer")
        return None
    return replicas, content["normexp"]["losses"]["num_steps"]


def read_checkpoint(checkpoint: Path) -> dict[str, Any] | None:
    """A checkpoint with all that a resume reads of it; None without one.

    One that is torn or foreign is set aside, and is none.
    """
    if not checkpoint.is_file():
        return None
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        lacking = (PARTS - set(content)) | (OWN_PARTS - set(content["normexp"]))
        if lacking:
            raise ValueError(f"it has no {min(lacking)}")
    except Exception as error:  # torch raises many kinds
        set_aside(checkpoint, one_line(error))
        return None
    return content


def set_aside(checkpoint: Path, reason: str) -> None:
    """Renames a checkpoint that cannot be used: to last.unreadable, or -2, -3 ... where taken."""
    suffixes = chain([".unreadable"], (f".unreadable-{number}" for number in count(2)))
    paths = (checkpoint.with_suffix(suffix) for suffix in suffixes)
    aside = next(path for path in paths if not path.exists())
    with suppress(FileNotFoundError):  # another process of this training was faster
        checkpoint.replace(aside)
        logger.warning(
            "%s cannot be used (%s); it is kept as %s and the stack starts over",
            *(checkpoint, reason, aside.name),
        )


def _fits(states: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state is of these parameters and has their knobs; others may be what it counts."""
    fresh = optimizer.state_dict()["param_groups"]
    saved = [group for state in states for group in state.get("param_groups", [])]
    return len(saved) == len(fresh) and all(
        new["params"] == old.get("params") and new.keys() <= old.keys()
        for new, old in zip(fresh, saved, strict=True)
    )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}
