"""Reports in W&B and TensorBoard, read back by their own readers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import write_study

from normexp.cells.trackers import find_wandb_target
from normexp.report import main
from normexp.reporting.to_tensorboard import size_of_png
from normexp.reporting.to_wandb import WandbTarget

FIGURES = {"metric_by_size_main", "heat_map_main", "improvement_main"}


def logged(root: Path, trackers: str) -> list[str]:
    """Writes and logs the report of a synthetic study; the words of the command."""
    write_study(root, np.random.default_rng(0), sizes=(2, 128), level=("group",), num_seeds=3)
    return ["study=synthetic", f"runs_dir={root}", f"log={trackers}"]


def test_tensorboard_has_figures_table_and_verdict(tmp_path: Path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(logged(tmp_path, "tensorboard")) == 0
    folder = tmp_path / "synthetic" / "tensorboard" / "report"
    assert f"tensorboard --logdir {folder.parent}" in capsys.readouterr().out
    events = EventAccumulator(str(folder)).Reload()
    assert {f"report/{name}" for name in FIGURES} <= set(events.Tags()["images"])
    (image,) = events.Images("report/metric_by_size_main")
    png = tmp_path / "synthetic" / "report" / "figures" / "metric_by_size_main.png"
    assert image.encoded_image_string == png.read_bytes()
    assert (image.width, image.height) == size_of_png(png.read_bytes())
    assert image.step == 9  # ended runs
    (verdict,), (cells,) = (events.Tensors(f"report/{name}") for name in ("verdict", "cells"))
    assert b"batch loses" in verdict.tensor_proto.string_val[0]
    assert b"| group |" in cells.tensor_proto.string_val[0]


@pytest.mark.slow
def test_wandb_has_figures_table_and_verdict_in_one_run_of_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(logged(tmp_path, "[wandb]")) == 0
    (folder,) = (tmp_path / "synthetic" / "wandb").glob("offline-run-*")
    assert f"wandb sync {folder}" in capsys.readouterr().out
    images = {path.name for path in (folder / "files" / "media").rglob("*.png")}
    assert all(any(image.startswith(name) for image in images) for name in FIGURES)
    tables = {path.name: path.read_text() for path in (folder / "files").rglob("*.table.json")}
    (cells,) = [json.loads(text) for name, text in tables.items() if name.startswith("cells")]
    assert [row[0] for row in cells["data"]] == ["batch", "batch", "group"]
    (verdict,) = [text for name, text in tables.items() if name.startswith("verdict")]
    assert "batch loses" in verdict
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "synthetic/report" in answer.stdout and "figures/metric_by_size_main" in answer.stdout


def test_wandb_target_is_that_of_the_studys_own_runs(tmp_path: Path):
    texts = ["logger: {csv: {}}", "{torn", "logger: {wandb: {project: mine, entity: team}}"]
    cells = [tmp_path / str(i) for i in range(len(texts))]
    for cell, text in zip(cells, texts, strict=True):
        cell.mkdir()
        (cell / "config.yaml").write_text(text)
    assert find_wandb_target([tmp_path / "none", *cells]) == WandbTarget("mine", "team")
    assert find_wandb_target(cells[:2]) == WandbTarget("normexp", None)


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path: Path, capsys):
    assert main(logged(tmp_path, "[wandb,mlflow]")) == 2
    message = "normexp: log=mlflow is not known; choose from wandb, tensorboard\n"
    assert capsys.readouterr().err == message
    assert not (tmp_path / "synthetic" / "report").exists()
