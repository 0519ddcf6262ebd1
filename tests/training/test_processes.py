"""Two processes that share every step train what one does with the same sizes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from process_cases import CASES, build, outcome_of, train
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from normexp.batching.sizes import Share, Sizes
from normexp.config.place import environment_of
from normexp.errors import UserError

UNSEEN = ("key", "first_sample")  # where each process stands in its own dropout


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
    task = build(case, num_processes=1)
    train(task, tmp_path / "alone.ckpt", num_processes=1)
    alone = outcome_of(task)
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
    for name, column in alone["final"].items():
        assert first["final"][name] == pytest.approx(column, abs=1e-9)


def test_shares_of_a_step_hold_each_sample_once_in_whole_ghost_groups():
    for sizes, num_samples in ((Sizes(8, 4), 8), (Sizes(8, 4), 6), (Sizes(8), 3), (Sizes(12), 12)):
        bounds = [sizes.micro_bounds(num_samples, Share(index, 2)) for index in (0, 1)]
        taken = sorted(i for own in bounds for first, last in own for i in range(first, last))
        assert taken == list(range(num_samples))
        width = sizes.shared_by(2).norm
        assert all(first % width == 0 for own in bounds for first, _ in own)


@pytest.mark.parametrize(
    ("sizes", "norm_batch_size"),
    [
        (Sizes(32), 16),
        (Sizes(32, 8), 4),
        (Sizes(32, None, 4), 4),
        (Sizes(32, None, 16), 16),
        (Sizes(32, 8, 8), 4),
    ],
)
def test_devices_split_statistics_as_ghost_sub_batches(sizes: Sizes, norm_batch_size: int):
    shared = sizes.shared_by(2)
    assert (shared.batch_size, shared.micro) == (sizes.batch_size, sizes.micro)
    assert shared.norm == norm_batch_size
    assert sizes.shared_by(2, synchronized=True).norm == sizes.micro
    assert sizes.shared_by(1) == sizes


def test_forward_that_devices_cannot_share_is_refused():
    with pytest.raises(UserError, match="batch_size=32 cannot be shared evenly by 3 devices"):
        Sizes(32).shared_by(3)
    with pytest.raises(UserError, match="micro_batch_size=8 .* try 2"):
        Sizes(32, 8).shared_by(3)
