"""Weights of a file, loaded into a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from normexp.any_network.weights import Weights, read_values
from normexp.errors import UserError


@pytest.mark.parametrize(
    ("missing", "is_refused"),
    [("1.weight", False), ("3.bias", False), ("0.bias", True), ("2.weight", True)],
)
def test_norms_and_the_last_layer_alone_may_lack_weights(missing: str, is_refused: bool) -> None:
    """An encoder without its head is a start; half of one is not, whatever its widths."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 3)]
    network, said = nn.Sequential(*layers), list[str]()
    values = {name: torch.rand(p.shape) for name, p in network.named_parameters()}
    del values[missing]
    weights = Weights("file.pt", "", lambda: values)
    if is_refused:
        with pytest.raises(UserError, match=f"7 of its 8 parameters.*{missing} is not in the file"):
            weights.load(network, said.append)
        return
    assert weights.load(network, said.append) == {}
    assert f"{missing} is not in the file" in said[0]
    for name, value in values.items():
        assert torch.equal(network.get_parameter(name), value)


@pytest.mark.parametrize("kept", ["0.weight", "2.weight"])
def test_a_tied_weight_is_loaded_under_either_name(kept: str) -> None:
    """As safetensors saves it."""
    network, said = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5)), list[str]()
    network[2].weight = network[0].weight
    values = {name: torch.rand(value.shape) for name, value in network.state_dict().items()}
    del values[{"0.weight": "2.weight", "2.weight": "0.weight"}[kept]]
    Weights("file.pt", "", lambda: values).load(network, said.append)
    assert "33 of 33 parameters are loaded; every" in said[0]
    assert torch.equal(network[0].weight, values[kept])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda value: (10 * value).to(torch.int8),
            "0.weight is torch.float32, in the file torch.int8",
        ),
        (Tensor.to_sparse, "0.weight is in the file as torch.sparse_coo"),
        (lambda value: value.to("meta"), "0.weight is in the file as .* on meta"),
        (lambda value: value / 0 * 0, "0.weight holds NaN"),
    ],
)
def test_values_that_are_no_plain_numbers_are_not_loaded(
    change: Callable[[Tensor], Tensor], reason: str
) -> None:
    """Quantized weights without their scale would be other weights."""
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    values = network.state_dict()
    values["0.weight"] = change(values["0.weight"])
    with pytest.raises(UserError, match=reason):
        Weights("file.pt", "", lambda: values).load(network, print)


def test_a_mask_may_hold_infinity_and_numbers_for_truth_values() -> None:
    network = nn.Linear(3, 4)
    network.register_buffer("causal", torch.zeros(2, 2))
    network.register_buffer("real", torch.zeros(2, dtype=torch.bool))
    values = {name: torch.ones(value.shape) for name, value in network.state_dict().items()}
    values["causal"] = torch.full((2, 2), -torch.inf).triu(1)
    Weights("file.pt", "", lambda: values).load(network, print)
    assert torch.equal(network.causal, values["causal"])
    assert network.real.all()


def test_a_file_of_weights_is_read_whatever_its_name(tmp_path: Path) -> None:
    values = {"a": torch.rand(2)}
    save_file(values, tmp_path / "w.bin")
    torch.save(values, tmp_path / "w.safetensors")
    for name in ("w.bin", "w.safetensors"):
        assert torch.equal(read_values(tmp_path / name)["a"], values["a"])
