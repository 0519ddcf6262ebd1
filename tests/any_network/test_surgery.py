"""Replacing the norms of finished networks: of torchvision, timm, transformers and one's own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import timm.layers
import torch
import torchvision
from surgery_cases import layer_norm, replaced, taking_settings
from torch import Tensor, nn
from wild_norms import LlamaRMSNorm

from normexp.errors import UserError
from normexp.norms.adapt import foreign_factory
from normexp.norms.factory import NormFactory
from normexp.norms.site import load_as_built, named_sites, state_as_built
from normexp.norms.zoo.batch import BatchRenorm

LAYER_NORM = taking_settings(layer_norm)
BATCH_NORM = taking_settings(nn.BatchNorm2d)
MAP = torch.randn(4, 6, 3, 3)
TOKENS = torch.randn(4, 3, 6)


def shape_at_norm(old: nn.Module, *shape: int) -> tuple[int, ...]:
    """The shape in which the new norm sees an input of `shape`, in the place of `old`."""
    shapes = []

    def make(num_features: int, **_: Any) -> nn.Module:
        norm = nn.Identity()
        norm.register_forward_hook(
            lambda _m, args, _o: shapes.append((num_features, *args[0].shape))
        )
        return norm

    network = nn.Sequential(nn.Sequential(old))
    replaced(network, NormFactory(make), torch.randn(shape))
    shapes.clear()
    assert not any(module is old for module in network.modules())
    assert network(torch.randn(shape)).shape == shape
    return shapes[0]


MAPS = {2: (2, 6), 3: (2, 6, 3), 4: (2, 6, 3, 4), 5: (2, 6, 3, 4, 5)}
OF_MAPS = [
    *((nn.BatchNorm1d(6), n) for n in (2, 3)),
    *((make(6), 4) for make in (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d)),
    (nn.InstanceNorm3d(6), 5),
    (nn.GroupNorm(2, 6), 4),
    (torchvision.models.convnext.LayerNorm2d(6), 4),
    (torchvision.ops.FrozenBatchNorm2d(6), 4),
    (timm.layers.RmsNorm2d(6), 4),
    (timm.layers.GroupNormAct(6, group_size=3), 4),
    (timm.layers.LayerNormAct2d(6), 4),
]


@pytest.mark.parametrize(("old", "num_dims"), OF_MAPS)
def test_norm_of_maps_becomes_a_site_of_maps(old: nn.Module, num_dims: int) -> None:
    assert shape_at_norm(old, *MAPS[num_dims]) == (6, *MAPS[num_dims])


LAST = [nn.LayerNorm(6), nn.RMSNorm(6), timm.layers.RmsNorm(6), LlamaRMSNorm(6)]


@pytest.mark.parametrize("old", LAST, ids=lambda old: type(old).__name__)
@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 6), (2, 3, 4, 6)])
def test_norm_of_the_last_axis_becomes_a_site_of_tokens(
    old: nn.Module, shape: tuple[int, ...]
) -> None:
    assert shape_at_norm(old, *shape) == (6, torch.Size(shape[:-1]).numel(), 6)


def test_a_norm_that_stands_in_two_places_becomes_one_site() -> None:
    shared = nn.BatchNorm2d(6)
    network = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    replaced(network, BATCH_NORM, MAP)
    assert network[0] is network[1][1] and [name for name, _ in named_sites(network)] == ["0"]


def test_settings_values_and_statistics_follow_the_old_norm() -> None:
    old = nn.BatchNorm2d(6, eps=1e-3, momentum=0.01)
    for tensor in (*old.parameters(), old.running_mean, old.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 1, 2)
    network = nn.Sequential(old, nn.BatchNorm2d(6, affine=False))
    expected = old.state_dict()
    surgery = replaced(network, BATCH_NORM, MAP)
    new, plain = (site.norm for _, site in named_sites(network))
    assert (new.eps, new.momentum, plain.affine) == (1e-3, 0.01, False)
    torch.testing.assert_close(dict(new.state_dict()), dict(expected), rtol=0, atol=0)
    assert surgery.lost == []
    other = nn.BatchNorm2d(6)
    nn.init.ones_(other.get_buffer("running_mean"))
    surgery = replaced(nn.Sequential(other), LAYER_NORM, MAP)
    assert surgery.lost == ["0.running_mean"]


def test_batches_of_an_earlier_training_do_not_count_for_a_ramp() -> None:
    old = nn.BatchNorm2d(6)
    assert old.num_batches_tracked is not None
    old.num_batches_tracked.fill_(9)
    network = nn.Sequential(old)
    bounds = {"r_max": 3.0, "d_max": 5.0, "warmup": 0.1, "r_ramp_end": 0.4, "d_ramp_end": 0.3}
    surgery = replaced(network, taking_settings(partial(BatchRenorm, **bounds)), MAP)
    ((_, site),) = named_sites(network)
    assert site.norm.num_batches_tracked == 0 and surgery.lost == []


def test_activation_of_a_norm_is_kept() -> None:
    network = nn.Sequential(timm.layers.BatchNormAct2d(6, act_layer="silu"))
    x = torch.randn(4, 6, 3, 3)
    expected = network(x)
    replaced(network, BATCH_NORM, x)
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-6)
    assert not any(getattr(module, "inplace", False) for module in network.modules())


def test_transformer_of_torch_works_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    network = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8)
    expected = network.train()(x)
    replaced(network, LAYER_NORM, x)
    torch.testing.assert_close(network.eval()(x), expected, rtol=0, atol=1e-4)


class EntropyNorm(LlamaRMSNorm):
    """Norm in name: it squashes what it normalizes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).tanh()


def test_classes_can_be_named_and_what_is_left_is_said() -> None:
    parts = [nn.Linear(6, 6), LlamaRMSNorm(6), EntropyNorm(6), nn.LayerNorm((3, 6))]
    surgery = replaced(nn.Sequential(*parts), LAYER_NORM, TOKENS)
    assert surgery.classes == {"1": "LlamaRMSNorm"}
    said = list(surgery.notes())
    assert said[0] == "replaced 1 LlamaRMSNorm: 1"
    assert re.search(r"left alone: .*1 LayerNorm \(.*several axes.*1 EntropyNorm \(.*rms", said[1])
    network = nn.Sequential(nn.LayerNorm(6), LlamaRMSNorm(6))
    assert replaced(network, LAYER_NORM, TOKENS, ["LlamaRMSNorm"]).classes.keys() == {"1"}


@pytest.mark.parametrize(
    ("parts", "only", "message"),
    [
        ([nn.Linear(6, 6)], None, "no norm.*1 Linear.*argument `norm`"),
        ([nn.LayerNorm((3, 6))], None, "left alone: 1 LayerNorm .*several axes"),
        ([EntropyNorm(6)], ["EntropyNorm"], r"model.replace=\[EntropyNorm\].*no affine map"),
        ([nn.LayerNorm(6)], ["LayerNom"], "model.replace.*LayerNom.*LayerNorm"),
    ],
)
def test_nothing_to_replace_is_refused(parts: list, only: list | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replaced(nn.Sequential(*parts), LAYER_NORM, TOKENS, only)


def test_norms_as_built_share_their_statistics_as_norm_batch_size_says():
    network = nn.Sequential(nn.BatchNorm2d(3))
    factory = NormFactory(foreign_twin, norm_batch_size=2, keeps_norms=True)
    surgery = replaced(network, factory, torch.randn(4, 3, 5, 5))
    assert not surgery.lost
    x = torch.randn(4, 3, 5, 5)
    parts = torch.cat([nn.BatchNorm2d(3)(part) for part in x.split(2)])
    torch.testing.assert_close(network(x), parts)


@pytest.mark.parametrize(
    "network",
    [
        lambda: timm.create_model("test_resnet", num_classes=3),
        # channels last
        lambda: timm.create_model("test_convnext", num_classes=3, depths=(1, 1, 1, 1)),
        pytest.param(  # activations inside of norms
            lambda: timm.create_model("regnetx_002", num_classes=3), marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize("keeps_norms", [True, False])
def test_trained_weights_load_strictly_into_the_network_as_built(
    network: Callable[[], nn.Module], *, keeps_norms: bool
):
    """Before training, norms that are kept give its very outputs, and so do the same norms."""
    built = network()
    trained = copy.deepcopy(built)
    factory = NormFactory(foreign_twin, keeps_norms=keeps_norms)
    x = torch.randn(4, 3, 32, 32)
    replaced(trained, factory, x)
    again = copy.deepcopy(trained)
    for value in again.state_dict().values():
        value.zero_()
    for is_training in (False, True):
        outputs = [one.train(is_training)(x) for one in (built, trained)]
        torch.testing.assert_close(*outputs, rtol=0, atol=0 if keeps_norms else 1e-5)
    outputs[1].sum().backward()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.sub_(0.01 * parameter.grad)
    state = state_as_built(trained)
    built.load_state_dict(state)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(built.eval()(x), trained.eval()(x))
    load_as_built(again, state)
    assert torch.equal(again.eval()(x), trained.eval()(x))


def foreign_twin(num_features: int, eps: float = 1e-5, momentum: float | None = None, **_: Any):
    """Batch norm with the momentum of the replaced norm, layer norm in place of one without."""
    if momentum is None:
        return foreign_factory(nn.LayerNorm, target="torch.nn.LayerNorm", eps=eps)(num_features)
    return nn.BatchNorm2d(num_features, eps, momentum)
