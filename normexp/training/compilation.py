"""What makes a device fast: memory layout, float32 products on tensor cores, torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Measure, Replicas, backward
from normexp.batching.sizes import Sizes
from normexp.data.dataset import Data
from normexp.errors import UserError


def set_matmul_precision(precision: str, device_type: str) -> None:
    """How a GPU multiplies float32: `highest` in float32, `high` and `medium` on tensor cores.

    `high` is TF32, 10 bits of mantissa; torch has convolutions in it by default and matrix
    products not, here both go together. A CPU always computes in float32.
    """
    if device_type != "cuda":
        return
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def prepare_for(device: torch.device, replicas: Replicas, data: Data) -> None:
    """On a GPU, convolution weights of plain networks go channels last, and activations follow.

    Stacked replicas stay as they are: under vmap a convolution is one of many groups.
    """
    if device.type == "cuda" and not replicas.is_stacked and len(data.input_shape) == 3:
        make_channels_last(replicas)


def make_channels_last(replicas: Replicas) -> None:
    """Parameters of four axes (O, I, H, W) in memory as (O, H, W, I); no value changes."""
    with torch.no_grad():
        for parameter in replicas.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.contiguous(memory_format=torch.channels_last)


def compiled(
    replicas: Replicas, sizes: Sizes, device: torch.device
) -> Callable[[Batch, Measure, float], Tensor]:
    """`replicas.add_gradient` with forward and backward through torch.compile.

    On a GPU a step of one forward pass is replayed as a CUDA graph (mode `reduce-overhead`). With
    accumulation it is not: gradients in a graph's memory must not outlive its next replay.

    Raises, when called:
        UserError: the first call failed, so the network cannot be compiled here.
    """
    torch.compiler.reset()  # it counts networks, and from the ninth in a process on would not
    replays = device.type == "cuda" and sizes.micro == sizes.batch_size
    run = torch.compile(replicas.measure, mode="reduce-overhead" if replays else None)
    worked = False

    def add_gradient(batch: Batch, measure: Measure, weight: float) -> Tensor:
        nonlocal worked
        if replays:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            measured = run(batch, measure)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if worked:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"compile=true: this network cannot be compiled here ({reason}); try compile=false"
            ) from error
        worked = True
        return backward(measured["loss"], weight)

    return add_gradient
