"""W&B sweeps: the shipped definition, and the one run of a command under an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from train_cases import results, wandb_records

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.outcome import Outcome
from normexp.config.spec import CellSpec
from normexp.errors import UserError
from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result, Status
from normexp.reporting.wandb_runs import (
    log_to_agent,
    mean_metrics,
    mean_rows,
)
from normexp.sweeps.sweep import run_cells
from normexp.train import main

SWEEP_FILE = Path(__file__).parents[2] / "scripts" / "wandb_sweep.yaml"


def sweep() -> dict:
    return yaml.safe_load(SWEEP_FILE.read_text())


@pytest.mark.slow  # imports wandb
def test_command_that_an_agent_makes_of_it_composes():
    """By W&B's own functions, for the first and the last value of every parameter."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    definition = sweep()
    assert definition["metric"]["name"].startswith("val/")
    for end in (0, -1):
        values = {
            key: spec.get("values", [spec.get("value", spec.get("max"))])[end]
            for key, spec in definition["parameters"].items()
        }
        args = {"args": {key: {"value": value} for key, value in values.items()}}
        words = create_sweep_command_args(args)["args_no_hyphens"]
        command = create_sweep_command(definition["command"])
        line = [w for part in command for w in (words if part == "${args_no_hyphens}" else [part])]
        assert line[:4] == ["${env}", "${interpreter}", "-m", "normexp.train"]
        (cell,) = compose_cells(parse_command(line[4:]))
        assert "wandb" in cell.values["logger"]
        found = [cell.values[key] for key in ("norm_batch_size", "lr", "replicas")]
        assert found == [values["norm_batch_size"], values["lr"], 1]


def result(seed: int, status: str, **metrics: float) -> Result:
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    step = 2 if status == "diverged" else None
    error = "no more" if status == "failed" else None
    return Result("a cell", seed, status, {}, named, {}, diverged_at_step=step, error=error)  # type: ignore[arg-type]


def test_final_means_are_over_seeds_and_a_diverged_seed_has_accuracy_0():
    good = [result(0, "finished", val_accuracy=0.9, val_loss=0.2)]
    good.append(result(1, "finished", val_accuracy=0.7, val_loss=0.4))
    means = mean_metrics(good)
    assert means["val/accuracy"] == pytest.approx(0.8) and means["val/loss"] == pytest.approx(0.3)
    lost = mean_metrics([*good, result(2, "diverged", val_accuracy=0.1)])
    assert lost["val/accuracy"] == pytest.approx(1.6 / 3)
    assert "val/loss" not in lost and lost["diverged_seeds"] == 1


def test_rows_are_means_by_step(tmp_path: Path):
    for seed, loss in ((0, 1.0), (1, 3.0)):
        (tmp_path / f"seed-{seed}").mkdir()
        with MetricsWriter(tmp_path / f"seed-{seed}" / "metrics.csv") as writer:
            writer.add(1, 0, 8, {"train/loss": loss, "val/loss": loss})
            if seed == 0:
                writer.add(2, 0, 16, {"train/loss": 5.0})
    both = [result(0, "finished"), result(1, "finished")]
    rows = mean_rows(tmp_path, both)
    assert rows == {1: {"train/loss": 2.0, "val/loss": 2.0}, 2: {"train/loss": 5.0}}
    lost = [result(0, "finished"), result(1, "diverged")]
    assert mean_rows(tmp_path, lost)[1] == {"train/loss": 2.0}


@pytest.mark.parametrize(
    ("status", "code"), [(Status.FINISHED, 0), (Status.SKIPPED, 0), (Status.FAILED, 1)]
)
def test_cell_with_a_failed_seed_has_no_mean_and_an_exit_code(
    status: Status, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Mock()
    monkeypatch.setitem(sys.modules, "wandb", Mock(**{"init.return_value": run}))
    ended = "failed" if status == "failed" else "finished"
    results = [result(0, "finished", val_accuracy=0.5), result(1, ended, val_accuracy=0.6)]
    sizes = {"batch_size": 8, "micro_batch_size": None, "norm_batch_size": None}
    cell = CellSpec({"logger": {"wandb": {"mode": "offline"}}}, {}, "a")
    log_to_agent(cell, Outcome(status, "a", "a", tmp_path / "a", sizes, results))
    run.finish.assert_called_once_with(exit_code=code)
    logged = [name for call in run.log.call_args_list for name in call.args[0]]
    assert ("val/accuracy" in logged) == (code == 0)


def test_sweep_of_cells_under_an_agent_is_refused(monkeypatch: pytest.MonkeyPatch):
    cells = [CellSpec(None, {}, "a"), CellSpec(None, {}, "b")]
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with pytest.raises(UserError, match="one cell, not 2"):
        run_cells(cells, [])


@pytest.mark.slow
def test_agents_run_has_the_mean_of_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["norm=group", "steps=12", "log_every=5", "replicas=2", "logger=wandb"]
    line = [*words, f"runs_dir={tmp_path}"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(line) == 0
    assert len(list(tmp_path.glob("default/wandb/offline-run-*"))) == 2  # one per (cell, seed)
    environment = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "run1"}
    script = "import sys; from normexp.train import main; sys.exit(main(sys.argv[1:]))"

    for _ in range(2):  # what is recorded already is logged all the same
        subprocess.run(
            [sys.executable, "-c", script, *line], env={**os.environ, **environment}, check=True
        )
    folder = next(iter(tmp_path.glob("default/wandb/offline-run-*-run1")))
    history = [row["history"] for row in wandb_records(folder) if row["type"] == "history"]
    last = history[-1]["item"]
    expected = sum(run.metrics["val/accuracy"] for run in results(tmp_path).values()) / 2
    assert last["val/accuracy"] == pytest.approx(expected)
    assert last["seeds"] == 2
