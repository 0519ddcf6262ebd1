"""Building blocks for data sources: splits, statistics of images, downloads, a memory check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.errors import UserError

TEST_FRACTION = 0.2  # of a source without a test split of its own
TEST_SEED = 0  # a constant: the test split is the same for every split_seed


def build_image_data(
    name: str,
    train: Examples,
    test: Examples,
    *,
    num_classes: int,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None = None,
    source_version: str = "",
) -> Data:
    """Data for image classification: val is split off `train`, test is unchanged.

    Shapes: inputs uint8 (N, C, H, W), targets int64 (N,) in [0, num_classes).

    Raises:
        UserError: train images of another dtype or shape; a fraction that empties train or val.
    """
    if train.inputs.ndim != 4 or train.inputs.dtype != torch.uint8:
        found = f"{train.inputs.dtype} {tuple(train.inputs.shape)}"
        raise UserError(f"data={name}: train.inputs is {found}, must be torch.uint8 (N, C, H, W)")
    if len(train.inputs) != len(train.targets):
        lengths = f"{len(train.inputs)} images and {len(train.targets)} targets"
        raise UserError(f"data={name}: train has {lengths}")
    kept, held_out = (
        Examples(train.inputs[indices], train.targets[indices])
        for indices in split_off_val(len(train), val_fraction, split_seed)
    )
    mean, std = compute_channel_moments(kept.inputs)
    return Data(
        name=name,
        task="classification",
        train=kept,
        val=held_out,
        test=test,
        num_outputs=num_classes,
        input_shape=tuple(train.inputs.shape[1:]),
        mean=mean,
        std=std,
        augmentation=augmentation if augmentation and augmentation.is_on else None,
        source_version=source_version,
    )


def compute_channel_moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 (N, C, H, W), in 0..1 units.

    Computed from a histogram of the 256 values: exact, and without a float copy of the images. A
    constant channel gets a standard deviation of 1.
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)  # (C, 256)
    for part in images.split(4096):
        for channel, pixels in enumerate(part.unbind(dim=1)):
            counts[channel] += torch.bincount(pixels.flatten(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    weights = counts / counts.sum(dim=1, keepdim=True)
    mean = weights @ values  # (C,)
    var = (weights * (values - mean[:, None]).square()).sum(dim=1)
    std = torch.where(var > 0, var.sqrt(), 1)
    return tuple(mean.tolist()), tuple(std.tolist())


def split_off_val(num_samples: int, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """Indices (train, val) from one seeded permutation, each in ascending order.

    Raises:
        UserError: a fraction that leaves train or val empty.
    """
    num_val = round(num_samples * val_fraction)
    if not 0 < num_val < num_samples:
        remedy = "try data.val_fraction=0.1"
        if not 0 < round(num_samples * 0.1) < num_samples:
            remedy = "give more samples" if num_samples < 2 else "try data.val_fraction=0.5"
        raise UserError(
            f"data.val_fraction={val_fraction} takes {num_val} of {num_samples} training samples "
            f"for validation; {remedy}"
        )
    order = torch.randperm(num_samples, generator=generator(split_seed, "split"))
    return order[num_val:].sort().values, order[:num_val].sort().values


def split_off_test(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (rest, test); test has a fifth of each class, the same for every split_seed."""
    order = torch.randperm(len(targets), generator=generator(TEST_SEED, "split"))
    is_test = torch.zeros(len(targets), dtype=torch.bool)
    for target in targets.unique():
        members = order[targets[order] == target]
        is_test[members[: round(TEST_FRACTION * len(members))]] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


@contextmanager
def downloading(name: str, path: Path) -> Iterator[None]:
    """Turns a failed download to `path` into a UserError about data=`name`; cleans up after it."""
    had_folder, had_file = path.parent.exists(), path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError, HTTPException) as error:  # URLError is an OSError
        if not had_file:
            path.unlink(missing_ok=True)
        if not had_folder and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
        raise UserError(
            f"data={name} needs {path.name}, and downloading it failed ({error}); put the file "
            f"into {path.parent.resolve()}, or set data_dir to the folder that has it; data=digits "
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
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
