"""How far one value of a site's input reaches: which samples, channels and positions it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from normexp.checks.sites import ProbedSite, moved_places, outlier


@dataclass(frozen=True)
class Reach:
    """The outputs that one input value moves, `places` (N, C, P) booleans, its own place first.

    The value is the first one of all, which cumulative statistics carry to every later position.
    """

    places: Tensor
    responds: bool  # whether an output follows its own input at all

    @property
    def other_samples(self) -> bool:
        return bool(self.places[1:].any())

    @property
    def other_channels(self) -> bool:
        return bool(self.places[:, 1:].any())

    @property
    def pools(self) -> bool:
        """Whether outputs depend on a statistic: on other values, or on nothing, as z - z does."""
        others = self.places.flatten()[1:]
        return bool(others.any()) or not self.responds

    def num_values(self, group_size: int) -> int:
        """Values in the statistic (all of them together, where a norm has several).

        Args:
            group_size: samples that share a statistic; those beyond the probe's count as its own
                other samples do.
        """
        counts = self.places.flatten(1).sum(dim=1).tolist()
        own = max(1, counts[0])
        others = counts[1:]
        if not others or group_size == 1:
            return own
        return own + round(sum(others) / len(others) * (group_size - 1))


def measure_reaches(sites: Sequence[ProbedSite], *, training: bool) -> list[tuple[str, Reach]]:
    """The reach at each site, with the site's name."""
    return [(probed.name, measure_reach(probed, training=training)) for probed in sites]


def measure_reach(probed: ProbedSite, *, training: bool) -> Reach:
    """Runs the site with and without an outlier in its first value, then on other scales.

    Scales alone tell a statistic over one value, where (x - x) and x / |x| stay the same, from a
    norm that takes no statistic.
    """
    values = probed.values()
    before, _ = probed.run(values, training=training)
    changed = values.clone()
    changed[0, 0, 0] += outlier(values)
    places = moved_places(before, probed.run(changed, training=training)[0])
    if places.flatten()[1:].any():
        return Reach(places, responds=True)
    small, _ = probed.run(0.1 * values, training=training)
    large, _ = probed.run(3 * values, training=training)
    return Reach(places, responds=bool(moved_places(small, large, tolerance=1e-2).any()))
