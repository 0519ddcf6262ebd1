"""Sweeps through Hydra's launchers: refusals, and what runs on one machine, a job killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.spec import CellSpec
from normexp.records.history import read_history
from normexp.records.result import Status, read_result
from normexp.sweeps import launch as launching
from normexp.sweeps.log import StudyLog
from normexp.sweeps.sweep import train_cells
from normexp.train import main

QUICK = ["steps=8", "replicas=1"]
RECIPE = """\
# @package _global_
defaults:
  - override /hydra/launcher: {launcher}
cells:
  - {{norm: none, lr: 0.1}}
  - {{norm: group, lr: 0.3}}
replicas: 1
steps: 8
hydra:
  mode: MULTIRUN
  launcher: {{timeout_min: 7}}
"""


def recipe(tmp_path: Path, launcher: str) -> list[str]:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "far.yaml").write_text(RECIPE.format(launcher=launcher))
    return ["--config-dir", str(tmp_path), "experiment=far", f"runs_dir={tmp_path / 'runs'}"]


@pytest.mark.skipif(find_spec("hydra_plugins.hydra_ray_launcher") is not None, reason="it is")
def test_launcher_that_is_not_installed_names_its_extra(tmp_path: Path, capsys):
    typed = ["-m", "norm=batch,group", "hydra/launcher=ray"]
    for words in (typed, recipe(tmp_path, "ray")):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "hydra/launcher=ray" in told and "normexp[ray]" in told
    assert main(["-m", "norm=batch,group", "hydra/launcher=dask"]) == 2
    assert "basic, ray, ray_aws, submitit_local" in capsys.readouterr().err


@pytest.mark.slow
def test_launcher_of_an_experiment_runs_its_cells_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Plugins.instance()  # imports all launchers anew when it is first called
    launcher = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    launched: list[tuple[int, list[str]]] = []

    def launch(self: Any, overrides: list[list[str]], initial_job_idx: int) -> list[Any]:  # noqa: ARG001
        tasks = [next(word for word in words if "task=" in word) for words in overrides]
        launched.append((self.params["timeout_min"], tasks))
        return []

    monkeypatch.setattr(launcher.LocalLauncher, "launch", launch)
    words = recipe(tmp_path, "submitit_local")
    assert main(words) == 1  # no job has run
    assert "2 failed" in capsys.readouterr().out
    assert main([*words, "hydra.launcher.timeout_min=9"]) == 1
    assert launched == [(minutes, ["+task=0", "+task=1"]) for minutes in (7, 9)]
    assert main([*words, "hydra/launcher=basic"]) == 2  # which has no such setting
    assert "timeout_min" in capsys.readouterr().err


@pytest.mark.slow
def test_cell_whose_job_died_is_a_failed_row_and_the_same_line_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["-m", "norm=none,group", "hydra/launcher=submitit_local", *QUICK, "workers=0"]
    for num_jobs, told in ((1, "1 finished, 1 failed"), (2, "1 finished, 1 skipped")):

        def train(*arguments: Any, num_jobs: int = num_jobs) -> str:
            tasks: list[list[CellSpec]]
            *_, tasks, command_id = arguments
            for task in tasks[:num_jobs]:
                train_cells(task, [], workers=0, command_id=command_id)
            return "one of them was killed" if num_jobs < len(tasks) else ""

        monkeypatch.setattr(launching, "_run_hydra", train)
        assert main([*words, f"runs_dir={tmp_path / 'runs'}"]) == 2 - num_jobs
        assert told in capsys.readouterr().out


def test_old_error_is_not_shown_for_a_job_that_died(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["-m", "norm=none,group", "micro_batch_size=4", f"runs_dir={tmp_path}"]
    cells = compose_cells(parse_command(words))
    log = StudyLog(cells, ["normexp-train", *words])
    log.begin(tmp_path / "default")
    for cell in cells:
        log.end(cell, Status.REFUSED, "an old mistake")
    monkeypatch.setattr(launching, "_run_hydra", lambda *_: "")
    assert main([*words, "hydra/launcher=submitit_local"]) == 1
    told = capsys.readouterr()
    assert "its job died" in told.out + told.err and "an old mistake" not in told.out + told.err


# --- With jobs in processes of their own ---------------------------------------------------------


def line(runs: Path, launcher: str, *words: str) -> list[str]:
    sweep = ["-m", "norm=batch,group", f"hydra/launcher={launcher}", f"runs_dir={runs}"]
    return [sys.executable, "-m", "normexp.train", *sweep, *words]


def start(words: list[str], folder: Path, **streams: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(words, cwd=folder, env=env, text=True, **streams)


def results(runs: Path) -> dict[Path, bytes]:
    # Not Path.glob, which raises where a folder goes away while it looks.
    found = map(Path, glob(f"{runs}/default/*/seed-*/result.json"))
    return {path: path.read_bytes() for path in found}


def run(words: list[str], folder: Path) -> tuple[int, str]:
    with start(words, folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=900)
    return process.returncode, out


@pytest.mark.slow
def test_two_terminals_and_a_launcher_share_a_study(tmp_path: Path):
    """Nothing missing, nothing twice, nothing left over."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["lr=0.03,0.1", "norm_batch_size=4,32", "steps=60", "replicas=2"]
    local = line(tmp_path / "runs", "basic", *words)
    launched = line(tmp_path / "runs", "submitit_local", *words)
    commands = [start(each, tmp_path) for each in (local, local, launched)]
    ended: dict[Path, int] = {}
    while any(command.poll() is None for command in commands):
        for path in results(tmp_path / "runs"):
            assert ended.setdefault(path, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
        time.sleep(0.05)
    assert [command.returncode for command in commands] == [0, 0, 0]
    runs = results(tmp_path / "runs")
    assert len(runs) == (2 * 2 + 2) * 2  # group norm mixes no samples: one size
    assert {read_result(path).status for path in runs} == {"finished"}
    left = {".lock", "last.ckpt", "members.json"}
    assert not [p for p in tmp_path.rglob("*") if p.name in left or p.suffix in (".tmp", ".pickle")]
    code, told = run(launched, tmp_path)
    assert code == 0 and "6 skipped" in told
    assert results(tmp_path / "runs") == runs
    code, told = run([*launched, "micro_batch_size=5"], tmp_path)
    assert code == 2 and "micro_batch_size=5" in told
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # Hydra left nothing beside
    recorded = {
        tuple(each.command[1:]) for each in read_history(tmp_path / "runs" / "default").commands
    }
    launches = {tuple(launched[3:])}  # none that was refused
    assert recorded - {tuple(local[3:])} == launches  # none of a job; of a terminal, if it trained


@pytest.fixture
def ray_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of two nodes with one CPU each, on this machine."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    node = {"num_cpus": 1, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own, at its import and its end
def test_killed_ray_worker_fails_its_sweep_and_the_same_line_completes_it(
    ray_address: str, tmp_path: Path
):
    launcher = "hydra.launcher.ray"
    ray = [f"{launcher}.init.address={ray_address}", f"+{launcher}.remote.max_retries=0"]
    words = line(tmp_path / "runs", "ray", *ray, "steps=1500", "replicas=1")
    with start(words, tmp_path) as sweep:
        while len(glob(f"{tmp_path}/runs/default/*/stacks/*/run.log")) < 2:
            assert sweep.poll() is None, "the sweep ended before a job could be killed"
            time.sleep(0.1)
        listed = subprocess.check_output(["ps", "-eo", "pid,args"], text=True).splitlines()
        jobs = [int(text.split()[0]) for text in listed if "ray::_run_job" in text]
        assert len(jobs) == 2  # one on each node
        os.kill(jobs[0], signal.SIGKILL)
        assert sweep.wait(300) == 1
    assert len(results(tmp_path / "runs")) < 2
    code, told = run(words, tmp_path)
    assert code == 0, told
    runs = results(tmp_path / "runs")
    assert [read_result(path).status for path in runs] == ["finished", "finished"]
