from __future__ import annotations

import pytest

from normexp.batching.sizes import Share, Sizes
from normexp.errors import UserError


def test_null_reads_as_the_size_above():
    for typed, split in (((32,), (32, 32)), ((32, 8), (8, 8)), ((32, None, 4), (32, 4))):
        assert (Sizes(*typed).micro, Sizes(*typed).norm) == split


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 5), "micro_batch_size=5 does not divide batch_size=32; try micro_batch_size=4 or"),
        ((32, 8, 16), "norm_batch_size=16 does not divide micro_batch_size=8"),
        ((8, None, -2), "norm_batch_size=-2 .*positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(sizes, message: str):
    with pytest.raises(UserError, match=message):
        Sizes(*sizes)


def test_shares_of_a_step_hold_each_sample_once_in_whole_ghost_groups():
    assert Sizes(8, 4).micro_bounds(5) == [(0, 4), (4, 5)]
    for sizes, num_samples in ((Sizes(8, 4), 8), (Sizes(8, 4), 6), (Sizes(8), 3), (Sizes(12), 12)):
        bounds = [sizes.micro_bounds(num_samples, Share(index, 2)) for index in (0, 1)]
        taken = sorted(i for own in bounds for first, last in own for i in range(first, last))
        assert taken == list(range(num_samples))
        width = sizes.shared_by(2).norm
        assert all(first % width == 0 for own in bounds for first, _ in own)


def test_devices_split_statistics_as_ghost_sub_batches():
    for sizes, norm_batch_size in ((Sizes(32), 16), (Sizes(32, 8), 4), (Sizes(32, None, 4), 4)):
        shared = sizes.shared_by(2)
        assert (shared.batch_size, shared.micro) == (sizes.batch_size, sizes.micro)
        assert shared.norm == norm_batch_size
        assert sizes.shared_by(2, synchronized=True).norm == sizes.micro
    with pytest.raises(UserError, match="batch_size=32 cannot be shared evenly by 3 devices"):
        Sizes(32).shared_by(3)
    with pytest.raises(UserError, match="micro_batch_size=8 .* try 2"):
        Sizes(32, 8).shared_by(3)
