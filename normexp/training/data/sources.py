"""Helpers of the data sources: splits, downloads, a memory check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.training.batching.draws import generator
from normexp.training.records.locks import one_at_a_time

TEST_FRACTION = 0.2  # for a source without a test split
TEST_SEED = 0  # constant, so that the test split is the same for every split_seed


def split_off_val(num_samples: int, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """Indices (train, val) from one seeded permutation, each in ascending order.

    Raises:
        UserError: a fraction that leaves train or val empty.
    """
    num_val = round(num_samples * val_fraction)
    if not 0 < num_val < num_samples:
        enough = max(0.1, 1 / max(num_samples, 2))  # for one sample of two or more
        raise UserError(
            f"data.val_fraction={val_fraction} takes {num_val} of {num_samples} training samples "
            f"for validation; try data.val_fraction={enough:.2g}, or give more samples"
        )
    order = torch.randperm(num_samples, generator=generator(split_seed, "split"))
    return order[num_val:].sort().values, order[:num_val].sort().values


def split_off_test(targets: Tensor, fraction: float = TEST_FRACTION) -> tuple[Tensor, Tensor]:
    """Indices (rest, test); test has a fraction of each class, the same for every split_seed."""
    order = torch.randperm(len(targets), generator=generator(TEST_SEED, "split"))
    is_test = torch.zeros(len(targets), dtype=torch.bool)
    for target in targets.unique():
        members = order[targets[order] == target]
        is_test[members[: round(fraction * len(members))]] = True
    return torch.where(~is_test)[0], torch.where(is_test)[0]


@contextmanager
def downloading(name: str, path: Path) -> Iterator[None]:
    """Turns a failed download to `path` into a UserError about data=`name`, without leftovers."""
    folder = path.parent
    had_folder = folder.exists()
    had_file = path.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(path.name):
            yield
    except (OSError, RuntimeError, HTTPException) as error:  # URLError is an OSError
        if not had_file:
            path.unlink(missing_ok=True)
        if not had_folder:
            with suppress(OSError):  # fails if the folder holds other files
                folder.rmdir()
        raise UserError(
            f"data={name} needs {path.name}, and downloading it failed ({error}); put the file "
            f"into {folder.resolve()}, or set data_dir to the folder that has it; data=digits "
            "and data=manual need no download"
        ) from error


def refuse_beyond_memory(name: str, num_bytes: int, remedy: str) -> None:
    """Raises UserError if `num_bytes` exceed the available memory (checked on Linux only)."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise UserError(
            f"{name} needs {num_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB is "
            f"available; {remedy}"
        )


def available_memory() -> int | None:
    """Bytes that can be used without swapping; None if unknown (not Linux)."""
    try:
        content = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable: *(\d+) kB", content)
    return found and int(found[1]) * 1024
