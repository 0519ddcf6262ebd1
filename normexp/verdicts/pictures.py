"""What the best and the worst arm of a slice predict: pictures that their runs have saved."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.slices import Slice


@dataclass(frozen=True)
class Picture:
    """A PNG: test images, below them their masks, and below these what a run predicts.

    name: of its file, without the ending
    """

    name: str
    caption: str
    content: bytes

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{b64encode(self.content).decode()}"


def draw_pictures(slice_: Slice) -> list[Picture]:
    """Of the best and the worst arm, where arms are compared first; none without saved pictures."""
    means = {}
    for side in slice_.at(slice_.compared_at[0]).values():
        if side.mean.estimate is not None:
            means[side] = slice_.metric.sign * side.mean.estimate
    if len({*means.values()}) < 2:
        return []
    pictures: list[Picture] = []
    ordered = sorted(means, key=means.__getitem__)
    for rank, side in (("best", ordered[-1]), ("worst", ordered[0])):
        pictures += islice(_pictures_of(side, rank, slice_), 1)
    return pictures


def _pictures_of(side: ArmAtSize, rank: str, slice_: Slice) -> Iterator[Picture]:
    """One for each seed that has saved one."""
    for run in side.best.runs:
        if content := run.load_picture():
            where = f"{side.arm}{slice_.at_words(slice_.compared_at[0])}"
            caption = f"{where}, {rank} mean: {side.estimate()}; seed {run.seed}"
            yield Picture(f"predictions_{slice_.slug}_{rank}", caption, content)
