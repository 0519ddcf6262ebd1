"""Augmentation as gathers over a whole batch: no loop over samples, no random state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.errors import UserError

_RANGE = 2**31  # draws are reduced modulo the wanted range; the bias is below 1e-6


@dataclass(frozen=True)
class Augmentation:
    """Random crop of the zero-padded image, horizontal flip, cutout; 0 or false turns one off.

    Padding and the cut square are black (0). Cutout: DeVries & Taylor 2017, arXiv:1708.04552; the
    square's centre is uniform over the image, so the square may stick out of it.

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

    def __str__(self) -> str:
        """As on the command line: `crop_padding=4, flip=true`; what is off is left out."""
        shown = {name: value for name, value in vars(self).items() if value}
        return ", ".join(f"{name}={str(value).lower()}" for name, value in shown.items())

    def draw(self, seed: int, step: int, num_samples: int) -> dict[str, Tensor]:
        """Random numbers for one step, each (num_samples,), int64 or bool, on the CPU.

        Those of sample i depend only on (seed, step, i): not on the number of samples, nor on which
        augmentations are on.
        """
        table = torch.randint(
            _RANGE, (num_samples, 5), generator=generator(seed, "augment", step)
        ).unbind(dim=1)  # filled row by row: sample i has row i for every num_samples
        draws: dict[str, Tensor] = {}
        if self.crop_padding:
            num_shifts = 2 * self.crop_padding + 1
            draws["crop_top"], draws["crop_left"] = table[0] % num_shifts, table[1] % num_shifts
        if self.flip:
            draws["flip"] = table[2] % 2 == 1
        if self.cutout:
            draws["cut_row"], draws["cut_column"] = table[3], table[4]  # modulo H, W in `apply`
        return draws

    def apply(self, images: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augments images (..., N, C, H, W), same shape and dtype out, by draws (..., N).

        Every output pixel is gathered from a source row and column, or is black.
        """
        height, width = images.shape[-2:]
        flat = images.reshape(-1, *images.shape[-3:])  # (M, C, H, W), M = all leading axes
        draws = {name: draw.reshape(-1, 1).to(images.device) for name, draw in draws.items()}
        rows = torch.arange(height, device=images.device).expand(len(flat), -1)  # (M, H)
        columns = torch.arange(width, device=images.device).expand(len(flat), -1)  # (M, W)
        black = None  # (M, H, W)
        if "cut_row" in draws:
            top = draws["cut_row"] % height - self.cutout // 2
            left = draws["cut_column"] % width - self.cutout // 2
            cut_rows, cut_columns = rows - top, columns - left
            black = _outer(_is_within(cut_rows, self.cutout), _is_within(cut_columns, self.cutout))
        if "flip" in draws:
            columns = torch.where(draws["flip"], width - 1 - columns, columns)
        if "crop_top" in draws:
            rows = rows + draws["crop_top"] - self.crop_padding
            columns = columns + draws["crop_left"] - self.crop_padding
            outside = ~_outer(_is_within(rows, height), _is_within(columns, width))
            black = outside if black is None else black | outside
            rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        source = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)  # (M, H * W)
        source = source[:, None].expand(-1, flat.shape[1], -1)
        out = flat.flatten(2).gather(2, source).view_as(flat)
        if black is not None:
            out = out.masked_fill(black[:, None], 0)
        return out.view_as(images)


def _is_within(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    return rows[:, :, None] & columns[:, None, :]  # (M, H), (M, W) -> (M, H, W)
