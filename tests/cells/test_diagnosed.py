"""Diagnoses of networks from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normexp.evaluate import main

NETWORK = """
from torch import nn

def layers(layer, num_classes):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    return nn.Conv2d(1, 8, 3), layer, *head

class Plain(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(*layers(nn.BatchNorm2d(8), num_classes))

class Grouped(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(*layers(nn.GroupNorm(4, 8), num_classes))
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "my_diagnosed.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return ["model=custom", "trainer=cpu", "data.limit_train=256"]


def save(name: str) -> str:
    """Saves weights that look trained, without buffers."""
    import my_diagnosed

    network = getattr(my_diagnosed, name)()
    torch.nn.init.normal_(network[1].weight)
    torch.save(dict(network.named_parameters()), "weights.pt")
    return f"model._target_=my_diagnosed.{name}"


def test_weights_without_buffers_are_told(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*words, save("Plain"), "model.weights=weights.pt"]) == 0
    printed = capsys.readouterr()
    assert "were not in the state_dict" in printed.out
    assert "not loaded: 1.running_mean" in printed.err
    assert "images are normalized by mean [0.3" in printed.err


def test_a_network_keeps_its_norms(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*words, save("Grouped"), "model.weights=weights.pt"]) == 0
    assert "No norm with running averages" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "more, message",
    [
        ([], "model.weights is missing: name the file"),
        (["model.weights=weights.pt", "batch_size=200"], "batch_size=200: the training split has"),
        (["model.weights=weights.pt", "-m", "batch_size=8,16"], "2 cells: a diagnosis is of one"),
    ],
)
def test_mistakes(words: list[str], more: list[str], message: str, capsys):
    assert main([*words, save("Plain"), *more]) == 2
    assert message in capsys.readouterr().err
