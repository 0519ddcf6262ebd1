from __future__ import annotations

import pytest
import torch

from normexp.data.dataset import split_off_val, stratified_holdout
from normexp.errors import UserError


def test_val_and_train_share_no_sample_and_hold_all():
    train, val = split_off_val(103, 0.1, split_seed=0)
    assert len(val) == 10
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(103))


def test_split_depends_on_its_seed_only():
    assert torch.equal(split_off_val(100, 0.2, 0)[1], split_off_val(100, 0.2, 0)[1])
    assert not torch.equal(split_off_val(100, 0.2, 0)[1], split_off_val(100, 0.2, 1)[1])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.001])
def test_fraction_that_empties_a_split_is_refused(fraction: float):
    with pytest.raises(UserError, match=f"data.val_fraction={fraction}.*0.1"):
        split_off_val(100, fraction, 0)


def test_stratified_holdout_takes_the_fraction_of_each_class():
    targets = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    rest, held_out = stratified_holdout(targets, 0.2, seed=0)
    assert torch.bincount(targets[held_out]).tolist() == [10, 4, 2]
    assert torch.bincount(targets[rest]).tolist() == [40, 16, 8]
    assert torch.equal(torch.cat([rest, held_out]).sort().values, torch.arange(80))
