"""Models, data and weights of the user's own, through the command line."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from normexp import load, run
from normexp.errors import UserError
from normexp.evaluate import main as evaluate
from normexp.train import main

SOURCE = """
import torch
from torch import nn
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


class Plain(nn.Module):
    def __init__(self, num_classes=10, width=8):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.bn = nn.BatchNorm2d(width, eps=1e-3, momentum=0.2)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).relu().mean(dim=(2, 3)))


def make_plain(num_classes=10):
    class Local(Plain):
        pass

    return Local(num_classes)


class Freezing(Plain):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self
"""
DATA = """
_target_: someone.load_stripes
num_samples: 64
num_classes: 2
val_fraction: 0.25
"""
MODEL = ["model=custom", "model._target_=someone.Plain"]
FROZEN = ["lr=1e-30", "optim.weight_decay=0", "steps=1"]  # one step that moves no weight


def plain_weights(num_classes: int = 10, channels: int = 1) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    shapes = {"conv.weight": (8, channels, 3, 3), "conv.bias": (8,), "fc.bias": (num_classes,)}
    shapes |= {f"bn.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")}
    shapes["fc.weight"] = (num_classes, 8)
    values = {name: torch.rand(shape, generator=draws) + 0.5 for name, shape in shapes.items()}
    return values | {"bn.num_batches_tracked": torch.tensor(7)}


@pytest.fixture
def folder(tmp_path: Path, own_module: Callable[[str, str], Path]) -> Path:
    """Holds someone.py, which can be imported, and a config for its data."""
    own_module("someone", SOURCE)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "mine.yaml").write_text(DATA)
    return tmp_path


@pytest.fixture
def train(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Trains one seed; returns the result, the network and the log."""

    def run(*words: str) -> tuple[dict[str, Any], nn.Module, str]:
        capsys.readouterr()
        before = set(folder.glob("runs/*/*/seed-*"))
        common = ["replicas=1", "workers=0", f"runs_dir={folder / 'runs'}"]
        assert main([*common, "--config-dir", str(folder / "conf"), *words]) == 0
        (run_dir,) = set(folder.glob("runs/*/*/seed-*")) - before
        log = capsys.readouterr().err
        return json.loads((run_dir / "result.json").read_text()), load(run_dir), log

    return run


@pytest.mark.parametrize("name", ["w.ckpt", "w.safetensors"])
def test_group_norm_takes_the_place_of_pretrained_batch_norm(
    train: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """One line fine-tunes: convolution, gain and head are loaded, statistics have no place."""
    values = plain_weights()
    average = {k: 2 * v for k, v in values.items() if k != "fc.bias"}  # fits less of the network
    within = {"epoch": 3, "net": {f"module.{k}": v for k, v in values.items()}, "ema": average}
    if name == "w.safetensors":
        save_file(values, tmp_path / name)
    else:
        torch.save(within, tmp_path / name)
    _, network, log = train(*MODEL, "norm=group", *FROZEN, f"model.weights={tmp_path / name}")
    own = network.state_dict()
    for key in ("conv.weight", "conv.bias", "fc.weight", "fc.bias"):
        torch.testing.assert_close(own[key], values[key], rtol=0, atol=1e-6)
    for key in ("weight", "bias"):
        torch.testing.assert_close(own[f"bn.norm.{key}"], values[f"bn.{key}"], rtol=0, atol=1e-6)
    assert "186 of 186 parameters are loaded" in log
    assert "the new norm has no place for bn.running_mean, bn.running_var" in log


def test_statistics_that_the_file_lacks_are_named(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    """Saved parameters alone would evaluate by mean 0 and variance 1."""
    values = {name: v for name, v in plain_weights().items() if "running" not in name}
    torch.save(values, tmp_path / "w.pt")
    _, _, log = train(*MODEL, "norm=frozen", *FROZEN, f"model.weights={tmp_path / 'w.pt'}")
    assert "186 of 186 parameters are loaded; not loaded: bn.running_mean is not in the file" in log


def test_a_function_may_define_the_class_of_its_network(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of several seeds train together, and are evaluated so."""
    words = ["model=someone.make_plain", "norm=group", "steps=2", "replicas=2", "workers=0"]
    assert main([*words, f"runs_dir={folder / 'runs'}"]) == 0
    assert "by itself" not in capsys.readouterr().err
    (cell,) = folder.glob("runs/default/*/config.yaml")
    assert evaluate([f"run={cell.parent}"]) == 0


@pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode")
def test_norms_that_train_leaves_in_evaluation_mode_do_not_move(
    train: Callable[..., Any],
) -> None:
    model = ["model=custom", "model._target_=someone.Freezing"]
    for norm, moves in (("as_built", False), ("batch", True)):
        _, network, _ = train(*model, f"norm={norm}", "steps=2")
        assert bool(network.get_buffer("bn.norm.running_mean").any()) is moves


def test_batch_norm_keeps_statistics_and_a_head_of_another_size_is_fresh(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    values = plain_weights(num_classes=7, channels=3)
    torch.save(values, tmp_path / "w.pt")
    words = [*MODEL, "norm=frozen", *FROZEN, f"model.weights={tmp_path / 'w.pt'}"]
    _, network, log = train(*words)
    own = network.state_dict()
    for key in ("running_mean", "running_var"):
        torch.testing.assert_close(own[f"bn.norm.{key}"], values[f"bn.{key}"])
    grey = values["conv.weight"].sum(dim=1, keepdim=True)
    torch.testing.assert_close(own["conv.weight"], grey, rtol=0, atol=1e-6)
    assert "fc.weight is 10x8, in the file 7x8" in log


@pytest.mark.parametrize(
    ("write", "words", "message"),
    [
        (None, MODEL, "model.weights=.*does not exist"),
        (b"text", MODEL, "model.weights=.*state_dict"),
        (
            torch.nn.Linear(2, 2),
            MODEL,
            r"nor safetensors \(only tensors are read, and it holds torch.nn.modules.linear.Linear",
        ),
        (
            {"net": plain_weights(), "options": Namespace(lr=0.1)},
            MODEL,
            "only tensors are read, and it holds argparse.Namespace",
        ),
        (
            {"net": plain_weights(), "averaged": plain_weights()},
            MODEL,
            r"several networks of this kind, named averaged.\*, net.\*; save one of them alone",
        ),
        ({"other": torch.ones(3)}, MODEL, "model.weights=.*does not fit.*other.*conv"),
        ({}, MODEL, "model.weights=.*holds no tensors"),
        (plain_weights(), ["model=convnet"], "model.weights=.*does not fit"),
        (
            {name: value for name, value in plain_weights().items() if "conv" not in name},
            MODEL,
            "4 of its 6 parameters are in the file.*; conv.weight is not in the file, and only",
        ),
        (plain_weights(), ["model=convnet", "+model.replace=[ReLU]"], "model.replace"),
        (
            plain_weights(),
            [*MODEL, "data=mine", "data.num_classes=1"],
            "data=stripes: train.targets has 1; num_outputs=1",
        ),
    ],
)
def test_weights_and_data_that_do_not_fit_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], write: Any, words: list[str], message: str
) -> None:
    path = folder / "w.pt"
    if isinstance(write, bytes):
        path.write_bytes(write)
    elif write is not None:
        torch.save(write, path)
    line = ["--config-dir", str(folder / "conf"), *words, f"model.weights={path}", "workers=0"]
    assert main([*line, f"runs_dir={folder / 'runs'}"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list((folder / "runs").glob("*"))


RESTLESS = """
import os

import torch

os.chdir("/")
torch.set_default_dtype(torch.float64)


class Norm(torch.nn.GroupNorm):
    def __init__(self, num_features):
        super().__init__(1, num_features)
        os.chdir("/")
"""


def test_code_that_changes_the_process_changes_neither_folders_nor_precision(
    tmp_path: Path,
    own_module: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    own_module("restless", RESTLESS)
    monkeypatch.chdir(tmp_path)
    assert main(["norm=restless.Norm", "replicas=1", "workers=0", "steps=1", "runs_dir=here"]) == 0
    assert len([*tmp_path.glob("here/*/*/seed-0/result.json")]) == 1
    log = capsys.readouterr().err
    assert f"restless.Norm changes the current folder to /; paths stay in {tmp_path}" in log
    assert "restless.Norm sets torch's default dtype to float64; training stays in float32" in log


def test_another_default_dtype_of_torch_is_refused(tmp_path: Path):
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(UserError, match="default dtype is torch.float64, set before"):
            run(["steps=1", "replicas=1", f"runs_dir={tmp_path}"])
    finally:
        torch.set_default_dtype(torch.float32)
