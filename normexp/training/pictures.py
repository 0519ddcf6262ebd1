"""Draws predictions.png: a few test images of a run that segments, and what it predicts."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image

from normexp.training.data.augment import IGNORED

GAP = 2  # white pixels between images
MAX_SIDE = 128  # of an image as drawn: of larger ones every second or third pixel and so on
WHITE = 255


def draw_predictions(images: np.ndarray, masks: np.ndarray, predictions: np.ndarray) -> bytes:
    """Returns a PNG of a column per image, in three rows: the images, the masks, the predictions.

    Args:
        images: uint8 (N, C, H, W); the first three channels are drawn as red, green and blue, or
            the first as grey.
        masks, predictions: classes, uint8 (N, H, W).
    """
    images = images[:, : 3 if images.shape[1] >= 3 else 1]
    step = math.ceil(max(images.shape[-2:]) / MAX_SIDE)
    images, masks, predictions = (one[..., ::step, ::step] for one in (images, masks, predictions))
    colours = class_colours()
    num_images, _, height, width = images.shape
    rows = [np.broadcast_to(images.transpose(0, 2, 3, 1), (num_images, height, width, 3))]
    rows += [colours[masks], colours[predictions]]
    canvas = np.full((3 * (height + GAP), num_images * (width + GAP), 3), WHITE, dtype=np.uint8)
    for line, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            top, left = line * (height + GAP), column * (width + GAP)
            canvas[top : top + height, left : left + width] = picture
    content = io.BytesIO()
    Image.fromarray(canvas[:-GAP, :-GAP]).save(content, "PNG", optimize=True)
    return content.getvalue()


def class_colours() -> np.ndarray:
    """RGB uint8 (256, 3) of classes, as in Pascal VOC: class 0 is black; pixels without one white.

    Each colour has three bits of its class's number in its high bits, and three in the next ones.
    """
    numbers = np.arange(256)
    colours = np.zeros((256, 3), dtype=np.uint8)
    for place in range(3):
        for channel in range(3):
            bit = numbers >> (3 * place + channel) & 1
            colours[:, channel] |= (bit << (7 - place)).astype(np.uint8)
    colours[IGNORED] = WHITE
    return colours
