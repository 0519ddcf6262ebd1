"""Norms from the wild: arguments found by name, layouts by a probe, faults refused at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from norm_cases import EPS, SHAPES, C, random_tensor
from torch import Tensor, nn
from torch.testing import assert_close
from wild_norms import LlamaRMSNorm

from normexp.errors import UserError
from normexp.norms.adapt import adapt, find_layout, foreign_factory
from normexp.norms.factory import NormFactory


def norm_of(forward: Callable[[Any, Tensor], Any]) -> type[nn.Module]:
    """A class without arguments whose forward is this function."""
    return type("TheirNorm", (nn.Module,), {"forward": forward})


@pytest.mark.parametrize(
    "make",
    [
        lambda size=2.5, channels=3: nn.LayerNorm(channels),  # noqa: ARG005
        lambda k: nn.LayerNorm(k),
        lambda k, /: nn.LayerNorm(k),
        lambda *k: nn.LayerNorm(*k),
    ],
)
def test_features_go_to_the_argument_named_for_them_or_to_the_only_required_one(make):
    assert adapt(make, target="t", eps=EPS)(C).normalized_shape == (C,)


def test_eps_has_one_value_unless_the_user_sets_it():
    assert build(LlamaRMSNorm).norm.variance_epsilon == EPS
    assert build(LlamaRMSNorm, variance_epsilon=0.5).norm.variance_epsilon == 0.5


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


def build(make, **knobs) -> nn.Module:
    return foreign_factory(partial(make, **knobs), target="their.Norm", eps=EPS)(C).double()


def last(reference: nn.Module, x: Tensor) -> Tensor:
    return reference.double()(x.movedim(1, -1)).movedim(-1, 1)


def joined(reference: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The reference over (N, C, P), P positions."""
    return reference(x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)).view(x.shape)


ALL_DIMS, WITH_POSITIONS = (2, 3, 4, 5), (3, 4, 5)
RMS = partial(last, nn.RMSNorm(C, eps=EPS))
INSTANCE = partial(joined, nn.InstanceNorm1d(C, eps=EPS))
# A norm, the same over (N, C, *), and for which numbers of dimensions.
LAYOUTS = [
    (nn.LayerNorm, partial(last, nn.LayerNorm(C, eps=EPS)), ALL_DIMS),
    *((make, RMS, ALL_DIMS) for make in (nn.RMSNorm, LlamaRMSNorm, BareRMSNorm)),
    *(
        (make, partial(joined, nn.BatchNorm1d(C, eps=EPS).double()), ALL_DIMS)
        for make in (nn.BatchNorm1d, nn.BatchNorm2d)
    ),
    # torch takes (N, C, T) for one image without a batch axis, and only warns.
    (nn.InstanceNorm2d, INSTANCE, WITH_POSITIONS),
    (partial(nn.InstanceNorm2d, affine=True), INSTANCE, WITH_POSITIONS),
    (partial(nn.GroupNorm, num_groups=4), nn.GroupNorm(4, C, eps=EPS).double(), ALL_DIMS),
    (RowNorm, partial(joined, lambda x: x - x.mean(dim=(0, 2), keepdim=True)), ALL_DIMS),
]


@pytest.mark.parametrize(("make", "reference", "dims"), LAYOUTS)
def test_a_norm_of_any_layout_takes_channels_first_and_any_number_of_positions(
    make, reference, dims
):
    for num_dims in dims:
        x = random_tensor(*SHAPES[num_dims])
        assert_close(build(make)(x), reference(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [nn.Tanh, nn.Identity, partial(BareRMSNorm, axis=1)])
def test_without_a_sign_of_the_layout_channels_come_first(make):
    layout = find_layout(adapt(make, target="their.Norm", eps=None), C, target="their.Norm")
    assert not layout.channels_last and layout.num_dims == ALL_DIMS


def test_a_foreign_batch_norm_serves_token_sites_with_padding():
    site = NormFactory(lambda n: foreign_factory(nn.BatchNorm2d, target="t", eps=EPS)(n).double())
    x, mask = random_tensor(4, 5, C), torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    expected = nn.BatchNorm1d(C, eps=EPS).double()(x[mask])
    assert_close(site.tokens(C)(x, mask)[mask], expected, rtol=0, atol=1e-12)


def test_the_layout_is_noted_once_and_the_random_state_is_kept(caplog):
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        factory = foreign_factory(nn.LayerNorm, target="t", eps=1e-5)
        for num_features in (8, 16):
            factory(num_features)
    assert caplog.messages == ["norm._target_=t takes channels last, 2-D 3-D 4-D 5-D inputs"]
    assert torch.equal(torch.get_rng_state(), state)


class Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(x.shape[1], *[1] * (x.ndim - 2)))
        return x * self.gain


def failing(_, x: Tensor) -> Tensor:
    raise RuntimeError(f"no {x.ndim}-D today")


def broken_key(num_features: int) -> nn.Module:  # noqa: ARG001
    raise KeyError("gain")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            norm_of(lambda _, x: x[:, ::2]),
            r"does not fit on an input of shape \(4, 8\): .*\(4, 4\)",
        ),
        (norm_of(failing), r"\(4, 8\): RuntimeError: no 2-D today \(test_norm_foreign.py, line "),
        (partial(nn.LayerNorm, normalized_shape=4), r"does not fit .*norm\.layout=first or"),
        (broken_key, "cannot be built for 8 features: KeyError: 'gain'"),
        (nn.GroupNorm, "needs the argument num_groups; set norm.num_groups="),
        (nn.functional.relu, ""),
        (lambda n: n, "made a int"),
        (norm_of(lambda _, x: (x, x)), "returns a tuple, not a tensor"),
        (norm_of(lambda _, x: x.double() / 2), "returns torch.float64 .* for torch.float32"),
        (Late, "creates or reshapes parameters"),
        (nn.LazyBatchNorm2d, "uninitialized"),
    ],
)
def test_what_keeps_no_norm_contract_is_refused_with_the_reason(make, reason):
    with pytest.raises(UserError, match=rf"norm\._target_=their\.Norm .*{reason}"):
        build(make)


def test_the_layout_that_is_said_is_the_only_one_tried():
    def layout(say: str) -> nn.Module:
        make = foreign_factory(BareRMSNorm, target="t", eps=EPS, layout=say)
        return make(C).double()

    x = random_tensor(2, C, 3, 3)
    assert_close(layout("last")(x), RMS(x), rtol=0, atol=1e-12)
    assert_close(layout("first")(x), x / (x.square().mean(-1, keepdim=True) + EPS).sqrt())
    with pytest.raises(UserError, match=r"norm\.layout=both"):
        layout("both")


@pytest.mark.parametrize("name", ["LayerNorm2d", "BatchNormAct2d", "FilterResponseNormTlu2d"])
def test_a_norm_of_timm_learns_at_a_site(name: str):
    make = get_object(f"timm.layers.{name}")
    site = NormFactory(foreign_factory(make, target=name, eps=EPS))(C)
    site(random_tensor(4, C, 3, 3, dtype=torch.float)).square().sum().backward()
    assert list(site.parameters())
    assert all(p.grad is not None for p in site.parameters())
