"""Images of the user's own: a tree train/<class>/ and test/<class>/ of image files."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples, refuse_beyond_memory, whole_file
from normexp.data.images import build_image_data
from normexp.errors import UserError

_FILES_PER_TASK = 128


def decode_images(files: list[Path], size: int | None, what: str) -> Tensor:
    """All files as RGB, uint8 (N, 3, H, W); `what` names the set in messages.

    Raises:
        UserError: a file that cannot be decoded, or has another size than the first where `size`
            is None; more than memory holds.
    """
    first = decode_image(files[0], size)
    refuse_beyond_memory(
        f"{what}: {len(files)} images of {first.shape[1]}x{first.shape[2]}",
        2 * len(files) * first.nbytes,  # twice: train is copied when val comes out of it
        f"try a smaller data.size than {size or max(first.shape[1:])}",
    )
    images = np.empty((len(files), *first.shape), dtype=np.uint8)

    def decode_part(start: int) -> int:
        part = files[start : start + _FILES_PER_TASK]
        for index, file in enumerate(part, start):
            image = decode_image(file, size)
            if image.shape != first.shape:
                raise _odd_size(file, image, files[0], first)
            images[index] = image
        return len(part)

    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        tasks = [pool.submit(decode_part, i) for i in range(0, len(files), _FILES_PER_TASK)]
        with _progress(f"decoding {len(files):,} images of {what}", len(files)) as advance:
            for task in as_completed(tasks):
                advance(task.result())
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, do not decode the rest
    return torch.from_numpy(images)


def decode_image(file: Path, size: int | None) -> np.ndarray:
    """One file as RGB, uint8 (3, H, W); scaled and centre-cropped to a square where size is set."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except Exception as error:  # bad bytes: Pillow's readers raise half a dozen unrelated types
        reason = "not an image" if type(error).__name__ == "UnidentifiedImageError" else error
        raise UserError(f"cannot decode {file} ({reason}); replace or remove the file") from error
    if size is not None:
        image = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)  # HWC -> CHW


def _odd_size(file: Path, image: np.ndarray, first_file: Path, first: np.ndarray) -> UserError:
    return UserError(
        f"{file} is {image.shape[1]}x{image.shape[2]} pixels, {first_file} is "
        f"{first.shape[1]}x{first.shape[2]}; set data.size=32 to bring all to one size"
    )


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a bar on stderr; a plain line where that is no terminal."""
    if not sys.stderr.isatty():
        print(title, file=sys.stderr)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, advance=count)


SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
_log = logging.getLogger(__name__)


@dataclass
class Listing:
    """The image files of a split with their classes, in a fixed order."""

    files: list[Path]
    targets: list[int]
    class_names: tuple[str, ...]


def load_image_folder(
    *,
    root: str,
    size: int | None,
    data_dir: str,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None,
) -> Data:
    """RGB images, uint8 (N, 3, H, W), decoded once and kept under data_dir/cache.

    Args:
        root: folder with train/<class>/ and test/<class>/; other folders (val/) are ignored.
        size: side in pixels that images are scaled and centre-cropped to; None keeps them as they
            are, and then all must be of one size.

    Raises:
        UserError: a missing root, an empty class, classes that differ between train and test, a
            file that is no image, images of several sizes, more images than memory holds.
    """
    if size is not None and size < 1:
        raise UserError(f"data.size={size} must be positive; try data.size=32")
    folder = Path(root)
    if not folder.is_dir():
        raise UserError(
            f"data.root={root} is no folder; name one with train/<class>/ and test/<class>/"
        )
    train, test = list_images(folder, "train"), list_images(folder, "test")
    for one, other, split in ((train, test, "train"), (test, train, "test")):
        extra = sorted(set(one.class_names) - set(other.class_names))
        if extra:
            raise UserError(
                f"data.root={root}: class {extra[0]} is in {split}/ alone; train/ and test/ need "
                "the same class folders"
            )
    images = _load_or_decode(folder, train.files + test.files, size, Path(data_dir))
    train_images, test_images = images.split([len(train.files), len(test.files)])
    return build_image_data(
        "image_folder",
        Examples(train_images, torch.tensor(train.targets)),
        Examples(test_images, torch.tensor(test.targets)),
        class_names=train.class_names,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )


def list_images(root: Path, split: str) -> Listing:
    """The images under root/split/<class>/ at any depth; hidden files are left out."""
    folder = root / split
    if not folder.is_dir():
        raise UserError(
            f"data.root={root} has no folder {split}/; it needs {split}/<class>/ with images"
        )
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        raise UserError(f"{folder} has no class folders; put images into {folder}/<class>/")
    files: list[Path] = []
    targets: list[int] = []
    for target, class_folder in enumerate(classes):
        found = sorted(p for p in class_folder.rglob("*") if _is_image(p))
        if not found:
            raise UserError(
                f"{class_folder} holds no images ({' '.join(sorted(SUFFIXES))}); add some or "
                "remove the folder"
            )
        files += found
        targets += [target] * len(found)
    return Listing(files, targets, tuple(p.name for p in classes))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _load_or_decode(root: Path, files: list[Path], size: int | None, data_dir: Path) -> Tensor:
    """The images of `files`, uint8 (N, 3, H, W), from the cache where nothing has changed."""
    path = data_dir / "cache" / f"{_listing_digest(root, files, size)}.pt"
    images = _read_cache(path, len(files))
    if images is not None:
        return images
    images = decode_images(files, size, f"data.root={root}")
    try:
        with whole_file(path) as part:
            torch.save(images, part)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        _log.warning(
            "cannot keep the decoded images at %s (%s); the next run decodes again", path, error
        )
    return images


def _listing_digest(root: Path, files: list[Path], size: int | None) -> str:
    """Changes with the name, size or time of change of any file, so an edit is decoded anew."""
    digest = hashlib.sha256(f"{root.resolve()}|{size}".encode())
    for file in files:
        status = file.stat()
        line = f"\n{file.relative_to(root)}|{status.st_size}|{status.st_mtime_ns}"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _read_cache(path: Path, num_images: int) -> Tensor | None:
    """The cached tensor; None where there is none, or none that can be used."""
    if not path.exists():
        return None
    try:
        images = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        _log.warning("the cache %s is unreadable (%s); it is made again", path, reason)
        return None
    is_usable = (
        isinstance(images, Tensor) and images.dtype == torch.uint8 and len(images) == num_images
    )
    if not is_usable:
        _log.warning("the cache %s holds something else; it is made again", path)
        return None
    return images
