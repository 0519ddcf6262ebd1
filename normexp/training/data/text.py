"""Language modelling on the characters of one text: embedded, downloaded or the user's own."""

from __future__ import annotations

import hashlib
import logging
import math
import platform
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.training.data.dataset import SPLITS, Data, Windows
from normexp.training.data.sources import downloading, refuse_beyond_memory
from normexp.training.records.files import read_path

log = logging.getLogger(__name__)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MOST_NAMED = 8  # symbols in a message
CONVERT = "convert it, as by iconv -f LATIN1 -t UTF-8, or by iconv -f UTF-16LE -t UTF-8"
BYTES_PER_CHARACTER = 24  # at the peak: text, code points, tokens and their copies


def load_manual(*, block_size: int, val_fraction: float, test_fraction: float) -> Data:
    """The language reference of the running Python, some 465,000 characters."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[title] for title in sorted(topics))
    version = f"python {platform.python_version()}"
    return build_text_data("manual", text, block_size, val_fraction, test_fraction, version)


def load_shakespeare(
    *, data_dir: str, block_size: int, val_fraction: float, test_fraction: float
) -> Data:
    """Tiny Shakespeare, 1,115,394 characters, downloaded once and verified. Karpathy 2015."""
    path = read_path("data_dir", data_dir) / "tinyshakespeare.txt"
    with downloading("shakespeare", path):
        if not path.is_file():
            torch.hub.download_url_to_file(
                SHAKESPEARE_URL, str(path), hash_prefix=SHAKESPEARE_SHA256, progress=False
            )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(
            f"data=shakespeare: {path} has another content (its sha256 differs); delete it, or "
            f"read it with data=text_file data.path={path}"
        )
    return build_text_data("shakespeare", content.decode(), block_size, val_fraction, test_fraction)


def load_text_file(
    *, path: str, block_size: int, val_fraction: float, test_fraction: float
) -> Data:
    """A UTF-8 text file of the user, without a byte order mark, and with lines that end in \\n.

    Raises:
        UserError: the file is missing, not UTF-8, too short or larger than memory.
    """
    name = f"data.path={path}"
    try:
        file = read_path("data.path", path)
        num_bytes = file.stat().st_size * BYTES_PER_CHARACTER
        refuse_beyond_memory(name, num_bytes, "try a part of the file")
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{name} is not UTF-8: byte {byte:#04x} at offset {error.start}; {CONVERT}"
        ) from error
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}; name a text file") from error
    if "\0" in text:  # English in UTF-16 can be read as UTF-8, with every second byte null
        raise UserError(f"{name} has null characters, as UTF-16 and binary files do; {CONVERT}")
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
        UserError: fractions that leave no train; a split shorter than two blocks, which one window
            at every offset needs.
    """
    _check_lengths(name, len(text), block_size, val_fraction, test_fraction)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    used, tokens = np.unique(codes, return_inverse=True)
    symbols = tuple(map(chr, used))
    num_val = int(len(text) * val_fraction)
    num_test = int(len(text) * test_fraction)
    lengths = (len(text) - num_val - num_test, num_val, num_test)
    num_bytes = torch.tensor([len(symbol.encode()) for symbol in symbols])
    windows: dict[str, Any] = {}
    counts: dict[str, Tensor] = {}
    bytes_per_token: dict[str, float] = {}  # by split, because a text may change its script
    splits = torch.from_numpy(tokens).split(lengths)
    for split, characters in zip(SPLITS, splits, strict=True):
        windows[split] = Windows(characters, block_size)
        counts[split] = characters.bincount(minlength=len(symbols))
        bytes_per_token[split] = int(counts[split] @ num_bytes) / len(characters)
    unseen = ((counts["test"] > 0) & (counts["train"] == 0)).nonzero().flatten().tolist()
    if unseen:
        examples = " ".join(ascii(symbols[token]) for token in unseen[:MOST_NAMED])
        log.warning(
            "data=%s: test has %d symbols that train lacks, such as %s", name, len(unseen), examples
        )
    return Data(
        name,
        "language_modeling",
        **windows,
        num_outputs=len(symbols),
        input_shape=(block_size,),
        vocab_size=len(symbols),
        bytes_per_token=bytes_per_token,
        symbols=symbols,
        source_version=source_version,
    )


def _check_lengths(
    name: str, num_characters: int, block_size: int, val_fraction: float, test_fraction: float
) -> None:
    if block_size < 1:
        raise UserError(f"data.block_size={block_size} must be positive; try data.block_size=64")
    smallest = min(1 - val_fraction - test_fraction, val_fraction, test_fraction)
    if smallest <= 0:
        raise UserError(
            f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} leave a "
            "split empty; try 0.05 for each"
        )
    needed = math.ceil(2 * block_size / smallest) + 1
    if num_characters < needed:
        raise UserError(
            f"data={name} has {num_characters} characters; data.block_size={block_size} needs "
            f"{needed}; try a longer text or a smaller data.block_size"
        )
