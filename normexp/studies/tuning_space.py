"""What a search varies: Hydra's own sweep grammar read as a search space. Knows no Optuna."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
)

from normexp.errors import UserError

Point = Mapping[str, str]  # key to the value as it is typed on the command line
EDGE = 0.05  # the part of an interval at either end that counts as its edge
DIGITS = 4  # significant digits of a value that is drawn from an interval


@dataclass(frozen=True)
class Choice:
    """`choice(a,b)` or `range(1,4)`: the values as texts, in their order."""

    key: str
    texts: tuple[str, ...]

    def ends(self) -> tuple[str, str]:
        return self.texts[0], self.texts[-1]

    def is_at_edge(self, text: str) -> bool:
        """Whether a number is the least or greatest of at least three; words have no edge."""
        try:
            numbers = sorted(float(value) for value in self.texts)
            return len(numbers) > 2 and float(text) in (numbers[0], numbers[-1])
        except ValueError:
            return False

    def describe(self) -> str:
        return f"{self.key}=choice({','.join(self.texts)})"


@dataclass(frozen=True)
class Range:
    """`interval(low,high)`, both ends included: `log` draws evenly in log(x), `whole` integers."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def ends(self) -> tuple[str, str]:
        return self.text_of(self.low), self.text_of(self.high)

    def text_of(self, value: float) -> str:
        """The value as typed: four significant digits, never beyond the ends."""
        if self.whole:
            return str(int(value))
        rounded = float(f"{value:.{DIGITS}g}")
        return repr(min(max(rounded, self.low), self.high))

    def is_at_edge(self, text: str) -> bool:
        """Whether a value lies in the outermost 5 % of the interval, on its own scale."""
        scale = math.log if self.log else float
        low, high, value = scale(self.low), scale(self.high), scale(float(text))
        return not EDGE <= (value - low) / (high - low) <= 1 - EDGE

    def describe(self) -> str:
        inner = f"interval({self.low:g},{self.high:g})"
        inner = f"int({inner})" if self.whole else inner
        return f"{self.key}=tag(log,{inner})" if self.log else f"{self.key}={inner}"


Dimension = Choice | Range


@dataclass(frozen=True)
class Space:
    """The dimensions of a search; at least one."""

    dimensions: tuple[Dimension, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dimension.key for dimension in self.dimensions)

    def num_points(self) -> int | None:
        """How many points a space of choices alone has; None where there is an interval."""
        if not all(isinstance(dimension, Choice) for dimension in self.dimensions):
            return None
        return math.prod(len(d.texts) for d in self.dimensions if isinstance(d, Choice))

    def points(self) -> Iterator[dict[str, str]]:
        """Every point of a space of choices alone; the first key slowest."""
        texts = [d.texts for d in self.dimensions if isinstance(d, Choice)]
        yield from (dict(zip(self.keys, point, strict=True)) for point in itertools.product(*texts))

    def probes(self) -> Iterator[dict[str, str]]:
        """The low point, then it with one key at another of its choices or at its upper end."""
        low = {dimension.key: dimension.ends()[0] for dimension in self.dimensions}
        yield low
        for dimension in self.dimensions:
            others = dimension.texts[1:] if isinstance(dimension, Choice) else dimension.ends()[1:]
            yield from (low | {dimension.key: text} for text in others)

    def edges(self, point: Point) -> list[Dimension]:
        """The dimensions in which a point lies at the edge of what was searched."""
        return [d for d in self.dimensions if d.is_at_edge(point[d.key])]

    def describe(self) -> str:
        return " ".join(dimension.describe() for dimension in self.dimensions)


def is_searched(override: Override) -> bool:
    """Whether an override is a dimension: choice, range or interval; `a,b` is a grid instead."""
    if not override.is_sweep_override():
        return False
    value = override.value()
    simple = isinstance(value, ChoiceSweep) and value.simple_form
    return isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep) and not simple


def read_space(overrides: Sequence[Override]) -> Space:
    """The space of those overrides that are searched. Raises UserError for one without values."""
    return Space(tuple(_dimension(override) for override in overrides))


def _dimension(override: Override) -> Dimension:
    value, key, text = override.value(), override.get_key_element(), str(override.input_line)
    assert isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep)
    unknown = sorted(value.tags - {"log"})
    if unknown:
        raise UserError(f"{text}: tag {unknown[0]} is unknown; the one tag is log")
    if isinstance(value, IntervalSweep):
        return _interval(value, key, text)
    if value.tags:
        raise UserError(f"{text}: only an interval has a log scale; take the tag away")
    if isinstance(value, RangeSweep):
        texts = [_number_text(number) for number in value.range()]
    else:
        texts = list(override.sweep_string_iterator())
    unique = tuple(dict.fromkeys(texts))
    if len(unique) < 2:
        raise UserError(f"{text}: {len(unique)} value to search in; name two or more, or {key}=...")
    return Choice(key, unique)


def _interval(value: IntervalSweep, key: str, text: str) -> Range:
    low, high = value.start, value.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{text}: an interval has two ends, interval(low,high)")
    if low >= high:
        raise UserError(f"{text}: low must be below high; try interval({high:g},{low:g})")
    log = "log" in value.tags
    if log and low <= 0:
        raise UserError(f"{text}: a log scale begins above 0, not at {low:g}")
    return Range(key, low, high, log, whole=isinstance(low, int) and isinstance(high, int))


def _number_text(number: float) -> str:
    return str(number) if isinstance(number, int) else repr(float(f"{number:.12g}"))  # no 0.1 + 0.2
