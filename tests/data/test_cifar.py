from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from normexp.data import Examples
from normexp.data.cifar import load_cifar10, load_cifar100
from normexp.errors import UserError


@pytest.mark.parametrize(
    ("load", "archive"),
    [(load_cifar10, "cifar-10-python.tar.gz"), (load_cifar100, "cifar-100-python.tar.gz")],
)
@pytest.mark.parametrize("error", [URLError("no route"), RuntimeError("corrupted")])
def test_failed_download_names_the_archive_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load, archive: str, error: Exception
):
    folder = tmp_path / "data"

    def download(source: datasets.CIFAR10) -> None:
        folder.mkdir()
        (folder / source.filename).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(datasets.CIFAR10, "download", download)
    with pytest.raises(UserError) as caught:
        load(data_dir=str(folder), val_fraction=0.1, split_seed=0, augmentation=None)
    message = str(caught.value)
    assert archive in message and str(folder) in message and "data=digits" in message
    assert not folder.exists()


def test_failed_download_keeps_a_file_that_the_user_placed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def download(_: datasets.CIFAR10) -> None:
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(datasets.CIFAR10, "download", download)
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(b"mine")
    with pytest.raises(UserError):
        load_cifar10(data_dir=str(tmp_path), val_fraction=0.1, split_seed=0, augmentation=None)
    assert archive.read_bytes() == b"mine"


def test_cifar_images_become_channels_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)

    def read(self: datasets.CIFAR10, root: str, train: bool, download: bool) -> None:
        assert download and root == str(tmp_path)
        self.data = pixels if train else pixels[:10]
        self.targets = [i % 10 for i in range(len(self.data))]
        self.classes = [f"class {i}" for i in range(10)]

    monkeypatch.setattr(datasets.CIFAR10, "__init__", read)
    data = load_cifar10(data_dir=str(tmp_path), val_fraction=0.1, split_seed=0, augmentation=None)
    assert (len(data.train), len(data.val), len(data.test)) == (18, 2, 10)
    assert isinstance(data.test, Examples)
    assert torch.equal(data.test.inputs[3, 2], torch.from_numpy(pixels[3, :, :, 2]))
    assert data.test.targets.tolist() == list(range(10))
