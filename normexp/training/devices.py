"""The devices that train a cell, and the arithmetic of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from normexp.errors import UserError
from normexp.training.config.keys import TrainerKeys


def device_type(accelerator: str) -> str:
    """`cuda` or `cpu`, from a value of `trainer.accelerator`.

    `auto` is never "mps", which has no float64 for sums over a data set.
    """
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if accelerator == "cpu" else "cuda"


def check_devices(trainer: TrainerKeys) -> None:
    """Raises UserError for GPUs that this machine lacks."""
    accelerator, wanted, count = trainer.accelerator, trainer.devices, torch.cuda.device_count()
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


@contextmanager
def gpu_arithmetic(matmul_precision: str) -> Iterator[None]:
    """Inside the block a GPU multiplies float32 as asked for, and equal steps have equal bits.

    `highest` is float32; `high` is TF32 with 10 bits of mantissa, and `medium` less, on tensor
    cores. By default torch uses TF32 for convolutions but not for matrix products; here both follow
    one setting.

    By default cuDNN may choose convolutions whose sums differ from call to call, and the backward
    of fused attention may add up in any order (pytorch#182551). Then a resumed training would not
    end as one that was never interrupted. So both are off. (Under vmap, that backward also fails.)
    """
    cudnn: Any = torch.backends.cudnn  # not its `flags`, which switch it off by default
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic
    torch.set_float32_matmul_precision(matmul_precision)
    cudnn.allow_tf32, cudnn.deterministic = matmul_precision != "highest", True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.deterministic = before[1:]
