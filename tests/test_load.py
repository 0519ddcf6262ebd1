"""From Python: a trained network and a study as a table."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import normexp
from normexp.cells.finished import load_weights
from normexp.data.images import load_digits
from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.result import read_result
from normexp.train import main as train


@pytest.fixture(scope="module")
def cell_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("runs")
    words = ["norm=batch", "epochs=1", "model.width=4", "replicas=2", "trainer=cpu"]
    assert train([*words, f"runs_dir={runs_dir}", "study=loaded"]) == 0
    (cell_dir,) = (path for path in (runs_dir / "loaded").iterdir() if path.is_dir())
    return cell_dir


def accuracy_on_digits(network: nn.Module) -> float:
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    batch = data.test.gather(torch.arange(len(data.test)))
    with torch.no_grad():
        named = network(data.model_inputs(batch["inputs"])).argmax(dim=1)
    return (named == batch["targets"]).double().mean().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_loaded_network_has_the_recorded_test_accuracy(cell_dir: Path, seed: int):
    network = normexp.load(cell_dir / f"seed-{seed}")
    assert type(network).__name__ == "ConvNet"
    assert not network.training
    recorded = read_result(seed_dir(cell_dir, seed)).metrics["test/accuracy"]
    assert accuracy_on_digits(network) == recorded


def test_loaded_network_can_be_trained_on(cell_dir: Path):
    network = normexp.load(str(cell_dir / "seed-0")).train()
    network(torch.randn(4, 1, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_double_precision_is_kept(tmp_path: Path):
    words = ["epochs=1", "model.width=4", "replicas=1", "trainer=cpu", "trainer.precision=64-true"]
    assert train([*words, f"runs_dir={tmp_path}"]) == 0
    (cell_dir,) = (path for path in (tmp_path / "default").iterdir() if path.is_dir())
    network = normexp.load(cell_dir)  # its only seed
    saved = torch.load(cell_dir / "seed-0" / "weights.pt", weights_only=True)
    assert torch.equal(network.get_parameter("conv1.weight"), saved["conv1.weight"])
    assert saved["conv1.weight"].dtype == torch.float64


def test_cell_of_several_seeds_is_refused_with_their_names(cell_dir: Path):
    with pytest.raises(UserError, match="give one of its seeds: seed-0, seed-1"):
        normexp.load(cell_dir)


def test_missing_run_names_the_nearest(cell_dir: Path):
    with pytest.raises(UserError, match="does not exist; nearest: .*seed-0"):
        normexp.load(cell_dir / "seed-7")


def test_study_is_a_table_with_a_row_per_run(cell_dir: Path):
    table = normexp.load_study("loaded", runs_dir=cell_dir.parents[1])
    assert isinstance(table, pd.DataFrame)
    assert table["seed"].tolist() == [0, 1]
    assert set(table["cell_id"]) == {cell_dir.name}
    recorded = [read_result(seed_dir(cell_dir, s)).metrics["test/accuracy"] for s in (0, 1)]
    assert table["test/accuracy"].tolist() == recorded


def test_unknown_study_is_refused(cell_dir: Path):
    with pytest.raises(UserError, match="nearest: loaded"):
        normexp.load_study("loadde", runs_dir=cell_dir.parents[1])


def test_a_study_without_an_ended_run_is_refused(tmp_path: Path):
    (tmp_path / "runs" / "torn" / "cell" / "seed-0").mkdir(parents=True)
    with pytest.raises(UserError, match="study=torn has no ended run"):
        normexp.load_study("torn", runs_dir=tmp_path / "runs")


def test_unreadable_and_unended_runs_are_warnings(
    cell_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    study = tmp_path / "loaded"
    shutil.copytree(cell_dir, study / cell_dir.name)
    (study / cell_dir.name / "seed-1" / "result.json").write_text("{")
    (study / "later" / "seed-0").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="normexp"):
        table = normexp.load_study("loaded", runs_dir=tmp_path)
    assert table["seed"].tolist() == [0]
    assert "seed-1" in caplog.text and "later: 1 run" in caplog.text


def test_weights_of_any_other_content_are_named(tmp_path: Path):
    for content in (b"junk", b"", b"PK\x03\x04", bytes(range(256))):
        (tmp_path / "weights.pt").write_bytes(content)
        with pytest.raises(UserError, match="does not fit its config.yaml, or is torn"):
            load_weights(nn.Linear(2, 2), tmp_path / "weights.pt", precision="32-true")
