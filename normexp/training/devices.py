"""Where a training runs: devices, matmul precision, several processes, and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from normexp.batching.replicas import Batch, Loss, Replicas, backward
from normexp.batching.sizes import Sizes
from normexp.errors import UserError, first_line
from normexp.training.step import AddGradient
from normexp.training.stopping import StopRequest


def device_type(accelerator: str) -> str:
    """Returns "cuda" or "cpu"; any other accelerator is left for Lightning to check.

    `auto` is never "mps", which has no float64 for sums over a data set.
    """
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator


def set_matmul_precision(precision: str, device_type: str) -> None:
    """Sets how a GPU multiplies float32: `highest` in float32, `high` or `medium` on tensor cores.

    `high` is TF32 with 10 bits of mantissa. By default torch uses TF32 for convolutions but not
    for matrix products; here both follow one setting. A CPU always computes in float32.
    """
    if device_type != "cuda":
        return
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def resolve_trainer_options(
    options: dict[str, Any], stop: StopRequest | None = None
) -> dict[str, Any]:
    """Returns the Trainer's options with `accelerator=auto` and `strategy=ddp` resolved."""
    options = options | {"accelerator": device_type(options["accelerator"])}
    if options.get("strategy") != "ddp":
        return options
    if options["devices"] * options.get("num_nodes", 1) == 1:
        return options | {"strategy": "auto"}
    # The processes are connected already. Without an explicit environment Lightning would choose
    # SLURM's inside any SLURM job.
    strategy = ReplicatedStrategy(stop, cluster_environment=LightningEnvironment())
    return options | {"strategy": strategy}


class ReplicatedStrategy(DDPStrategy):
    """One process per device, each with the whole network; gradients are summed by the module.

    Lightning connects the processes, places devices and lets the first one write. It does not wrap
    the network in DistributedDataParallel, see `batching.processes`.
    """

    def __init__(self, stop: StopRequest | None, **options: Any) -> None:
        super().__init__(**options)
        self.stop = stop

    def configure_ddp(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        """Also restores our signal handlers: processes wait here after Lightning set its own."""
        if self.stop is not None:
            self.stop.keep_listening()
        super().barrier(name)


def compiled_gradient(replicas: Replicas, sizes: Sizes, device: torch.device) -> AddGradient:
    """Returns `replicas.add_gradient` with forward and backward through torch.compile.

    On a GPU a step of one forward is replayed as a CUDA graph (mode `reduce-overhead`). Not with
    accumulation: gradients in a graph's memory must not outlive its next replay.

    Raises, when called:
        UserError: the first call failed: this network cannot be compiled here.
    """
    torch.compiler.reset()  # its limit of recompilations counts over all networks of a process
    replays = device.type == "cuda" and sizes.micro == sizes.batch_size
    measure = torch.compile(replicas.measure, mode="reduce-overhead" if replays else None)
    has_worked = False

    def add_gradient(batch: Batch, loss: Loss, weight: float) -> Tensor:
        nonlocal has_worked
        if replays:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            losses = measure(batch, loss)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if has_worked:
                raise
            raise UserError(
                f"compile=true: this network cannot be compiled here ({first_line(error)}); "
                "try compile=false"
            ) from error
        has_worked = True
        return backward(losses, weight)

    return add_gradient
