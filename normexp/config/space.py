"""The space of a search, read from Hydra's sweep grammar, and its points.

All points are known in advance: a grid of choices, or the first points of one scrambled Sobol
sequence (Owen, 1998), so that a longer search extends a shorter one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from normexp.errors import UserError

DIGITS = 4  # significant digits of a value that is drawn from an interval
SCRAMBLE = 0  # seed of the Sobol sequence: every search of a space has the same points
LOGARITHMIC = ("lr",)  # keys whose intervals have a log scale without a tag
DRAWN = 8  # points drawn for each one wanted, since rounded values and choices repeat


@dataclass(frozen=True)
class Choice:
    """`choice(a,b)` or `range(1,4)`: the values as texts, in order."""

    key: str
    texts: tuple[str, ...]

    def at(self, fraction: float) -> str:
        """The choice at a fraction in [0, 1) of the list."""
        return self.texts[int(fraction * len(self.texts))]


@dataclass(frozen=True)
class Range:
    """`interval(low,high)`, both ends included; `log`: uniform in log(x); `whole`: integers."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def at(self, fraction: float) -> str:
        """The value at a fraction in [0, 1) of the interval, on its scale."""
        low, high = self.low, self.high + self.whole  # each integer has an equal share
        if self.log:
            return self.text_of(low * (high / low) ** fraction)
        return self.text_of(low + fraction * (high - low))

    def text_of(self, value: float) -> str:
        """The value as typed: four significant digits, never beyond the ends."""
        if self.whole:
            return str(min(int(value), int(self.high)))
        rounded = float(f"{value:.{DIGITS}g}")
        return repr(min(max(rounded, self.low), self.high))


Dimension = Choice | Range


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

        All combinations of choices, the first key slowest, if there are no more than `count`;
        otherwise the first different points of the Sobol sequence.
        """
        choices = [d.texts for d in self.dimensions if isinstance(d, Choice)]
        is_grid = len(choices) == len(self.dimensions)
        if is_grid and math.prod(map(len, choices)) <= count:
            rows = itertools.product(*choices)
        else:
            drawn = _sobol(len(self.dimensions), DRAWN * count)
            pairs = (zip(self.dimensions, row, strict=True) for row in drawn)
            rows = [tuple(dimension.at(u) for dimension, u in pair) for pair in pairs]
        unique = list(dict.fromkeys(rows))[:count]
        return [dict(zip(self.keys, row, strict=True)) for row in unique]


def _sobol(num_dimensions: int, count: int) -> list[list[float]]:
    """At least `count` points of one sequence in [0, 1)^d; more points begin with the same ones."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(num_dimensions, scramble=True, rng=SCRAMBLE)
    return sequence.random_base2(math.ceil(math.log2(count))).tolist()


def read_space(overrides: Sequence[Override]) -> Space:
    """Reads the space of the searched overrides. Raises UserError for one without values."""
    return Space(tuple(_dimension(override) for override in overrides))


def _dimension(override: Override) -> Dimension:
    value, key, text = override.value(), override.get_key_element(), str(override.input_line)
    assert isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep)
    unknown = sorted(value.tags - {"log"})
    if unknown:
        raise UserError(f"{text}: unknown tag {unknown[0]}; the only tag is log")
    if isinstance(value, IntervalSweep):
        return _interval(value, key, text)
    if value.tags:
        raise UserError(f"{text}: only an interval has a log scale; remove the tag")
    if isinstance(value, RangeSweep):  # without the digits of 0.1 + 0.2
        numbers = list(value.range())
        texts = [str(x if isinstance(x, int) else float(f"{x:.12g}")) for x in numbers]
    else:
        texts = list(override.sweep_string_iterator())
    unique = tuple(dict.fromkeys(texts))
    if len(unique) < 2:
        raise UserError(f"{text}: {len(unique)} values to search; name two or more, or {key}=...")
    return Choice(key, unique)


def _interval(value: IntervalSweep, key: str, text: str) -> Range:
    low, high = value.start, value.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{text}: an interval has two ends, interval(low,high)")
    if low >= high:
        raise UserError(f"{text}: low must be below high; try interval({high:g},{low:g})")
    log = "log" in value.tags or key in LOGARITHMIC
    if log and low <= 0:
        raise UserError(f"{text}: a log scale begins above 0, not at {low:g}")
    return Range(key, low, high, log, whole=isinstance(low, int) and isinstance(high, int))
