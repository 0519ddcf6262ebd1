"""Augmentation as gathers over a whole batch: no loop over samples, no random state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from normexp.errors import UserError
from normexp.training.batching.draws import generator

IGNORED = 255  # in a mask: a pixel without a class, which no loss and no metric counts
_RANGE = 2**31  # draws are taken modulo a far smaller number, which biases them by less than 1e-6


@dataclass(frozen=True)
class Augmentation:
    """Random crop of the zero-padded image, horizontal flip, cutout; 0 or false turns one off.

    The crop has the size of the image, or that of `data.crop`.

    Padding and the cut square are black (0). Cutout: DeVries & Taylor 2017, arXiv:1708.04552; the
    square's centre is uniform over the image, so the square may stick out of it. A mask moves with
    its image; it is `IGNORED` in the padding, and the cut square stays what it was.

    Args:
        crop_padding: pixels added on each side before a crop of the original size.
        flip: mirror left to right with probability 1/2.
        cutout: side of the blackened square in pixels.
    """

    crop_padding: int
    flip: bool
    cutout: int

    def __post_init__(self) -> None:
        for key in ("crop_padding", "cutout"):
            value = getattr(self, key)
            if value < 0:
                raise UserError(f"data.augmentation.{key}={value} is negative; 0 turns it off")

    def draw(self, seed: int, step: int, num_samples: int) -> Tensor:
        """Random numbers for one step, int64 (num_samples, 5), on the CPU.

        Row i depends on (seed, step, i) alone: not on the number of samples, nor on which
        augmentations are on.
        """
        draws = generator(seed, "augment", step)
        return torch.randint(_RANGE, (num_samples, 5), generator=draws)

    def apply_to(self, batch: dict[str, Tensor], draws: Tensor, crop: int | None = None) -> None:
        """Augments the images of a batch, and its targets if they are masks (..., N, H, W)."""
        images, targets = batch["inputs"], batch["targets"]
        batch["inputs"] = self.apply(images, draws, crop)
        if targets.ndim == images.ndim - 1:
            moved, _ = self._moved(targets.unsqueeze(-3), draws, IGNORED, crop)
            batch["targets"] = moved.view(*targets.shape[:-2], *moved.shape[-2:])

    def apply(self, images: Tensor, draws: Tensor, crop: int | None = None) -> Tensor:
        """Augments images (..., N, C, H, W) by draws (..., N, 5); the dtype stays.

        Every output pixel is gathered from the padded image, or is black.

        Args:
            crop: side of the output in pixels; None: that of the images.
        """
        out, (cut_row, cut_column) = self._moved(images, draws, 0, crop)
        height, width = out.shape[-2:]
        if self.cutout:
            is_cut_row = self._is_cut(height, cut_row)
            is_cut_column = self._is_cut(width, cut_column)
            is_cut = is_cut_row[:, :, None] & is_cut_column[:, None]  # (M, H, W)
            out = out.masked_fill(is_cut[:, None], 0)
        return out.view(*images.shape[:-2], height, width)

    def _moved(
        self, images: Tensor, draws: Tensor, border: int, crop: int | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Cropped and mirrored images (M, C, H, W), M all leading axes; and the draws of cutout."""
        height, width = (crop or side for side in images.shape[-2:])
        flat = images.reshape(-1, *images.shape[-3:])  # (M, C, H, W), M = all leading axes
        draws = draws.reshape(-1, 5, 1).to(images.device)
        top, left, flip, cut_row, cut_column = draws.unbind(dim=1)  # (M, 1)
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        if self.flip:
            columns = torch.where(flip % 2 == 1, columns.flip(0), columns)  # (M, W)
        padded = functional.pad(flat, [self.crop_padding] * 4, value=border)
        rows = rows + top % (padded.shape[-2] - height + 1)  # (M, H)
        columns = columns + left % (padded.shape[-1] - width + 1)
        source = rows[:, :, None] * padded.shape[-1] + columns[:, None]  # (M, H, W)
        source = source.flatten(1)[:, None].expand(-1, flat.shape[1], -1)  # (M, C, H * W)
        moved = padded.flatten(2).gather(2, source).unflatten(2, (height, width))
        return moved, (cut_row, cut_column)

    def _is_cut(self, size: int, centre: Tensor) -> Tensor:
        """True for the rows or columns (M, size) within the square around a centre (M, 1)."""
        start = centre % size - self.cutout // 2
        positions = torch.arange(size, device=centre.device) - start
        return (positions >= 0) & (positions < self.cutout)
