"""What a training step sees: gathers, windows of a text, the order of an epoch."""

from __future__ import annotations

import pytest
import torch

from normexp.data import Augmentation, Data, Examples, Windows
from normexp.data.batches import TrainingBatches, epoch_order, window_offset


def images(augmentation: Augmentation | None = None) -> Data:
    """Ten grey images of 4x4; the target of image i is i."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (10, 1, 4, 4), generator=generator).to(torch.uint8)
    split = Examples(pixels, torch.arange(10))
    return Data(
        "dots",
        "classification",
        *(split, split, split),
        num_outputs=10,
        input_shape=(1, 4, 4),
        mean=(0.5,),
        std=(0.25,),
        augmentation=augmentation,
    )


def test_examples_gather_keeps_the_leading_axes_of_the_indices():
    inputs = torch.arange(5 * 3).view(5, 3)
    mask = inputs % 2 == 0
    indices = torch.tensor([[4, 0], [1, 1], [2, 3]])
    batch = Examples(inputs, torch.arange(5) * 10, mask).gather(indices)
    assert batch["targets"].tolist() == [[40, 0], [10, 10], [20, 30]]
    for key, source in (("inputs", inputs), ("mask", mask)):
        rows = [torch.stack([source[i] for i in row]) for row in indices.tolist()]
        assert torch.equal(batch[key], torch.stack(rows))
    assert sorted(Examples(inputs, inputs[:, 0]).gather(indices)) == ["inputs", "targets"]


@pytest.mark.parametrize("length", [0, 4, 7, 8, 9, 11, 12, 13, 40])
def test_targets_of_a_window_are_its_inputs_shifted_by_one_at_every_offset(length: int):
    block = 4
    windows = Windows(torch.arange(length) * 7, block)
    assert len(windows) == max(length - 1 - (block - 1), 0) // block
    for offset in range(block):
        batch = windows.gather(torch.arange(len(windows)), torch.tensor(offset))
        for window in range(len(windows)):
            span = [7 * i for i in range(window * block + offset, window * block + offset + 5)]
            assert batch["inputs"][window].tolist() == span[:-1]
            assert batch["targets"][window].tolist() == span[1:]


def test_windows_broadcast_an_offset_per_replica():
    windows = Windows(torch.arange(40), 4)
    indices = torch.tensor([[0, 2, 5], [1, 1, 0]])
    batch = windows.gather(indices, torch.tensor([[3], [0]]))
    assert batch["inputs"].shape == (2, 3, 4)
    assert batch["inputs"][..., 0].tolist() == [[3, 11, 23], [4, 4, 0]]
    assert torch.equal(windows.gather(indices)["inputs"][..., 0], indices * 4)


def test_order_is_a_permutation_that_depends_on_seed_and_epoch_only():
    first = epoch_order(0, 0, 101)
    assert torch.equal(first.sort().values, torch.arange(101))
    assert torch.equal(first, epoch_order(0, 0, 101))
    assert not torch.equal(first, epoch_order(0, 1, 101))
    assert not torch.equal(first, epoch_order(1, 0, 101))


def test_window_offset_takes_every_value_of_the_block():
    offsets = [window_offset(0, epoch, 4) for epoch in range(200)]
    assert set(offsets) == {0, 1, 2, 3}
    assert offsets == [window_offset(0, epoch, 4) for epoch in range(200)]


@pytest.mark.parametrize("drop_last", [True, False])
def test_steps_of_an_epoch_cover_its_order_once(drop_last: bool):
    batches = TrainingBatches(images(), [4], 3, drop_last=drop_last)
    steps = 3 if drop_last else 4
    chunk = batches.chunk(steps, steps)  # all of epoch 1
    targets = torch.cat([batch["targets"][0] for batch in chunk])
    assert torch.equal(targets, epoch_order(4, 1, 10)[: 9 if drop_last else 10])


@pytest.mark.parametrize("augmentation", [None, Augmentation(1, True, 0)])
def test_replicas_follow_their_seeds_and_chunks_equal_single_steps(augmentation):
    both = TrainingBatches(images(augmentation), [4, 9], 3, drop_last=True)
    alone = TrainingBatches(images(augmentation), [9], 3, drop_last=True)
    for step, batch in enumerate(both.chunk(3, 3), start=3):
        (single,) = alone.chunk(step, 1)
        assert torch.equal(batch["inputs"][1], single["inputs"][0])
        assert torch.equal(batch["targets"][1], single["targets"][0])
        assert not torch.equal(batch["targets"][0], batch["targets"][1])


def test_images_are_normalised():
    batches = TrainingBatches(images(), [0], 5, drop_last=True)
    (batch,) = batches.chunk(0, 1, torch.float64)
    raw = batches.data.train.gather(epoch_order(0, 0, 10)[:5])["inputs"].double()
    torch.testing.assert_close(batch["inputs"][0], (raw / 255 - 0.5) / 0.25)


def test_samples_seen_count_a_short_last_batch_if_it_is_kept():
    kept = TrainingBatches(images(), [0], 4, drop_last=False)
    dropped = TrainingBatches(images(), [0], 4, drop_last=True)
    assert [kept.num_samples_before(step) for step in range(5)] == [0, 4, 8, 10, 14]
    assert [dropped.num_samples_before(step) for step in range(5)] == [0, 4, 8, 12, 16]


def test_windows_of_a_text_start_elsewhere_each_epoch():
    split = Windows(torch.arange(31), 5)
    data = Data(
        "count",
        "language_modeling",
        *(split, split, split),
        num_outputs=31,
        input_shape=(5,),
        vocab_size=31,
    )
    batches = TrainingBatches(data, [2], 1, drop_last=True)
    for epoch in range(3):
        (batch,) = batches.chunk(epoch * batches.steps_per_epoch, 1)
        expected = int(epoch_order(2, epoch, 5)[0]) * 5 + window_offset(2, epoch, 5)
        assert int(batch["inputs"][0, 0, 0]) == expected
        assert torch.equal(batch["targets"], batch["inputs"] + 1)
