"""The pixels of image files, as a viewer shows them: upright, over white, black to white in 8 bits.

CMYK is converted without its colour profile.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor

from normexp.data.images import count_levels
from normexp.data.sources import refuse_beyond_memory
from normexp.errors import UserError, one_line

log = logging.getLogger(__name__)

DEEP = {"I": "whole numbers", "F": "floats"}  # of more than 8 bits, by the first letter of the mode
WHITES = (1, 255, 1023, 4095, 16383, 65535)  # floats, and 8, 10, 12, 14 and 16 bits
SMALLEST_RANGE = 16  # grey levels, of 256
OUTLIERS = 1e-4  # share of pixels, as of hot ones, that tell nothing of the contrast
MOST_NAMED = 5  # files in a message


class Header(NamedTuple):
    """What is read of a file before its pixels are decoded.

    Attributes:
        kind: key of `DEEP`; another one, or none, for 8 bits.
        low, high: the extreme values of a deep image.
    """

    kind: str = ""
    low: float = 0
    high: float = 0
    has_frames: bool = False


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
            return f"{file} ({one_line(error)})"

    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.filterwarnings("ignore", module="PIL")  # of EXIF data that end early
        headers = dict(zip(files, pool.map(read_header, files), strict=True))
        whites = white_levels(headers, name)
        if several := sum(header.has_frames for header in headers.values()):
            log.info("%s: %d files hold several frames; the first is used", name, several)
        first = decode(files[0])
        if isinstance(first, np.ndarray):
            refuse_beyond_memory(
                f"{name}: {len(files)} images of {first.shape[1]}x{first.shape[2]}",
                2 * len(files) * first.nbytes,  # splitting off val copies train
                f"try a smaller data.size than {size or max(first.shape[1:])}",
            )
        progress = track(
            pool.map(decode, files),
            f"decoding {len(files):,} images of {name}",
            total=len(files),
            console=Console(stderr=True),
        )
        decoded = [*progress]
    images = [image for image in decoded if isinstance(image, np.ndarray)]
    broken = [reason for reason in decoded if isinstance(reason, str)]
    if broken:
        raise UserError(
            f"{name}: {len(broken)} files cannot be decoded, such as "
            f"{', '.join(broken[:MOST_NAMED])}; replace or remove them"
        )
    of_size = {f"{i.shape[1]}x{i.shape[2]}": file for i, file in zip(images, files, strict=True)}
    if len(of_size) > 1:
        (first_size, first), (other_size, other), *_ = of_size.items()
        raise UserError(
            f"{other} is {other_size} pixels, {first} is {first_size}; set data.size=32 to scale "
            "all to one size"
        )
    pixels = torch.from_numpy(np.stack(images))
    counts = count_levels(pixels).sum(dim=0)
    below = counts.cumsum(0) / counts.sum()
    low, high = int((below <= OUTLIERS).sum()), int((below < 1 - OUTLIERS).sum())
    if high - low < SMALLEST_RANGE:
        raise UserError(
            f"{name}: nearly every pixel is between {low} and {high} of 255, too little contrast "
            "(cut to 8 bits? outliers? class numbers? white on transparent?); save the images "
            "with black at 0 and white at 255"
        )
    return pixels


def read_header(file: Path) -> Header:
    """The header of a file; of one that cannot be read, an empty one."""
    with suppress(Exception), Image.open(file) as image:
        has_frames = getattr(image, "is_animated", False)
        values = np.asarray(image) if image.mode[0] in DEEP else np.zeros(1)
        return Header(image.mode[0], float(values.min()), float(values.max()), has_frames)
    return Header()


def white_levels(headers: Mapping[Path, Header], name: str) -> dict[str, float]:
    """The value that is white in all images of each deep kind: the first of `WHITES` that fits.

    Raises:
        UserError: values below 0 or above 65535, or not a number.
    """
    brightest: dict[str, list[float]] = {}
    for file, header in headers.items():
        if header.kind not in DEEP:
            continue
        if not 0 <= header.low <= header.high <= WHITES[-1]:
            raise UserError(
                f"{name}: {file} has {DEEP[header.kind]} from {header.low:g} to {header.high:g}; "
                "save it with 0 to 255, 0 to 65535, or floats 0 to 1"
            )
        brightest.setdefault(header.kind, []).append(header.high)
    whites = {}
    for kind, values in brightest.items():
        high = max(values)
        whites[kind] = next(white for white in WHITES if high <= white)
        log.info(
            "%s: %d images hold %s up to %g; %g is white",
            name,
            len(values),
            DEEP[kind],
            high,
            whites[kind],
        )
    return whites


def decode_image(file: Path, size: int | None, whites: Mapping[str, float]) -> np.ndarray:
    """One file as RGB, uint8 (3, H, W); with `size`, scaled and centre-cropped to a square."""
    with Image.open(file) as opened:
        try:
            image = ImageOps.exif_transpose(opened)
        except SyntaxError:  # of EXIF data that no viewer can read
            image = opened.copy()
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
