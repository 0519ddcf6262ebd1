"""Finished runs: loaded and evaluated again, with every statistic, or refused in one line."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from torch import nn

import normexp
from normexp.errors import UserError
from normexp.evaluate import main
from normexp.train import main as train
from normexp.training.cells import finished
from normexp.training.data.images import load_digits
from normexp.training.records.layout import seed_dir
from normexp.training.records.metrics import read_metrics
from normexp.training.records.result import read_result
from normexp.training.records.samples import read_samples

ALL = "evaluate_with=[running,precise,batch]"
SEEDS = (0, 1)


def trained(runs_dir: Path, *words: str) -> Path:
    """The folder of a cell trained for one epoch on digits, on the CPU."""
    common = ["epochs=1", "model.width=4", "trainer=cpu", f"runs_dir={runs_dir}"]
    assert train([*common, *words]) == 0
    (config,) = runs_dir.glob("*/*/config.yaml")
    return config.parent


@pytest.fixture(scope="module")
def cell_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["norm=batch", "norm_batch_size=2", "replicas=2", "study=mine", ALL]
    return trained(tmp_path_factory.mktemp("runs"), *words)


@pytest.fixture
def copy(cell_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(cell_dir, tmp_path / "mine" / cell_dir.name)


def evaluation(cell_dir: Path, seed: int = 0) -> dict[str, Any]:
    return json.loads((seed_dir(cell_dir, seed) / "evaluation.json").read_text())


def final_rows(cell_dir: Path, seed: int = 0) -> dict[str, float]:
    """The last value of each metric in metrics.csv."""
    return {row.name: row.value for row in read_metrics(seed_dir(cell_dir, seed) / "metrics.csv")}


# --- Loading -------------------------------------------------------------------------------------


def test_loaded_networks_have_the_recorded_test_accuracy(cell_dir: Path):
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    batch = data.test.gather(torch.arange(len(data.test)))
    for seed in SEEDS:
        network = normexp.load(cell_dir / f"seed-{seed}")
        assert type(network).__name__ == "ConvNet" and not network.training
        with torch.no_grad():
            named = network(data.model_inputs(batch["inputs"])).argmax(dim=1)
        accuracy = (named == batch["targets"]).double().mean().item()
        recorded = read_result(seed_dir(cell_dir, seed)).metrics
        assert accuracy == recorded["test/accuracy"]
        network.train()(torch.randn(4, 1, 8, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_run_is_loaded_whose_norm_has_moved_since(copy: Path):
    config = copy / "config.yaml"
    moved = re.sub(r"normexp\.norms\.\w+", "normexp.norms.former_home", config.read_text())
    assert moved != config.read_text()
    config.write_text(moved)
    normexp.load(seed_dir(copy, 0))


def test_a_run_is_loaded_and_evaluated_whose_keys_are_not_those_of_today(copy: Path):
    config = copy / "config.yaml"
    older = re.sub(r"^(compile|tags): .*\n", "", config.read_text(), flags=re.MULTILINE)
    assert len(older.splitlines()) == len(config.read_text().splitlines()) - 2
    config.write_text(f"{older}former_key: 3\n")
    normexp.load(seed_dir(copy, 0))
    shutil.rmtree(seed_dir(copy, 1))
    assert main([f"run={copy}"]) == 0


def test_a_loaded_network_names_the_classes_of_bytes_and_floats(cell_dir: Path, monkeypatch):
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    images = data.test.gather(torch.arange(300))["inputs"]
    with monkeypatch.context() as patch:  # the data set is not needed
        patch.setattr(
            "normexp.training.cells.cell.build_data", lambda _: pytest.fail("data were loaded")
        )
        network = normexp.load(cell_dir / "seed-0")
    with torch.no_grad():
        expected = [str(int(i)) for i in network(data.model_inputs(images)).argmax(dim=1)]
    predict = network.predict
    assert predict(images) == predict(images / 255) == predict(images.numpy()) == expected
    assert predict(images[0]) == expected[:1] and deepcopy(network).predict(images) == expected
    for wrong in (images.float(), images[:, :, 1:]):
        with pytest.raises(UserError, match="must be .N, 1, 8, 8., whole numbers 0 to 255"):
            predict(wrong)


def test_single_seed_of_a_cell_is_loaded_in_the_precision_of_its_training(tmp_path: Path):
    cell_dir = trained(tmp_path, "replicas=1", "trainer.precision=64-true")
    weight = normexp.load(str(cell_dir)).get_parameter("conv1.weight")
    saved = torch.load(cell_dir / "seed-0" / "weights.pt", weights_only=True)
    assert torch.equal(weight, saved["conv1.weight"]) and weight.dtype == torch.float64


def test_what_cannot_be_loaded_is_refused_with_the_nearest(cell_dir: Path, tmp_path: Path):
    with pytest.raises(UserError, match="give one of its seeds: seed-0, seed-1"):
        normexp.load(cell_dir)
    with pytest.raises(UserError, match="seed-7 is not one run; give one of its seeds: seed-0"):
        normexp.load(cell_dir / "seed-7")
    for content in (b"junk", b"", b"PK\x03\x04", bytes(range(256))):
        (tmp_path / "weights.pt").write_bytes(content)
        with pytest.raises(UserError, match="does not fit its config.yaml, or is torn"):
            finished.load_weights(nn.Linear(2, 2), tmp_path / "weights.pt", precision="32-true")


def test_study_is_a_table_with_a_row_per_run(copy: Path, tmp_path: Path, caplog):
    table = normexp.load_study("mine", runs_dir=tmp_path)
    assert isinstance(table, pd.DataFrame)
    assert table["seed"].tolist() == [0, 1] and set(table["cell_id"]) == {copy.name}
    recorded = [read_result(seed_dir(copy, seed)).metrics["test/accuracy"] for seed in SEEDS]
    assert table["test/accuracy"].tolist() == recorded
    (copy / "seed-1" / "result.json").write_text("{")
    (copy.parent / "later" / "seed-0").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="normexp"):
        table = normexp.load_study("mine", runs_dir=tmp_path)
    assert table["seed"].tolist() == [0]
    assert "seed-1" in caplog.text and "later: 1 run" in caplog.text
    with pytest.raises(UserError, match="did you mean .*mine"):
        normexp.load_study("mien", runs_dir=tmp_path)


# --- Evaluating ----------------------------------------------------------------------------------


def test_training_records_every_kind_of_statistics_in_every_file(cell_dir: Path):
    suffixes = {"running": "", "precise": "@precise", "batch2": "@batch2"}
    for seed in SEEDS:
        found, rows = evaluation(cell_dir, seed), final_rows(cell_dir, seed)
        result = read_result(seed_dir(cell_dir, seed))
        for kind, suffix in suffixes.items():
            for name in ("val/accuracy", "val/loss", "test/accuracy", "test/loss"):
                value = found[kind][name]
                assert value == result.metrics[name + suffix] == rows[name + suffix]
    assert found["batch2"]["test/loss"] > found["running"]["test/loss"]


def test_evaluating_kept_weights_gives_what_training_recorded(cell_dir: Path, copy: Path, capsys):
    recorded = [evaluation(cell_dir, seed) for seed in SEEDS]
    for seed in SEEDS:
        (seed_dir(copy, seed) / "evaluation.json").unlink()
    assert main([f"run={copy}", ALL]) == 0
    contents = [evaluation(copy, seed) for seed in SEEDS]
    for content in contents:
        parts = content.pop("decomposition")
        assert parts.pop("num_samples") <= 359
        assert sum(parts.values()) == pytest.approx(2 * parts["evaluation"])  # training + terms
        assert parts["own_share"] != 0
    assert contents == recorded
    shown = capsys.readouterr().out
    assert "batch on digits: n = 2 seeds" in shown and "own share" in shown
    assert "of 359 test samples, whole batches: n = 2 seeds" in shown  # another loss than above
    for kind in ("precise",):
        values = [found[kind]["test/accuracy"] for found in recorded]
        assert f"{sum(values) / 2:.4f}" in shown


def test_evaluating_again_adds_to_what_is_there(copy: Path):
    before = evaluation(copy)
    samples = [read_samples(seed_dir(copy, seed)) for seed in SEEDS]
    assert main([f"run={copy}", "evaluate_with=[batch]", "evaluate_batch_sizes=[2,32]"]) == 0
    after = evaluation(copy)
    assert set(after) == {*before, "batch32", "decomposition"}
    assert all(after[name] == before[name] for name in before)
    assert after["batch32"]["test/loss"] < after["batch2"]["test/loss"]
    for seed, old in zip(SEEDS, samples, strict=True):
        found, own = read_samples(seed_dir(copy, seed)), evaluation(copy, seed)
        assert found.keys() == {"running", "precise", "batch2", "batch32"}
        for kind, right in found.items():
            assert right.mean() == pytest.approx(own[kind]["test/accuracy"])
        assert all(right.tolist() == found[kind].tolist() for kind, right in old.items())


def test_a_cell_from_before_a_key_of_its_norm_is_the_same_cell(copy: Path):
    path = copy / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["norm"]["track_running_stats"], config["data"]["crop"]
    path.write_text(yaml.safe_dump(config))
    assert main([f"run={copy}", "evaluate_with=[running]"]) == 0


def test_statistics_that_a_norm_does_not_have_are_absent(tmp_path: Path, capsys):
    cell_dir = trained(tmp_path, "norm=group", "norm.num_groups=2", "replicas=1", ALL)
    assert not (cell_dir / "seed-0" / "evaluation.json").exists()
    assert not [name for name in final_rows(cell_dir) if "@" in name]
    told = capsys.readouterr().err
    assert told.count("no precise statistics") == told.count("no batch statistics") == 1
    assert main([f"run={cell_dir}", "evaluate_with=[precise,batch]"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "keeps no running moments or gave no finite number; try evaluate_with=[running]" in line


def without(*names: str) -> Callable[[Path], None]:
    def spoil(cell_dir: Path) -> None:
        for run_dir in cell_dir.glob("seed-*"):
            for name in names:
                (run_dir / name).unlink()

    return spoil


def edited(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(cell_dir: Path) -> None:
        (cell_dir / name).write_bytes(edit((cell_dir / name).read_bytes()))

    return spoil


def test_a_seed_without_weights_is_named_and_the_others_are_evaluated(copy: Path, caplog, capsys):
    (copy / "seed-1" / "weights.pt").unlink()
    assert main([f"run={copy}", "evaluate_with=[running]"]) == 0
    assert "not evaluated: seed 1, which has no weights.pt" in caplog.text + capsys.readouterr().err


REMEDY = "remove the cell's folder and train it again"
REFUSED: dict[str, tuple[Callable[[Path], None] | None, list[str], str]] = {
    "far": (None, ["run=/nowhere/at/all"], "/nowhere/at/all does not exist"),
    "near": (None, ["run={cell}x"], "{cell}x does not exist; did you mean {cell}?"),
    "study": (None, ["run={study}"], "{study} is no cell"),
    "seed": (None, ["run={cell}/seed-0"], "is one seed of a cell; give the cell, {cell}"),
    "large": (None, ["run={cell}", "evaluate_batch_sizes=[145]"], "145 is more than the 144 sam"),
    "no weights": (without("weights.pt"), [], "has no finished run with weights (save_weights="),
    "no end": (without("weights.pt", "result.json"), [], "has no finished run with weights"),
    "another config": (
        edited("config.yaml", lambda text: text.replace(b"width: 4", b"width: 8")),
        *([], "has changed since it was trained"),
    ),
    "torn config": (edited("config.yaml", lambda _: b": ["), [], REMEDY),
    "foreign config": (edited("config.yaml", lambda _: b"a: 1"), [], REMEDY),
    "torn weights": (
        edited("seed-0/weights.pt", lambda content: content[:1000]),
        *([], "weights.pt does not fit its config.yaml, or is torn"),
    ),
}


@pytest.mark.parametrize(("spoil", "words", "part"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_evaluated_is_refused_in_one_line_and_changes_nothing(
    copy: Path, spoil, words, part, capsys
):
    if spoil is not None:
        spoil(copy)
    names = {"cell": copy, "study": copy.parent}
    before = evaluation(copy)
    assert main([word.format(**names) for word in words or ["run={cell}"]]) == 2
    assert part.format(**names) in capsys.readouterr().err.splitlines()[-1]
    assert evaluation(copy) == before
