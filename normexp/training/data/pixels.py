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

from normexp.errors import UserError, one_line
from normexp.training.data.images import refuse_low_contrast
from normexp.training.data.sources import refuse_beyond_memory
from normexp.words import format_count

log = logging.getLogger(__name__)

# Images with more than 8 bits: what their pixels are, by the first letter of Pillow's mode.
DEEP = {"I": "whole numbers", "F": "floats"}
WHITES = (1, 255, 1023, 4095, 16383, 65535)  # floats, and 8, 10, 12, 14 and 16 bits
MOST_NAMED = 5  # files in a message


class Header(NamedTuple):
    """What is known of a file before its pixels are decoded.

    Attributes:
        size: width and height.
        kind: a key of DEEP; any other text for 8 bits.
        low, high: the extreme values of a deep image.
    """

    size: tuple[int, int] = (0, 0)
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
        num_animated = sum(header.has_frames for header in headers.values())
        if num_animated:
            animated = format_count(num_animated, "file")
            log.info("%s: only the first of several frames is read of %s", name, animated)
        width, height = (size, size) if size else headers[files[0]].size
        refuse_beyond_memory(
            f"{name}: {len(files)} images of {height}x{width}",
            2 * len(files) * 3 * height * width,  # splitting off val copies train
            f"try a smaller data.size than {max(height, width)}",
        )
        progress = track(
            pool.map(decode, files),
            f"decoding {len(files):,} images of {name}",
            total=len(files),
            console=Console(stderr=True),
        )
        images: list[np.ndarray] = []
        broken: list[str] = []
        for result in progress:
            if isinstance(result, str):
                broken.append(result)
            else:
                images.append(result)
    if broken:
        raise UserError(
            f"{name}: {format_count(len(broken), 'file')} cannot be decoded, such as "
            f"{', '.join(broken[:MOST_NAMED])}; replace or remove them"
        )
    first_size = _size(images[0])
    for file, image in zip(files, images, strict=True):
        if _size(image) != first_size:
            raise UserError(
                f"{file} is {_size(image)} pixels, {files[0]} is {first_size}; set data.size=32 "
                "to scale all to one size"
            )
    pixels = torch.from_numpy(np.stack(images))
    refuse_low_contrast(pixels, name)
    return pixels


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]}x{image.shape[2]}"


def read_header(file: Path) -> Header:
    """The header of a file; an empty one if the file cannot be read."""
    with suppress(Exception), Image.open(file) as image:
        has_frames = getattr(image, "is_animated", False)
        values = np.asarray(image) if image.mode[0] in DEEP else np.zeros(1)
        lowest, highest = float(values.min()), float(values.max())
        return Header(image.size, image.mode[0], lowest, highest, has_frames)
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
