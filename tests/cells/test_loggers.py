"""What loggers other than metrics.csv have written after a training."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from ssl import SSLError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.error import HTTPError, URLError

import pytest
import yaml
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from train_cases import wandb_records

from normexp.train import main
from normexp.training import trackers
from normexp.training.config.target import read_target

CSV_LOGGER = "pytorch_lightning.loggers.CSVLogger"
RECORDED = ("train/loss", "train/grad_norm")
WORDS = ("steps=4", "replicas=2", "batch_size=16", "workers=0", "log_every=2")


def train(folder: Path, *words: str, norm: str = "group") -> int:
    return main([f"norm={norm}", *WORDS, f"runs_dir={folder}", *words])


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_logger_of_ones_own_gets_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # in a job whose processes train by themselves
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


class Begun:
    """A W&B run, with what it began with and what was logged to it."""

    options: dict[str, Any]
    all: list[Begun] = []

    def __init__(self, **options: Any) -> None:
        Begun.options = options
        in_sweep = os.environ.get("WANDB_SWEEP_ID")
        self.id = os.environ["WANDB_RUN_ID"] if in_sweep else options.get("id")
        self.logged: dict[str, float] = {}
        self.log, self.config = self.logged.update, Mock()
        self.define_metric = self.finish = Mock()
        Begun.all.append(self)


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Begins the W&B run of a cell with some knobs; returns its options."""
    monkeypatch.setattr("wandb.init", Begun)
    monkeypatch.setattr(Begun, "all", [])
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("MODE", "PROJECT", "DIR", "RUN_GROUP", "ENTITY", "API_KEY", "RUN_ID", "SWEEP_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    places = {"save_dir": str(tmp_path / "study/wandb"), "run_dir": str(tmp_path / "run")}
    names = {"name": "cell", "version": "seed-0", "labels": [], "notes": None}

    def begin(**knobs: Any) -> dict[str, Any]:
        trackers.wandb_logger(**places, **names, **knobs)
        return Begun.options

    return begin


def test_the_environment_of_wandb_wins_over_what_is_shipped_and_typed_knobs_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_run: Callable[..., Any]
):
    shipped = wandb_run()
    assert [shipped[key] for key in ("project", "group", "mode")] == ["normexp", "cell", "offline"]
    assert shipped["dir"] == tmp_path / "study"
    said = {"PROJECT": "ours", "RUN_GROUP": "g", "ENTITY": "team", "DIR": str(tmp_path / "wb")}
    for name, value in said.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    asked = wandb_run()
    assert [asked[key] for key in ("project", "group", "entity")] == ["ours", "g", "team"]
    assert asked["dir"] == tmp_path / "wb" and (tmp_path / "wb").is_dir()
    typed = wandb_run(project="mine", group="h", entity="me")
    assert [typed[key] for key in ("project", "group", "entity")] == ["mine", "h", "me"]
    assert asked["id"] == typed["id"]


@pytest.mark.usefixtures("wandb_run")
def test_each_run_that_a_sweep_asks_for_has_its_metrics_also_of_a_recorded_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    for run_id, size in {"first": 16, "again": 16, "same-cell": 8, "again-": 8}.items():
        monkeypatch.setenv("WANDB_RUN_ID", run_id)
        words = [*("norm=group", "logger=wandb", f"runs_dir={tmp_path}", "steps=4", "log_every=2")]
        words += ["batch_size=16", "replicas=1", "workers=0", f"norm_batch_size={size}"]
        assert main(words) == 0
    assert [run.id for run in Begun.all] == ["first", "again", "same-cell", "again-"]
    first, *others = (run.logged for run in Begun.all)
    for logged in others:  # all but speed
        assert logged == {name: first[name] for name in logged}
        assert {"train/loss", "val/accuracy", "test/accuracy"} <= logged.keys()
    assert "the sweep's W&B run again gets the record" in capsys.readouterr().err
    assert train(tmp_path, "logger=wandb") == 2
    assert "asks for one run, and this command has 2; add replicas=1" in capsys.readouterr().err


@pytest.mark.usefixtures("wandb_run")
def test_a_run_id_of_the_user_merges_no_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    for _ in range(2):  # recorded the second time, which nobody asks to log
        assert train(tmp_path, "logger=wandb") == 0
    assert len({run.id for run in Begun.all} - {"mine"}) == len(Begun.all) == 2


@pytest.mark.parametrize("mode", ["offline", "dryrun", "disabled"])
def test_a_key_sends_nothing_where_the_environment_opts_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_run: Callable[..., Any], mode: str
):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert wandb_run()["mode"] == ("disabled" if mode == "disabled" else "offline")
    assert (tmp_path / "run").exists() == (tmp_path / "study").exists() == (mode != "disabled")


def test_wandb_that_cannot_be_reached_costs_a_warning_and_is_offline(
    monkeypatch: pytest.MonkeyPatch, wandb_run: Callable[..., Any], caplog
):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for answer, mode in {
        URLError(OSError("no route")): "offline",
        HTTPError("", 401, "who are you?", Message(), None): "online",
        URLError(SSLError("unknown certificate")): "online",
    }.items():
        monkeypatch.setattr(trackers, "urlopen", Mock(side_effect=answer))
        assert wandb_run()["mode"] == mode
    assert caplog.text.count("W&B cannot be reached: ") == 1 and "no route" in caplog.text


BROKEN = """
from pytorch_lightning.loggers import CSVLogger

class Broken(CSVLogger):
    def __init__(self, save_dir, name, version, fails):
        super().__init__(save_dir, name, version)
        self.fails = fails
        self.fail("start")

    def fail(self, when):
        if when == self.fails:
            raise ConnectionError(f"no route, {when}")

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        self.fail("metrics")

    def finalize(self, status):
        self.fail("end")
"""


@pytest.mark.parametrize("when", ["start", "metrics", "end"])
def test_a_logger_that_fails_costs_a_warning_and_never_the_training(
    tmp_path: Path, own_module, capsys, when: str
):
    own_module("my_tracker", BROKEN)
    words = ("logger=custom", "logger.custom._target_=my_tracker.Broken")
    assert train(tmp_path, *words, f"logger.custom.fails={when}") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "logger.custom" in line]
    assert len(said) == 1 and f"no route, {when}" in said[0] and "goes on without it" in said[0]


TRIES: list[str] = []


def unreachable(name: str) -> Any:
    TRIES.append(name)
    raise OSError("no route")


def test_a_tracker_that_has_failed_is_left_alone_for_ten_minutes(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(trackers, "time", clock)
    target = read_target({"_target_": f"{__name__}.unreachable"}, "logger.mine")
    process, places = trackers.Trackers(), {"save_dir": "nowhere", "name": "cell"}
    for now, tries in ((0.0, 1), (599.0, 1), (601.0, 2)):
        clock.monotonic = lambda now=now: now
        (logger,) = process.loggers([target], places)
        logger.log_metrics({"val/loss": 1.0}, step=1)
        assert len(TRIES) == tries, now


class Store:
    """An MLflow client, whose runs are kept by its address."""

    runs: dict[str, dict[str, str]] = {}

    def __init__(self, uri: str) -> None:
        self.kept = self.runs.setdefault(uri, {})

    def update_run(self, run_id: str, status: str) -> None:
        if run_id not in self.kept:
            raise LookupError(run_id)
        self.kept[run_id] = status


class Mlflow:
    """In place of Lightning's logger, whose package is no dependency of the tests."""

    def __init__(self, run_id: str | None = None, **options: Any) -> None:
        self.options, self.experiment = options, Store(options["tracking_uri"])
        if run_id is None:
            run_id = f"run {len(self.experiment.kept)}"
            self.experiment.kept[run_id] = "RUNNING"
        self.run_id = run_id


def test_mlflow_follows_its_environment_and_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers, "MLFlowLogger", Mlflow)
    monkeypatch.setattr(Store, "runs", {})
    client = SimpleNamespace(get_experiment=lambda number: SimpleNamespace(name=f"number {number}"))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda _: client))
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_ID"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    places = {"save_dir": str(tmp_path / "runs/s/mlflow"), "run_dir": str(tmp_path / "seed-0")}

    def begin(**knobs: Any) -> Any:
        return trackers.mlflow_logger(**places, run_name="cell/seed-0", **knobs)

    shipped = begin()
    assert shipped.options["tracking_uri"] == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert shipped.options["experiment_name"] == "s"
    shipped.experiment.kept[shipped.run_id] = "FAILED"
    assert begin().run_id == shipped.run_id and shipped.experiment.kept == {"run 0": "RUNNING"}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    monkeypatch.setenv("MLFLOW_RUN_ID", "project")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://project")
    in_project = begin(tags={"a": "b"})
    assert in_project.options["experiment_name"] == "number 7"
    assert in_project.options["tags"] == {"mlflow.parentRunId": "project", "a": "b"}
    assert in_project.run_id != "project"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ours")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team")
    asked = begin()  # on another server, which does not know the run
    assert asked.options["tracking_uri"] == "http://ours"
    assert asked.options["experiment_name"] == "team" and Store.runs["http://ours"]
    typed = begin(tracking_uri="http://mine", experiment_name="e")
    assert typed.options["tracking_uri"] == "http://mine"
    assert typed.options["experiment_name"] == "e"


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
    monkeypatch.setattr("normexp.training.config.compose.find_spec", lambda _: None)
    assert main(["-m", "norm=group,batch", "logger=wandb", f"runs_dir={tmp_path}"]) == 2
    assert "pip install wandb" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
