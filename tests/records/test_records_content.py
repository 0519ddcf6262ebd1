"""Digests of the content of files, and their cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normexp.records import content
from normexp.records.content import digest_of_path, reading_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for name in ("train/a/1.png", "train/b/1.png", "test/a/2.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        os.utime(folder / name, (1, 1))  # long ago, so that digests are cached
    return folder


def test_content_and_names_count_and_times_and_places_do_not(folder: Path, tmp_path: Path):
    before = digest_of_path(folder)
    (folder / "train/a/1.png").touch()
    (folder / ".hidden").touch()
    assert digest_of_path(folder) == before
    moved = folder.rename(tmp_path / "moved")
    assert digest_of_path(moved) == before
    (moved / "train/a/1.png").rename(moved / "train/a/3.png")
    renamed = digest_of_path(moved)
    (moved / "train/a/3.png").write_text("edited")
    assert len({before, renamed, digest_of_path(moved)}) == 3
    assert digest_of_path(moved, lambda path: path.parts[0] == "test") is not None
    assert digest_of_path(tmp_path / "missing") is None


def test_a_file_is_read_again_only_if_size_or_time_has_changed(folder: Path, monkeypatch):
    before = digest_of_path(folder)
    read: list[Path] = []
    digest_of_file = content._digest_of_file
    monkeypatch.setattr(
        content, "_digest_of_file", lambda path: read.append(path) or digest_of_file(path)
    )
    assert digest_of_path(folder) == before
    assert read == []
    file = folder / "train/a/1.png"
    file.write_text("train/A/1.png")  # of the same size
    os.utime(file, (2, 2))
    assert digest_of_path(folder) != before
    assert read == [file]


@pytest.mark.parametrize("torn", ["{", "[1]", '{"train/a/1.png": 3}', '{"train/a/1.png": [1, 2]}'])
def test_a_torn_or_unwritable_cache_is_computed_again(torn: str, folder: Path, cache: Path):
    before = digest_of_path(folder)
    (file,) = cache.rglob("*.json")
    file.write_text(torn)
    assert digest_of_path(folder) == before
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the cache should be")
    assert digest_of_path(folder) == before


def test_inside_a_block_a_file_is_looked_at_once(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("before")
    with reading_once():
        before = digest_of_path(file)
        file.write_text("after")
        assert digest_of_path(file) == before
    assert digest_of_path(file) != before
