from __future__ import annotations

import errno
import multiprocessing
import os
from datetime import datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import yaml

from normexp.errors import UserError
from normexp.records.history import append_command, read_commands

COMMAND = ["-m", "norm=batch,group", "lr=1e-5"]
ROUNDS = 40


def append_many(study: Path, name: str, barrier: Barrier) -> None:
    barrier.wait()
    for number in range(ROUNDS):
        append_command(study, [name, "x" * 5000], {"number": number}, "0123")


def test_two_processes_append_without_tearing(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    names = ["first", "second"]
    workers = [
        context.Process(target=append_many, args=(tmp_path, name, barrier)) for name in names
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    documents = read_commands(tmp_path)
    assert len(documents) == 2 * ROUNDS
    for name in names:
        numbers = [each["grid"]["number"] for each in documents if each["command"][0] == name]
        assert numbers == list(range(ROUNDS))
    assert [
        each["command"] for each in yaml.safe_load_all((tmp_path / "study.yaml").read_text())
    ] == [each["command"] for each in documents]


def test_yaml_and_own_reader_agree_on_every_value(tmp_path: Path):
    grid = {
        "lr": [1e-5, 1e22, 0.1, -1.5e-7, 1.0, 3],
        "text": [
            "yes",
            "1e-5",
            "größer\u2028\x85\x7f",
            "a: b # c",
            'quote"\\',
            "tab\t",
            "😀",
            "\\ud83d",
        ],
        "nested": {"none": None, "true": True, "empty": {}, "list": []},
        "über: key": "",
    }
    append_command(tmp_path, COMMAND, grid, "0123")
    append_command(tmp_path, [], {}, "4567")
    text = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    first, second = list(yaml.safe_load_all(text))
    assert first["grid"] == grid
    assert [type(value) for value in first["grid"]["lr"]] == [float] * 5 + [int]
    assert first["command"] == COMMAND
    assert (first["code_version"], second["code_version"]) == ("0123", "4567")
    assert datetime.fromisoformat(first["time"]).utcoffset() is not None
    assert read_commands(tmp_path) == [first, second]


def test_earlier_documents_keep_their_bytes(tmp_path: Path):
    append_command(tmp_path, COMMAND, {}, "0123")
    before = (tmp_path / "study.yaml").read_bytes()
    append_command(tmp_path, COMMAND, {}, "0123")
    assert (tmp_path / "study.yaml").read_bytes().startswith(before)


def test_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch):
    append_command(tmp_path, COMMAND, {}, "0123")
    before = (tmp_path / "study.yaml").read_bytes()
    real_write = os.write
    calls = []

    def fill_up(descriptor: int, content: bytes) -> int:
        calls.append(content)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, content[:10])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        append_command(tmp_path, COMMAND, {}, "0123")
    assert (tmp_path / "study.yaml").read_bytes() == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_value_that_is_not_plain_is_refused_before_writing(tmp_path: Path, value: object):
    with pytest.raises(ValueError, match="not a (finite number|plain value)"):
        append_command(tmp_path, [], {"x": value}, "0123")
    assert list(tmp_path.iterdir()) == []


def test_file_edited_by_hand_is_named_with_the_line(tmp_path: Path):
    assert read_commands(tmp_path) == []
    append_command(tmp_path, COMMAND, {}, "0123")
    with (tmp_path / "study.yaml").open("a") as file:
        file.write("oops\n")
    with pytest.raises(UserError, match=r"study\.yaml line 6 is not as normexp writes it"):
        read_commands(tmp_path)


def test_document_that_a_killed_writer_tore_is_cut_at_its_last_line(tmp_path: Path):
    append_command(tmp_path, ["first"], {}, "0" * 16)
    path = tmp_path / "study.yaml"
    whole = path.read_bytes()
    path.write_bytes(whole + b'---\ntime: "2026-01-01T00:00:00+00:00"\ncommand: ["seco')
    assert [document.get("command") for document in read_commands(tmp_path)] == [["first"], None]
    append_command(tmp_path, ["third"], {}, "0" * 16)
    commands = [document.get("command") for document in read_commands(tmp_path)]
    assert commands == [["first"], None, ["third"]]


@pytest.mark.parametrize(
    "line",
    [b"command: 3", b'command: ["a", 1]', b'cells: {"d": 1}', b"code_version: []", b"\xff: 1"],
)
def test_value_of_another_kind_is_named_with_its_line(tmp_path: Path, line: bytes):
    (tmp_path / "study.yaml").write_bytes(b"---\n" + line + b"\n")
    with pytest.raises(UserError, match="line 2 is not as normexp writes it"):
        read_commands(tmp_path)


def test_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    append_command(tmp_path, COMMAND, {}, "0123")

    def denied(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UserError, match=r"study\.yaml: Permission denied; make it readable"):
        read_commands(tmp_path)
