from __future__ import annotations

import torch

from normexp.data.batches import epoch_order, window_offset


def test_epoch_order_is_a_permutation():
    assert torch.equal(epoch_order(3, 5, 101).sort().values, torch.arange(101))


def test_epoch_order_is_the_same_for_the_same_seed_and_epoch_only():
    first = epoch_order(0, 0, 100)
    assert torch.equal(first, epoch_order(0, 0, 100))
    assert not torch.equal(first, epoch_order(0, 1, 100))
    assert not torch.equal(first, epoch_order(1, 0, 100))


def test_window_offset_takes_every_value_of_the_block():
    offsets = [window_offset(0, epoch, 4) for epoch in range(200)]
    assert set(offsets) == {0, 1, 2, 3}
    assert offsets == [window_offset(0, epoch, 4) for epoch in range(200)]
