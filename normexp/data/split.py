"""Seeded splits. Validation comes out of train; test is fixed and never moves with a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.errors import UserError


def split_off_val(num_samples: int, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """Indices (train, val) from one seeded permutation, each in rising order.

    Raises:
        UserError: a fraction that leaves train or val empty.
    """
    num_val = round(num_samples * val_fraction)
    if not 0 < num_val < num_samples:
        raise UserError(
            f"data.val_fraction={val_fraction} makes {num_val} of {num_samples} training samples "
            "validation samples; try data.val_fraction=0.1"
        )
    order = torch.randperm(num_samples, generator=generator(split_seed, "split"))
    return order[num_val:].sort().values, order[:num_val].sort().values


def stratified_holdout(targets: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (rest, held out), the latter with round(fraction * n) samples of each class."""
    order = torch.randperm(len(targets), generator=generator(seed, "split"))
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    for target in targets.unique():
        members = order[targets[order] == target]
        held_out[members[: round(fraction * len(members))]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
