from __future__ import annotations

import pytest

from normexp.errors import UserError
from normexp.training.schedule import (
    count_steps,
    count_steps_per_epoch,
    momentum_of_half_life,
    scale_learning_rate,
)


@pytest.mark.parametrize(
    ("rule", "lr", "momentum"),
    [
        ("none", 0.1, 0.9),
        ("linear", 0.4, 0.9),
        ("sqrt", 0.2, 0.9),
        ("momentum_aware", 0.1 * 4 * (1 - 0.9**4) / (1 - 0.9), 0.9**4),
    ],
)
def test_rule_at_four_times_the_base_batch(rule: str, lr: float, momentum: float):
    scaled = scale_learning_rate(rule, lr=0.1, momentum=0.9, batch_size=128, base_batch_size=32)
    assert scaled == pytest.approx((lr, momentum))


def test_momentum_aware_rule_keeps_what_a_sample_moves_and_how_long_it_lasts():
    """lr / (batch_size * (1 - m)) is a sample's total effect, m^(1 / batch_size) its decay."""
    for batch_size in (8, 32, 256):
        lr, momentum = scale_learning_rate(
            "momentum_aware", lr=0.1, momentum=0.9, batch_size=batch_size, base_batch_size=32
        )
        assert momentum is not None
        assert lr / (batch_size * (1 - momentum)) == pytest.approx(0.1 / (32 * (1 - 0.9)))
        assert momentum ** (1 / batch_size) == pytest.approx(0.9 ** (1 / 32))


def test_momentum_aware_rule_needs_a_momentum():
    with pytest.raises(UserError, match=r"needs optim\.momentum"):
        scale_learning_rate(
            "momentum_aware", lr=0.1, momentum=None, batch_size=8, base_batch_size=32
        )


@pytest.mark.parametrize("batch_size", [2, 10, 100])
def test_half_life_halves_the_past_at_every_batch_size(batch_size: int):
    momentum = momentum_of_half_life(100, batch_size)
    assert (1 - momentum) ** (100 / batch_size) == pytest.approx(0.5)


def test_steps_of_an_epoch_with_and_without_its_ragged_end():
    assert count_steps_per_epoch(70, 32, drop_last=True) == 2
    assert count_steps_per_epoch(70, 32, drop_last=False) == 3
    with pytest.raises(UserError, match="batch_size=80 is more than the 70 training samples"):
        count_steps_per_epoch(70, 80, drop_last=True)


def test_budget_in_epochs_steps_or_samples():
    assert count_steps(10, 32, epochs=3, steps=None, samples=None, samples_per_epoch=320) == 30
    assert count_steps(10, 32, epochs=3, steps=7, samples=None, samples_per_epoch=320) == 7
    assert count_steps(10, 32, epochs=3, steps=None, samples=100, samples_per_epoch=320) == 3
    with pytest.raises(UserError, match="steps=7 and samples=100 are both set"):
        count_steps(10, 32, epochs=3, steps=7, samples=100, samples_per_epoch=320)
    with pytest.raises(UserError, match="samples=20 is less than one batch_size=32"):
        count_steps(10, 32, epochs=3, steps=None, samples=20, samples_per_epoch=320)


def test_budget_in_samples_counts_a_kept_ragged_batch_as_what_it_holds():
    """Two epochs of 70 samples in batches of 32, 32 and 6 are six steps."""
    steps = count_steps(3, 32, epochs=1, steps=None, samples=140, samples_per_epoch=70)
    assert steps == 6
