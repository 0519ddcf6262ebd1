"""Two processes that share every step train what one does with the same sizes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import (
    CASES,
    build,
    in_two_processes,
    lose_second,
    outcome_of,
    resume,
    train_all,
)
from torch.multiprocessing.spawn import ProcessExitedException
from training_cases import train

UNSEEN = ("key", "first_sample")  # each process has its own position in dropout


def assert_same_outcome(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    for own, theirs in zip(expected["states"], found["states"], strict=True):
        for name in (name for name in own if not name.endswith(UNSEEN)):
            torch.testing.assert_close(theirs[name], own[name], rtol=0, atol=atol, msg=name)
    for name, column in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(column, abs=atol)


@pytest.fixture(scope="module")
def shared_trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the outcome of every case in each of two processes."""
    folder = tmp_path_factory.mktemp("two")
    in_two_processes(partial(train_all, folder=folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(case: str, shared_trainings: Path, tmp_path: Path):
    alone = outcome_of(train(build(case), tmp_path / "alone.ckpt"))
    first, second = (
        torch.load(shared_trainings / f"{case}.{index}.pt", weights_only=True) for index in (0, 1)
    )
    # AdamW divides by the root of a mean of squares, which magnifies rounding from step to step.
    atol = 1e-9 if case == "adamw_clipped" else 1e-12
    assert_same_outcome(first, alone, atol)
    assert_same_outcome(second, first, 0)
    for own, theirs in zip(alone["rows"], first["rows"], strict=True):
        assert [row[:3] for row in own] == [row[:3] for row in theirs]
        for own_row, their_row in zip(own, theirs, strict=True):
            assert own_row[3] == pytest.approx(their_row[3], abs=atol)


@pytest.mark.slow
def test_killed_process_leaves_a_checkpoint_that_one_or_two_processes_resume(tmp_path: Path):
    alone = outcome_of(train(build("batch_stacked"), tmp_path / "alone.ckpt"))
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        in_two_processes(partial(lose_second, name="batch_stacked", checkpoint=one, step=6))
    step = torch.load(one, weights_only=True)["normexp"]["losses"]["num_steps"]
    assert 0 < step < 10
    shutil.copy(one, two)
    assert_same_outcome(outcome_of(train(build("batch_stacked"), one)), alone, 1e-12)
    in_two_processes(partial(resume, name="batch_stacked", checkpoint=two))
    found = torch.load(two.with_suffix(".0.pt"), weights_only=True)
    assert_same_outcome(found, alone, 1e-12)
