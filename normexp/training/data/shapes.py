"""Small images of textured shapes over clutter, with the class of each pixel: drawn, not read.

All arithmetic is of whole numbers, so that the images are the same on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.training.batching.draws import generator
from normexp.training.batching.replicas import suitable_threads
from normexp.training.data.augment import IGNORED, Augmentation
from normexp.training.data.dataset import Data, Examples
from normexp.training.data.images import build_image_data
from normexp.training.data.sources import TEST_SEED

CLASSES = ("background", "disc", "ring", "square", "triangle")
NUM_THINGS = 5  # drawn into an image
NUM_KINDS = 7  # of things: a bar of clutter in place of class 0, four shapes, and two that are none
# Added to the colour of a shape; a bar has that of any, so that colour alone does not tell them.
TINTS = torch.tensor([(60, 0, 0), (0, 60, 0), (0, 0, 60), (60, 60, 0)]).int()
ONE_IN_EMPTY = 10  # images of test hold no shape
LEAST_SIZE = 24  # pixels
BLOCK = 64  # images that are drawn at once, which stay in the cache of a core
# Directions as whole numbers of length TURN, spread over a half circle.
TURNS = torch.tensor([(5, 0), (4, 3), (3, 4), (0, 5), (-3, 4), (-4, 3)]).int()
TURN = 5


def load_shapes(
    *,
    num_images: int,
    num_test: int,
    size: int,
    one_in_empty: int | None,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None,
) -> Data:
    """Colour images uint8 (N, 3, size, size), masks uint8 (N, size, size) of `CLASSES`.

    Discs, rings, squares and triangles, striped, at any angle and each kind in a tint of its own,
    hide each other and are hidden by bars in the same tints, over blocks of other colours; the
    light of an image is bright or dim, and brighter at one side. One test image in ten holds no
    shape. A pixel whose left or upper neighbour is of another class has none itself (255). The
    images are the same for every seed.

    Args:
        num_images: of train and val.
        num_test: images.
        size: pixels of a side.
        one_in_empty: one image of train and val in so many holds no shape; None: all hold some.

    Raises:
        UserError: no image, images too small for the shapes, or none with a shape.
    """
    if size < LEAST_SIZE:
        raise UserError(f"data.size={size} is too small for the shapes; try data.size={LEAST_SIZE}")
    for key, value in {"num_images": num_images, "num_test": num_test}.items():
        if value < 1:
            raise UserError(f"data.{key}={value} must be a whole number above 0")
    if one_in_empty is not None and one_in_empty < 2:
        raise UserError(f"data.one_in_empty={one_in_empty} leaves no shape; try 2 or more, or null")
    with suitable_threads():  # several would wait for each other at every small tensor
        train = _draw_all(num_images, size, one_in_empty, stream=0)
        test = _draw_all(num_test, size, ONE_IN_EMPTY, stream=1)
    return build_image_data(
        "shapes",
        train,
        test,
        num_classes=len(CLASSES),
        class_names=CLASSES,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )


def _draw_all(num_images: int, size: int, one_in_empty: int | None, stream: int) -> Examples:
    source, blocks = generator(TEST_SEED, "shapes", stream), []
    for first in range(0, num_images, BLOCK):
        blocks.append(_draw(Draws(min(BLOCK, num_images - first), size, source), one_in_empty))
    images, masks = zip(*blocks, strict=True)
    return Examples(torch.cat(images), torch.cat(masks))


def _draw(draws: Draws, one_in_empty: int | None) -> tuple[Tensor, Tensor]:
    """Images and their masks: one thing after another, each over those before it."""
    size = draws.size
    images = draws.colours() + draws.blocks()
    masks = images.new_zeros(len(images), size, size)
    is_empty = draws.below(one_in_empty or ONE_IN_EMPTY) == 0  # (N, 1, 1)
    is_empty &= torch.tensor(one_in_empty is not None)
    for _ in range(NUM_THINGS):
        kind = draws.below(NUM_KINDS)
        inside = draws.things(kind) & ((kind == 0) | ~is_empty)
        masks = torch.where(inside, kind, masks)
        images = torch.where(inside[:, None], draws.textures(kind), images)
    images = draws.lit(images) + draws.between(-12, 12, (3, size, size))
    return images.clamp(0, 255).to(torch.uint8), without_borders(masks).to(torch.uint8)


def without_borders(masks: Tensor) -> Tensor:
    """Masks (N, H, W), ignored where the left or the upper pixel is of another class."""
    is_border = torch.zeros_like(masks, dtype=torch.bool)
    is_border[:, 1:] |= masks[:, 1:] != masks[:, :-1]
    is_border[:, :, 1:] |= masks[:, :, 1:] != masks[:, :, :-1]
    return masks.masked_fill(is_border, IGNORED)


class Draws:
    """Random parts of N images; whole numbers (N, 1, 1) or maps (N, size, size)."""

    def __init__(self, num_images: int, size: int, source: torch.Generator) -> None:
        self.num_images = num_images
        self.size = size
        self.source = source
        self.y = torch.arange(size, dtype=torch.int32).view(1, -1, 1)
        self.x = torch.arange(size, dtype=torch.int32).view(1, 1, -1)

    def between(self, low: int, high: int, shape: tuple[int, ...] = (1, 1)) -> Tensor:
        """Whole numbers (N, *shape) from `low` to `high`."""
        shape = (self.num_images, *shape)
        return torch.randint(low, high + 1, shape, generator=self.source, dtype=torch.int32)

    def below(self, limit: int) -> Tensor:
        return self.between(0, limit - 1)

    def colours(self) -> Tensor:
        """A colour of each image (N, 3, 1, 1), between dark and light."""
        return self.between(60, 160, (1, 1, 1)) + self.between(-20, 20, (3, 1, 1))

    def textures(self, kind: Tensor) -> Tensor:
        """Stripes in two shades of the colour of a kind (N, 3, size, size)."""
        shape = torch.where(kind == 0, self.below(len(TINTS)), kind.clamp(max=len(TINTS)) - 1)
        first = self.colours() + TINTS[shape.flatten()].view(-1, 3, 1, 1)
        across, down = self.between(-3, 3), self.between(-3, 3)
        stripe = (across * self.x + down * self.y) // self.between(5, 14) & 1  # (N, size, size)
        return first + stripe[:, None] * self.between(-40, 40, (1, 1, 1))

    def blocks(self) -> Tensor:
        """Squares of other colours, an eighth of the image wide (N, 3, size, size)."""
        place = (torch.arange(self.size) * 8) // self.size
        return self.between(-40, 40, (3, 8, 8))[:, :, place][:, :, :, place]

    def things(self, kind: Tensor) -> Tensor:
        """Where things of a kind (N, 1, 1) are, bool (N, size, size)."""
        radius = self.between(self.size // 6, self.size // 3) * TURN
        right, down = self.x - self.below(self.size), self.y - self.below(self.size)
        turn = TURNS[self.below(len(TURNS)).flatten()].view(-1, 2, 1, 1)
        across = turn[:, 0] * right + turn[:, 1] * down  # in units of 1 / TURN pixels
        along = turn[:, 0] * down - turn[:, 1] * right
        square_of_distance = across * across + along * along
        in_disc = square_of_distance <= radius * radius
        of_kind = (
            (across.abs() <= 2 * radius) & (5 * along.abs() <= radius),  # a bar
            in_disc,
            in_disc & (4 * square_of_distance > radius * radius),
            5 * torch.maximum(across.abs(), along.abs()) <= 4 * radius,
            (2 * along >= -radius) & (4 * along <= 4 * radius - 7 * across.abs()),
        )
        inside = torch.zeros_like(in_disc)
        for index, shape in enumerate(of_kind):
            inside |= (kind == index) & shape
        return inside

    def lit(self, images: Tensor) -> Tensor:
        """Images (N, 3, size, size) in a light of their own."""
        light = self.between(120, 300)
        for position in (self.x, self.y):
            light = light + self.between(-60, 60) * (2 * position - self.size) // self.size
        return (images * light[:, None] >> 8) + self.between(-40, 40)[:, None]
