"""How Lightning places a training on devices."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from normexp.tasks.stopping import StopRequest


class Replicated(DDPStrategy):
    """One process a device, each with the whole network; the task sums gradients itself.

    Lightning brings the processes together, places devices, and lets the first one write; it does
    not wrap the network, see `batching.processes`.

    Args:
        stop: what answers signals.
    """

    def __init__(self, stop: StopRequest | None, **options: Any) -> None:
        super().__init__(**options)
        self.stop = stop

    def configure_ddp(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        """Before a stage begins, processes meet here with Lightning's handler just put in place."""
        if self.stop is not None:
            self.stop.keep_listening()
        super().barrier(name)


class Told(LightningEnvironment):
    """Processes that environment variables tell their place, for all trainings of a command."""

    def teardown(self) -> None:
        pass


def device_type(accelerator: str) -> str:
    """`cuda` or `cpu`; what other accelerators there are, Lightning's check knows.

    `auto` is never `mps`, which has no float64 for sums over a data set.
    """
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator


def placed(options: dict[str, Any], stop: StopRequest | None = None) -> dict[str, Any]:
    """The Trainer's options, with what `accelerator: auto` and `strategy: ddp` stand for."""
    options = options | {"accelerator": device_type(options["accelerator"])}
    if options.get("strategy") != "ddp":
        return options
    if options["devices"] * options.get("num_nodes", 1) == 1:
        return options | {"strategy": "auto"}
    # Processes that were told their place by environment variables, as torchrun does, and not by
    # SLURM, which Lightning would find wherever it runs below a SLURM job.
    told = Told() if "RANK" in os.environ else None
    return options | {"strategy": Replicated(stop, cluster_environment=told)}
