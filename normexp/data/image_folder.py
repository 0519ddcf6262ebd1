"""The user's own images: train/<class>/ and test/<class>/, or class folders that are split here."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.images import build_image_data
from normexp.data.sources import refuse_beyond_memory, split_off_test
from normexp.errors import UserError
from normexp.records.files import open_atomic

log = logging.getLogger(__name__)

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
OTHER_SPLIT = {"train": "test", "test": "train"}
MIN_STD = 0.001  # a grey level is 0.004

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})


def has_split_folders(root: Path) -> bool:
    """True if an image folder has train/ or test/; otherwise each of its folders is a class."""
    return any((root / split).is_dir() for split in ("train", "test"))


def load_image_folder(
    *,
    root: str,
    size: int | None,
    data_dir: str,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Data:
    """RGB images, uint8 (N, 3, H, W), decoded once and cached under data_dir/cache.

    Args:
        root: folder with train/<class>/ and test/<class>/; other folders (val/) are ignored. If it
            has neither, every folder is a class, and a fifth of each is the test split.
        size: side in pixels to which images are scaled and centre-cropped; None leaves images as
            they are, which must then have one size.
        mean, std: of each channel, in 0..1 units, by which images are normalized; None: those of
            the training images. Networks that start from weights need those of their training.

    Raises:
        UserError: bad or incomplete mean and std, a missing folder, an empty class, classes that
            differ between train and test, a file that cannot be decoded, images of several sizes,
            too little memory.
    """
    if size is not None and size < 1:
        raise UserError(f"data.size={size} must be positive; try data.size=32")
    moments = _given_moments(mean, std)
    folder = Path(root)
    splits = ("train", "test") if has_split_folders(folder) else ("",)
    listing = {split: list_images(folder, split) for split in splits}
    if len(splits) == 2:
        check_same_classes(root, listing)
    files = [list(chain.from_iterable(by_class.values())) for by_class in listing.values()]
    images = _load_or_decode(folder, [*chain.from_iterable(files)], size, Path(data_dir))
    classes = list(listing[splits[0]])
    counts = [
        torch.tensor([len(by_class[name]) for name in classes]) for by_class in listing.values()
    ]
    parts = [
        Examples(part, torch.arange(len(classes)).repeat_interleave(count))
        for part, count in zip(images.split([*map(len, files)]), counts, strict=True)
    ]
    train, test = parts if len(parts) == 2 else _split_off_test(root, parts[0])
    data = build_image_data(
        "image_folder",
        train,
        test,
        num_classes=len(classes),
        class_names=classes,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )
    return data if moments is None else dataclasses.replace(data, **moments)


def _given_moments(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, Any] | None:
    """The fields of `Data` that hold a mean and standard deviation; None if both are None."""
    if mean is None and std is None:
        return None
    for key, values in (("mean", mean), ("std", std)):
        if values is None:
            raise UserError(f"data.{key} is missing: give data.mean and data.std, or neither")
        numbers = values if isinstance(values, Sequence) else []
        least = 0 if key == "mean" else MIN_STD
        if len(numbers) != 3 or not all(
            isinstance(number, int | float) and least <= number <= 1 for number in numbers
        ):
            given, example = (str(v).replace(" ", "") for v in (values, IMAGENET[key]))
            raise UserError(
                f"data.{key}={given}: must be three numbers from {least:g} to 1, of the channels "
                f"red, green and blue, as ImageNet's data.{key}={example}"
            )
    assert mean is not None and std is not None
    return {"mean": tuple(mean), "std": tuple(std), "has_own_moments": False}


def list_images(root: Path, split: str) -> dict[str, list[Path]]:
    """The images below root/split/<class>/ by class, sorted, without hidden files.

    Args:
        split: `train`, `test`, or empty for classes directly below the root.
    """
    folder = root / split
    classes = sorted(p for p in folder.glob("*") if p.is_dir() and not p.name.startswith("."))
    if not classes:
        one_folder = root / OTHER_SPLIT[split] if split else root
        advice = f". To split the images of one folder, name it: data.root={one_folder}"
        raise UserError(
            f"data.root={root} has no images in {split}/; it needs {folder}/<class>/"
            f"{advice * one_folder.is_dir()}"
            if split
            else f"data.root={root} has no folders; it needs a folder of images for each class, "
            f"{root}/<class>/, or {root}/train/<class>/ and {root}/test/<class>/"
        )
    by_class = {
        path.name: sorted(file for file in path.rglob("*") if _is_image(file)) for path in classes
    }
    for name, files in by_class.items():
        if not files:
            raise UserError(
                f"data.root={root}: {folder / name} has no images ({' '.join(sorted(SUFFIXES))}); "
                "add some or remove the folder"
            )
    return by_class


def _split_off_test(root: str, images: Examples) -> tuple[Examples, Examples]:
    """Train and test of a folder without these, see `split_off_test`; the log says so."""
    train, test = (
        Examples(images.inputs[part], images.targets[part])
        for part in split_off_test(images.targets)
    )
    if len(test.targets.unique()) < len(train.targets.unique()):
        raise UserError(
            f"data.root={root}: a class has fewer than three images, of which none can be the test "
            "split; add some"
        )
    log.info(
        "data.root=%s has no train/ and test/: a fifth of each class is the test split, the same "
        "in every command (%d of %d images)",
        *(root, len(test), len(images)),
    )
    return train, test


def check_same_classes(root: str, listing: dict[str, dict[str, list[Path]]]) -> None:
    """Raises UserError if a class is in only one of the splits."""
    for split, other in OTHER_SPLIT.items():
        extra = sorted(listing[split].keys() - listing[other].keys())
        if extra:
            raise UserError(
                f"data.root={root}: class {extra[0]} is in {split}/ only; train/ and test/ need "
                "the same class folders"
            )


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def decode_images(files: list[Path], size: int | None, name: str) -> Tensor:
    """All files as RGB, uint8 (N, 3, H, W), decoded in parallel; `name` is for messages.

    Raises:
        UserError: a file that cannot be decoded, or whose size differs from the first one's; more
            than memory holds.
    """
    from rich.console import Console
    from rich.progress import track

    first = decode_image(files[0], size)
    refuse_beyond_memory(
        f"{name}: {len(files)} images of {first.shape[1]}x{first.shape[2]}",
        2 * len(files) * first.nbytes,  # splitting off val copies train
        f"try a smaller data.size than {size or max(first.shape[1:])}",
    )
    images = np.empty((len(files), *first.shape), dtype=np.uint8)

    def decode_into(index: int) -> None:
        image = decode_image(files[index], size)
        if image.shape != first.shape:
            raise UserError(
                f"{files[index]} is {image.shape[1]}x{image.shape[2]} pixels, {files[0]} is "
                f"{first.shape[1]}x{first.shape[2]}; set data.size=32 to scale all to one size"
            )
        images[index] = image

    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    done = pool.map(decode_into, range(len(files)))
    title = f"decoding {len(files):,} images of {name}"
    try:
        for _ in track(done, title, total=len(files), console=Console(stderr=True)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, do not decode the rest
    return torch.from_numpy(images)


def decode_image(file: Path, size: int | None) -> np.ndarray:
    """One file as RGB, uint8 (3, H, W); with `size`, scaled and centre-cropped to a square."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except Exception as error:  # Pillow raises half a dozen unrelated types for a broken file
        raise UserError(
            f"cannot decode {file} ({type(error).__name__}); replace or remove it"
        ) from error
    if size is not None:
        image = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)  # HWC -> CHW


def _load_or_decode(root: Path, files: list[Path], size: int | None, data_dir: Path) -> Tensor:
    """The images of `files`, uint8 (N, 3, H, W), from the cache unless a file has changed."""
    path = data_dir / "cache" / f"{_listing_digest(root, files, size)}.pt"
    if path.exists():
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:  # torch raises half a dozen unrelated types for a broken file
            log.warning("cannot read the cache %s (%s); decoding again", path, error)
    images = decode_images(files, size, f"data.root={root}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            torch.save(images, file)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        log.warning("cannot cache the decoded images in %s (%s)", path, error)
    return images


def _listing_digest(root: Path, files: list[Path], size: int | None) -> str:
    """A hash of every file's name, size and modification time, so that edits are decoded again."""
    digest = hashlib.sha256(f"{root.resolve()}|{size}".encode())
    for file in files:
        status = file.stat()
        line = f"\n{file.relative_to(root)}|{status.st_size}|{status.st_mtime_ns}"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
