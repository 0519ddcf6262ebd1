"""The pixels of image files, as a viewer shows them: upright, over white, black to white in 8 bits.

CMYK is converted without its colour profile.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor

from normexp.data.sources import refuse_beyond_memory
from normexp.errors import UserError, first_line

log = logging.getLogger(__name__)

Made = TypeVar("Made")

DEEP = {"I": "whole numbers", "F": "floats"}  # of more than 8 bits, by the first letter of the mode
WHITES = (1, 255, 1023, 4095, 16383, 65535)  # floats, and 8, 10, 12, 14 and 16 bits
SMALLEST_RANGE = 16  # grey levels, of 256
OUTLIERS = 1e-4  # share of pixels, as of hot ones, that tell nothing of the contrast
MOST_NAMED = 5  # files in a message


@dataclass(frozen=True)
class Header:
    """What is read of a file before its pixels are decoded.

    Attributes:
        kind: key of `DEEP`; empty for 8 bits.
        low, high: the extreme values of a deep image.
    """

    file: Path
    has_frames: bool = False
    kind: str = ""
    low: float = 0
    high: float = 0


def decode_images(files: list[Path], size: int | None, name: str) -> Tensor:
    """All files as RGB, uint8 (N, 3, H, W), decoded in parallel.

    Raises:
        UserError: begins with `name`. Files that cannot be decoded, or whose size differs from the
            first one's; more than memory holds; hardly any contrast.
    """

    def decode(file: Path) -> np.ndarray | str:
        try:
            return decode_image(file, size, whites)
        except Exception as error:  # Pillow raises half a dozen unrelated types for a broken file
            return f"{file} ({type(error).__name__}: {first_line(error)})"

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # of EXIF data that end early
        headers = _in_parallel(read_header, files)
        whites = white_levels(headers, name)
        if several := sum(header.has_frames for header in headers):
            log.info("%s: %d files hold several frames; the first is used", name, several)
        first = decode(files[0])
        if isinstance(first, np.ndarray):
            refuse_beyond_memory(
                f"{name}: {len(files)} images of {first.shape[1]}x{first.shape[2]}",
                2 * len(files) * first.nbytes,  # splitting off val copies train
                f"try a smaller data.size than {size or max(first.shape[1:])}",
            )
        decoded = _in_parallel(decode, files, f"decoding {len(files):,} images of {name}")
    images = [image for image in decoded if isinstance(image, np.ndarray)]
    broken = [reason for reason in decoded if isinstance(reason, str)]
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
    pixels = torch.from_numpy(np.stack(images))
    low, high = grey_range(pixels)
    if high - low < SMALLEST_RANGE:
        raise UserError(
            f"{name}: nearly every pixel is between {low} and {high} of 255, too little contrast "
            "(cut to 8 bits? outliers? class numbers? white on transparent?); save the images "
            "with black at 0 and white at 255"
        )
    return pixels


def grey_range(pixels: Tensor) -> tuple[int, int]:
    """The lowest and highest value of uint8 (N, 3, H, W), without rare outliers."""
    counts = torch.zeros(256, dtype=torch.float64)
    for part in pixels.split(4096):
        counts += torch.bincount(part.flatten(), minlength=256)
    below = counts.cumsum(0) / counts.sum()
    return int((below <= OUTLIERS).sum()), int((below < 1 - OUTLIERS).sum())


def _in_parallel(act: Callable[[Path], Made], files: Sequence[Path], title: str = "") -> list[Made]:
    """`act` of each file, in order; with a title, shows progress."""
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        results: Iterable[Made] = pool.map(act, files)
        if title:
            results = track(results, title, total=len(files), console=Console(stderr=True))
        return list(results)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, do not decode the rest


def read_header(file: Path) -> Header:
    """The header of a file; of one that cannot be read, an empty one."""
    with suppress(Exception), Image.open(file) as image:
        has_frames = getattr(image, "is_animated", False)
        if image.mode[0] not in DEEP:
            return Header(file, has_frames)
        values = np.asarray(image)
        return Header(file, has_frames, image.mode[0], float(values.min()), float(values.max()))
    return Header(file)


def white_levels(headers: Sequence[Header], name: str) -> dict[str, float]:
    """The value that is white in all images of each deep kind: the first of `WHITES` that fits.

    Raises:
        UserError: values below 0 or above 65535, or not a number.
    """
    whites = {}
    for kind, words in DEEP.items():
        deep = [header for header in headers if header.kind == kind]
        for header in deep:
            if not 0 <= header.low <= header.high <= WHITES[-1]:
                raise UserError(
                    f"{name}: {header.file} has {words} from {header.low:g} to {header.high:g}; "
                    "save it with 0 to 255, 0 to 65535, or floats 0 to 1"
                )
        if deep:
            high = max(header.high for header in deep)
            whites[kind] = next(white for white in WHITES if high <= white)
            line = "%s: %d images hold %s up to %g; %g is white"
            log.info(line, name, len(deep), words, high, whites[kind])
    return whites


def decode_image(file: Path, size: int | None, whites: dict[str, float]) -> np.ndarray:
    """One file as RGB, uint8 (3, H, W); with `size`, scaled and centre-cropped to a square."""
    image = _open_upright(file)
    if image.mode[0] in DEEP:
        levels = np.asarray(image).astype(np.float64) * 255 // whites[image.mode[0]]
        image = Image.fromarray(levels.astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    image = image.convert("RGB")
    if size is not None:
        image = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)  # HWC -> CHW


def _open_upright(file: Path) -> Image.Image:
    """The first frame, turned as its EXIF orientation says."""
    with Image.open(file) as image:
        try:
            return ImageOps.exif_transpose(image)
        except SyntaxError:  # of EXIF data that no viewer can read
            return image.copy()
