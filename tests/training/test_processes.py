"""Two processes that share every step train what one does with the same sizes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from process_cases import CASES, build, outcome_of
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from training_cases import train

from normexp.config.place import environment_of

UNSEEN = ("key", "first_sample")  # each process has its own position in dropout


@pytest.fixture(scope="module")
def shared_trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the outcome of every case in each of two processes."""
    folder = tmp_path_factory.mktemp("two")
    script = Path(__file__).with_name("process_cases.py")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join([str(script.parent), *filter(None, sys.path)])
    running = []
    for index in range(2):
        told = {**os.environ, "PYTHONPATH": path, **environment_of(index, 2, store.port)}
        running.append(subprocess.Popen([sys.executable, str(script), str(folder)], env=told))
    deadline = time.monotonic() + 600
    try:
        for process in running:
            assert process.wait(deadline - time.monotonic()) == 0
    finally:
        for process in running:
            process.kill()
            process.wait()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(case: str, shared_trainings: Path, tmp_path: Path):
    alone = outcome_of(train(build(case), tmp_path / "alone.ckpt"))
    first, second = (
        torch.load(shared_trainings / f"{case}.{index}.pt", weights_only=True) for index in (0, 1)
    )
    for own, theirs, other in zip(alone["states"], first["states"], second["states"], strict=True):
        for name in (name for name in own if not name.endswith(UNSEEN)):
            torch.testing.assert_close(theirs[name], own[name], rtol=0, atol=1e-9, msg=name)
            assert torch.equal(theirs[name], other[name]), f"{name} differs between processes"
    for own, theirs in zip(alone["rows"], first["rows"], strict=True):
        assert [row[:3] for row in own] == [row[:3] for row in theirs]
        for own_row, their_row in zip(own, theirs, strict=True):
            assert own_row[3] == pytest.approx(their_row[3], abs=1e-9)
    for name, column in alone["metrics"].items():
        assert first["metrics"][name] == pytest.approx(column, abs=1e-9)
