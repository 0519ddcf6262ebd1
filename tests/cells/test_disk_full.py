"""A disk that fills up in the middle of a study: one message, and the same line completes it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import check_nothing_torn, numbers_of

pytestmark = pytest.mark.slow

GRID = ["-m", "norm=batch,group,layer", "steps=30", "replicas=2", "log_every=5"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_full_disk_is_one_message_and_the_rerun_completes(
    tmp_path: Path, small_disk: Path, workers: int
):
    entry = [sys.executable, "-m", "normexp.train", *GRID, f"workers={workers}"]
    whole = subprocess.run([*entry, f"runs_dir={tmp_path}"], capture_output=True, check=True)
    assert whole.returncode == 0
    size = sum(path.stat().st_size for path in (tmp_path / "default").rglob("*") if path.is_file())
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (4 * 2**20 - size // 2))  # room for half of the study
    command = [*entry, f"runs_dir={small_disk / 'runs'}"]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    (message,) = [line for line in full.stderr.splitlines() if line.startswith("normexp: ")]
    assert "the disk is full" in message
    study = small_disk / "runs" / "default"
    check_nothing_torn(study)
    assert 0 < len(numbers_of(study)) < 6  # no run that failed for want of room
    ballast.unlink()
    subprocess.run(command, capture_output=True, check=True)
    assert numbers_of(study) == numbers_of(tmp_path / "default")
