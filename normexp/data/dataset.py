"""What a data source returns, and what is checked of it, a user's own sources included."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.samples import Examples, Windows, content_digest, tensors_of
from normexp.errors import UserError

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
