"""How reports show a metric: name, unit, direction, tolerance and digits.

Imported while training, so this file imports neither pandas, scipy nor altair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from normexp.verdicts.interval import Interval

# The main metric is the first of these that was recorded.
PREFERRED = (
    "test/accuracy",
    "test/iou",
    "test/bits_per_byte",
    "test/loss",
    "val/accuracy",
    "val/iou",
    "val/bits_per_byte",
    "val/loss",
)
OF_TEST = [name for name in PREFERRED if name.startswith("test/")]
OF_VALIDATION = [name for name in PREFERRED if name.startswith("val/")]
UNIFORM_BITS = 8.0  # bits per byte that a diverged language model counts as
MAX_DIGITS = 4
BEST = "●"  # the mark of a norm that may be the best
FEW_SEEDS = 3  # so many seeds or fewer are shown, without an interval
LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity", "error")
NOISE = 1e-12  # a smaller number is a rounded 0
SMALL, LARGE = 1e-4, 1e6  # numbers outside have an exponent


class Kind(NamedTuple):
    """What metrics of one kind have in common; see Metric."""

    label: str
    unit: str
    scale: float = 1.0
    digits: int = 3
    tolerance: float = 0.0
    least: float = 0.0


KINDS = {
    "accuracy": Kind("accuracy (%)", "pp", 100.0, 1, tolerance=1.0),
    "iou": Kind("IoU per image (%)", "pp", 100.0, 1, tolerance=1.0),
    "miou": Kind("IoU over classes (%)", "pp", 100.0, 1, tolerance=1.0),
    "pixel_accuracy": Kind("pixel accuracy (%)", "pp", 100.0, 1, tolerance=1.0),
    "pixel_accuracy_empty": Kind("pixel accuracy in empty images (%)", "pp", 100.0, 1, 1.0),
    "loss": Kind("loss (nats)", "nats", tolerance=0.05),
    "bits_per_byte": Kind("bits per byte", "bits per byte", tolerance=0.02),
}


@dataclass(frozen=True)
class Metric:
    """A metric as reports show it.

    label: axis title, with the unit
    unit: unit of a difference
    scale: factor from recorded to shown values
    tolerance: smaller differences, in `unit`, count as none
    digits: minimum number of decimals
    least: a bound of the values; -inf if none is known
    chosen_by: the metric by which a learning rate is chosen; None: its own on validation data
    chance_level: what a diverged run counts as; None: as `chance` says
    """

    name: str
    label: str
    unit: str
    scale: float
    higher_is_better: bool
    tolerance: float
    digits: int
    least: float
    chosen_by: Metric | None = None
    chance_level: float | None = None

    @property
    def kind(self) -> str:
        """`accuracy` of `test/accuracy@precise`."""
        return self.name.partition("@")[0].split("/")[-1]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The range of the values; None if it is not known."""
        return (0.0, 100.0) if self.unit == "pp" else None

    @property
    def limit(self) -> float:
        """The greatest possible difference."""
        return math.inf if self.bounds is None else self.bounds[1] - self.bounds[0]

    def chance(self, share: float | None) -> float | None:
        """What a diverged run counts as: always the most frequent class, or uniform bits.

        share: the share of that class; None if not known, and then there is no chance level
        """
        if self.chance_level is not None:
            return self.chance_level
        if self.kind == "bits_per_byte":
            return UNIFORM_BITS
        if share is None:
            return None
        return {"accuracy": self.scale * share, "loss": -math.log(share)}.get(self.kind)

    @property
    def sign(self) -> float:
        """Values times this are higher if they are better."""
        return 1.0 if self.higher_is_better else -1.0

    @property
    def worst(self) -> float:
        """The value that an unfinished run counts as when points of a search are compared."""
        return 0.0 if self.higher_is_better else math.inf

    def mean_over(self, values: Iterable[float | None]) -> float:
        """The mean over runs; one without a value, such as an unfinished one, counts as `worst`."""
        mean, _ = over_seeds([self.worst if value is None else value for value in values])
        return mean

    @property
    def selection_name(self) -> str:
        """The metric by which a learning rate is chosen: never one on test data."""
        if self.chosen_by:
            return self.chosen_by.name
        split, _, rest = self.name.partition("/")
        return f"val/{rest.partition('@')[0]}" if split == "test" else self.name


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """The number that stands for several seeds, and how far they spread; NaN for one alone."""
    has_spread = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.fmean(values), statistics.stdev(values) if has_spread else math.nan


def direction_of(metric: str) -> str:
    """`min` or `max`: which way a metric improves, such as val/loss or test/accuracy@precise."""
    kind = metric.partition("@")[0].rpartition("/")[2]
    return "min" if any(word in kind for word in LOWER_IS_BETTER) else "max"


def describe_metric(name: str, tolerance: float | None = None) -> Metric:
    """The metric of that name. tolerance: None: that of its kind."""
    path, _, suffix = name.partition("@")
    split, _, kind_name = path.rpartition("/")
    kind = KINDS.get(kind_name, Kind(kind_name.replace("_", " "), "", least=-math.inf))
    label = f"{split} {kind.label}".strip()
    if suffix == "whole":
        label += ", whole images"
    elif suffix.startswith("tiles"):
        label += f", in {suffix}"
    elif suffix:
        label += f", at {suffix}x{suffix} pixels" if suffix.isdigit() else f", {suffix} statistics"
    return Metric(
        name=name,
        label=label,
        unit=kind.unit,
        scale=kind.scale,
        higher_is_better=direction_of(name) == "max",
        tolerance=kind.tolerance if tolerance is None else tolerance,
        digits=kind.digits,
        least=kind.least,
    )


def choose_metric(
    available: Collection[str], wanted: str | Metric | None, tolerance: float | None
) -> Metric | None:
    """`wanted`, or the first metric of PREFERRED if None; None if it is not available."""
    if isinstance(wanted, Metric):
        return wanted if wanted.name in available else None
    names = PREFERRED if wanted is None else (wanted,)
    found = next((name for name in names if name in available), None)
    return None if found is None else describe_metric(found, tolerance)


def is_at_chance(accuracy: float | None, chance: float | None, num_samples: int) -> bool:
    """True if a run is indistinguishable from chance: at most two standard errors above it.

    Two standard errors of few samples are much, so a tenth of the way to 1 is the most. No score
    of samples between 0 and 1 has a larger error than right and wrong, so an IoU fits as well.

    accuracy: on the test split, 0 to 1; or the IoU per image
    chance: the same of always naming the most frequent class
    num_samples: of the test split; 0: not known, and the error counts as 0
    """
    if accuracy is None or chance is None or chance >= 1:  # there is one class
        return False
    error = math.sqrt(chance * (1 - chance) / num_samples) if num_samples else 0.0
    return accuracy <= chance + min(2 * error, 0.1 * (1 - chance))


@dataclass(frozen=True)
class Estimate:
    """A number of a table with its interval, or with the values of its few seeds.

    digits: the fewest decimals; more for a narrow interval, or one that would seem to touch 0
    is_signed: a difference
    is_best: it may be the best of its column
    words: a text that says the same
    """

    interval: Interval
    digits: int
    seeds: Collection[float] = ()
    is_signed: bool = False
    is_best: bool = False
    words: str = ""

    @property
    def bounds(self) -> list[float]:
        """Both bounds of the interval; none where they are not known."""
        low, high = self.interval.low, self.interval.high
        return [] if low is None or high is None else [low, high]

    @property
    def decimals(self) -> int:
        """Enough digits to show the half width, and a bound near 0 as different from 0."""
        low, high = self.bounds or [self.interval.estimate or 0.0] * 2
        sizes = [(high - low) / 2]
        if low * high > 0:
            sizes.append(min(abs(low), abs(high)))
        enough = [math.ceil(-math.log10(size)) for size in sizes if size > NOISE]
        return min(max(self.digits, *enough, 0), MAX_DIGITS)

    def numbers(self, decimals: int) -> list[str]:
        """The number, then its bounds or seeds; very small and large ones have an exponent."""
        if self.interval.estimate is None:
            return []
        few = sorted(self.seeds) if 1 < len(self.seeds) <= FEW_SEEDS else []
        values = [self.interval.estimate, *(self.bounds or few)]
        size = max(map(abs, values))
        style = f"z.{decimals}f" if SMALL <= size < LARGE or size <= NOISE else ".2e"
        texts = [f"{value:{style}}" for value in values]
        if self.is_signed:
            texts[0] = f"{values[0]:+{style}}"
        return texts

    def named(self, head: str) -> dict[str, float | bool | None]:
        """The number and its bounds under names of their own, for programs."""
        named: dict[str, float | bool | None] = {head: self.interval.estimate}
        named[f"{head} low"] = self.interval.low
        named[f"{head} high"] = self.interval.high
        if self.is_best:
            named[f"{head} may be best"] = True
        return named

    def joined(self, numbers: Sequence[str]) -> str:
        """`1.2 [0.6, 1.9]`, or of a few seeds `1.2 (0.9, 1.5)`; `-` without a value."""
        if not numbers:
            return "-"
        others = ", ".join(numbers[1:])
        if self.bounds:
            return f"{numbers[0]} [{others}]"
        return f"{numbers[0]} ({others})" if others else numbers[0]

    def __str__(self) -> str:
        text = self.words or self.joined(self.numbers(self.decimals))
        return f"{text} {BEST}" if self.is_best else text
