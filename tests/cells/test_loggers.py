"""What loggers other than metrics.csv have written after a training."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from train_cases import wandb_records

from normexp.train import main

CSV_LOGGER = "pytorch_lightning.loggers.CSVLogger"
RECORDED = ("train/loss", "train/grad_norm")
WORDS = ("steps=4", "replicas=2", "batch_size=16", "workers=0", "log_every=2")


def train(folder: Path, *words: str, norm: str = "group") -> int:
    return main([f"norm={norm}", *WORDS, f"runs_dir={folder}", *words])


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_logger_of_ones_own_gets_every_run(tmp_path: Path):
    words = ("logger=[csv,custom]", f"logger.custom._target_={CSV_LOGGER}", "tags=[a]", "study=s")
    assert train(tmp_path, *words, "logger.custom.flush_logs_every_n_steps=1") == 0
    (cell,) = (tmp_path / "s").glob("group-*")
    for seed in (0, 1):
        file = tmp_path / "s" / "custom" / cell.name / f"seed-{seed}" / "metrics.csv"
        logged = {
            name: {int(row["step"]): float(row[name]) for row in rows_of(file) if row[name]}
            for name in RECORDED
        }
        own = rows_of(cell / f"seed-{seed}" / "metrics.csv")
        for name in RECORDED:
            values = {int(r["step"]): float(r["value"]) for r in own if r["name"] == name}
            assert [*values] == [2, 4] and logged[name] == pytest.approx(values)
        params = yaml.safe_load((file.parent / "hparams.yaml").read_text())
        assert [params[f"{key}batch_size"] for key in ("", "micro_", "norm_")] == [16, 16, 16]
        assert params["seed"] == seed and params["study"] == "s"


@pytest.mark.slow
def test_wandb_runs_of_one_process_stay_apart_and_know_their_study(tmp_path: Path, capsys):
    words = ("logger=wandb", "logger.wandb.offline=true", "tags=[baseline]", "notes=first try")
    assert train(tmp_path, *words, "study=mine", "logger.wandb.group=short") == 0
    assert capsys.readouterr().err.count("wandb sync") == 1
    folders = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*"))
    texts = [json.dumps(wandb_records(folder)) for folder in folders]
    assert len(texts) == 2
    for seed in (0, 1):
        (own,) = [text for text in texts if f"/seed-{seed}" in text]
        for said in ("baseline", "first try", "mine", "train/loss", "train/grad_norm"):
            assert said in own
        assert "norm_batch_size" in own and '"norm_batch_size": null' not in own


def test_tensorboard_has_a_curve_per_seed(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path, "logger=tensorboard", "norm_batch_size=8", norm="batch") == 0
    folders = sorted(tmp_path.glob("default/tensorboard/*/seed-*"))
    assert [folder.name for folder in folders] == ["seed-0", "seed-1"]
    for seed, folder in enumerate(folders):
        events = EventAccumulator(str(folder)).Reload()
        assert {"train/loss", "train/grad_norm"} <= set(events.Tags()["scalars"])
        params = yaml.safe_load((folder / "hparams.yaml").read_text())
        assert params["norm_batch_size"] == 8 and params["seed"] == seed


def test_a_missing_package_is_a_mistake_of_the_command(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("normexp.config.compose.find_spec", lambda _: None)
    assert main(["-m", "norm=group,batch", "logger=wandb", f"runs_dir={tmp_path}"]) == 2
    assert "pip install 'normexp[wandb]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
