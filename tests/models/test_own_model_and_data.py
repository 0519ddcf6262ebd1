"""Your own model or data set costs one Python file and one YAML, and no edited line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normexp.train import main

MODEL = """
from torch import nn

class TwoLayers(nn.Module):
    def __init__(self, norm, input_shape, num_outputs, *, width):
        super().__init__()
        self.conv = norm.conv(input_shape[0], width, 3)
        self.norm = norm(width)
        self.act = norm.act(width)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, inputs):
        return self.head(self.act(self.norm(self.conv(inputs))).amax(dim=(2, 3)))
"""
DATA = """
import torch
from normexp.data import Examples, build_image_data

def load_stripes(num_samples, val_fraction, num_classes, split_seed=0):
    targets = torch.arange(num_samples) % 2
    images = torch.zeros(num_samples, 1, 8, 8, dtype=torch.uint8)
    images[targets == 0, :, ::2] = 255
    images[targets == 1, :, :, ::2] = 255
    part = Examples(images, targets)
    return build_image_data(
        "stripes", part, part, num_classes=num_classes, val_fraction=val_fraction,
        split_seed=split_seed)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "my_data.py").write_text(DATA)
    for group, content in {
        "model": "_target_: my_model.TwoLayers\n_partial_: true\nwidth: 8\n",
        "data": "_target_: my_data.load_stripes\nnum_samples: 64\nnum_classes: 2\n"
        "val_fraction: 0.25\n",
    }.items():
        (tmp_path / "my_conf" / group).mkdir(parents=True)
        (tmp_path / "my_conf" / group / "mine.yaml").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


CUSTOM_DATA = ["data._target_=my_data.load_stripes", "data.num_samples=64", "data.num_classes=2"]
CUSTOM_DATA += ["data.val_fraction=0.25"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "num_parameters"),
    [
        # convolution, norm, act, head
        (["model=mine", "act=tlu"], 10 * 8 + 2 * 8 + 8 + 9 * 10),
        (["model=mine", "data=mine", "model.width=12"], 10 * 12 + 2 * 12 + 13 * 2),
        (["model=mine", "data=custom", *CUSTOM_DATA], 10 * 8 + 2 * 8 + 9 * 2),
        (["model=custom", "model._target_=my_model.TwoLayers", "model.width=4"], 40 + 8 + 5 * 10),
    ],
)
def test_own_model_and_data_train(folder: Path, choice: list[str], num_parameters: int) -> None:
    words = ["--config-dir", str(folder / "my_conf"), *choice, "norm=group", "norm.num_groups=2"]
    runs = folder / "runs"
    assert main([*words, "steps=2", "replicas=1", "workers=0", f"runs_dir={runs}"]) == 0
    (result,) = runs.glob("default/*/seed-0/result.json")
    content = json.loads(result.read_text())
    assert content["status"] == "finished"
    assert content["num_parameters"] == num_parameters


def test_own_data_that_contradict_themselves_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config-dir", str(folder / "my_conf"), "data=mine", "data.num_classes=1"]
    assert main([*words, "workers=0", f"runs_dir={folder / 'runs'}"]) == 2
    assert "data=stripes: train.targets has 1; num_outputs=1" in capsys.readouterr().err
    assert not (folder / "runs").exists()
