from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

from normexp.data import Data, Windows, build_text_data, text
from normexp.errors import UserError


def splits(data: Data) -> list[Windows]:
    return [part for part in (data.train, data.val, data.test) if isinstance(part, Windows)]


def decode(data: Data, split: Windows) -> str:
    assert data.symbols is not None
    return "".join(data.symbols[token] for token in split.tokens.tolist())


def load(path: Path, block_size: int = 4) -> Data:
    return text.load_text_file(
        path=str(path), block_size=block_size, val_fraction=0.1, test_fraction=0.2
    )


def test_splits_are_contiguous_parts_and_tokens_spell_the_text():
    content = "abcdefghij" * 20 + "é€𝄞 tail of the text " * 5
    data = build_text_data("toy", content, 4, 0.1, 0.2)
    parts = [decode(data, part) for part in splits(data)]
    assert "".join(parts) == content
    assert list(map(len, parts)) == [214, 30, 61] and len(content) == 305


def test_vocabulary_is_that_of_the_whole_text_in_order():
    data = build_text_data("toy", "b" * 100 + "a" * 100 + "é", 2, 0.1, 0.1)
    assert data.symbols == ("a", "b", "é")
    assert data.vocab_size == data.num_outputs == 3
    assert data.input_shape == (2,) and data.task == "language_modeling"


def test_bytes_per_token_counts_utf8():
    data = build_text_data("toy", "a€" * 160 + "é" * 40 + "𝄞" * 40, 2, 0.1, 0.1)
    assert data.bytes_per_token == {"train": 2.0, "val": 2.0, "test": 4.0}


def test_manual_holds_the_topics_of_this_python():
    data = text.load_manual(block_size=64, val_fraction=0.05, test_fraction=0.05)
    from pydoc_data.topics import topics

    length = sum(len(part.tokens) for part in splits(data))
    assert length == sum(map(len, topics.values())) + 2 * (len(topics) - 1)
    assert length > 300_000
    assert data.source_version.startswith("python 3.")
    again = text.load_manual(block_size=64, val_fraction=0.05, test_fraction=0.05)
    assert again.digest == data.digest


@pytest.mark.parametrize("block_size", [1, 4, 9])
def test_shortest_text_that_is_taken_is_the_one_the_message_names(tmp_path: Path, block_size: int):
    path = tmp_path / "a.txt"
    path.write_text("xy")
    with pytest.raises(UserError, match=r"2 characters.*needs \d+") as caught:
        load(path, block_size)
    needed = int(str(caught.value).split("needs ")[1].split(";")[0])
    assert needed == math.ceil(2 * block_size / 0.1) + 1
    path.write_text("xy" * (needed // 2) + "x" * (needed % 2))
    assert len(load(path, block_size).val) == 1


def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("ein Käse".encode("latin-1") * 50)
    with pytest.raises(UserError, match="latin1.txt is not UTF-8: byte 0xe4 at offset 5"):
        load(path)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_text_that_cannot_be_read_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="data.path=.* cannot be read"):
        load(tmp_path / name)


def test_empty_text_is_refused(tmp_path: Path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(UserError, match="has 0 characters; data.block_size=4 needs"):
        load(path)


def test_text_beyond_memory_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("normexp.data.dataset.available_memory", lambda: 1_000_000)
    path = tmp_path / "long.txt"
    path.write_text("abcdefghij" * 100_000)
    with pytest.raises(UserError, match="long.txt needs .* GB of memory"):
        load(path)


@pytest.mark.parametrize(("val", "test"), [(0.0, 0.1), (0.1, 0.0), (0.6, 0.5), (-0.1, 0.1)])
def test_fractions_that_empty_a_split_are_refused(val: float, test: float):
    with pytest.raises(UserError, match=f"data.val_fraction={val} .*leave a split empty"):
        build_text_data("toy", "abc" * 100, 2, val, test)


def test_block_size_must_be_positive():
    with pytest.raises(UserError, match="data.block_size=0 must be positive"):
        build_text_data("toy", "abc" * 100, 0, 0.1, 0.1)


def fail(error: Exception) -> Callable:
    def urlopen(*_: object, **__: object) -> None:
        raise error

    return urlopen


class Response:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def read(self) -> bytes:
        return self.content


def load_shakespeare(data_dir: Path) -> Data:
    return text.load_shakespeare(
        data_dir=str(data_dir), block_size=8, val_fraction=0.05, test_fraction=0.05
    )


@pytest.mark.parametrize("error", [URLError("no route"), TimeoutError("timed out")])
def test_shakespeare_without_a_network_says_where_to_put_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
):
    monkeypatch.setattr(text, "urlopen", fail(error))
    folder = tmp_path / "data"
    with pytest.raises(UserError) as caught:
        load_shakespeare(folder)
    message = str(caught.value)
    assert str(folder / "tinyshakespeare.txt") in message and "data=digits" in message
    assert not folder.exists()


def test_shakespeare_is_downloaded_once_and_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import hashlib

    content = b"To be, or not to be. " * 100
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(text, "urlopen", lambda *_, **__: Response(content))
    first = load_shakespeare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tinyshakespeare.txt"]
    monkeypatch.setattr(text, "urlopen", fail(AssertionError("downloaded twice")))
    assert load_shakespeare(tmp_path).digest == first.digest
    assert torch.equal(splits(load_shakespeare(tmp_path))[0].tokens, splits(first)[0].tokens)


def test_damaged_download_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(text, "urlopen", lambda *_, **__: Response(b"captive portal"))
    with pytest.raises(UserError, match="damaged"):
        load_shakespeare(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_file_in_place_of_shakespeare_is_refused(tmp_path: Path):
    (tmp_path / "tinyshakespeare.txt").write_text("Marlowe")
    with pytest.raises(UserError, match="is not tiny Shakespeare.*data=text_file"):
        load_shakespeare(tmp_path)
