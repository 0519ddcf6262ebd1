from __future__ import annotations

import pytest
import torch

from normexp.batching.draws import Dropout, derive_seed, generator


def test_draws_are_functions_of_seed_stream_and_index_and_independent():
    assert derive_seed(3, "order", 5) == derive_seed(3, "order", 5)
    others = [derive_seed(4, "order", 5), derive_seed(3, "init", 5), derive_seed(3, "order", 6)]
    assert len({derive_seed(3, "order", 5), *others}) == 4
    rows = torch.stack([torch.randn(2000, generator=generator(s, "init")) for s in range(8)])
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 0.1  # four standard errors of 1/sqrt(2000)


def dropout(p: float, key: int = 7) -> Dropout:
    module = Dropout(p)
    module.key.fill_(key)
    return module.train()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_share_and_the_mean_without_a_pattern(p: float):
    x = torch.ones(300, 400)
    outputs = [dropout(p, key)(x) for key in (1, 2)]
    kept = [(y != 0).double() for y in outputs]
    limit = 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert kept[0].mean().item() == pytest.approx(1 - p, abs=limit)
    torch.testing.assert_close(outputs[0], kept[0].float() / (1 - p))
    noise = [mask - (1 - p) for mask in kept]
    pairs = [(noise[0][1:], noise[0][:-1]), (noise[0][:, 1:], noise[0][:, :-1]), tuple(noise)]
    for first, second in pairs:  # along rows, columns and keys
        assert (first * second).mean().abs() < limit


def test_dropout_of_a_part_is_that_part_of_the_whole_and_nothing_in_evaluation():
    x = torch.randn(8, 3, 4)
    whole = dropout(0.4)(x)
    part = dropout(0.4)
    part.first_sample.fill_(6)
    assert torch.equal(part(x[6:]), whole[6:])
    assert torch.equal(part.eval()(x), x)
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        Dropout(1.0)
