from __future__ import annotations

import pytest

from normexp.batching.sizes import Sizes
from normexp.errors import UserError


def test_null_reads_as_the_size_above():
    assert (Sizes(32).micro, Sizes(32).norm) == (32, 32)
    assert (Sizes(32, 8).micro, Sizes(32, 8).norm) == (8, 8)
    assert (Sizes(32, None, 4).micro, Sizes(32, None, 4).norm) == (32, 4)


@pytest.mark.parametrize(
    ("sizes", "label"),
    [
        (Sizes(32), "full"),
        (Sizes(32, 32, 32), "full"),
        (Sizes(32, 8), "accumulated"),
        (Sizes(32, 8, 8), "accumulated"),
        (Sizes(32, None, 4), "ghost"),
        (Sizes(32, 8, 4), "accumulated ghost"),
    ],
)
def test_label_names_the_split(sizes: Sizes, label: str):
    assert sizes.label == label


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 5), "micro_batch_size=5 does not divide batch_size=32; try micro_batch_size=4 or"),
        ((32, 8, 16), "norm_batch_size=16 does not divide micro_batch_size=8"),
        ((32, 64), "micro_batch_size=64 does not divide batch_size=32; .*micro_batch_size=32"),
        ((0,), "batch_size=0 is not positive"),
        ((8, None, -2), "norm_batch_size=-2 is not positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(sizes, message: str):
    with pytest.raises(UserError, match=message):
        Sizes(*sizes)


def test_last_forward_pass_may_be_short():
    assert Sizes(8, 4).micro_bounds(8) == [(0, 4), (4, 8)]
    assert Sizes(8, 4).micro_bounds(6) == [(0, 4), (4, 6)]
    assert Sizes(8).micro_bounds(3) == [(0, 3)]
