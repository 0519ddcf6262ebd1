"""How norms from the wild are presented: where channels stand, and how many axes there are."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from foreign_cases import EPS, HiddenRMSNorm, build
from norm_cases import C, gradients, random_tensor
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.adapt import adapt, find_layout, foreign_factory
from normexp.norms.factory import NormFactory


class BareRMSNorm(nn.Module):
    """No features asked, no parameters: only what it pools tells its layout."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=self.axis, keepdim=True) + EPS).sqrt()


class RowNorm(nn.Module):
    """Batch statistics of rows (N, C); with positions its running mean takes another shape."""

    running_mean: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=0)
        self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
        return x - mean


def positions_joined(x: Tensor) -> Tensor:
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)


SHAPES = {2: (6, C), 3: (6, C, 5), 4: (4, C, 3, 5), 5: (3, C, 2, 3, 4)}
ALL_DIMS = (2, 3, 4, 5)
LAST = [
    (nn.LayerNorm, {}, nn.LayerNorm(C, eps=EPS)),
    (nn.RMSNorm, {}, nn.RMSNorm(C, eps=EPS)),
    (HiddenRMSNorm, {}, nn.RMSNorm(C, eps=EPS)),
    (BareRMSNorm, {}, nn.RMSNorm(C, eps=EPS)),
]


@pytest.mark.parametrize("num_dims", ALL_DIMS)
@pytest.mark.parametrize(("make", "knobs", "reference"), LAST)
def test_channels_last_norms_take_channels_first(make, knobs, reference, num_dims):
    norm = build(make, **knobs)
    x = random_tensor(*SHAPES[num_dims])
    expected = reference.double()(x.movedim(1, -1)).movedim(-1, 1)
    assert_close(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_dims", ALL_DIMS)
@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_batch_norms_of_one_number_of_dimensions_take_any(make, num_dims):
    norm, reference = build(make), nn.BatchNorm1d(C, eps=EPS).double()
    x = random_tensor(*SHAPES[num_dims])
    for _ in range(2):
        expected = reference(positions_joined(x)).view(x.shape)
        assert_close(norm(x), expected, rtol=0, atol=1e-12)
    for name, value in reference.state_dict().items():
        assert_close(norm.state_dict()[f"norm.{name}"], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_dims", [3, 4, 5])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("make", [nn.InstanceNorm1d, nn.InstanceNorm2d])
def test_instance_norms_never_read_samples_as_channels(make, affine, num_dims):
    """torch takes (N, C, T) for one image without a batch axis, and only warns."""
    norm, reference = build(make, affine=affine), nn.InstanceNorm1d(C, eps=EPS)
    x = random_tensor(*SHAPES[num_dims])
    expected = reference(positions_joined(x)).view(x.shape)
    assert_close(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_dims", ALL_DIMS)
def test_a_norm_that_fits_is_not_wrapped(num_dims):
    norm = build(nn.GroupNorm, num_groups=4)
    assert type(norm) is nn.GroupNorm and norm.eps == EPS
    x = random_tensor(*SHAPES[num_dims])
    assert_close(norm(x), nn.GroupNorm(4, C, eps=EPS).double()(x), rtol=0, atol=0)


@pytest.mark.parametrize("num_dims", ALL_DIMS)
def test_a_norm_of_rows_sees_each_position_as_a_row(num_dims):
    norm = build(RowNorm)
    x = random_tensor(*SHAPES[num_dims])
    mean = positions_joined(x).mean(dim=(0, 2))
    expected = x - mean.view(-1, *[1] * (num_dims - 2))
    assert_close(norm(x), expected, rtol=0, atol=1e-12)
    assert_close(norm.state_dict()["norm.running_mean"], 0.1 * mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [nn.Tanh, nn.Identity, partial(BareRMSNorm, axis=1)])
def test_without_a_sign_of_the_layout_channels_come_first(make):
    layout = find_layout(adapt(make, target="their.Norm", eps=None), C, target="their.Norm")
    assert not layout.channels_last and layout.num_dims == ALL_DIMS


def test_gradients_pass_through_the_presentation():
    norm, reference = build(nn.LayerNorm), nn.LayerNorm(C, eps=EPS).double()
    x = random_tensor(4, C, 3, 5).requires_grad_()
    expected = reference(x.movedim(1, -1)).movedim(-1, 1)
    found = gradients(norm(x), [x, *norm.parameters()])
    assert_close(found, gradients(expected, [x, *reference.parameters()]), rtol=0, atol=1e-12)


def test_a_foreign_batch_norm_serves_token_sites_with_padding():
    site = NormFactory(lambda n: foreign_factory(nn.BatchNorm2d, target="t", eps=EPS)(n).double())
    x, mask = random_tensor(4, 5, C), torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    expected = nn.BatchNorm1d(C, eps=EPS).double()(x[mask])
    assert_close(site.tokens(C)(x, mask)[mask], expected, rtol=0, atol=1e-12)


def test_the_finding_is_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        norm = foreign_factory(nn.LayerNorm, target="torch.nn.LayerNorm", eps=EPS)
        for num_features in (8, 16):
            norm(num_features)
    expected = "norm._target_=torch.nn.LayerNorm takes channels last, 2-D 3-D 4-D 5-D inputs"
    assert caplog.messages == [expected]


class OverSequence(nn.Module):
    """Pools the positions of (B, T, C), and takes nothing else."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        _, _, width = x.shape
        assert width == self.dim
        return x / (x.square().mean(dim=(1, 2), keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize(("view", "told"), [("token", True), ("sequence", False)])
def test_norm_of_sequences_that_sees_tokens_one_by_one_is_noted(caplog, view, told):
    make = foreign_factory(OverSequence, target="t", eps=EPS)
    with caplog.at_level(logging.INFO):
        NormFactory(make, view=view).tokens(C)
        NormFactory(make, view=view)(C)
    notes = [message for message in caplog.messages if "norm.view=sequence" in message]
    assert len(notes) == told


def test_a_probe_leaves_the_random_state():
    before = torch.get_rng_state()
    foreign_factory(nn.LayerNorm, target="torch.nn.LayerNorm", eps=EPS)(C)
    assert torch.equal(torch.get_rng_state(), before)
