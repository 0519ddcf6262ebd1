"""What each of the tutorials' mistakes costs: the numbers of its docstring."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from norm_cases import C, random_tensor
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.deviations import (
    BatchNormBiasedAverage,
    BatchNormEpsOutside,
    BatchNormNaiveVariance,
    BatchNormNoEps,
    BatchNormUnbiased,
    LayerNormNoEps,
    LayerNormUnbiased,
)
from normexp.norms.group import InstanceNorm


def columns(count: int, deviation: float = 1.0) -> Tensor:
    """(count, C), each channel with mean 0 and this deviation."""
    x = F.batch_norm(random_tensor(count, C), None, None, training=True, eps=1e-30)
    return x * deviation


def rows(size: int, deviation: float = 1.0) -> Tensor:
    return F.layer_norm(random_tensor(3, size), (size,), eps=1e-30) * deviation


SMALL = 3.5e-4**0.5
COSTS = [
    *((BatchNormUnbiased, columns(n), gain) for n, gain in ((2, 0.707), (8, 0.935), (32, 0.984))),
    *((LayerNormUnbiased, rows(n), gain) for n, gain in ((4, 0.866), (64, 0.992), (768, 0.9993))),
    *((BatchNormEpsOutside, columns(64, d), r) for d, r in ((1, 1), (0.01, 1.048), (0.001, 3.283))),
    (BatchNormNoEps, columns(64, SMALL), 1.0142),
    (LayerNormNoEps, rows(C, SMALL), 1.0142),
]


@pytest.mark.parametrize(("deviation", "x", "gain"), COSTS)
def test_outputs_are_the_norm_s_times_a_gain(deviation, x, gain):
    reference = nn.LayerNorm if "Layer" in deviation.__name__ else nn.BatchNorm1d
    out, expected = (make(x.shape[1]).double()(x) for make in (deviation, reference))
    assert_close(out, gain * expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("make", [BatchNormNoEps, LayerNormNoEps])
def test_without_eps_constants_are_not_a_number(make):
    assert make(C)(torch.ones(4, C)).isnan().all()


@pytest.mark.parametrize(("count", "ratio"), [(2, 0.5), (8, 0.875), (256, 255 / 256)])
def test_biased_average_makes_the_running_variance_too_small(count, ratio):
    norm, x = BatchNormBiasedAverage(C, momentum=1.0).double(), random_tensor(count, C)
    assert_close(norm(x), nn.BatchNorm1d(C).double()(x), rtol=0, atol=1e-12)
    assert_close(norm.running_var, ratio * x.var(dim=0), rtol=0, atol=1e-12)


def test_naive_variance_loses_its_digits_with_the_mean():
    errors = []
    for mean in (0.0, 1000.0, 10_000.0):
        x = (random_tensor(256, 64) + mean).float()
        norm = BatchNormNaiveVariance(64, momentum=1.0)
        out = norm(x)
        errors.append((norm.running_var - x.double().var(dim=0)).abs().max().item())
    assert errors[0] < 1e-5 and 0.02 < errors[1] < 0.5 and errors[2] > 2
    assert out.isnan().any()


def test_layer_norm_over_maps_loses_the_scale_of_channels():
    x = F.instance_norm(random_tensor(2, 2, 3, 4), eps=1e-30) * torch.tensor([[[1.0]], [[3.0]]])
    ours, theirs = InstanceNorm(2).double()(x), F.group_norm(x, 1)
    assert_close(ours, nn.LayerNorm((3, 4)).double()(x), rtol=0, atol=1e-12)
    deviations = [y.std(dim=(2, 3), correction=0)[0].tolist() for y in (ours, theirs)]
    assert deviations[0] == pytest.approx([1, 1], abs=1e-4)
    assert deviations[1] == pytest.approx([0.447, 1.342], abs=1e-3)
