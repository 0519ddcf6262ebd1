"""The members of a stack on disk: found by each of its cells until all of them have results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.result import Result, write_result
from normexp.records.stacks import begin_stack, end_stack, list_stacks

RATES = {"a": 0.1, "b": 0.3}


def test_stack_of_one_cell_lies_in_it(tmp_path: Path):
    stack = begin_stack(tmp_path, [("a", 2), ("a", 3)], {"a": 0.1}, apart="why", attempts=2)
    assert stack.directory == tmp_path / "a" / "stacks" / "2-3"
    assert list_stacks(tmp_path, ["a"]) == [stack]
    assert list_stacks(tmp_path, ["b"]) == []
    shutil.copytree(stack.directory, stack.directory.with_name("2-3.bak"))
    assert list_stacks(tmp_path, ["a"]) == [stack]


def test_stack_of_several_cells_is_found_by_each_and_leaves_its_log(tmp_path: Path):
    stack = begin_stack(tmp_path, [("a", 0), ("b", 0)], RATES)
    other = begin_stack(tmp_path, [("a", 1), ("b", 1)], RATES)
    assert stack.id != other.id and stack.directory != other.directory
    for cell in "ab":
        assert {each.id for each in list_stacks(tmp_path, cell)} == {stack.id, other.id}
    (stack.directory / "run.log").touch()
    assert stack.checkpointed_at == 0
    stack.checkpoint.touch()
    assert stack.checkpointed_at > 0
    end_stack(stack)
    assert list_stacks(tmp_path, "ab") == [other]
    assert [path.name for path in stack.directory.iterdir()] == ["run.log"]


def test_member_has_ended_when_it_has_a_result_that_is_no_earlier_attempt(tmp_path: Path):
    members = [("a", seed) for seed in range(4)]
    stack = begin_stack(tmp_path, members, {"a": 0.1}, attempts=1)
    results = [
        Result("a", 0, "finished", {}, {}, {}),
        Result("a", 1, "failed", {}, {}, {}, error="why", attempts=1),
        Result("a", 2, "failed", {}, {}, {}, error="why", attempts=2),
    ]
    for result in results:
        seed_dir(tmp_path / "a", result.seed).mkdir(parents=True)
        write_result(seed_dir(tmp_path / "a", result.seed), result)
    assert [stack.has_ended(tmp_path, member) for member in members] == [True, False, True, False]


@pytest.mark.parametrize("text", ["", "[]", '{"members": [["a"]]}', '{"members": [["a", 0]]}'])
def test_members_edited_by_hand_are_one_message(tmp_path: Path, text: str):
    stack = begin_stack(tmp_path, [("a", 0)], {"a": 0.1})
    (stack.directory / "members.json").write_text(text)
    with pytest.raises(UserError, match=r"members\.json cannot be read; remove its folder"):
        list_stacks(tmp_path, ["a"])
