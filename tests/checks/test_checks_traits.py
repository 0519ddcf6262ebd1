"""What a cell is refused for, or marked with, before anything is trained."""

from __future__ import annotations

import logging
from pathlib import Path

import broken_norms as broken
import pytest
import torch
from checks_cases import FlatNet, Hidden, convnet, image_data, text_data
from torch import Tensor, nn

from normexp.batching.sizes import Sizes
from normexp.cells.cell import Cell, prepare_cell
from normexp.checks.probing import cannot_stack
from normexp.checks.traits import Traits, measure_traits
from normexp.config.compose import compose_cell
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import InstanceNorm
from normexp.norms.none import NoNorm
from normexp.records.result import read_result
from normexp.train import main


def traits_of(network: nn.Module, data: Data, sizes: Sizes | None = None) -> Traits:
    return measure_traits(network, data, sizes or Sizes(8), drop_last=True)


def prepared(*words: str) -> Cell:
    return prepare_cell(*compose_cell(list(words)))


def test_traits_of_batch_norm_on_images():
    traits = traits_of(convnet(NormFactory(BatchNorm)), image_data())
    assert traits.mixes_samples and not traits.mixes_samples_in_evaluation
    assert not traits.leaks_future and not traits.leaks_future_in_training
    assert traits.pools and traits.stacking_obstacle is None
    assert traits.elements_per_sample == 8 * 64 + 16 * 16 + 16 * 16


def test_no_norm_pools_nothing():
    traits = traits_of(convnet(NormFactory(NoNorm)), image_data())
    assert not traits.pools and not traits.mixes_samples


def test_batch_norm_behind_a_gate_that_starts_at_zero_mixes_samples(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.INFO):
        traits = traits_of(Hidden(NormFactory(BatchNorm)), text_data())
    assert traits.mixes_samples
    assert traits.leaks_future_in_training and not traits.leaks_future
    assert "train/loss is no likelihood" in caplog.text


def test_norm_that_erases_the_input_is_refused():
    """The mean over positions of what is centred over positions is its bias."""

    class MeanOverPositions(nn.Module):
        def __init__(self, norm: NormFactory) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.final_norm = norm(4)
            self.head = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.head(self.final_norm(self.conv(inputs)).mean(dim=(2, 3)))

    with pytest.raises(UserError, match="output is the same for every input"):
        traits_of(MeanOverPositions(NormFactory(InstanceNorm)), image_data())


def test_head_that_starts_at_zero_does_not_look_as_if_the_input_were_erased():
    network = FlatNet(NormFactory(NoNorm))
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    assert traits_of(network, image_data()).leak is None


def test_ragged_last_batch_of_one_sample_is_refused():
    network = FlatNet(NormFactory(BatchNorm))
    assert measure_traits(network, image_data(33), Sizes(8), drop_last=True).mixes_samples
    with pytest.raises(UserError, match="site norm1: batch norm got one value per channel"):
        measure_traits(network, image_data(33), Sizes(8), drop_last=False)


@pytest.mark.parametrize("norm", ["instance", "causal_instance"])
def test_norm_that_needs_positions_is_refused_on_a_model_that_has_none(norm: str):
    with pytest.raises(UserError, match="norm at site norm1: .* needs positions"):
        prepared(f"norm={norm}", "model=custom", "model._target_=checks_cases.FlatNet")


def test_language_model_that_reads_the_future_is_refused():
    with pytest.raises(UserError, match="try norm=causal_instance, or allow_leak=true"):
        prepared("norm=instance", "data=manual", "model.depth=1")


def test_optimizer_that_cannot_be_built_is_the_users_mistake():
    with pytest.raises(UserError, match="optim._target_=torch.optim.SGD: .*unexpected.*'knob'"):
        prepared("+optim.knob=3")


def test_numbers_of_a_leak_that_is_allowed_are_marked_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["norm=instance", "data=manual", "allow_leak=true", f"runs_dir={tmp_path}"]
    small = ["model.depth=1", "model.width=16", "steps=2", "replicas=1", "data.block_size=8"]
    assert main([*words, *small]) == 0
    assert "INVALID" in capsys.readouterr().out
    (path,) = tmp_path.rglob("result.json")
    result = read_result(path)
    assert result is not None
    assert result.invalid == (
        "leaks the future at blocks.0.attn_norm, blocks.0.mlp_norm, final_norm"
    )
    assert result.config["leaks_future"] is True


class Exploding(nn.Module):
    """A norm that fails in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("no statistics\nsecond line")
        return x * torch.ones(())


def test_failure_of_a_norm_names_its_site():
    with pytest.raises(UserError, match="norm at norm1: no statistics$"):
        traits_of(convnet(NormFactory(lambda _: Exploding())), image_data())


def test_tensor_that_a_forward_keeps_is_in_the_way_of_stacking():
    batch = {"inputs": torch.randn(4, 8), "targets": torch.zeros(4)}
    assert "no buffer" in str(cannot_stack(broken.KeepsItsMean(8), batch))
