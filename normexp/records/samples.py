"""samples.npz: a run's score on each test sample, so that runs can be compared sample by sample.

One array for each kind of test statistics (`running`, `precise`, `batch32`), in the order of the
test split. For classification: correct or not, stored as packed bits beside their number. For a
language model: the mean loss per token of each sequence, float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from normexp.errors import UserError
from normexp.records.files import open_atomic
from normexp.records.paths import SAMPLES_FILE

if TYPE_CHECKING:
    import numpy as np

NUM_SAMPLES = "num_samples"  # of packed bits, which are padded to whole bytes


def write_samples(run_dir: Path, samples: Mapping[str, np.ndarray]) -> None:
    """Replaces samples.npz atomically; write it before result.json.

    Args:
        samples: by kind of statistics, bool or float32 (N,), with the same N.
    """
    import numpy as np

    arrays: dict[str, Any] = {}
    for kind, values in samples.items():
        if values.dtype == bool:
            arrays |= {kind: np.packbits(values), NUM_SAMPLES: len(values)}
        else:
            arrays[kind] = values.astype(np.float32)
    with open_atomic(run_dir / SAMPLES_FILE) as file:
        np.savez_compressed(file, **arrays)


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
    import numpy as np

    path = run_dir / SAMPLES_FILE
    if not path.exists():
        return {}
    try:
        with open(path, "rb") as file, np.load(file) as content:
            arrays = dict(content)
        count = arrays.pop(NUM_SAMPLES, None)
        if count is None:
            return arrays
        return {
            kind: np.unpackbits(bits, count=int(count)).astype(bool)
            for kind, bits in arrays.items()
        }
    except (OSError, EOFError, BadZipFile, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it") from error
