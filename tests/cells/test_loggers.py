"""What loggers other than metrics.csv have written after a training."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from train_cases import wandb_records

from normexp.train import main
from normexp.training.schedule import named_schedule

CSV_LOGGER = "pytorch_lightning.loggers.CSVLogger"
RECORDED = ("train/loss", "train/grad_norm")
TRACKED = ("train/lr", "train/samples_per_second")
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
        (file,) = (cell / f"seed-{seed}").glob(f"**/seed-{seed}/metrics.csv")
        logged = {
            name: {int(row["step"]): float(row[name]) for row in rows_of(file) if row[name]}
            for name in (*RECORDED, *TRACKED)
        }
        own = rows_of(cell / f"seed-{seed}" / "metrics.csv")
        for name in RECORDED:
            values = {int(r["step"]): float(r["value"]) for r in own if r["name"] == name}
            assert [*values] == [2, 4] and logged[name] == pytest.approx(values)
        assert not {row["name"] for row in own} & {*TRACKED}  # what no repetition repeats
        rates, factor = logged["train/lr"], named_schedule("cosine", 0.1, 4).factor
        assert factor is not None and max(rates) == 4  # a rate is of the step that was just made
        assert rates == {step: pytest.approx(0.1 * factor(step - 1)) for step in rates}
        speeds = logged["train/samples_per_second"]
        assert len(speeds) == len(rates) and min(speeds.values()) > 0
        params = yaml.safe_load((file.parent / "hparams.yaml").read_text())
        assert [params[f"{key}batch_size"] for key in ("", "micro_", "norm_")] == [16, 16, 16]
        assert params["seed"] == seed and params["study"] == "s"


def test_a_logger_per_cell_gets_the_mean_and_says_so(tmp_path: Path):
    words = ("logger=custom", f"logger.custom._target_={CSV_LOGGER}", "logger.custom.per=cell")
    assert train(tmp_path, *words) == 0
    (file,) = tmp_path.glob("default/*/*/mean-of-seeds-0-to-1/metrics.csv")
    mean = [float(row["train/loss"]) for row in rows_of(file) if row["train/loss"]]
    single = [
        [float(row["value"]) for row in rows_of(path) if row["name"] == "train/loss"]
        for path in sorted(tmp_path.glob("default/*/seed-*/metrics.csv"))
    ]
    assert mean == pytest.approx([sum(pair) / 2 for pair in zip(*single, strict=True)])


def test_tensorboard_has_hyperparameters_and_says_what_a_curve_is_the_mean_of(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path, "logger=tensorboard", "norm_batch_size=8", norm="batch") == 0
    (folder,) = tmp_path.glob("default/*/tensorboard/mean-of-seeds-0-to-1")
    events = EventAccumulator(str(folder)).Reload()
    assert {"train/loss", "train/lr", "train/grad_norm"} <= set(events.Tags()["scalars"])
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    params = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert params["norm_batch_size"] == 8 and params["curves"] == "mean of seeds 0 to 1"


@pytest.mark.slow
def test_wandb_runs_of_one_process_stay_apart_and_know_their_study(tmp_path: Path, capsys):
    words = ("logger=wandb", "logger.wandb.mode=offline", "tags=[baseline]", "notes=first try")
    assert train(tmp_path, *words, "study=mine", "logger.wandb.name=short") == 0
    assert capsys.readouterr().err.count("wandb sync") == 1
    (log,) = tmp_path.glob("mine/*/stacks/*/run.log")
    assert log.read_text().count("wandb sync") == 1
    folders = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*"))
    texts = [json.dumps(wandb_records(folder)) for folder in folders]
    assert len(texts) == 2
    for seed in (0, 1):
        (own,) = [text for text in texts if f"short/seed-{seed}" in text]
        for said in ("baseline", "first try", "mine", "train/lr", "train/samples_per_second"):
            assert said in own
        assert "norm_batch_size" in own and '"norm_batch_size": null' not in own


def test_wandb_runs_that_opened_are_finished_where_the_next_one_cannot(tmp_path, monkeypatch):
    finished = []

    class Run:
        mode = "disabled"

        def __init__(self, *, config: dict, **_: object) -> None:
            self.seed = config["seed"]
            if self.seed == 2:
                raise OSError("no connection")

        def finish(self, *, failed: bool) -> None:
            finished.append((self.seed, failed))

    monkeypatch.setattr("normexp.cells.assembly.WandbRun", Run)
    words = ["norm=none", "steps=1", "replicas=3", "logger=wandb", f"runs_dir={tmp_path}"]
    assert main(words) == 1
    # Those of the stack; then each run is tried alone.
    assert sorted(finished[:2]) == [(0, True), (1, True)]
