"""Values per statistic, counted by what one value moves, against the formula of each norm."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from checks_cases import FlatNet, Make, convnet, encoder, image_data, padded_data
from torch import Tensor, nn

from normexp.batching.sizes import Sizes
from normexp.checks.probing import probe_batch
from normexp.checks.reach import measure_reaches
from normexp.checks.sites import ProbedSite, probe_sites
from normexp.checks.statistics_size import check_counts, count_values, smallest_group
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d
from normexp.norms.none import NoNorm


class Tanh(nn.Module):
    """tanh(5 x): bounded, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(5 * x)


class OwnSize(nn.Module):
    """x / sqrt(x^2 + eps): a root mean square over one value."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square() + 1e-5)


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, num_groups=4)


def torch_batch_norm(num_features: int) -> nn.Module:
    return nn.BatchNorm2d(num_features)


def counts_of(network: nn.Module, group_size: int) -> dict[str, int]:
    return counts_at(probe_sites(network, probe_batch(image_data(), 4)), group_size)


def counts_at(sites: Sequence[ProbedSite], group_size: int) -> dict[str, int]:
    return count_values(measure_reaches(sites, training=True), group_size)


# The sites of the small convnet see 8 channels at 64 positions, 16 at 16, 16 at 16.
@pytest.mark.parametrize(
    ("make", "per_sample", "group_size"),
    [
        (BatchNorm, (64, 16, 16), 3),
        (BatchNorm, (64, 16, 16), 128),
        (torch_batch_norm, (64, 16, 16), 128),
        (InstanceNorm, (64, 16, 16), None),
        (LayerNorm, (8 * 64, 16 * 16, 16 * 16), None),
        (LayerNorm2d, (8, 16, 16), None),
        (group_norm, (2 * 64, 4 * 16, 4 * 16), None),
    ],
)
def test_count_on_maps_is_of_the_formula(
    make: Make, per_sample: tuple[int, ...], group_size: int | None
):
    """`group_size` None: the samples that share a batch do not count."""
    counts = counts_of(convnet(NormFactory(make)), group_size or 32)
    expected = [count * (group_size or 1) for count in per_sample]
    assert list(counts.items()) == list(zip(("norm1", "norm2", "norm3"), expected, strict=True))


@pytest.mark.parametrize("make", [NoNorm, lambda _: Tanh()], ids=["none", "tanh"])
def test_norm_without_a_statistic_has_no_count(make: Make):
    assert counts_of(convnet(NormFactory(make)), 32) == {}
    assert counts_of(FlatNet(NormFactory(make)), 32) == {}


def test_count_over_tokens_is_of_the_view():
    data = padded_data()
    batch = probe_batch(data, 4)
    tokens = probe_sites(encoder(NormFactory(group_norm)), batch)
    assert set(counts_at(tokens, 8).values()) == {16 // 4}
    positions = probe_sites(encoder(NormFactory(group_norm, view="sequence")), batch)
    assert set(counts_at(positions, 8).values()) == {16 // 4 * 8}
    pooled = probe_sites(encoder(NormFactory(BatchNorm)), batch)
    assert set(counts_at(pooled, 32).values()) == {32 * 8}


@pytest.mark.parametrize("make", [lambda n: nn.GroupNorm(n, n), lambda _: OwnSize()])
def test_statistic_over_one_value_is_refused_with_its_site(make: Make):
    counts = counts_of(FlatNet(NormFactory(make)), 32)
    assert counts == {"norm1": 1}
    with pytest.raises(UserError, match="statistics over 1 value at norm1"):
        check_counts(counts, 32)


def test_group_of_one_sample_leaves_batch_norm_one_value():
    assert counts_of(FlatNet(NormFactory(BatchNorm)), 1) == {"norm1": 1}
    assert counts_of(convnet(NormFactory(BatchNorm)), 1)["norm2"] == 16


def test_weight_that_starts_at_zero_is_no_statistic_over_one_value():
    def silent(num_features: int) -> nn.Module:
        norm = BatchNorm(num_features)
        nn.init.zeros_(norm.weight)  # pyright: ignore[reportArgumentType]
        return norm

    assert counts_of(FlatNet(NormFactory(silent)), 32) == {"norm1": 32}


def test_few_values_are_warned_of_by_number_and_site(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_counts({"norm1": 128, "norm2": 8, "norm3": 2, "norm4": 8, "norm5": 9}, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "statistics over only 2 values at norm3",
        "statistics over only 8 values at norm2, norm4",
    ]


@pytest.mark.parametrize(
    ("sizes", "num_samples", "drop_last", "smallest"),
    [
        (Sizes(32), 100, True, 32),
        (Sizes(32, 16, 4), 100, True, 4),
        (Sizes(32), 96, False, 32),
        (Sizes(32), 97, False, 1),
        (Sizes(32, 8, 4), 96 + 13, False, 1),  # parts of 8 and 5, the latter in groups of 4 and 1
        (Sizes(32, 8, 4), 96 + 8, False, 4),
        (Sizes(32, None, 8), 96 + 6, False, 6),
    ],
    ids=str,
)
def test_smallest_group_counts_a_ragged_last_batch(
    sizes: Sizes, num_samples: int, drop_last: bool, smallest: int
):
    assert smallest_group(sizes, num_samples, drop_last=drop_last) == smallest
