"""Several devices: a process for each, by torchrun or srun; equal to ghost sub-batches of one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_fabric.utilities import rank_zero as fabric_ranks
from pytorch_lightning.utilities import rank_zero as trainer_ranks
from train_cases import spec_of

from normexp.errors import UserError
from normexp.train import main
from normexp.training.checks.training import check_norm_batch_size
from normexp.training.data.build import build_data
from normexp.training.recipe import Recipe, recipe_of
from normexp.training.records.result import read_result
from normexp.training.sweeps.machine import importing_torch, started_processes

DDP = ["trainer=ddp", "trainer.accelerator=cpu"]
VARIABLES = ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def recipe(*words: str) -> Recipe:
    spec = spec_of(*DDP, *words)
    return recipe_of(spec, build_data(spec.config["data"]))


def test_statistics_over_several_devices_are_refused_but_for_a_norm_that_spans_them():
    with pytest.raises(UserError, match="try norm_batch_size=16, or norm=sync"):
        check_norm_batch_size(recipe("norm=batch", "norm_batch_size=32"))
    assert recipe("norm=batch").sizes.norm == 16
    assert recipe("norm=sync").sizes.norm == 32


def test_devices_cannot_move_running_averages_one_after_another():
    with pytest.raises(UserError, match="norm.running_from=sequence: 2 devices run their groups"):
        recipe("trainer.devices=2", "norm.running_from=sequence")


def test_place_is_told_by_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert started_processes() == (0, 1)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert started_processes() == (0, 1)  # a batch script: nothing has started its tasks
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert started_processes() == (1, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "")
    assert started_processes() == (1, 2)
    monkeypatch.setenv("RANK", "3")
    assert started_processes() == (3, 4)


@pytest.mark.parametrize("rank", ["", "first"])
def test_lightning_can_be_imported_where_a_rank_is_no_number(
    monkeypatch: pytest.MonkeyPatch, rank: str
):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, rank)
    with importing_torch():
        for module in (fabric_ranks, trainer_ranks):
            runpy.run_path(str(module.__file__))
    assert not {"RANK", "LOCAL_RANK", "SLURM_PROCID"} & os.environ.keys()


def test_a_plain_process_says_the_line_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = [*DDP, "trainer.devices=2", f"runs_dir={tmp_path}"]
    assert main(words) == 2
    line = f"torchrun --nnodes 1 --nproc-per-node 2 -m normexp.train {' '.join(words)}"
    assert line in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert main([f"runs_dir={tmp_path}"]) == 2
    assert "this command has 4; drop torchrun or srun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_train_as_one_with_ghost_sub_batches(tmp_path: Path):
    shared = ["norm=batch", "steps=6", "replicas=1", f"runs_dir={tmp_path}", "batch_size=32"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    line = [*torchrun, "-m", "normexp.train", *shared, *DDP, "trainer.devices=2", "study=two"]
    subprocess.run(line, check=True, capture_output=True)
    one = [*shared, "trainer=cpu", "norm_batch_size=16", "workers=0", "study=one"]
    assert main(one) == 0
    results = [
        read_result(path)
        for study in ("two", "one")
        for path in tmp_path.glob(f"{study}/*/seed-0/result.json")
    ]
    assert results[0].metrics == pytest.approx(results[1].metrics, abs=1e-3)
