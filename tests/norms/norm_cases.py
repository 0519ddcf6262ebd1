"""The shipped norms beside their torch.nn counterparts, and inputs of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from normexp.norms.batch import BatchNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d
from normexp.norms.none import NoNorm
from normexp.norms.rms import RMSNorm

Norm = TypeVar("Norm", bound=nn.Module)

EPS = 1e-3  # large enough to be seen where it is left out or misplaced
C = 8
SHAPES = {2: (6, C), 3: (6, C, 5), 4: (4, C, 3, 5), 5: (3, C, 2, 3, 4)}
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE_NORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


@dataclass(frozen=True)
class Case:
    """A shipped norm and, by number of dimensions, the torch module that computes the same."""

    make: Callable[[], nn.Module]
    counterpart: Callable[[int], nn.Module]
    channels_last: bool = False  # the counterpart wants its channels last
    num_dims: tuple[int, ...] = (2, 3, 4, 5)


CASES = {
    "batch": Case(lambda: BatchNorm(C, eps=EPS), lambda n: BATCH_NORMS[n](C, eps=EPS)),
    "layer": Case(
        lambda: LayerNorm(C, eps=EPS),
        lambda n: nn.LayerNorm(C, eps=EPS) if n == 2 else nn.GroupNorm(1, C, eps=EPS),
    ),
    "layer2d": Case(
        lambda: LayerNorm2d(C, eps=EPS), lambda _: nn.LayerNorm(C, eps=EPS), channels_last=True
    ),
    "instance": Case(
        lambda: InstanceNorm(C, eps=EPS),
        lambda n: INSTANCE_NORMS[n](C, eps=EPS, affine=True),
        num_dims=(3, 4, 5),
    ),
    "group": Case(
        lambda: GroupNorm(C, num_groups=4, eps=EPS), lambda _: nn.GroupNorm(4, C, eps=EPS)
    ),
    "rms": Case(lambda: RMSNorm(C, eps=EPS), lambda _: nn.RMSNorm(C, eps=EPS), channels_last=True),
    "none": Case(lambda: NoNorm(C), lambda _: nn.Identity()),
}
CASES_AND_DIMS = [(name, n) for name, case in CASES.items() for n in case.num_dims]


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_mask(*shape: int, seed: int = 1) -> Tensor:
    """Two of three are real, and so are the first two of each sample."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.67
    mask[:, :2] = True
    return mask


def randomize(norm: Norm, seed: int = 7) -> Norm:
    """Parameters away from 1 and 0, running averages away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of sum(out * r), r fixed and random: a plain sum is blind where outputs add up to zero."""
    weight = random_tensor(*out.shape, seed=11).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), inputs)
