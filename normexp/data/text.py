"""Language modelling on the characters of one text: embedded, downloaded or the user's own."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch

from normexp.data.dataset import Data, Windows, refuse_beyond_memory, validate, whole_file
from normexp.errors import UserError

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_BYTES_PER_CHARACTER = 24  # at the peak: text, code points, tokens and their copies


def load_manual(*, block_size: int, val_fraction: float, test_fraction: float) -> Data:
    """Python's own language reference, some 465,000 characters, as the running Python has it."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[title] for title in sorted(topics))
    version = f"python {platform.python_version()}"
    return build_text_data("manual", text, block_size, val_fraction, test_fraction, version)


def load_shakespeare(
    *, data_dir: str, block_size: int, val_fraction: float, test_fraction: float
) -> Data:
    """Tiny Shakespeare, 1,115,394 characters, downloaded once and verified. Karpathy 2015."""
    path = Path(data_dir) / "tinyshakespeare.txt"
    if not path.is_file():
        _write(path, _download_shakespeare(path))
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path} is not tiny Shakespeare (its sha256 differs); delete it, or read a text of "
            f"your own with data=text_file data.path={path}"
        )
    return build_text_data("shakespeare", content.decode(), block_size, val_fraction, test_fraction)


def load_text_file(
    *, path: str, block_size: int, val_fraction: float, test_fraction: float
) -> Data:
    """A UTF-8 text file of the user's.

    Raises:
        UserError: the file is missing, not UTF-8 (with the byte), too short or too large.
    """
    try:
        refuse_beyond_memory(
            f"data.path={path}",
            os.path.getsize(path) * _BYTES_PER_CHARACTER,
            "try a part of the file",
        )
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.path={path} is not UTF-8: byte {error.object[error.start]:#04x} at offset "
            f"{error.start}; try iconv -t UTF-8 on it"
        ) from error
    except OSError as error:
        raise UserError(
            f"data.path={path} cannot be read: {error.strerror}; name a UTF-8 text file"
        ) from error
    return build_text_data("text_file", text, block_size, val_fraction, test_fraction)


def build_text_data(
    name: str,
    text: str,
    block_size: int,
    val_fraction: float,
    test_fraction: float,
    source_version: str = "",
) -> Data:
    """Data for language modelling on characters; the vocabulary is that of the whole text.

    Test is the last `test_fraction` of the text, val the `val_fraction` before it, train the rest.

    Raises:
        UserError: fractions that leave no train, or a split shorter than two blocks, so that one
            window fits at every offset.
    """
    _check_lengths(name, len(text), block_size, val_fraction, test_fraction)
    tokens, symbols = encode_characters(text)
    num_test = int(len(text) * test_fraction)
    num_val = int(len(text) * val_fraction)
    lengths = [len(text) - num_val - num_test, num_val, num_test]
    parts = tokens.split(lengths)
    train, val, test = (Windows(part, block_size) for part in parts)
    return validate(
        Data(
            name=name,
            task="language_modeling",
            train=train,
            val=val,
            test=test,
            num_outputs=len(symbols),
            input_shape=(block_size,),
            vocab_size=len(symbols),
            bytes_per_token=_bytes_per_character(text, lengths),
            symbols=symbols,
            source_version=source_version,
        )
    )


def _bytes_per_character(text: str, lengths: list[int]) -> dict[str, float]:
    """Of each split's own text: scripts differ, and a text may change its script."""
    found, first = {}, 0
    for split, length in zip(("train", "val", "test"), lengths, strict=True):
        found[split] = len(text[first : first + length].encode()) / length
        first += length
    return found


def encode_characters(text: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Token of each character, int64 (L,), and the symbols in the order of their code points."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    is_used = np.zeros(0x110000, dtype=bool)
    is_used[codes] = True
    used = np.flatnonzero(is_used)
    token_of = np.zeros(0x110000, dtype=np.int64)
    token_of[used] = np.arange(len(used))
    return torch.from_numpy(token_of[codes]), tuple(map(chr, used))


def _check_lengths(
    name: str, num_characters: int, block_size: int, val_fraction: float, test_fraction: float
) -> None:
    if block_size < 1:
        raise UserError(f"data.block_size={block_size} must be positive; try data.block_size=64")
    train_fraction = 1 - val_fraction - test_fraction
    smallest = min(train_fraction, val_fraction, test_fraction)
    if smallest <= 0:
        raise UserError(
            f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} leave a "
            "split empty; try 0.05 for each"
        )
    needed = math.ceil(2 * block_size / smallest) + 1  # two blocks: a window at every offset
    if num_characters < needed:
        raise UserError(
            f"data={name} has {num_characters} characters; data.block_size={block_size} needs "
            f"{needed}; try a longer text or a smaller data.block_size"
        )


def _download_shakespeare(path: Path) -> bytes:
    try:
        with urlopen(SHAKESPEARE_URL, timeout=30) as response:
            content = response.read()
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        raise UserError(
            f"data=shakespeare wants tinyshakespeare.txt, and its download failed ({error}); put "
            f"the file at {path.resolve()}; data=manual and data=digits need none"
        ) from error
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(
            f"the download of tinyshakespeare.txt is damaged (its sha256 differs); try again, or "
            f"put the file at {path.resolve()}; data=manual and data=digits need none"
        )
    return content


def _write(path: Path, content: bytes) -> None:
    try:
        with whole_file(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"data_dir={path.parent} cannot be written: {error.strerror}; set data_dir to a folder "
            "of yours"
        ) from error
