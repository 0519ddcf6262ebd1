"""What a data source returns, and what is checked of it, a user's own sources included."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.data.augment import Augmentation
from normexp.errors import UserError


@dataclass
class Examples:
    """N labelled samples.

    Shapes: inputs uint8 (N, C, H, W) or int64 tokens (N, T); targets int64 (N,); mask bool (N, T),
    true where a token is real, None where all are.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, indices: Tensor, offset: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        """The samples at `indices` (...,), whose shape leads; offset is for Windows alone."""
        indices = indices.to(self.targets.device)
        batch = {"inputs": self.inputs[indices], "targets": self.targets[indices]}
        if self.mask is not None:
            batch["mask"] = self.mask[indices]
        return batch

    def to(self, device: torch.device | str) -> Examples:
        mask = None if self.mask is None else self.mask.to(device)
        return Examples(self.inputs.to(device), self.targets.to(device), mask)


@dataclass
class Windows:
    """One text of L tokens, int64 (L,), seen in windows of `block_size` T to model language."""

    tokens: Tensor
    block_size: int

    def __len__(self) -> int:
        """Windows that do not overlap and fit for every offset in [0, T), targets included."""
        return max(len(self.tokens) - self.block_size, 0) // self.block_size

    def gather(self, indices: Tensor, offset: Tensor | None = None) -> dict[str, Tensor]:
        """Window i begins at i * T + offset; targets are the inputs shifted by one.

        Shapes: indices (...,), offset broadcastable to it (None is 0); inputs, targets (..., T).
        """
        device = self.tokens.device
        starts = indices.to(device) * self.block_size
        if offset is not None:
            starts = starts + offset.to(device)
        positions = starts[..., None] + torch.arange(self.block_size, device=device)
        return {"inputs": self.tokens[positions], "targets": self.tokens[positions + 1]}

    def to(self, device: torch.device | str) -> Windows:
        return Windows(self.tokens.to(device), self.block_size)


def content_digest(
    splits: Sequence[Examples | Windows], symbols: tuple[str, ...] | None = None
) -> str:
    """First 16 hex digits of the sha256 over dtype, shape and bytes of every tensor."""
    digest = hashlib.sha256(repr(symbols).encode())
    for split in splits:
        for tensor in tensors_of(split):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def tensors_of(split: Examples | Windows) -> list[Tensor]:
    """The tensors that hold a split."""
    if isinstance(split, Windows):
        return [split.tokens]
    return [t for t in (split.inputs, split.targets, split.mask) if t is not None]


Task = Literal["classification", "language_modeling"]


@dataclass
class Data:
    """A data set with its three splits and what a model must know of it.

    A source of your own (`data=custom data._target_=my_pkg.load_shapes data.val_fraction=0.1`) is
    a function that returns one; `build_image_data` splits, measures and checks:

        def load_shapes(val_fraction: float, split_seed: int) -> Data:
            train = Examples(train_images, train_targets)  # uint8 (N, C, H, W), int64 (N,)
            test = Examples(test_images, test_targets)
            return build_image_data(
                "shapes", train, test, class_names=("round", "square"),
                val_fraction=val_fraction, split_seed=split_seed)

    Args:
        num_outputs: classes, or symbols of the vocabulary for language modelling.
        input_shape: (C, H, W), or (T,) for tokens.
        mean, std: per channel of the train split, in 0..1 units; None for tokens.
        vocab_size: number of different tokens; None for images.
        bytes_per_token: UTF-8 bytes per token of each split, language modelling only.
        augmentation: of training images; None for none.
        class_names, symbols: names of targets and of tokens, for reports.
        source_version: of the package that the content comes from, "" where there is none.
        digest: sha256 of the content, 16 hex digits; computed where it is not given.
    """

    name: str
    task: Task
    train: Examples | Windows
    val: Examples | Windows
    test: Examples | Windows
    num_outputs: int
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    vocab_size: int | None = None
    bytes_per_token: dict[str, float] | None = None
    augmentation: Augmentation | None = None
    class_names: tuple[str, ...] | None = None
    symbols: tuple[str, ...] | None = None
    source_version: str = ""
    digest: str = ""
    _scale: Tensor | None = field(default=None, init=False, repr=False)
    _shift: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.digest:
            self.digest = content_digest((self.train, self.val, self.test), self.symbols)
        if self.mean is not None and self.std is not None:
            mean, std = (torch.tensor(v, dtype=torch.float64) for v in (self.mean, self.std))
            device = tensors_of(self.train)[0].device
            self._scale = (1 / (255 * std)).view(-1, 1, 1).to(device)  # (C, 1, 1)
            self._shift = (-mean / std).view(-1, 1, 1).to(device)

    def model_inputs(self, inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images (..., C, H, W) as (x / 255 - mean) / std in `dtype`; tokens unchanged."""
        if self._scale is None or self._shift is None:
            return inputs
        return inputs.to(dtype) * self._scale.to(dtype) + self._shift.to(dtype)

    def to(self, device: torch.device | str) -> Data:
        train, val, test = (split.to(device) for split in (self.train, self.val, self.test))
        return dataclasses.replace(self, train=train, val=val, test=test)


def validate(data: Data) -> Data:
    """Returns `data`; raises UserError naming the split and what is wrong with it."""
    if data.task not in ("classification", "language_modeling"):
        raise _wrong(data, f"task={data.task!r} must be classification or language_modeling")
    for split in ("train", "val", "test"):
        part = getattr(data, split)
        if data.task == "language_modeling" and isinstance(part, Windows):
            _check_windows(data, split, part)
        elif data.task == "classification" and isinstance(part, Examples):
            _check_examples(data, split, part)
        else:
            kind = "Examples" if data.task == "classification" else "Windows"
            raise _wrong(data, f"{split} is {type(part).__name__}; {data.task} needs {kind}")
    _check_names(data)
    return data


def _check_examples(data: Data, split: str, part: Examples) -> None:
    _check_tensor(data, f"{split}.targets", part.targets, torch.int64, (len(part.inputs),))
    if not len(part):
        raise _wrong(data, f"{split} is empty")
    _check_range(data, f"{split}.targets", part.targets, data.num_outputs, "num_outputs")
    shape = (len(part), *data.input_shape)
    if data.vocab_size is None:
        _check_tensor(data, f"{split}.inputs", part.inputs, torch.uint8, shape)
        if part.mask is not None:
            raise _wrong(data, f"{split}.mask is given, but vocab_size is not: images have no mask")
        _check_statistics(data)
        return
    _check_tensor(data, f"{split}.inputs", part.inputs, torch.int64, shape)
    _check_range(data, f"{split}.inputs", part.inputs, data.vocab_size, "vocab_size")
    if part.mask is not None:
        _check_tensor(data, f"{split}.mask", part.mask, torch.bool, shape)
        if not bool(part.mask.any(dim=1).all()):
            raise _wrong(data, f"{split}.mask has a sample without a real token")


def _check_windows(data: Data, split: str, part: Windows) -> None:
    _check_tensor(data, f"{split}.tokens", part.tokens, torch.int64, (len(part.tokens),))
    if data.input_shape != (part.block_size,) or part.block_size < 1:
        raise _wrong(
            data,
            f"{split}.block_size={part.block_size} differs from input_shape={data.input_shape}",
        )
    if not len(part):
        raise _wrong(
            data,
            f"{split} has {len(part.tokens)} tokens; block_size={part.block_size} needs at least "
            f"{2 * part.block_size}",
        )
    if data.vocab_size is None or data.vocab_size != data.num_outputs:
        raise _wrong(data, f"vocab_size={data.vocab_size} must be num_outputs={data.num_outputs}")
    sizes = data.bytes_per_token or {}
    if any(sizes.get(split, 0) <= 0 for split in ("train", "val", "test")):
        raise _wrong(
            data, f"bytes_per_token={data.bytes_per_token} must be above 0 for train, val and test"
        )
    _check_range(data, f"{split}.tokens", part.tokens, data.vocab_size, "vocab_size")


def _check_statistics(data: Data) -> None:
    if len(data.input_shape) != 3:
        raise _wrong(data, f"input_shape={data.input_shape} of images must be (C, H, W)")
    num_channels = data.input_shape[0]
    for key, values in (("mean", data.mean), ("std", data.std)):
        if values is None or len(values) != num_channels:
            raise _wrong(
                data, f"{key}={values} needs one value for each of {num_channels} channels"
            )
    if data.std is not None and min(data.std) <= 0:
        raise _wrong(data, f"std={data.std} must be above 0 for train, val and test")


def _check_names(data: Data) -> None:
    names, symbols = data.class_names, data.symbols
    if names is not None and len(names) != data.num_outputs:
        raise _wrong(data, f"{len(names)} class_names for num_outputs={data.num_outputs}")
    if symbols is not None and len(symbols) != data.vocab_size:
        raise _wrong(data, f"{len(symbols)} symbols for vocab_size={data.vocab_size}")


def _check_tensor(
    data: Data, what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise _wrong(
            data, f"{what} is {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {shape}"
        )


def _check_range(data: Data, what: str, values: Tensor, limit: int, limit_name: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= limit:
        bad = low if low < 0 else high
        raise _wrong(data, f"{what} has {bad}; {limit_name}={limit} allows 0 to {limit - 1}")


def _wrong(data: Data, what: str) -> UserError:
    return UserError(f"data={data.name}: {what}")


def split_off_val(num_samples: int, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """Indices (train, val) from one seeded permutation, each in rising order.

    Raises:
        UserError: a fraction that leaves train or val empty.
    """
    num_val = round(num_samples * val_fraction)
    if not 0 < num_val < num_samples:
        raise UserError(
            f"data.val_fraction={val_fraction} makes {num_val} of {num_samples} training samples "
            "validation samples; try data.val_fraction=0.1"
        )
    order = torch.randperm(num_samples, generator=generator(split_seed, "split"))
    return order[num_val:].sort().values, order[:num_val].sort().values


def stratified_holdout(targets: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (rest, held out), the latter with round(fraction * n) samples of each class."""
    order = torch.randperm(len(targets), generator=generator(seed, "split"))
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    for target in targets.unique():
        members = order[targets[order] == target]
        held_out[members[: round(fraction * len(members))]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say (not Linux)."""
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def refuse_beyond_memory(what: str, num_bytes: int, remedy: str) -> None:
    """Raises UserError when `num_bytes` is more than what is available."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise UserError(
            f"{what} needs {num_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB is "
            f"available; {remedy}"
        )


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends well and is removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
