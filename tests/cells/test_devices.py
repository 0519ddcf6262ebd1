"""Cells on several devices: refusals, places, identity; and whole trainings by two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from normexp.cells.device_processes import Order, ProcessFailed, run_processes
from normexp.cells.plan import check_norm_batch_size, place_on_one_device, plan_training, sizes_of
from normexp.config.compose import compose_config
from normexp.config.place import environment_of, place_among
from normexp.config.rules import validate
from normexp.config.spec import CellSpec, place_of_command
from normexp.errors import UserError
from normexp.records.result import read_result
from normexp.train import main
from normexp.training.stopping import StopRequest

DDP = ["trainer=ddp", "trainer.accelerator=cpu"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.devices=2"], "trainer=ddp"),
        ([*DDP, "trainer.devices=3"], "batch_size=32 cannot be shared evenly by 3 devices; try 2"),
        ([*DDP, "trainer.num_nodes=2"], "as 4"),
        ([*DDP, "trainer.strategy=fsdp"], "trainer.strategy=fsdp: must be one of auto, ddp"),
        ([*DDP, "trainer.devices=0"], "trainer.devices=0: must be a whole number above 0"),
    ],
)
def test_devices_that_do_not_fit_are_refused_before_any_work(words: list[str], message: str):
    with pytest.raises(UserError) as error:
        validate(compose_config(words))
    assert message in str(error.value)


def test_statistics_over_several_devices_are_refused_but_for_a_norm_that_spans_them():
    cfg = compose_config([*DDP, "norm=batch", "norm_batch_size=32"])
    with pytest.raises(UserError, match="try norm_batch_size=16, or norm=sync"):
        check_norm_batch_size(cfg, sizes_of(cfg))
    assert sizes_of(compose_config([*DDP, "norm=batch"])).norm == 16
    assert sizes_of(compose_config([*DDP, "norm=sync"])).norm == 32
    with pytest.raises(UserError, match="over all 2 devices; try norm_batch_size=null"):
        sizes_of(compose_config([*DDP, "norm=sync", "norm_batch_size=8"]))


def test_last_batch_that_leaves_a_device_idle_is_refused_where_its_peers_would_wait():
    words = [*DDP, "norm=sync", "drop_last=false"]
    with pytest.raises(UserError, match="has 8 samples, which leaves one of 2 devices"):
        plan_training(compose_config(words), 72)
    assert plan_training(compose_config(words), 96).steps_per_epoch == 3
    assert plan_training(compose_config([*words, "norm=batch"]), 72).steps_per_epoch == 3


def test_cell_of_two_devices_is_evaluated_on_one_as_what_it_is():
    cfg = compose_config([*DDP, "norm=batch"])
    place_on_one_device(cfg)
    assert (cfg.norm_batch_size, cfg.trainer.devices, cfg.trainer.strategy) == (16, 1, "auto")


def test_place_is_told_by_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert place_among(2) is None
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert place_among(2) is None  # a batch script: nothing has started its tasks
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert (place_among(2), place_among(4), place_among(1)) == (1, None, None)
    for name, value in environment_of(3, 4, 29500).items():
        monkeypatch.setenv(name, value)
    assert place_among(4) == 3


def test_devices_that_are_no_number_are_no_place_and_left_to_be_refused():
    config = compose_config(["trainer.num_nodes=null"])
    assert place_of_command([CellSpec(config, {}, "")]) is None


@pytest.mark.slow
def test_two_processes_leave_the_records_of_the_cell_that_one_device_trains(tmp_path: Path):
    common = ["norm=batch", "steps=12", "replicas=2", "trainer.precision=64-true"]
    assert main([*DDP, *common, f"runs_dir={tmp_path / 'two'}"]) == 0
    one = [*common, "trainer=cpu", "trainer.precision=64-true", "norm_batch_size=16"]
    assert main([*one, f"runs_dir={tmp_path / 'one'}"]) == 0
    runs = {kind: sorted(tmp_path.glob(f"{kind}/default/*/seed-*")) for kind in ("one", "two")}
    assert [run.relative_to(tmp_path / "one") for run in runs["one"]] == [
        run.relative_to(tmp_path / "two") for run in runs["two"]
    ]
    for alone, shared in zip(runs["one"], runs["two"], strict=True):
        own, theirs = read_result(alone), read_result(shared)
        assert theirs.metrics == pytest.approx(own.metrics, abs=1e-9)
        assert (own.config["devices"], theirs.config["devices"]) == (1, 2)
        assert theirs.config["norm_batch_size"] == 16
    assert not list(tmp_path.glob("two/default/*/stacks/*/*.ckpt"))


@pytest.mark.slow
def test_processes_that_torchrun_has_started_train_one_cell(tmp_path: Path):
    words = [*DDP, "norm=group", "steps=8", "replicas=1", f"runs_dir={tmp_path}"]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = [sys.executable, *run, "-m", "normexp.train", *words]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, cwd=os.getcwd())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained, n = 1 seeds") == 1
    (result,) = tmp_path.glob("default/*/seed-0/result.json")
    assert read_result(result).status == "finished"


@pytest.mark.slow
def test_failure_of_one_process_ends_the_others_and_is_told():
    plain = OmegaConf.to_container(compose_config([*DDP, "norm=batch"]), resolve=True)
    assert isinstance(plain, dict)
    plain["model"]["_target_"] = "normexp.nowhere.Model"
    choices = {"norm": "batch", "model": "convnet", "data": "digits", "optim": "sgd"}
    order = Order({str(key): value for key, value in plain.items()}, choices, [0], [], False)
    with pytest.raises((UserError, ProcessFailed), match="normexp.nowhere"):
        run_processes(order, 2, StopRequest())
