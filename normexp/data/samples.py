"""A split of a data set: tensors that live on the device, taken by index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Examples:
    """N labelled samples.

    Shapes: inputs uint8 (N, C, H, W) or int64 tokens (N, T); targets int64 (N,); mask bool (N, T),
    true where a token is real, None where all are.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, indices: Tensor, offset: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        """The samples at `indices` (...,), whose shape leads; offset is for Windows alone."""
        indices = indices.to(self.targets.device)
        batch = {"inputs": self.inputs[indices], "targets": self.targets[indices]}
        if self.mask is not None:
            batch["mask"] = self.mask[indices]
        return batch

    def to(self, device: torch.device | str) -> Examples:
        mask = None if self.mask is None else self.mask.to(device)
        return Examples(self.inputs.to(device), self.targets.to(device), mask)


@dataclass
class Windows:
    """One text of L tokens, int64 (L,), seen in windows of `block_size` T to model language."""

    tokens: Tensor
    block_size: int

    def __len__(self) -> int:
        """Windows that do not overlap and fit for every offset in [0, T), targets included."""
        return max(len(self.tokens) - self.block_size, 0) // self.block_size

    def gather(self, indices: Tensor, offset: Tensor | None = None) -> dict[str, Tensor]:
        """Window i begins at i * T + offset; targets are the inputs shifted by one.

        Shapes: indices (...,), offset broadcastable to it (None is 0); inputs, targets (..., T).
        """
        device = self.tokens.device
        starts = indices.to(device) * self.block_size
        if offset is not None:
            starts = starts + offset.to(device)
        positions = starts[..., None] + torch.arange(self.block_size, device=device)
        return {"inputs": self.tokens[positions], "targets": self.tokens[positions + 1]}

    def to(self, device: torch.device | str) -> Windows:
        return Windows(self.tokens.to(device), self.block_size)


def content_digest(
    splits: Sequence[Examples | Windows], symbols: tuple[str, ...] | None = None
) -> str:
    """First 16 hex digits of the sha256 over dtype, shape and bytes of every tensor."""
    digest = hashlib.sha256(repr(symbols).encode())
    for split in splits:
        for tensor in tensors_of(split):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def tensors_of(split: Examples | Windows) -> list[Tensor]:
    """The tensors that hold a split."""
    if isinstance(split, Windows):
        return [split.tokens]
    return [t for t in (split.inputs, split.targets, split.mask) if t is not None]
