"""How many workers, and what each gets of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from normexp.errors import UserError
from normexp.sweeps import machine as placement
from normexp.sweeps.machine import Place, places_for, usable_cores, visible_gpus


def cfg(workers: int | None = None, **trainer: object) -> DictConfig:
    trainer = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, **trainer}
    return OmegaConf.create({"workers": workers, "trainer": trainer})


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("workers", "num_cells", "count", "threads"),
    [(None, 100, 8, 1), (None, 3, 3, 2), (2, 100, 2, 4), (20, 100, 20, 1), (1, 100, 1, 8)],
)
def test_cores_are_shared_out(workers: int | None, num_cells: int, count: int, threads: int):
    assert places_for([cfg(workers)], num_cells) == [Place(threads)] * count


@pytest.mark.usefixtures("eight_cores")
def test_gpus_take_turns_and_a_cpu_training_gets_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "visible_gpus", lambda: ["0", "1", "2"])
    gpus = [place.gpu for place in places_for([cfg(accelerator="auto")], 100)]
    assert gpus == ["0", "1", "2"]
    gpus = [place.gpu for place in places_for([cfg(6, accelerator="gpu")], 100)]
    assert gpus == ["0", "1", "2", "0", "1", "2"]
    assert {place.gpu for place in places_for([cfg()], 100)} == {None}


def test_no_worker_where_asked_and_where_a_cell_takes_the_whole_machine():
    assert places_for([cfg(0)], 9) == []
    assert places_for([cfg(), cfg(devices=2)], 9) == []


def test_one_number_of_workers_for_a_sweep():
    with pytest.raises(UserError, match="workers=1,2: one value for all"):
        places_for([cfg(1), cfg(2)], 9)


def test_threads_that_the_user_set_are_not_raised():
    assert Place(4).environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert Place(1).environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "1"
    assert Place(4, "1").environment({"A": "b"}) == {
        "A": "b",
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_a_containers_quota_cuts_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "cpu.max"
    monkeypatch.setattr(placement, "CGROUP_LIMITS", ((str(file),),))
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores() == affinity  # no such file
    file.write_text("max 100000\n")
    assert usable_cores() == affinity
    file.write_text("100000 100000\n")
    assert usable_cores() == 1


def test_gpus_are_named_as_the_environment_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)'; echo 'GPU 1: H200 (UUID: GPU-b)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(placement, "version", lambda _: "2.11.0+cu128")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(placement, "version", lambda _: "2.11.0+cpu")
    assert visible_gpus() == []
