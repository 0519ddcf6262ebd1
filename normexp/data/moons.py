"""Two moons: points of two interleaved half circles with noise, as images of one pixel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.data.dataset import Data, Examples
from normexp.data.images import build_image_data
from normexp.data.sources import TEST_SEED

LOW, HIGH = -2.0, 3.0  # coordinates that 0 and 255 stand for


def load_moons(
    *, num_points: int, num_test: int, noise: float, val_fraction: float, split_seed: int
) -> Data:
    """Points (x, y) as uint8 (N, 2, 1, 1), in steps of 0.02; two classes of equal size.

    The upper moon is (cos t, sin t), the lower one (1 - cos t, 1/2 - sin t), t from 0 to pi, both
    with Gaussian noise, as in sklearn.datasets.make_moons. The points are the same for every seed.
    """
    train, test = (_draw(n, noise, part) for part, n in enumerate((num_points, num_test)))
    return build_image_data(
        "moons", train, test, num_classes=2, val_fraction=val_fraction, split_seed=split_seed
    )


def _draw(num_points: int, noise: float, part: int) -> Examples:
    draws = generator(TEST_SEED, "moons", part)
    targets = torch.arange(num_points) % 2
    angle = torch.rand(num_points, generator=draws) * math.pi
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)  # (N, 2)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(targets[:, None] == 0, upper, lower)
    points = points + noise * torch.randn(num_points, 2, generator=draws)
    return Examples(_as_pixels(points), targets)


def _as_pixels(points: Tensor) -> Tensor:
    scaled = (points - LOW) / (HIGH - LOW) * 255
    return scaled.round().clamp(0, 255).to(torch.uint8)[:, :, None, None]
