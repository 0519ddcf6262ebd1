"""`normexp.run`: training from Python, with plain results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from train_cases import QUICK, files

import normexp
from normexp.errors import UserError
from normexp.records.result import Result
from normexp.train import main


def run(tmp_path: Path, *words: str, workers: int = 0) -> list[Result]:
    quick = [word for word in QUICK if not word.startswith("workers")]
    places = [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}"]
    return normexp.run([*words, *quick, *places], workers=workers)


def test_a_cell_is_trained_once_and_found_by_every_other_way(tmp_path: Path):
    results = run(tmp_path, "norm=group")
    assert [(result.seed, result.status) for result in results] == [
        (0, "finished"),
        (1, "finished"),
    ]
    assert results[0].config["norm"] == "group"
    before = files(tmp_path)
    assert run(tmp_path, "norm=group") == results
    assert main(["norm=group", *QUICK, f"runs_dir={tmp_path / 'runs'}"]) == 0
    recorded = {name: text for name, text in files(tmp_path).items() if "seed-" in name}
    assert recorded == {name: text for name, text in before.items() if "seed-" in name}
    table = normexp.load_study("default", tmp_path / "runs")
    assert sorted(table["seed"]) == [0, 1]
    cell_dir = tmp_path / "runs" / "default" / results[0].cell_id
    assert not normexp.load(cell_dir / "seed-1").training


def test_a_sweep_returns_each_run_once(tmp_path: Path):
    results = run(tmp_path, "-m", "norm=group", "norm_batch_size=8,32")  # the same training
    assert [(result.config["norm"], result.seed) for result in results] == [
        ("group", 0),
        ("group", 1),
    ]


@pytest.mark.slow
def test_a_mistake_is_raised_after_the_other_cells(tmp_path: Path):
    with pytest.raises(UserError, match="norm_batch_size=5 does not divide"):
        run(tmp_path, "-m", "norm_batch_size=5,8")
    assert len(normexp.load_study("default", tmp_path / "runs")) == 2
    for words in (["norm=grup"], ["--cfg", "job"], ["-m", "hydra/launcher=ray"], ["--nothing"]):
        with pytest.raises(UserError):
            normexp.run(words)
    with pytest.raises(UserError, match="must be a list of words"):
        normexp.run("norm=group")


def test_importing_normexp_is_light():
    script = "import sys, normexp; sys.exit(bool({'torch', 'hydra', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
