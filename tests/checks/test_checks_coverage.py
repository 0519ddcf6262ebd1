"""Every parameter reaches the optimizer, and a gradient every parameter of a norm."""

from __future__ import annotations

import logging

import pytest
import torch
from checks_cases import FlatNet, convnet, gpt, image_data, text_data
from torch import Tensor, nn

from normexp.checks.coverage import check_coverage, find_missing, find_without_gradient
from normexp.checks.probing import probe_batch
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.group import LayerNorm
from normexp.training.optim import parameter_groups


class Forgetful(LayerNorm):
    """A layer norm that has one parameter too many, and cuts another off."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.unused = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask
        assert self.weight is not None and self.bias is not None
        return torch.layer_norm(x, x.shape[1:]) * self.weight.detach() + self.bias


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(network, weight_decay=0.1, decay_norm=False)
    return torch.optim.SGD(groups, lr=0.1)


def test_groups_of_a_training_hold_every_parameter():
    for network in (convnet(NormFactory(LayerNorm)), gpt(NormFactory(LayerNorm))):
        assert find_missing(network, sgd(network)) == []


def test_parameter_outside_the_optimizer_is_refused_by_name():
    network = FlatNet(NormFactory(LayerNorm))
    optimizer = torch.optim.SGD(network.hidden.parameters(), lr=0.1)
    network.head.bias.requires_grad_(False)
    with pytest.raises(UserError, match="norm1.norm.weight, norm1.norm.bias, head.weight requires"):
        check_coverage(network, optimizer, probe_batch(image_data(), 4))


def test_norm_parameter_without_a_gradient_is_warned_of(caplog: pytest.LogCaptureFixture):
    network = FlatNet(NormFactory(Forgetful))
    with caplog.at_level(logging.WARNING):
        check_coverage(network, sgd(network), probe_batch(image_data(), 4))
    (record,) = caplog.records
    assert "norm1.norm.weight, norm1.norm.unused" in record.getMessage()
    assert all(parameter.grad is None for parameter in network.parameters())


def test_gradients_of_a_language_model_reach_all_norms():
    network = gpt(NormFactory(LayerNorm))
    assert find_without_gradient(network, probe_batch(text_data(), 4)) == []
