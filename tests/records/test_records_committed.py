"""The runs of a stack end together, whenever the process that ends them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records.committed import (
    commit_results,
    interrupted_stacks,
    publish_results,
    shared_dir,
    write_members,
)
from normexp.records.paths import seed_dir, stack_dir
from normexp.records.result import Result, read_result, write_result


def result(seed: int, accuracy: float) -> Result:
    return Result("cell", seed, "finished", {}, {"test/accuracy": accuracy}, {})


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    directory = stack_dir(tmp_path, 0, 1)
    directory.mkdir(parents=True)
    for seed in (0, 1):
        seed_dir(tmp_path, seed).mkdir()
    (directory / "last.ckpt").write_text("checkpoint")
    commit_results(directory, [result(0, 0.5), result(1, 0.6)])
    return directory


def test_committed_results_reach_their_runs_and_the_checkpoint_goes(tmp_path: Path, stack: Path):
    publish_results(tmp_path)
    assert [read_result(seed_dir(tmp_path, seed)) for seed in (0, 1)] == [
        result(0, 0.5),
        result(1, 0.6),
    ]
    assert list(stack.iterdir()) == []


def test_only_what_the_killed_process_left_out_is_written(tmp_path: Path, stack: Path):
    assert stack.is_dir()
    write_result(seed_dir(tmp_path, 0), result(0, 0.5))
    failed = Result("cell", 1, "failed", {}, {}, {}, error="killed", attempts=1)
    write_result(seed_dir(tmp_path, 1), failed)
    inode = (seed_dir(tmp_path, 0) / "result.json").stat().st_ino
    publish_results(tmp_path)
    assert (seed_dir(tmp_path, 0) / "result.json").stat().st_ino == inode
    assert read_result(seed_dir(tmp_path, 1)) == result(1, 0.6)


def test_stack_of_several_cells_stays_until_each_has_its_results(tmp_path: Path):
    members = [("a", 0), ("b", 0), ("b", 1)]
    directory = shared_dir(tmp_path, members)
    directory.mkdir(parents=True)
    write_members(directory, members)
    (directory / "last.ckpt").write_text("checkpoint")
    assert list(interrupted_stacks(tmp_path)) == [(directory, members)]
    for cell_id, seed in members:
        seed_dir(tmp_path / cell_id, seed).mkdir(parents=True)
    results = [Result(cell_id, seed, "finished", {}, {}, {}) for cell_id, seed in members]
    commit_results(directory, results)
    publish_results(tmp_path / "a")
    assert read_result(seed_dir(tmp_path / "a", 0)) == results[0]
    assert not (seed_dir(tmp_path / "b", 0) / "result.json").exists()
    assert (directory / "last.ckpt").exists()
    publish_results(tmp_path / "b")
    assert [read_result(seed_dir(tmp_path / "b", seed)) for seed in (0, 1)] == results[1:]
    assert [path.name for path in directory.iterdir()] == ["members.json"]


def test_members_edited_by_hand_are_one_message(tmp_path: Path):
    directory = shared_dir(tmp_path, [("a", 0)])
    directory.mkdir(parents=True)
    (directory / "last.ckpt").touch()
    for text in (None, "[]", '{"members": [["a"]]}'):
        if text is not None:
            (directory / "members.json").write_text(text)
        with pytest.raises(UserError, match=r"members\.json cannot be read; remove its folder"):
            list(interrupted_stacks(tmp_path))


def test_edited_commit_is_one_message(tmp_path: Path, stack: Path):
    (stack / "ended.json").write_text('{"results": [{"seed": 0}]}')
    with pytest.raises(UserError, match=r"ended\.json was edited by hand"):
        publish_results(tmp_path)
