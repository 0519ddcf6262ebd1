"""Workers, their cores and GPUs, and the cells that may be one stack."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from train_cases import spec_of

from normexp.training.config.spec import CellSpec
from normexp.training.records import environment
from normexp.training.records.environment import visible_gpus
from normexp.training.sweeps import machine, worker
from normexp.training.sweeps.machine import WorkerSlot, other_trainings, worker_slots


def on(workers: int | None = None, accelerator: str = "cpu") -> CellSpec:
    own = [] if workers is None else [f"workers={workers}"]
    return spec_of(*own, f"trainer.accelerator={accelerator}")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)


@pytest.mark.parametrize(
    ("workers", "count"),
    [(None, 8), (2, 2), (20, 20), (1, 1), (0, 0)],
)
def test_there_is_a_worker_for_each_core(workers: int | None, count: int):
    slots, num_workers = worker_slots([on(workers)])
    assert num_workers == count
    assert slots == [WorkerSlot()] * (count or 8)


def test_a_process_that_may_start_none_trains_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert worker_slots([on(2)]) == ([WorkerSlot()] * 2, 0)


def test_windows_has_no_workers_and_no_numbers_of_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "setsid")
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setenv("LOGNAME", "me")
    assert worker_slots([on(2)]) == ([WorkerSlot()] * 2, 0)
    assert WorkerSlot().paths()[0].parent.name == "normexp-me"


@pytest.mark.parametrize(
    ("cells", "gpus", "num_workers"),
    [
        ([on(accelerator="auto")] * 100, ["0", "1", "2"], 3),
        ([on(2, accelerator="auto")], ["0", "1", "2"], 2),
        ([on(6, accelerator="gpu")] * 100, ["0", "1", "2", "0", "1", "2"], 6),
        ([on()], [None] * 8, 8),
    ],
)
def test_gpus_take_turns_and_this_process_trains_where_workers_cannot(
    monkeypatch, cells, gpus, num_workers
):
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["0", "1", "2"])
    slots, count = worker_slots(cells)
    assert ([slot.gpu for slot in slots], count) == (gpus, num_workers)


def test_torchrun_gives_each_of_its_processes_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    slots, count = worker_slots([on(accelerator="gpu")])
    assert ([slot.gpu for slot in slots], count) == ([None, None], 0)


def test_each_command_takes_a_gpu_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["0", "1"])
    (first, second), _ = worker_slots([on(accelerator="auto")])
    with first.claim() as is_mine:
        assert is_mine and first.is_in_use() and not second.is_in_use()
        second.hide_other_gpus()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        with first.claim() as is_mine:
            assert not is_mine  # another command waits


def test_commands_share_the_slots_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    slot = WorkerSlot("0", ["gpu-0-0", "gpu-0-1"], waits=True)
    with slot.claim() as first:
        with slot.claim() as second, slot.claim() as third:
            assert (first, second, third) == (True, True, False)
            with replace(slot, waits=False).claim() as beside:  # workers=0
                assert beside
        assert not slot.is_in_use()
    assert not list(tmp_path.glob("*/gpu-*"))


@pytest.mark.parametrize("session", ["/gone/1000", "{}/file", "relative"])
def test_locks_lie_in_the_temporary_folder_where_the_session_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: str
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", session.format(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (path,) = WorkerSlot().paths()
    assert path.parent == tmp_path / f"normexp-{os.getuid()}"
    assert not (tmp_path / "relative").exists() and not Path("/gone").exists()


def test_a_cpu_is_not_waited_for_and_counts_the_trainings_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    slot = WorkerSlot()
    (path,) = slot.paths()
    with slot.claim() as first, slot.claim() as second:
        assert first and second
        assert other_trainings() == 0  # a command does not count itself
        path.write_text("process 1 (train norm=group)")
        assert other_trainings() == 1
    assert not path.exists() and other_trainings() == 0


@pytest.mark.parametrize(
    ("build", "asked", "gpus"),
    [
        ("2.11.0+cu128", None, ["0", "1"]),
        ("2.11.0+cu128", "1", ["1"]),
        ("2.11.0+cu128", "", []),
        ("2.11.0+cpu", None, []),
    ],
)
def test_gpus_are_named_as_the_environment_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, asked: str | None, gpus: list[str]
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'; echo 'GPU 1: H200 (UUID: b)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(environment, "version", lambda _: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert visible_gpus() == gpus


@pytest.mark.slow
def test_threads_that_wait_do_not_keep_a_core_busy():
    """The OpenMP library itself says how its threads wait."""
    words = "from normexp.training.sweeps.machine import importing_torch\n"
    words += "with importing_torch():\n import torch"
    variables = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    shown = subprocess.run(
        [sys.executable, "-c", words],
        **{"env": variables | {"OMP_DISPLAY_ENV": "true"}, "capture_output": True, "text": True},
    )
    assert "OMP_WAIT_POLICY" in shown.stderr and "'ACTIVE'" not in shown.stderr
    assert "'PASSIVE'" in shown.stderr


def test_why_a_worker_failed_is_known_though_its_last_line_was_read_before():
    one = object.__new__(worker.Worker)
    with tempfile.TemporaryFile() as output:
        vars(one).update(_output=output, _num_bytes_read=0, last_line="")
        one.process = SimpleNamespace(is_alive=lambda: True)
        output.write(b"step 3\nthe disk is full\n")
        output.flush()
        assert one.new_output() == ["step 3", "the disk is full"]
        assert (one.new_output(), one.last_line) == ([], "the disk is full")
