"""Images of the user's own: a tree train/<class>/ and test/<class>/ of image files."""

from __future__ import annotations

import hashlib
import logging
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data
from normexp.data.decode import decode_images
from normexp.data.files import whole_file
from normexp.data.images import build_image_data
from normexp.data.samples import Examples
from normexp.errors import UserError

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
