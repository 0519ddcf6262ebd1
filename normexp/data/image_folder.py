"""The user's own images: train/<class>/ and test/<class>/, or class folders that are split here."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.images import build_image_data
from normexp.data.sources import refuse_beyond_memory, split_off_test
from normexp.errors import UserError, first_line
from normexp.records.files import open_atomic

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

log = logging.getLogger(__name__)

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MIN_STD = 0.001  # a grey level is 0.004
MOST_NAMED = 5  # files in a message


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
            differ between train and test, files that cannot be decoded, images of several sizes,
            too little memory.
    """
    if size is not None and size < 1:
        raise UserError(f"data.size={size} must be positive; try data.size=32")
    moments = _given_moments(mean, std)
    splits = [Path(root, name) for name in ("train", "test") if Path(root, name).is_dir()]
    if len(splits) == 1:
        raise UserError(
            f"data.root={root} has {splits[0].name}/ alone; it needs train/ and test/. To split "
            f"the images of one folder, name it: data.root={splits[0]}"
        )
    listings = [_list_images(root, folder) for folder in splits or [Path(root)]]
    classes = listings[0].classes
    if differing := sorted(set(classes) ^ set(listings[-1].classes)):
        where = splits[differing[0] not in classes].name
        raise UserError(
            f"data.root={root}: class {differing[0]} is in {where}/ only; train/ and test/ need "
            "the same class folders"
        )
    files = [Path(name) for listing in listings for name, _ in listing.samples]
    images = _load_or_decode(Path(root), files, size, Path(data_dir))
    counts = [len(listing) for listing in listings]
    targets = torch.tensor([target for listing in listings for target in listing.targets])
    parts = [*map(Examples, images.split(counts), targets.split(counts))]
    train, test = parts if splits else _split_off_test(root, parts[0])
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
    for key, values, least in (("mean", mean, 0), ("std", std, MIN_STD)):
        numbers = values if isinstance(values, Sequence) else []
        if len(numbers) != 3 or not all(
            isinstance(number, int | float) and least <= number <= 1 for number in numbers
        ):
            given, example = (str(v).replace(" ", "") for v in (values, IMAGENET[key]))
            raise UserError(
                f"data.{key}={given}: must be three numbers from {least:g} to 1, of the channels "
                f"red, green and blue, as ImageNet's data.{key}={example}"
            )
    assert mean is not None and std is not None
    return {"mean": tuple(mean), "std": tuple(std)}


def _list_images(root: str, folder: Path) -> ImageFolder:
    """The images of each class, without hidden files and folders."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    class Listing(ImageFolder):
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names, _ = super().find_classes(directory)
            names = [name for name in names if not name.startswith(".")]
            return names, {name: target for target, name in enumerate(names)}

    def is_image(file: str) -> bool:
        name = os.path.basename(file).lower()
        return name.endswith(IMG_EXTENSIONS) and not name.startswith(".")

    try:
        return Listing(folder, is_valid_file=is_image)
    except OSError as error:
        raise UserError(
            f"data.root={root}: {first_line(error)}; it needs images ({' '.join(IMG_EXTENSIONS)}) "
            f"in {root}/<class>/, or in {root}/train/<class>/ and {root}/test/<class>/"
        ) from error


def _split_off_test(root: str, images: Examples) -> tuple[Examples, Examples]:
    """Train and test of a folder without these, see `split_off_test`; the log says so."""
    train, test = (
        Examples(images.inputs[part], images.targets[part])
        for part in split_off_test(images.targets)
    )
    if len(test.targets.unique()) < len(train.targets.unique()):
        raise UserError(
            f"data.root={root}: a class has fewer than three images, too few to keep any for the "
            "test split; add some"
        )
    log.info(
        "data.root=%s has no train/ and test/: a fifth of each class is the test split, the same "
        "in every command (%d of %d images)",
        *(root, len(test), len(images)),
    )
    return train, test


def decode_images(files: list[Path], size: int | None, name: str) -> Tensor:
    """All files as RGB, uint8 (N, 3, H, W), decoded in parallel; `name` is for messages.

    Raises:
        UserError: files that cannot be decoded, or whose size differs from the first one's; more
            than memory holds.
    """
    from rich.console import Console
    from rich.progress import track

    def decode(file: Path) -> np.ndarray | str:
        try:
            return decode_image(file, size)
        except Exception as error:  # Pillow raises half a dozen unrelated types for a broken file
            return f"{file} ({type(error).__name__}: {first_line(error)})"

    first = decode(files[0])
    if isinstance(first, np.ndarray):
        refuse_beyond_memory(
            f"{name}: {len(files)} images of {first.shape[1]}x{first.shape[2]}",
            2 * len(files) * first.nbytes,  # splitting off val copies train
            f"try a smaller data.size than {size or max(first.shape[1:])}",
        )
    images, broken = [], []
    title = f"decoding {len(files):,} images of {name}"
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        decoded = pool.map(decode, files)
        for image in track(decoded, title, total=len(files), console=Console(stderr=True)):
            (broken if isinstance(image, str) else images).append(image)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, do not decode the rest
    if broken:
        more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
        named = ", ".join(broken[:MOST_NAMED])
        raise UserError(f"{name}: cannot decode {named}{more}; replace or remove them")
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            sizes = [f"{part.shape[1]}x{part.shape[2]}" for part in (image, images[0])]
            raise UserError(
                f"{file} is {sizes[0]} pixels, {files[0]} is {sizes[1]}; set data.size=32 to scale "
                "all to one size"
            )
    return torch.from_numpy(np.stack(images))


def decode_image(file: Path, size: int | None) -> np.ndarray:
    """One file as RGB, uint8 (3, H, W); with `size`, scaled and centre-cropped to a square."""
    from PIL import Image, ImageOps

    with Image.open(file) as opened:
        image: Image.Image = opened
        if opened.mode.startswith("I"):  # grey of 16 bits, which Pillow would clip at 255
            image = Image.fromarray((np.asarray(opened).clip(0, 65535) // 257).astype(np.uint8))
        image = image.convert("RGB")
    if size is not None:
        image = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)  # HWC -> CHW


def _load_or_decode(root: Path, files: list[Path], size: int | None, data_dir: Path) -> Tensor:
    """The images of `files`, uint8 (N, 3, H, W), from the cache unless a file has changed."""
    digest = hashlib.sha256(f"{root.resolve()}|{size}".encode())
    for file in files:
        status = file.stat()
        line = f"\n{file.relative_to(root)}|{status.st_size}|{status.st_mtime_ns}"
        digest.update(line.encode(errors="surrogateescape"))
    path = data_dir / "cache" / f"{digest.hexdigest()[:16]}.pt"
    with suppress(Exception):  # missing, or torn by a full disk: torch raises many types
        return torch.load(path, weights_only=True)
    images = decode_images(files, size, f"data.root={root}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            torch.save(images, file)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        log.warning("cannot cache the decoded images in %s (%s)", path, error)
    return images
