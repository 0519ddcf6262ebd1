"""What each of the tutorials' mistakes costs: the numbers of its docstring."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from norm_cases import EPS, C, random_tensor, randomize
from torch import nn
from torch.testing import assert_close

from normexp.norms.deviations import (
    BatchNormBiasedAverage,
    BatchNormEpsOutside,
    BatchNormFlattened,
    BatchNormNaiveVariance,
    BatchNormNoEps,
    BatchNormUnbiased,
    LayerNormNoEps,
    LayerNormOverMap,
    LayerNormOverTime,
    LayerNormUnbiased,
)


@pytest.mark.parametrize(("count", "gain"), [(2, 0.707), (8, 0.935), (32, 0.984)])
def test_unbiased_batch_norm_has_a_gain_that_depends_on_the_batch(count, gain):
    x = random_tensor(count, C)
    ratio = BatchNormUnbiased(C, eps=0.0).double()(x) / nn.BatchNorm1d(C, eps=1e-30).double()(x)
    assert_close(ratio, torch.full_like(ratio, ((count - 1) / count) ** 0.5), rtol=0, atol=1e-9)
    assert ratio[0, 0].item() == pytest.approx(gain, abs=5e-4)


@pytest.mark.parametrize(("size", "gain"), [(4, 0.866), (64, 0.992), (100, 0.995), (768, 0.9993)])
def test_unbiased_layer_norm_has_a_constant_gain(size, gain):
    x = random_tensor(3, size)
    ratio = LayerNormUnbiased(size, eps=0.0).double()(x) / F.layer_norm(x, (size,), eps=1e-30)
    assert_close(ratio, torch.full_like(ratio, ((size - 1) / size) ** 0.5), rtol=0, atol=1e-9)
    assert ratio[0, 0].item() == pytest.approx(gain, abs=5e-4)


@pytest.mark.parametrize(
    ("deviation", "ratio"), [(1.0, 1.0), (0.1, 1.0004), (0.01, 1.048), (0.001, 3.283)]
)
def test_eps_outside_the_root_enlarges_small_channels(deviation, ratio):
    x = F.batch_norm(random_tensor(64, C), None, None, training=True, eps=1e-30) * deviation
    theirs = nn.BatchNorm1d(C).double()(x)
    found = BatchNormEpsOutside(C).double()(x) / theirs
    assert_close(found, torch.full_like(found, ratio), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("count", "ratio"), [(2, 0.5), (8, 0.875), (256, 0.996)])
def test_biased_average_makes_the_running_variance_too_small(count, ratio):
    x = random_tensor(count, C)
    ours, theirs = BatchNormBiasedAverage(C, momentum=1.0).double(), nn.BatchNorm1d(C, momentum=1.0)
    assert_close(ours(x), theirs.double()(x), rtol=0, atol=1e-12)
    found = ours.state_dict()["running_var"] / theirs.state_dict()["running_var"]
    assert_close(found, torch.full_like(found, (count - 1) / count), rtol=0, atol=1e-12)
    assert found[0].item() == pytest.approx(ratio, abs=5e-4)


def test_naive_variance_loses_its_digits_with_the_mean():
    x = random_tensor(256, 64)
    error = []
    for mean in (0.0, 1000.0, 10_000.0):
        shifted = (x + mean).float()
        norm = BatchNormNaiveVariance(64, momentum=1.0)
        out = norm(shifted)
        exact = shifted.double().var(dim=0)
        error.append((norm.state_dict()["running_var"] - exact).abs().max().item())
    assert error[0] < 1e-5 and 0.02 < error[1] < 0.5 and error[2] > 2
    assert out.isnan().any()


def test_without_eps_small_variances_come_out_larger_and_constants_not_at_all():
    x = F.layer_norm(random_tensor(4, C), (C,), eps=1e-30) * 3.5e-4**0.5
    ratio = LayerNormNoEps(C).double()(x) / F.layer_norm(x, (C,))
    assert_close(ratio, torch.full_like(ratio, 1.01419), rtol=0, atol=1e-5)
    channels = F.batch_norm(random_tensor(64, C), None, None, training=True, eps=1e-30)
    channels = channels * 3.5e-4**0.5
    ratio = BatchNormNoEps(C).double()(channels) / nn.BatchNorm1d(C).double()(channels)
    assert_close(ratio, torch.full_like(ratio, 1.01419), rtol=0, atol=1e-5)
    for norm in (BatchNormNoEps(C), LayerNormNoEps(C)):
        assert norm(torch.ones(4, C)).isnan().all()


def test_layer_norm_over_time_is_axis_1_of_a_sequence_and_instance_norm():
    x = random_tensor(3, C, 5)
    sequence = x.transpose(1, 2)  # (B, T, C)
    centred = sequence - sequence.mean(dim=1, keepdim=True)
    expected = centred / (sequence.var(dim=1, correction=0, keepdim=True) + EPS).sqrt()
    out = LayerNormOverTime(C, eps=EPS).double()(x)
    assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)
    assert_close(out, nn.InstanceNorm1d(C, eps=EPS).double()(x), rtol=0, atol=1e-12)


def test_layer_norm_over_maps_is_torchs_of_height_and_width_and_loses_the_channels():
    x = F.instance_norm(random_tensor(2, 2, 3, 4), eps=1e-30) * torch.tensor([1.0, 3.0]).view(
        2, 1, 1
    )
    out = LayerNormOverMap(2).double()(x)
    assert_close(out, nn.LayerNorm((3, 4)).double()(x), rtol=0, atol=1e-12)
    layer = F.group_norm(x, 1)
    deviations = [y.std(dim=(2, 3), correction=0)[0].tolist() for y in (out, layer)]
    assert deviations[0] == pytest.approx([1, 1], abs=1e-4)
    assert deviations[1] == pytest.approx([0.447, 1.342], abs=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_flattened_batch_norm_is_torchs_of_all_positions_and_features(training):
    ours = randomize(BatchNormFlattened(C, num_positions=5, eps=EPS).double()).train(training)
    theirs = nn.BatchNorm1d(5 * C, eps=EPS).double().train(training)
    state = {name.replace("position_", ""): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict({k: v.flatten() if v.ndim else v for k, v in state.items()})
    x = random_tensor(6, C, 5)
    expected = theirs(x.transpose(1, 2).flatten(1)).unflatten(1, (5, C)).transpose(1, 2)
    assert_close(ours(x), expected, rtol=0, atol=1e-12)
    longer = torch.cat([x, torch.full((6, C, 2), 9.0)], dim=2)
    mask = torch.tensor([True] * 5 + [False] * 2).expand(6, 7)
    again = randomize(BatchNormFlattened(C, num_positions=5, eps=EPS).double()).train(training)
    assert_close(again(longer, mask)[..., :5], expected, rtol=0, atol=1e-12)
    assert sum(p.numel() for p in ours.parameters()) == 2 * C * 5
