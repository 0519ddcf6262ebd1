"""How many values each statistic is taken over; one is refused, 8 or fewer are worth a warning."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from normexp.batching.sizes import Sizes
from normexp.checks.reach import Reach
from normexp.checks.sites import name_some
from normexp.errors import UserError

logger = logging.getLogger(__name__)

FEW_VALUES = 8


def smallest_group(sizes: Sizes, num_samples: int, *, drop_last: bool) -> int:
    """Samples in the smallest set that shares batch statistics in an epoch of `num_samples`."""
    rest = 0 if drop_last else num_samples % sizes.batch_size
    if not rest:
        return sizes.norm
    last_micro = rest % sizes.micro or sizes.micro
    return last_micro % sizes.norm or sizes.norm


def count_values(reaches: Sequence[tuple[str, Reach]], group_size: int) -> dict[str, int]:
    """Values per statistic at each site in training, where `group_size` samples share one.

    Sites whose norm takes no statistic are left out. A site that is entered with several shapes
    counts with its smallest.
    """
    counts: dict[str, int] = {}
    for name, reach in reaches:
        if reach.pools:
            count = reach.num_values(group_size)
            counts[name] = min(count, counts.get(name, count))
    return counts


def check_counts(counts: Mapping[str, int], group_size: int) -> None:
    """Raises UserError for a statistic over one value; warns of those over a few."""
    degenerate = [name for name, count in counts.items() if count == 1]
    if degenerate:
        raise UserError(
            f"the norm takes statistics over 1 value at {name_some(degenerate)}, which erases its "
            f"input (samples per statistic: {group_size}); try a larger batch_size or "
            "norm_batch_size, fewer groups, or norm=layer"
        )
    few: defaultdict[int, list[str]] = defaultdict(list)
    for name, count in counts.items():
        if count <= FEW_VALUES:
            few[count].append(name)
    for count, names in sorted(few.items()):
        logger.warning("statistics over only %d values at %s", count, name_some(names))
