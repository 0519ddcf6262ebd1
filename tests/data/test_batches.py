from __future__ import annotations

import torch

from normexp.data.augment import Augmentation
from normexp.data.batches import TrainingBatches, epoch_order, window_offset
from normexp.data.dataset import Data, Examples, Windows


def images(augmentation: Augmentation | None = None) -> Data:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (10, 1, 4, 4), generator=generator).to(torch.uint8)
    split = Examples(pixels, torch.arange(10) % 3)
    return Data(
        name="dots",
        task="classification",
        train=split,
        val=split,
        test=split,
        num_outputs=3,
        input_shape=(1, 4, 4),
        mean=(0.5,),
        std=(0.25,),
        augmentation=augmentation,
    )


def test_steps_of_an_epoch_cover_its_order_once():
    batches = TrainingBatches(images(), [4], 3, drop_last=False)
    targets = torch.cat([b["targets"][0] for b in batches.chunk(4, 4)])  # all of epoch 1
    assert torch.equal(targets, (epoch_order(4, 1, 10)) % 3)


def test_each_replica_follows_its_own_seed():
    both = TrainingBatches(images(), [4, 9], 3, drop_last=True).chunk(1, 2)
    alone = TrainingBatches(images(), [9], 3, drop_last=True).chunk(1, 2)
    for pair, single in zip(both, alone, strict=True):
        assert torch.equal(pair["inputs"][1], single["inputs"][0])


def test_chunk_is_the_same_steps_one_by_one():
    augmentation = Augmentation(crop_padding=1, flip=True, cutout=0)
    batches = TrainingBatches(images(augmentation), [0, 1], 3, drop_last=True)
    whole = batches.chunk(3, 3)
    for step, batch in enumerate(whole, start=3):
        (single,) = batches.chunk(step, 1)
        assert torch.equal(single["inputs"], batch["inputs"])


def test_images_come_normalised_in_the_asked_precision():
    batches = TrainingBatches(images(), [0], 5, drop_last=True)
    (batch,) = batches.chunk(0, 1, torch.float64)
    raw = batches.data.train.inputs[epoch_order(0, 0, 10)[:5]].double()
    torch.testing.assert_close(batch["inputs"][0], (raw / 255 - 0.5) / 0.25, rtol=0, atol=1e-14)


def test_samples_seen_count_the_ragged_batch_where_it_is_kept():
    kept = TrainingBatches(images(), [0], 4, drop_last=False)
    dropped = TrainingBatches(images(), [0], 4, drop_last=True)
    assert [kept.num_samples_before(step) for step in range(5)] == [0, 4, 8, 10, 14]
    assert [dropped.num_samples_before(step) for step in range(5)] == [0, 4, 8, 12, 16]


def test_windows_of_a_text_start_elsewhere_each_epoch():
    split = Windows(torch.arange(31), 5)
    data = Data(
        name="count",
        task="language_modeling",
        train=split,
        val=split,
        test=split,
        num_outputs=31,
        input_shape=(5,),
        vocab_size=31,
        bytes_per_token={"train": 1.0, "val": 1.0, "test": 1.0},
    )
    batches = TrainingBatches(data, [2], 1, drop_last=True)
    for epoch in range(3):
        (batch,) = batches.chunk(epoch * batches.steps_per_epoch, 1)
        first = int(batch["inputs"][0, 0, 0])
        expected = int(epoch_order(2, epoch, 5)[0]) * 5 + window_offset(2, epoch, 5)
        assert first == expected
        assert torch.equal(batch["targets"], batch["inputs"] + 1)
