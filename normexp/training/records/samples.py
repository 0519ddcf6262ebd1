"""samples.npz: the score of a run on each test sample, so that runs can be compared by sample.

One array for each kind of test statistics (`running`, `precise`, `batch32`) and each size of images
(`tiles32`), in the order of the test split. For classification: correct or not, stored as packed
bits beside their number. For segmentation: the mean IoU of each image; for a language model: the
mean loss per token of each sequence; both float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from zipfile import BadZipFile

from normexp.errors import UserError
from normexp.training.records.files import open_atomic
from normexp.training.records.layout import SAMPLES_FILE

if TYPE_CHECKING:
    import numpy as np


NUM_SAMPLES = "num_samples"  # beside packed bits, which are padded to whole bytes
TORN = (OSError, EOFError, BadZipFile, TypeError, ValueError)  # errors of numpy for a torn file


def write_samples(run_dir: Path, samples: Mapping[str, np.ndarray]) -> None:
    """Replaces samples.npz atomically; write it before result.json.

    Args:
        samples: by kind of statistics, bool or float (N,), with the same N.
    """
    import numpy as np

    single = {
        kind: values if values.dtype == bool else values.astype(np.float32)
        for kind, values in samples.items()
    }
    with open_atomic(run_dir / SAMPLES_FILE) as file:
        np.savez_compressed(file, **pack_bits(single))


def pack_bits(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays to save: those of bool (..., N) as bits, beside their number N."""
    import numpy as np

    packed = dict[str, Any](arrays)
    for name, values in arrays.items():
        if values.dtype == bool:
            packed |= {name: np.packbits(values, axis=-1), NUM_SAMPLES: values.shape[-1]}
    return packed


def unpack_bits(file: IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays given to `pack_bits`, from an npz file."""
    import numpy as np

    with np.load(file) as content:
        arrays = dict(content)
    count = arrays.pop(NUM_SAMPLES, None)
    for name, values in arrays.items():
        if values.dtype == np.uint8:
            arrays[name] = np.unpackbits(values, axis=-1, count=int(count)).astype(bool)
    return arrays


def count_samples(run_dir: Path) -> int:
    """The number of test samples of a run; 0 if none or no readable ones are recorded."""
    with suppress(UserError):
        return max(map(len, read_samples(run_dir).values()), default=0)
    return 0


def read_samples(run_dir: Path) -> dict[str, np.ndarray]:
    """Returns the arrays given to `write_samples`; none for a run without the file.

    A kind whose metrics are not finite is absent.

    Raises:
        UserError: the file is torn or not from normexp.
    """
    path = run_dir / SAMPLES_FILE
    if not path.exists():
        return {}
    try:
        with open(path, "rb") as file:
            return unpack_bits(file)
    except TORN as error:
        raise UserError(f"{path} cannot be read ({error}); remove it") from error
