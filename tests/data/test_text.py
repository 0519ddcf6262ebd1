"""A text as data: its splits, its characters, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from normexp.data import Data, Windows, build_text_data, sources
from normexp.data.dataset import validate
from normexp.data.text import load_text_file
from normexp.errors import UserError


def load(path: Path, block_size: int = 4) -> Data:
    data = load_text_file(
        path=str(path), block_size=block_size, val_fraction=0.1, test_fraction=0.2
    )
    validate(data)
    return data


def test_splits_are_contiguous_parts_and_tokens_spell_the_text(tmp_path: Path):
    content = "abcdefghij" * 20 + "é€𝄞 tail of the text " * 5
    (tmp_path / "a.txt").write_text(content)
    data = load(tmp_path / "a.txt")
    assert data.symbols == tuple(sorted(set(content)))
    assert data.vocab_size == data.num_outputs == len(set(content))
    parts = []
    for part in (data.train, data.val, data.test):
        assert isinstance(part, Windows)
        parts.append("".join(data.symbols[token] for token in part.tokens.tolist()))
    assert "".join(parts) == content
    assert list(map(len, parts)) == [214, 30, 61] and len(content) == 305


def test_bytes_per_token_counts_utf8_in_each_split():
    data = build_text_data("toy", "a€" * 160 + "é" * 40 + "𝄞" * 40, 2, 0.1, 0.1)
    assert data.bytes_per_token == {"train": 2.0, "val": 2.0, "test": 4.0}


@pytest.mark.parametrize("block_size", [1, 4, 9])
def test_shortest_accepted_text_is_the_one_that_the_message_names(tmp_path: Path, block_size: int):
    path = tmp_path / "a.txt"
    path.write_text("xy")
    needed = math.ceil(2 * block_size / 0.1) + 1
    with pytest.raises(UserError, match=f"2 characters.*block_size={block_size} needs {needed};"):
        load(path, block_size)
    path.write_text("xy" * (needed // 2) + "x" * (needed % 2))
    assert len(load(path, block_size).val) == 1


def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("ein Käse".encode("latin-1") * 50)
    with pytest.raises(UserError, match=f"data.path={path}.*0xe4 at offset 5"):
        load(path)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_text_that_cannot_be_read_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="data.path=.*cannot be read"):
        load(tmp_path / name)


def test_text_beyond_memory_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(sources, "available_memory", lambda: 20_000_000)
    path = tmp_path / "long.txt"
    path.write_text("abcdefghij" * 100_000)
    with pytest.raises(UserError, match="long.txt needs 0.0 GB of memory"):
        load(path)


@pytest.mark.parametrize(
    ("block_size", "val", "test", "message"),
    [
        (2, 0.0, 0.1, "data.val_fraction=0.0 and data.test_fraction=0.1"),
        (2, 0.1, 0.0, "data.test_fraction=0.0"),
        (2, 0.6, 0.5, "data.val_fraction=0.6"),
        (2, -0.1, 0.1, "data.val_fraction=-0.1"),
        (0, 0.1, 0.1, "data.block_size=0"),
    ],
)
def test_bad_sizes_are_refused(block_size: int, val: float, test: float, message: str):
    with pytest.raises(UserError, match=message):
        build_text_data("toy", "abc" * 100, block_size, val, test)
