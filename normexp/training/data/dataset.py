"""A data set: three splits as tensors on one device, and the checks that it must pass.

A saved network keeps the description of its data without the samples; a network of images predicts
class names by it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.training.batching.draws import generator
from normexp.training.data.augment import IGNORED, Augmentation
from normexp.words import name_some


@dataclass
class Examples:
    """N labelled samples.

    Shapes: inputs uint8 images (N, C, H, W), float32 rows (N, F) or int64 tokens (N, T); targets
    int64 (N,), or for segmentation uint8 (N, H, W), where `IGNORED` (255) counts nowhere; mask bool
    (N, T), true where a token is real, None where all are.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor is not None]

    def gather(self, indices: Tensor, offset: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        """The samples at `indices` (...,), whose axes lead in the result; `offset` is unused."""
        indices = indices.to(self.targets.device)
        return {name: t[indices] for name, t in vars(self).items() if t is not None}

    def subset(self, indices: Tensor) -> Examples:
        return Examples(**self.gather(indices))

    def to(self, device: torch.device | str) -> Examples:
        return Examples(*(tensor.to(device) for tensor in self.tensors))


@dataclass
class Windows:
    """A text of L tokens, int64 (L,), read in windows of `block_size` T for language modelling."""

    tokens: Tensor
    block_size: int

    def __len__(self) -> int:
        """Number of disjoint windows that fit at every offset in [0, T), targets included."""
        return max(len(self.tokens) - self.block_size, 0) // self.block_size

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens]

    def gather(self, indices: Tensor, offset: Tensor | None = None) -> dict[str, Tensor]:
        """Window i starts at i * T + offset; targets are the inputs shifted by one.

        Shapes: indices (...,), offset on the device of the tokens and broadcastable to `indices`
        (None is 0); inputs, targets (..., T).
        """
        device = self.tokens.device
        starts = indices.to(device) * self.block_size
        if offset is not None:
            starts = starts + offset
        positions = starts[..., None] + torch.arange(self.block_size, device=device)
        return {"inputs": self.tokens[positions], "targets": self.tokens[positions + 1]}

    def to(self, device: torch.device | str) -> Windows:
        return Windows(self.tokens.to(device), self.block_size)


SPLITS = ("train", "val", "test")
IMAGENET = {"mean": "[0.485,0.456,0.406]", "std": "[0.229,0.224,0.225]"}
LEAST_STD = 1e-8  # images that are equal but for one of a billion pixels have more


def read_moment(key: str, values: Any, num_channels: int, least: float = 0.0) -> Tensor:
    """`mean` or `std` of each channel, float64 (C,). Raises UserError for other values."""
    try:
        numbers = np.asarray(values, dtype=float)
    except (TypeError, ValueError):  # texts, or a list within the list
        numbers = np.empty(0)
    if numbers.shape != (num_channels,) or not ((numbers >= least) & (numbers <= 1)).all():
        raise UserError(
            f"data.{key}={values}: must be {num_channels} numbers from {least:g} to 1, "
            f"one for each channel, as ImageNet's data.{key}={IMAGENET[key]}"
        )
    return torch.from_numpy(numbers)


@dataclass
class Data:
    """A data set: three splits, and what a model needs to know of them.

    Args:
        num_outputs: number of classes, or of distinct tokens for language modelling.
        input_shape: of a sample as networks see it: (C, H, W), (F,) for rows, (T,) for tokens.
        mean, std: per channel or feature, of inputs / divisor; None for tokens.
        crop: side of the part that networks see of images, see views.py; None: they see all.
        divisor: 255 for images, whose mean and std are in 0..1 units; 1 for rows.
        vocab_size: number of distinct tokens; None for images and rows.
        bytes_per_token: UTF-8 bytes per token of each split; language modelling only.
        augmentation: applied to training images; None for none.
        symbols: the text of each token.
        class_names: the name of each class; None: its number.
        order: of the samples within a training batch. `sorted` by class shows different classes to
            the ghost sub-batches or devices that share a batch; its samples are the same.
        source_version: package and version that the content comes from; "" for none.
        digest: first 16 hex digits of the sha256 over symbols, and each tensor's dtype, shape and
            bytes; computed if not given.
    """

    name: str
    task: Literal["classification", "segmentation", "language_modeling"]
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
    symbols: tuple[str, ...] | None = None
    source_version: str = ""
    digest: str = ""
    class_names: tuple[str, ...] | None = None
    order: Literal["shuffled", "sorted"] = "shuffled"
    divisor: int = 255
    crop: int | None = None

    def __post_init__(self) -> None:
        if not self.digest:
            digest = hashlib.sha256(repr(self.symbols).encode())
            for split in self.splits.values():
                for tensor in split.tensors:
                    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                    digest.update(tensor.cpu().contiguous().numpy().data)
            self.digest = digest.hexdigest()[:16]
        if self.mean is not None or self.std is not None:
            # (x / divisor - mean) / std is x * scale + shift
            num_channels, *others = self.input_shape
            shape = (num_channels, *(1 for _ in others))
            if self.divisor == 1:  # rows, whose values have no bounds
                mean = torch.tensor(self.mean, dtype=torch.float64)
                std = torch.tensor(self.std, dtype=torch.float64)
            else:
                mean = read_moment("mean", self.mean, num_channels)
                std = read_moment("std", self.std, num_channels, LEAST_STD)
            mean, std = mean.reshape(shape).to(self.device), std.reshape(shape).to(self.device)
            self._scale = 1 / (self.divisor * std)
            self._shift = -mean / std

    @property
    def device(self) -> torch.device:
        return self.train.tensors[0].device

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of a sample before `crop`."""
        return tuple(self.train.tensors[0].shape[1:])

    @property
    def splits(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SPLITS}

    @property
    def has_mask(self) -> bool | None:
        """True if samples are padded; None if the samples are gone, see `without_samples`."""
        if isinstance(self.train, Windows):
            return False
        return None if self.train.inputs.ndim == 1 else self.train.mask is not None

    @property
    def chance_accuracy(self) -> float | None:
        """Test accuracy of always predicting the most frequent class; classification only."""
        if isinstance(self.test, Windows) or self.task != "classification":
            return None
        return self.test.targets.bincount().max().item() / len(self.test)

    def model_inputs(self, inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images and rows as (x / divisor - mean) / std in `dtype`; tokens unchanged."""
        if self.mean is None:
            return inputs
        return inputs.to(dtype) * self._scale.to(dtype) + self._shift.to(dtype)

    def to(self, device: torch.device | str) -> Data:
        splits = {name: split.to(device) for name, split in self.splits.items()}
        return dataclasses.replace(self, **splits)


MIN_VALUES = 16  # of a sample that does not equal another by chance


def limit_train(data: Data, num_samples: int, seed: int) -> Data:
    """The data set with only `num_samples` training samples; all else stays as it was.

    Labelled samples are taken in a random order by `seed`, so a larger subset contains a smaller
    one; a text keeps its first blocks. Mean, deviation and bytes per token remain those of the
    whole split.

    Raises:
        UserError: the split has fewer samples.
    """
    train = data.train
    available = len(train)
    if num_samples > available:
        raise UserError(
            f"data.limit_train={num_samples}: the training split of data={data.name} has "
            f"{available} samples; try data.limit_train={available} or null"
        )
    if isinstance(train, Windows):
        length = (num_samples + 1) * train.block_size
        limited = Windows(train.tokens[:length], train.block_size)
    else:
        order = torch.randperm(available, generator=generator(seed, "limit"))
        limited = train.subset(order[:num_samples])
    return dataclasses.replace(data, train=limited, digest="")


def describe_copies(data: Data) -> Iterator[str]:
    """Yields a line for each split that holds exact copies of training samples.

    Samples of a few values coincide by chance, and are not compared.
    """
    if not isinstance(data.train, Examples) or data.train.inputs[0].numel() < MIN_VALUES:
        return
    hashes = {}
    for name, split in data.splits.items():
        hashes[name] = [hash(sample.tobytes()) for sample in split.inputs.cpu().numpy()]
    training = set(hashes["train"])
    for name in ("val", "test"):
        num_copies = sum(sample in training for sample in hashes[name])
        if num_copies:
            yield (
                f"data={data.name}: {num_copies} of {len(hashes[name])} samples of {name} are also "
                "training samples (exact copies), so that memory counts as accuracy; remove them"
            )


def describe_missing(data: Data) -> Iterator[str]:
    """Yields a line if the network cannot learn some classes: no training sample has them."""
    if not isinstance(data.train, Examples):
        return
    targets = data.train.targets.flatten()
    counts = targets.bincount(minlength=data.num_outputs)[: data.num_outputs].tolist()
    names = data.class_names or range(data.num_outputs)
    missing = [str(name) for name, count in zip(names, counts, strict=True) if not count]
    if missing:
        what = "pixel" if data.task == "segmentation" else "sample"
        yield (
            f"data={data.name}: no training {what} is of class {name_some(missing)}, which "
            "therefore cannot be learned; add samples, move fewer to val or test, or leave the "
            "class out"
        )


def validate(data: Data) -> None:
    """Raises UserError for the first inconsistency in `data`."""
    problem = next(_problems(data), None)
    if problem:
        raise UserError(f"data={data.name}: {problem}")


def _problems(data: Data) -> Iterator[str]:
    """Yields the problems of `data`; each check assumes that those before it passed."""
    kinds = {"classification": Examples, "segmentation": Examples, "language_modeling": Windows}
    is_segmentation = data.task == "segmentation"
    if data.task not in kinds:
        yield f"task={data.task!r} must be {' or '.join(kinds)}"
    if data.order != "shuffled" and data.task != "classification":
        what = "a picture has many" if is_segmentation else "a text has none"
        yield f"data.order={data.order} sorts by class, and {what}; drop it"
    if is_segmentation and (len(data.input_shape) != 3 or data.num_outputs > IGNORED):
        yield (
            f"task=segmentation: input_shape={data.input_shape} and num_outputs={data.num_outputs} "
            f"must be images (C, H, W) and at most {IGNORED} classes"
        )
    is_row = data.vocab_size is None and data.divisor == 1
    inputs_dtype = torch.float32 if is_row else torch.uint8
    if data.vocab_size is not None:
        inputs_dtype = torch.int64
    for name, split in data.splits.items():
        kind = kinds[data.task]
        if not isinstance(split, kind):
            yield f"{name} is {type(split).__name__}; task={data.task} needs {kind.__name__}"
        num = len(split.tensors[0])
        if num == 0:
            yield f"{name} is empty"
        expected = {
            "inputs": (inputs_dtype, (num, *data.input_shape)),
            "mask": (torch.bool, (num, *data.input_shape)),
            "targets": (torch.int64, (num,)),
            "tokens": (torch.int64, (num,)),
        }
        if is_segmentation:
            expected["targets"] = (torch.uint8, (num, *data.input_shape[1:]))
        for field, tensor in vars(split).items():
            if not isinstance(tensor, Tensor):
                continue
            dtype, shape = expected[field]
            given_shape = tuple(tensor.shape)
            if (tensor.dtype, given_shape) != (dtype, shape):
                yield f"{name}.{field} is {tensor.dtype} {given_shape}, must be {dtype} {shape}"
            if not tensor.isfinite().all():
                yield f"{name}.{field} has a value that is not finite"
            key = "num_outputs" if field == "targets" else "vocab_size"
            limit = getattr(data, key)
            if is_segmentation and field == "targets":
                tensor = tensor.where(tensor != IGNORED, 0)
            lowest = int(tensor.min())
            highest = int(tensor.max())
            if limit is not None and not 0 <= lowest <= highest < limit:
                wrong = lowest if lowest < 0 else highest
                yield f"{name}.{field} has {wrong}; {key}={limit} allows 0 to {limit - 1}"
            if field == "mask" and not tensor.any(dim=1).all():
                yield f"{name}.mask has a sample without a real token"
    if data.class_names and len(data.class_names) != data.num_outputs:
        yield f"class_names has {len(data.class_names)} names for num_outputs={data.num_outputs}"
    if data.num_outputs < 2:
        yield f"num_outputs={data.num_outputs} leaves nothing to predict, must be 2 or more"
    if is_segmentation:
        yield from _images_without_targets(data)


def _images_without_targets(data: Data) -> Iterator[str]:
    for name, split in data.splits.items():
        has_none = (split.targets == IGNORED).flatten(1).all(dim=1)
        if has_none.all() or (name != "train" and has_none.any()):
            first = int(has_none.int().argmax())
            yield f"{name}.targets of image {first} are all {IGNORED} (ignored); leave it out"


KEPT = ("name", "task", "num_outputs", "input_shape", "mean", "std", "divisor", "vocab_size")
KEPT += ("class_names",)


def describe_data(data: Data) -> dict[str, Any]:
    """Shapes, classes and moments of a data set, for `without_samples`."""
    return {"num_train": len(data.train), **{name: getattr(data, name) for name in KEPT}}


def without_samples(description: Mapping[str, Any]) -> Data:
    """The data set of `describe_data`, for networks that are only built and loaded."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
    targets = torch.zeros(fields.pop("num_train"), dtype=torch.bool)
    splits = dict.fromkeys(SPLITS, Examples(targets, targets))
    return Data(**fields, **splits, bytes_per_token={})


@torch.no_grad()
def predict(network: nn.Module, data: Data, samples: Any) -> list[str] | Tensor:
    """The class names of rows, or of images, whose values are bytes or floats 0 to 1.

    Shapes: (N, C, H, W) or (N, F); without N for a single sample. Raises UserError for others.

    Returns:
        The name of each sample's class; for segmentation the class of each pixel, int64 (N, H, W).
    """
    values = torch.as_tensor(samples)
    shape = data.input_shape
    if values.ndim == len(shape):
        values = values.unsqueeze(0)
    if data.divisor == 1:
        white, what, kind = 1, "rows", "numbers"
        is_in_range = bool(values.isfinite().all())
    else:
        white = 1 if values.is_floating_point() else 255
        what, kind = "images", "whole numbers 0 to 255 or floats 0 to 1"
        is_in_range = bool(0 <= values.min() <= values.max() <= white)
    if values.shape[1:] != shape or not is_in_range:
        raise UserError(
            f"{what} are {tuple(values.shape)} with values {values.min():g} to {values.max():g}; "
            f"must be (N, {', '.join(map(str, shape))}), {kind}"
        )
    parameter = next(network.parameters())
    values = values * (data.divisor / white)
    inputs = data.model_inputs(values, parameter.dtype).to(parameter.device)
    was_training = network.training
    network.eval()
    classes = torch.cat([network(batch).argmax(dim=1) for batch in inputs.split(256)])
    network.train(was_training)
    if data.task == "segmentation":
        return classes
    names = data.class_names or range(data.num_outputs)
    return [str(names[i]) for i in classes.tolist()]


def attach_prediction(network: nn.Module, data: Data) -> None:
    """Adds `network.predict(samples)`, unless the network has a `predict` of its own."""
    if data.mean is not None and not hasattr(network, "predict"):
        object.__setattr__(network, "predict", partial(predict, network, data))
