from __future__ import annotations

import pytest

from normexp.batching.sizes import Share, Sizes
from normexp.errors import UserError


@pytest.mark.parametrize(
    ("sizes", "micro", "norm", "label"),
    [
        (Sizes(32), 32, 32, "full"),
        (Sizes(32, 32, 32), 32, 32, "full"),
        (Sizes(32, 8), 8, 8, "accumulated"),
        (Sizes(32, None, 4), 32, 4, "ghost"),
        (Sizes(32, 8, 4), 8, 4, "accumulated ghost"),
    ],
)
def test_null_reads_as_the_size_above_and_the_label_names_the_split(sizes, micro, norm, label):
    assert (sizes.micro, sizes.norm, sizes.label) == (micro, norm, label)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 5), "micro_batch_size=5 does not divide batch_size=32; try micro_batch_size=4 or"),
        ((32, 8, 16), "norm_batch_size=16 does not divide micro_batch_size=8"),
        ((32, 64), "micro_batch_size=64 does not divide batch_size=32; .*micro_batch_size=32"),
        ((0,), "batch_size=0 .*positive"),
        ((8, None, -2), "norm_batch_size=-2 .*positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(sizes, message: str):
    with pytest.raises(UserError, match=message):
        Sizes(*sizes)


def test_last_forward_pass_may_be_short():
    assert Sizes(8, 4).micro_bounds(8) == [(0, 4), (4, 8)]
    assert Sizes(8, 4).micro_bounds(5) == [(0, 4), (4, 5)]
    assert Sizes(8).micro_bounds(3) == [(0, 3)]


def test_shares_of_a_step_hold_each_sample_once_in_whole_ghost_groups():
    for sizes, num_samples in ((Sizes(8, 4), 8), (Sizes(8, 4), 6), (Sizes(8), 3), (Sizes(12), 12)):
        bounds = [sizes.micro_bounds(num_samples, Share(index, 2)) for index in (0, 1)]
        taken = sorted(i for own in bounds for first, last in own for i in range(first, last))
        assert taken == list(range(num_samples))
        width = sizes.shared_by(2).norm
        assert all(first % width == 0 for own in bounds for first, _ in own)


@pytest.mark.parametrize(
    ("sizes", "norm_batch_size"),
    [(Sizes(32), 16), (Sizes(32, 8), 4), (Sizes(32, None, 4), 4), (Sizes(32, 8, 8), 4)],
)
def test_devices_split_statistics_as_ghost_sub_batches(sizes: Sizes, norm_batch_size: int):
    shared = sizes.shared_by(2)
    assert (shared.batch_size, shared.micro) == (sizes.batch_size, sizes.micro)
    assert shared.norm == norm_batch_size
    assert sizes.shared_by(2, synchronized=True).norm == sizes.micro
    assert sizes.shared_by(1) == sizes


def test_forward_that_devices_cannot_share_is_refused():
    with pytest.raises(UserError, match="batch_size=32 cannot be shared evenly by 3 devices"):
        Sizes(32).shared_by(3)
    with pytest.raises(UserError, match="micro_batch_size=8 .* try 2"):
        Sizes(32, 8).shared_by(3)
