"""Where a training runs: devices, matmul precision, several processes, and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from normexp.batching.replicas import Batch, Loss, Replicas, backward
from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.training.step import AddGradient
from normexp.training.stopping import StopRequest


@dataclass(frozen=True)
class Devices:
    """The devices that train a cell together, and the precision of their numbers."""

    accelerator: str  # auto, cpu, gpu or cuda
    per_node: int
    num_nodes: int
    strategy: str  # auto, or ddp for several devices
    precision: str  # 32-true, bf16-mixed or 64-true
    matmul_precision: str  # of float32 on a GPU: highest, high or medium
    shares_statistics: bool  # the norm takes its statistics over all devices

    @property
    def count(self) -> int:
        """The number of devices, over all nodes."""
        return self.per_node * self.num_nodes

    @property
    def type(self) -> str:
        """`cuda` or `cpu`; any other accelerator is left for Lightning to check.

        `auto` is never "mps", which has no float64 for sums over a data set.
        """
        if self.accelerator == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cuda" if self.accelerator == "gpu" else self.accelerator


@contextmanager
def gpu_arithmetic(devices: Devices) -> Iterator[None]:
    """Sets how a GPU multiplies float32 inside the block, and makes equal steps equal to the bit.

    `highest` is float32; `high` is TF32 with 10 bits of mantissa, and `medium` less, on tensor
    cores. By default torch uses TF32 for convolutions but not for matrix products; here both follow
    one setting. A CPU always computes in float32.

    By default cuDNN may choose convolutions whose sums differ from call to call, and a resumed
    training would not end as one that was never interrupted.
    """
    if devices.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic
    torch.set_float32_matmul_precision(devices.matmul_precision)
    cudnn.allow_tf32, cudnn.deterministic = devices.matmul_precision != "highest", True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.deterministic = before[1:]


def trainer_options(devices: Devices, stop: StopRequest) -> dict[str, Any]:
    """Returns the options of Lightning's Trainer."""
    strategy: Any = "auto"
    if devices.strategy == "ddp" and devices.count > 1:
        # The processes are connected already. Without an explicit environment Lightning would
        # choose SLURM's inside any SLURM job.
        strategy = ReplicatedStrategy(stop, cluster_environment=LightningEnvironment())
    return {
        "accelerator": devices.type,
        "devices": devices.per_node,
        "num_nodes": devices.num_nodes,
        "strategy": strategy,
        "precision": devices.precision,
    }


def check_devices(devices: Devices) -> None:
    """Raises UserError for GPUs that this machine lacks."""
    accelerator, wanted, count = devices.accelerator, devices.per_node, torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}: this machine has no CUDA GPU; "
            "try trainer=cpu, or trainer=auto, which takes a GPU if there is one"
        )
    if accelerator != "cpu" and torch.cuda.is_available() and wanted > max(count, 1):
        raise UserError(
            f"trainer.devices={wanted}: this machine has {count} GPU{'s' if count > 1 else ''}; "
            f"try trainer.devices={count} or trainer.accelerator=cpu"
        )


class ReplicatedStrategy(DDPStrategy):
    """One process per device, each with the whole network; gradients are summed by the module.

    Lightning connects the processes, places devices and lets the first one write. It does not wrap
    the network in DistributedDataParallel, see `batching.processes`.
    """

    def __init__(self, stop: StopRequest, **options: Any) -> None:
        super().__init__(**options)
        self.stop = stop

    def configure_ddp(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        """Also restores our signal handlers: processes wait here after Lightning set its own."""
        self.stop.keep_listening()
        super().barrier(name)


def compiled_gradient(replicas: Replicas, sizes: Sizes, device: torch.device) -> AddGradient:
    """Returns `replicas.add_gradient` with forward and backward through torch.compile.

    On a GPU a step of one forward is replayed as a CUDA graph (mode `reduce-overhead`). Not with
    accumulation: gradients in a graph's memory must not outlive its next replay.
    """
    torch.compiler.reset()  # its limit of recompilations counts over all networks of a process
    replays = device.type == "cuda" and sizes.micro == sizes.batch_size
    measure = torch.compile(replicas.measure, mode="reduce-overhead" if replays else None)

    def add_gradient(batch: Batch, loss: Loss, weight: float) -> Tensor:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()
        return backward(measure(batch, loss), weight)  # compiled with its backward

    return add_gradient
