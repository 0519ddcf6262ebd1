"""Image files to one uint8 tensor: in parallel threads (Pillow releases the GIL), with progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normexp.data.memory import refuse_beyond_memory
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
