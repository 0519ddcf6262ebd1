"""Cells on several devices: refusals, places, identity; and whole trainings by two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from glob import glob
from pathlib import Path

import pytest
from train_cases import prepare, results, spec_of

from normexp.cells import devices
from normexp.cells.recipe import recipe_of
from normexp.cells.refusals import check_norm_batch_size
from normexp.cells.stack import Stack, create_stack
from normexp.config.compose import compose_config
from normexp.config.outcome import evaluations_of
from normexp.config.process import rank_among
from normexp.config.spec import CellSpec, rank_for
from normexp.errors import UserError
from normexp.records.samples import read_samples
from normexp.train import main
from normexp.training.recipe import Recipe
from normexp.training.stopping import TrainingControl

DDP = ["trainer=ddp", "trainer.accelerator=cpu"]


def recipe(*words: str, num_train: int = 96) -> Recipe:
    return recipe_of(spec_of(*DDP, *words), num_train=num_train, metrics=["val/loss"])


def test_an_evaluation_is_asked_for_at_the_size_that_several_devices_trained():
    words = ["norm=custom", "norm._target_=torch.nn.BatchNorm2d", "evaluate_with=[running,batch]"]
    trained = {"batch_size": 32, "micro_batch_size": None, "norm_batch_size": 16}
    assert evaluations_of(spec_of(*DDP, "trainer.devices=2", *words), trained) == {"batch16": 16}


def test_statistics_over_several_devices_are_refused_but_for_a_norm_that_spans_them():
    with pytest.raises(UserError, match="try norm_batch_size=16, or norm=sync"):
        check_norm_batch_size(32, recipe("norm=batch", "norm_batch_size=32"))
    assert recipe("norm=batch").sizes.norm == 16
    assert recipe("norm=sync").sizes.norm == 32
    with pytest.raises(UserError, match="over all 2 devices; try norm_batch_size=null"):
        recipe("norm=sync", "norm_batch_size=8")


def test_last_batch_that_leaves_a_device_idle_is_refused_where_its_peers_would_wait():
    words = ["norm=sync", "drop_last=false"]
    with pytest.raises(UserError, match="has 8 samples, which leaves one of 2 devices"):
        recipe(*words, num_train=72)
    assert recipe(*words, num_train=96).steps_per_epoch == 3
    assert recipe("norm=batch", "drop_last=false", num_train=72).steps_per_epoch == 3


def test_place_is_told_by_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert rank_among(2) is None
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert rank_among(2) is None  # a batch script: nothing has started its tasks
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert (rank_among(2), rank_among(4), rank_among(1)) == (1, None, None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert rank_among(4) == 3
    config = compose_config(["trainer.num_nodes=null"])  # which is refused later
    assert rank_for([CellSpec(config, {}, "")]) is None


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("words", "code", "out"),
    [(["dry_run=true"], 0, "runs to do"), (["-m", "norm=batch,group"], 2, "2 cells")],
    ids=["dry_run", "sweep"],
)
def test_first_of_started_processes_alone_answers_what_needs_no_other(
    index, words, code, out, monkeypatch, tmp_path: Path, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(index))
    assert main([*DDP, *words, f"runs_dir={tmp_path}"]) == code
    told = capsys.readouterr()
    if index == 0:
        assert out in told.out + told.err
    else:
        assert told.out + told.err == ""
    assert not list(tmp_path.iterdir())


def test_each_rank_repeats_every_cell_of_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For example the checkpoint of a stack of two rates, begun on one device."""
    words = [*DDP, "norm=batch", f"runs_dir={tmp_path}"]
    cells = [prepare(*words, f"lr={lr}") for lr in (0.5, 0.05)]
    begun = create_stack([(cell, seed) for cell in cells for seed in (0, 1)])
    ranks: list[Stack] = []
    monkeypatch.setattr(devices, "_spawn_ranks", lambda job, control: job.train(0, control))
    monkeypatch.setattr(devices, "train_stack", lambda stack, *_: ranks.append(stack))
    devices.train_on_devices(begun, TrainingControl())
    (stack,) = ranks
    assert (stack.lrs, stack.seeds) == ([0.5, 0.5, 0.05, 0.05], [0, 1, 0, 1])
    assert [cell.spec.id for cell, _ in stack.runs] == [cell.spec.id for cell, _ in begun.runs]


# --- whole trainings ------------------------------------------------------------------------------

TWO = [*DDP, "norm=batch", "trainer.precision=64-true"]
ONE = ["trainer=cpu", "norm=batch", "norm_batch_size=16", "trainer.precision=64-true"]


@pytest.mark.slow
def test_two_processes_leave_the_records_of_the_cell_that_one_device_trains(tmp_path: Path, capfd):
    words = ["steps=12", "replicas=2"]
    assert main([*TWO, *words, f"runs_dir={tmp_path / 'two'}"]) == 0
    told = capfd.readouterr()
    assert main([*ONE, *words, f"runs_dir={tmp_path / 'one'}"]) == 0
    assert told.err == capfd.readouterr().err  # each message once, and none of Lightning's
    alone, shared = results(tmp_path / "one"), results(tmp_path / "two")
    assert len(alone) == 2 and alone.keys() == shared.keys()
    for path, own in alone.items():
        assert shared[path].metrics == pytest.approx(own.metrics, abs=1e-12)
        assert (own.config["devices"], shared[path].config["devices"]) == (1, 2)
        assert shared[path].config["norm_batch_size"] == 16
        samples = [
            read_samples((tmp_path / kind / path).parent)["running"] for kind in ("one", "two")
        ]
        assert samples[0].tolist() == samples[1].tolist()
    assert not list(tmp_path.glob("two/default/*/stacks/*/*.ckpt"))


# Fails where a process is still connected as it ends: threads of Gloo may abort it then.
TRAIN = """
import atexit, os, runpy
from torch import distributed

atexit.register(lambda: distributed.is_initialized() and os._exit(3))
runpy.run_module("normexp.train", run_name="__main__")
"""


@pytest.mark.slow
def test_processes_that_torchrun_has_started_train_one_cell(tmp_path: Path):
    words = [*DDP, "norm=group", "steps=8", "replicas=1", f"runs_dir={tmp_path}"]
    (tmp_path / "train.py").write_text(TRAIN)
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = [sys.executable, *run, str(tmp_path / "train.py"), *words]
    for told in ("trained, n = 1 seed", "already recorded, n = 1 seed"):
        ended = subprocess.run(line, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count(told) == 1
    (result,) = results(tmp_path).values()
    assert result.status == "finished"


BROKEN = """
import os, traceback
from torch import nn

class BreaksInSecond(nn.BatchNorm2d):
    def forward(self, x):
        callers = {frame.name for frame in traceback.extract_stack()}
        if os.environ.get("LOCAL_RANK") == "1" and "training_step" in callers:
            raise RuntimeError("broken in the second process")
        return super().forward(x)
"""


@pytest.mark.slow
def test_failure_of_one_process_ends_the_others_and_is_recorded(
    tmp_path: Path, own_module: Callable[[str, str], Path]
):
    own_module("norm_of_one_rank", BROKEN)
    norm = ["norm=custom", "norm._target_=norm_of_one_rank.BreaksInSecond"]
    assert main([*DDP, *norm, "steps=4", "replicas=1", f"runs_dir={tmp_path / 'runs'}"]) == 1
    (result,) = results(tmp_path / "runs").values()
    assert result.status == "failed"
    assert "broken in the second process" in (result.error or "")


def begin(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a training in a session of its own, as in a terminal."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "normexp.train", *words],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "it ended before"
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that the training has spawned, without the tracker of shared memory."""
    found = subprocess.run(
        ["ps", "-ww", "--ppid", str(process.pid), "-o", "pid=,args="],
        capture_output=True,
        text=True,
    )
    lines = [line for line in found.stdout.splitlines() if "spawn_main" in line]
    return [int(line.split()[0]) for line in lines]


@pytest.mark.slow
def test_stopped_and_killed_ranks_leave_a_checkpoint_that_one_device_resumes(tmp_path: Path):
    words = ["steps=400", "replicas=2", "log_every=10", "chunk=4"]
    assert main([*ONE, *words, f"runs_dir={tmp_path / 'alone'}"]) == 0
    runs_dir, log = tmp_path / "runs", tmp_path / "log"
    line = [*TWO, *words, f"runs_dir={runs_dir}"]

    def checkpoint() -> list[str]:  # not by Path.glob, which raises where a folder goes away
        return glob(f"{runs_dir}/default/*/stacks/*/last.ckpt")

    def trains() -> bool:
        has_begun = glob(f"{runs_dir}/default/*/stacks/*/run.log")
        return bool(has_begun) and len(ranks_of(process)) == 2

    process = begin(line, log)
    wait_for(trains, process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    assert checkpoint() and "Traceback" not in log.read_text()
    process = begin(line, log)
    wait_for(trains, process)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    assert process.wait(120) == 1
    assert "killed" in log.read_text() or "SIGKILL" in log.read_text()
    assert checkpoint()
    assert main([*ONE, *words, f"runs_dir={runs_dir}"]) == 0
    alone, resumed = results(tmp_path / "alone"), results(runs_dir)
    assert alone.keys() == resumed.keys()
    for path, own in alone.items():
        assert resumed[path].status == "finished"
        assert resumed[path].metrics == pytest.approx(own.metrics, abs=1e-9)
