"""The batches of a training step: gathers, windows, the order of an epoch, augmentation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from normexp.data import Augmentation, Data, Examples, Windows
from normexp.data.batches import TrainingBatches, epoch_order, window_offset


def images(augmentation: Augmentation | None = None) -> Data:
    """Ten grey images of 4x4; the target of image i is i."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (10, 1, 4, 4), generator=generator).to(torch.uint8)
    parts = [Examples(pixels, torch.arange(10))] * 3
    own = {"mean": (0.5,), "std": (0.25,), "augmentation": augmentation}
    return Data("dots", "classification", *parts, num_outputs=10, input_shape=(1, 4, 4), **own)


@pytest.mark.parametrize("length", [0, 4, 7, 8, 9, 11, 12, 13, 40])
def test_targets_of_a_window_are_its_inputs_shifted_by_one_at_every_offset(length: int):
    block = 4
    windows = Windows(torch.arange(length) * 7, block)
    assert len(windows) == max(length - 1 - (block - 1), 0) // block
    offsets = torch.arange(block)[:, None]  # of each replica
    batch = windows.gather(torch.arange(len(windows)).expand(block, -1), offsets)
    for offset in range(block):
        for window in range(len(windows)):
            span = [7 * i for i in range(window * block + offset, window * block + offset + 5)]
            assert batch["inputs"][offset, window].tolist() == span[:-1]
            assert batch["targets"][offset, window].tolist() == span[1:]


def test_order_and_offset_depend_on_seed_and_epoch_only():
    first = epoch_order(0, 0, 101)
    assert torch.equal(first.sort().values, torch.arange(101))
    assert torch.equal(first, epoch_order(0, 0, 101))
    for seed, epoch in ((0, 1), (1, 0)):
        assert not torch.equal(first, epoch_order(seed, epoch, 101))
    assert {window_offset(0, epoch, 4) for epoch in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("drop_last", "seen"), [(True, [0, 4, 8, 12, 16]), (False, [0, 4, 8, 10, 14])]
)
def test_steps_of_an_epoch_cover_its_order_once(drop_last: bool, seen: list[int]):
    batches = TrainingBatches(images(), [4], 4, drop_last=drop_last)
    assert [batches.num_samples_before(step) for step in range(5)] == seen
    steps = batches.steps_per_epoch
    chunk = batches.chunk(steps, steps, torch.float64)  # all of epoch 1
    order = epoch_order(4, 1, 10)[: 8 if drop_last else 10]
    assert torch.equal(torch.cat([batch["targets"][0] for batch in chunk]), order)
    raw = batches.data.train.gather(order)["inputs"].double()
    shown = torch.cat([batch["inputs"][0] for batch in chunk])
    torch.testing.assert_close(shown, (raw / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("augmentation", [None, Augmentation(1, True, 0)])
def test_replicas_follow_their_seeds_and_chunks_equal_single_steps(augmentation):
    both = TrainingBatches(images(augmentation), [4, 9], 3, drop_last=True)
    alone = TrainingBatches(images(augmentation), [9], 3, drop_last=True)
    for step, batch in enumerate(both.chunk(3, 3), start=3):
        (single,) = alone.chunk(step, 1)
        assert torch.equal(batch["inputs"][1], single["inputs"][0])
        assert torch.equal(batch["targets"][1], single["targets"][0])
        assert not torch.equal(batch["targets"][0], batch["targets"][1])


def test_sorted_batches_hold_the_same_samples_in_the_order_of_their_classes():
    labels = torch.tensor([2, 0, 1] * 8)
    pixels = torch.arange(24, dtype=torch.uint8).view(24, 1, 1, 1)
    part = Examples(pixels, labels)
    known = {"num_outputs": 3, "input_shape": (1, 1, 1), "mean": (0.5,), "std": (0.25,)}
    data = Data("labels", "classification", part, part, part, **known)
    steps = {}
    for order in ("shuffled", "sorted"):
        batches = TrainingBatches(replace(data, order=order), [4, 9], 8, drop_last=True)
        steps[order] = batches.chunk(3, 3)
    for shuffled, in_order in zip(*steps.values(), strict=True):
        assert torch.equal(in_order["targets"], shuffled["targets"].sort(dim=1).values)
        assert not torch.equal(in_order["targets"], shuffled["targets"])
        for key in ("inputs", "targets"):
            assert torch.equal(in_order[key].sort(dim=1).values, shuffled[key].sort(dim=1).values)
        classes = labels[(in_order["inputs"].flatten(1) * 0.25 + 0.5).mul(255).round().long()]
        assert torch.equal(classes, in_order["targets"])


def test_windows_of_a_text_start_elsewhere_each_epoch():
    parts = [Windows(torch.arange(31), 5)] * 3
    own = {"num_outputs": 31, "input_shape": (5,), "vocab_size": 31}
    batches = TrainingBatches(
        Data("count", "language_modeling", *parts, **own), [2], 1, drop_last=True
    )
    for epoch in range(3):
        (batch,) = batches.chunk(epoch * batches.steps_per_epoch, 1)
        expected = int(epoch_order(2, epoch, 5)[0]) * 5 + window_offset(2, epoch, 5)
        assert int(batch["inputs"][0, 0, 0]) == expected
        assert torch.equal(batch["targets"], batch["inputs"] + 1)


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
