"""Runs of other data, or with another version of a package, do not join under one id."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from normexp.train import main
from normexp.training.records import source

DATA = """
from pathlib import Path
from normexp.training.data.images import load_digits

def load():
    seed = int(Path(__file__).with_name("state.txt").read_text())
    return load_digits(val_fraction=0.1, split_seed=seed, augmentation=None)
"""
NORM = """
from torch import nn

class Norm(nn.GroupNorm):
    def __init__(self, num_features):
        super().__init__({groups}, num_features)
"""
OWN = ["data=custom", "data._target_=data_of_joins.load"]


def test_runs_of_other_data_do_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    files = {"data_of_joins.py": DATA, "state.txt": "0"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*OWN, "steps=2", "workers=0", f"runs_dir={tmp_path / 'runs'}"]

    def train(*more: str) -> int:  # as another process would
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.endswith("_of_joins")]:
            del sys.modules[name]
        return main([*words, *more])

    assert train("replicas=1") == 0
    assert train("replicas=2") == 0
    (tmp_path / "state.txt").write_text("1")
    assert train("replicas=3") != 0
    shown = capsys.readouterr().err
    assert "is not what the recorded runs" in shown and "study=..." in shown
    assert len(list(tmp_path.glob("runs/default/*/seed-*/result.json"))) == 2
    assert train("replicas=1", "study=other") == 0


def test_runs_with_another_version_of_a_package_do_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    package = tmp_path / "site-packages/norms_of_joins"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .norm import Norm")
    monkeypatch.syspath_prepend(str(package.parent))

    def train(groups: int, *words: str) -> int:  # as another process would
        (package / "norm.py").write_text(NORM.format(groups=groups))
        importlib.invalidate_caches()
        source._digest_of_package.cache_clear()
        for name in [name for name in sys.modules if name.startswith(package.name)]:
            del sys.modules[name]
        runs = f"runs_dir={tmp_path / 'runs'}"
        return main([f"norm={package.name}.Norm", "steps=2", "workers=0", runs, *words])

    assert train(2, "replicas=1") == 0
    assert train(2, "replicas=2") == 0
    assert train(4, "replicas=3") != 0
    assert "the package of norm is not what the recorded runs" in capsys.readouterr().err
    assert len(list(tmp_path.glob("runs/default/*/seed-*/result.json"))) == 2


def test_another_path_of_recorded_contents_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for index, name in enumerate("ab" * 10):
        image = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        file = tmp_path / "images" / name / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    words = ["data=image_folder", "batch_size=2", "steps=1", "replicas=1", "workers=0"]
    words += [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path}"]

    def lines_of(norm: str, root: str) -> list[str]:
        assert main([*words, f"norm={norm}", f"data.root={tmp_path}/{root}"]) == 0
        shown = capsys.readouterr().err.splitlines()
        return [line for line in shown if "has the contents that study=default records" in line]

    assert lines_of("layer", "images") == lines_of("group", "images") == []
    (line,) = lines_of("group", "./images/")
    assert f"data.root={tmp_path}/./images/ has" in line and f"{tmp_path}/images;" in line
