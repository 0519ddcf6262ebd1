"""The space of a search, read from Hydra's sweep grammar, and its points.

All points are known in advance: a grid of choices, or the first points of one scrambled Sobol
sequence (Owen, 1998), so that a longer search extends a shorter one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from normexp.errors import UserError
from normexp.training.config.command import swept_texts

DIGITS = 4  # significant digits of a value that is drawn from an interval
SCRAMBLE = 0  # seed of the Sobol sequence: every search of a space has the same points
LOGARITHMIC = ("lr",)  # keys whose intervals have a log scale without a tag
DRAWS_PER_POINT = 8  # rounded values and choices repeat


@dataclass(frozen=True)
class Dimension:
    """What one key may be: one of the `texts`, or a number from `low` to `high`.

    Attributes:
        log: numbers are drawn uniformly in log(x).
    """

    key: str
    texts: Sequence[str] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, fraction: float) -> str:
        """The value at a fraction in [0, 1) of the list or the interval, as typed."""
        if self.texts:
            return self.texts[int(fraction * len(self.texts))]
        low, high = self.low, self.high
        value = low * (high / low) ** fraction if self.log else low + fraction * (high - low)
        return repr(min(max(float(f"{value:.{DIGITS}g}"), low), high))


@dataclass(frozen=True)
class Space:
    """The dimensions of a search; at least one."""

    dimensions: tuple[Dimension, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dimension.key for dimension in self.dimensions)

    @property
    def first(self) -> dict[str, str]:
        return {dimension.key: dimension.at(0) for dimension in self.dimensions}

    def points(self, count: int) -> list[dict[str, str]]:
        """At most `count` different points; fewer if the space has fewer.

        All combinations in order, if only choices are searched and there are no more of them;
        otherwise points of the Sobol sequence.
        """
        choices = [dimension.texts for dimension in self.dimensions]
        if 0 < math.prod(map(len, choices)) <= count:
            rows = [*itertools.product(*choices)]
        else:
            fractions = _sobol(len(choices), DRAWS_PER_POINT * count)
            rows = [tuple(map(Dimension.at, self.dimensions, row)) for row in fractions]
        unique = [*dict.fromkeys(rows)][:count]
        return [dict(zip(self.keys, row, strict=True)) for row in unique]


def _sobol(num_dimensions: int, count: int) -> list[list[float]]:
    """At least `count` points of one sequence in [0, 1)^d; more points begin with the same ones."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(num_dimensions, scramble=True, rng=SCRAMBLE)
    return sequence.random_base2(math.ceil(math.log2(count))).tolist()


def read_space(overrides: Sequence[Override]) -> Space:
    """Reads the space of the searched overrides. Raises UserError for one without values."""
    return Space(tuple(map(_dimension, overrides)))


def _dimension(override: Override) -> Dimension:
    value: Any = override.value()
    key, text = override.get_key_element(), override.input_line
    is_interval = isinstance(value, IntervalSweep)
    if value.tags - ({"log"} if is_interval else set()):
        raise UserError(f"{text}: the only tag is log, of an interval")
    if is_interval:
        return _interval(override)
    unique = tuple(dict.fromkeys(swept_texts(override)))
    if len(unique) < 2:
        raise UserError(f"{text}: {len(unique)} values to search; name two or more, or {key}=...")
    return Dimension(key, unique)


def _interval(override: Override) -> Dimension:
    value: Any = override.value()
    key, text = override.get_key_element(), override.input_line
    low, high = value.start, value.end
    if isinstance(low, int):  # by a cast
        raise UserError(f"{text}: whole numbers are a range, as in {key}=range(2,10)")
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise UserError(f"{text}: low must be below high, as in {key}=interval(0.1,1)")
    log = "log" in value.tags or key in LOGARITHMIC
    if log and low <= 0:
        raise UserError(f"{text}: a log scale begins above 0, not at {low:g}")
    return Dimension(key, (), float(low), float(high), log)
