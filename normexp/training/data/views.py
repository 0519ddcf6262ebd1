"""The part of an image that a network is shown: in training, in evaluation, at other sizes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from normexp.errors import UserError
from normexp.training.data.augment import IGNORED, Augmentation
from normexp.training.data.dataset import Data


@dataclass(frozen=True)
class View:
    """How an evaluation shows images.

    Attributes:
        name: as in `evaluate_at`, and the suffix of metrics.
        side: of a centre crop, or of tiles, in pixels; None: the whole image.
        stride: from a tile to the next; None: no tiles.
    """

    name: str
    side: int | None = None
    stride: int | None = None

    @property
    def crop(self) -> int | None:
        """The side of the centre crop of images and masks; None: none, as for tiles."""
        return None if self.stride else self.side

    def tiles(self, height: int, width: int) -> Iterator[tuple[slice, slice]]:
        """Yields the rows and columns of each tile; the last in a row ends at the border."""
        assert self.side and self.stride
        for top in self._starts(height):
            for left in self._starts(width):
                yield slice(top, top + self.side), slice(left, left + self.side)

    def _starts(self, length: int) -> list[int]:
        assert self.side and self.stride
        return [*range(0, length - self.side, self.stride), length - self.side]


def read_view(name: str) -> View:
    """The view that an item of `evaluate_at` names; tiles overlap by half unless it says more."""
    side, *stride = (int(number) for number in re.findall(r"\d+", name) or [0])
    if name.startswith("tiles"):
        return View(name, side, *(stride or [max(1, side // 2)]))
    return View(name, side or None)


def crop_centre(batch: dict[str, Tensor], side: int) -> None:
    """Crops the images of a batch, and its targets if they are masks."""
    images, targets = batch["inputs"], batch["targets"]
    height, width = images.shape[-2:]
    top, left = (height - side) // 2, (width - side) // 2
    centre = (..., slice(top, top + side), slice(left, left + side))
    batch["inputs"] = images[centre]
    if targets.ndim == images.ndim - 1:
        batch["targets"] = targets[centre]


def with_crop(data: Data, side: int) -> Data:
    """The data set whose networks see `side` pixels: random crops in training, else the centre.

    Raises:
        UserError: no images, smaller ones, or a mask without a class in its centre.
    """
    key = f"data.crop={side}"
    refuse_side(data, side, key)
    refuse_empty_centre(data, side, key)
    return dataclasses.replace(
        data,
        crop=side,
        input_shape=(data.input_shape[0], side, side),
        augmentation=data.augmentation or Augmentation(crop_padding=0, flip=False, cutout=0),
    )


def refuse_side(data: Data, side: int | None, key: str) -> None:
    """Raises UserError, which begins with `key`, unless images have at least `side` pixels."""
    if len(data.input_shape) != 3 or data.vocab_size is not None:
        raise UserError(f"{key}: data={data.name} has no images; drop it")
    height, width = data.stored_shape[1:]
    if side is not None and side > min(height, width):
        raise UserError(
            f"{key} is more than the images of data={data.name} have ({height}x{width}); try "
            f"{min(height, width)} or less"
        )


def refuse_empty_centre(data: Data, side: int, key: str) -> None:
    """Raises UserError, which begins with `key`, for an image whose centre cannot be scored."""
    if data.task != "segmentation":
        return
    for split in ("val", "test"):
        examples = data.splits[split]
        batch = {"inputs": examples.inputs, "targets": examples.targets}
        crop_centre(batch, side)
        has_none = (batch["targets"] == IGNORED).flatten(1).all(dim=1)
        if has_none.any():
            first = int(has_none.int().argmax())
            raise UserError(
                f"{key}: the {side}x{side} pixels at the centre of image {first} of {split} have "
                "no class; try a larger size"
            )
