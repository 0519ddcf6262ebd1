from __future__ import annotations

import pytest
import torch

from normexp.batching.draws import Dropout, derive_seed, generator


def test_draw_is_a_function_of_seed_stream_and_index():
    assert derive_seed(3, "order", 5) == derive_seed(3, "order", 5)
    others = [derive_seed(4, "order", 5), derive_seed(3, "init", 5), derive_seed(3, "order", 6)]
    assert len({derive_seed(3, "order", 5), *others}) == 4


def test_neighbouring_seeds_draw_independently():
    rows = torch.stack([torch.randn(2000, generator=generator(s, "init")) for s in range(8)])
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 0.1  # four standard errors of 1/sqrt(2000)


def dropout(p: float, key: int = 7) -> Dropout:
    module = Dropout(p)
    module.key.fill_(key)
    return module.train()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(p: float):
    x = torch.ones(400, 500)
    y = dropout(p)(x)
    kept = (y != 0).double().mean().item()
    assert kept == pytest.approx(1 - p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_dropout_noise_has_no_pattern_along_rows_columns_or_keys():
    masks = [(dropout(0.5, key)(torch.ones(300, 400)) != 0).double() - 0.5 for key in (1, 2)]
    noise = masks[0]
    limit = 5 * 0.25 / noise.numel() ** 0.5
    assert (noise[1:] * noise[:-1]).mean().abs() < limit
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < limit
    assert (masks[0] * masks[1]).mean().abs() < limit


def test_dropout_of_a_part_is_that_part_of_the_whole():
    x = torch.randn(8, 3, 4)
    whole = dropout(0.4)(x)
    part = dropout(0.4)
    part.first_sample.fill_(6)
    assert torch.equal(part(x[6:]), whole[6:])


def test_dropout_does_nothing_in_evaluation():
    x = torch.randn(4, 5)
    assert torch.equal(dropout(0.5).eval()(x), x)


def test_dropout_refuses_a_value_outside_of_0_to_1():
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        Dropout(1.0)
