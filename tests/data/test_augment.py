"""Augmentation: equal to a slow reference, and draws that depend on (seed, step, sample) only."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from normexp.data.augment import Augmentation

EVERYTHING = Augmentation(crop_padding=2, flip=True, cutout=3)


def augment_one(image: Tensor, draws: dict[str, Tensor], i: int, spec: Augmentation) -> Tensor:
    """One image (C, H, W), by padding, slicing and filling."""
    height, width = image.shape[1:]
    if spec.crop_padding:
        padded = torch.nn.functional.pad(image, [spec.crop_padding] * 4)
        top, left = int(draws["crop_top"][i]), int(draws["crop_left"][i])
        image = padded[:, top : top + height, left : left + width]
    if spec.flip and draws["flip"][i]:
        image = image.flip(-1)
    if spec.cutout:
        image = image.clone()
        top = int(draws["cut_row"][i]) % height - spec.cutout // 2
        left = int(draws["cut_column"][i]) % width - spec.cutout // 2
        image[:, max(top, 0) : top + spec.cutout, max(left, 0) : left + spec.cutout] = 0
    return image


@pytest.mark.parametrize(
    ("padding", "flip", "cutout"), list(product([0, 2], [False, True], [0, 1, 4]))
)
def test_augmentation_equals_slicing_one_image_at_a_time(padding: int, flip: bool, cutout: int):
    spec = Augmentation(padding, flip, cutout)
    images = torch.randint(1, 256, (2, 20, 3, 6, 5), generator=torch.manual_seed(0)).byte()
    draws = [spec.draw(seed, step=2, num_samples=20) for seed in (1, 2)]  # of two replicas
    out = spec.apply(images, {name: torch.stack([d[name] for d in draws]) for name in draws[0]})
    assert out.dtype == torch.uint8
    for replica, own in enumerate(draws):
        for i, image in enumerate(images[replica]):
            assert torch.equal(out[replica, i], augment_one(image, own, i, spec))


def test_draws_of_a_sample_depend_on_seed_step_and_sample_alone():
    every = EVERYTHING.draw(seed=4, step=9, num_samples=1000)
    for num_samples in (1, 7, 16, 17, 500):
        for name, draw in EVERYTHING.draw(4, 9, num_samples).items():
            assert torch.equal(draw, every[name][:num_samples]), name
    for alone in (Augmentation(2, False, 0), Augmentation(0, True, 0), Augmentation(0, False, 3)):
        draws = alone.draw(4, 9, 1000)
        assert draws and all(torch.equal(draw, every[name]) for name, draw in draws.items())
    for seed, step in ((4, 1), (1, 9)):
        assert not torch.equal(every["crop_left"], EVERYTHING.draw(seed, step, 1000)["crop_left"])
