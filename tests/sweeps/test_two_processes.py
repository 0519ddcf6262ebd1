"""Two processes on one study share its cells: none is trained twice, both end with all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from killing import numbers_of

pytestmark = pytest.mark.slow

GRID = ["norm=batch,group,layer", "norm_batch_size=4,32", "epochs=3", "replicas=2", "log_every=5"]


def command(tmp_path: Path, study: str, workers: int) -> list[str]:
    own = [f"workers={workers}", f"runs_dir={tmp_path / 'runs'}", f"study={study}"]
    return [sys.executable, "-m", "normexp.train", "-m", *GRID, *own]


def test_two_sweeps_at_once_train_each_run_once(tmp_path: Path):
    subprocess.run(command(tmp_path, "whole", 0), check=True, capture_output=True)
    both = [
        subprocess.Popen(
            command(tmp_path, "shared", workers),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for workers in (0, 1)
    ]
    answers = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    study = tmp_path / "runs" / "shared"
    assert numbers_of(study) == numbers_of(tmp_path / "runs" / "whole")
    cells = [path.name for path in study.iterdir() if path.is_dir()]
    assert len(cells) == 4
    for out, _ in answers:  # a closing table of all cells, whoever trained them
        assert all(name in out for name in cells)
    lines = [line for _, err in answers for line in err.splitlines() if line.startswith("[")]
    trained = [line.split()[2] for line in lines if line.split()[1] == "finished"]
    assert len(lines) == 12
    assert len(trained) == 4  # each of the four cells by one of the two
