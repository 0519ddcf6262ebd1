"""Settings that make a device fast: memory layout, float32 matmul precision, torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Loss, Replicas, backward
from normexp.batching.sizes import Sizes
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.training.step import AddGradient


def set_matmul_precision(precision: str, device_type: str) -> None:
    """Sets how a GPU multiplies float32: `highest` in float32, `high` or `medium` on tensor cores.

    `high` is TF32 with 10 bits of mantissa. By default torch uses TF32 for convolutions but not
    for matrix products; here both follow one setting. A CPU always computes in float32.
    """
    if device_type != "cuda":
        return
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def use_fast_layout(replicas: Replicas, data: Data, device: torch.device) -> None:
    """Stores convolution weights channels last if this is faster: plain networks on a GPU.

    Activations follow the weights. Under vmap a convolution has groups, which gain nothing.
    """
    if device.type == "cuda" and not replicas.is_stacked and len(data.input_shape) == 3:
        make_channels_last(replicas)


def make_channels_last(replicas: Replicas) -> None:
    """Stores parameters (O, I, H, W) in the memory order (O, H, W, I); no value changes."""
    with torch.no_grad():
        for parameter in replicas.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.contiguous(memory_format=torch.channels_last)


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
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"compile=true: this network cannot be compiled here ({reason}); try compile=false"
            ) from error
        has_worked = True
        return backward(losses, weight)

    return add_gradient
