"""How reports show a metric: name, unit, direction, tolerance and digits.

Imported while training, so this file imports neither pandas, scipy nor altair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normexp.records.result import Result
    from normexp.stats.interval import Interval

# The main metric is the first of these that was recorded.
PREFERRED = (
    "test/accuracy",
    "test/bits_per_byte",
    "test/loss",
    "val/accuracy",
    "val/bits_per_byte",
    "val/loss",
)
# Smaller differences count as none.
MARGINS = {"accuracy": 1.0, "bits_per_byte": 0.02, "loss": 0.05}
UNIFORM_BITS = 8.0  # per byte, of a diverged language model
LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity", "error")
MAX_DIGITS = 4
FEW_SEEDS = 3  # or fewer: they are shown themselves, without an interval
NOISE, SMALL, LARGE = 1e-12, 1e-4, 1e6  # between SMALL and LARGE numbers have no exponent


@dataclass(frozen=True)
class Metric:
    """A metric as reports show it.

    label: axis title, with the unit
    unit: unit of a difference
    scale: factor from recorded to shown values
    tolerance: smaller differences, in `unit`, count as none
    digits: minimum number of decimals
    """

    name: str
    label: str
    unit: str
    scale: float
    higher_is_better: bool
    tolerance: float
    digits: int

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

        share: of that class; None, also as the result: not known
        """
        kind = self.name.partition("@")[0].split("/")[-1]
        if kind == "bits_per_byte":
            return UNIFORM_BITS
        if share is None:
            return None
        return {"accuracy": self.scale * share, "loss": -math.log(share)}.get(kind)

    @property
    def worst(self) -> float:
        """The value that an unfinished run counts as when points of a search are compared."""
        return 0.0 if self.higher_is_better else math.inf

    def mean_over(self, results: Sequence[Result]) -> float:
        """The recorded mean over runs; an unfinished run counts as `worst`."""
        return statistics.fmean(
            run.metrics.get(self.name, self.worst) if run.status == "finished" else self.worst
            for run in results
        )

    @property
    def selection_name(self) -> str:
        """The metric by which a learning rate is chosen: never one on test data."""
        split, _, rest = self.name.partition("/")
        return f"val/{rest.partition('@')[0]}" if split == "test" else self.name

    def format(self, interval: Interval) -> str:
        """`1.2 [0.6, 1.9] pp`."""
        return f"{format_interval(interval, self.digits)} {self.unit}".strip()


def describe_metric(name: str, tolerance: float | None = None) -> Metric:
    """The metric of that name; tolerance: instead of that of MARGINS."""
    path, _, statistics = name.partition("@")
    split, _, kind = path.rpartition("/")
    words = f"{split} {kind.replace('_', ' ')}".strip()
    suffix = f", {statistics} statistics" if statistics else ""
    higher = not any(word in kind for word in LOWER_IS_BETTER)
    known = {
        "accuracy": (f"{words} (%)", "pp", 100.0, 1),
        "loss": (f"{words} (nats)", "nats", 1.0, 3),
        "bits_per_byte": (words, "bits per byte", 1.0, 3),
    }
    label, unit, scale, digits = known.get(kind, (words, "", 1.0, 3))
    return Metric(
        name=name,
        label=label + suffix,
        unit=unit,
        scale=scale,
        higher_is_better=higher,
        tolerance=MARGINS.get(kind, 0.0) if tolerance is None else tolerance,
        digits=digits,
    )


def choose_metric(available: Collection[str], wanted: str | None = None) -> str | None:
    """`wanted`, or the first metric of PREFERRED if None; None if it is not available."""
    names = PREFERRED if wanted is None else (wanted,)
    return next((name for name in names if name in available), None)


def is_at_chance(accuracy: float | None, chance: float | None, num_samples: int) -> bool:
    """True if a run is not told from chance: above it by at most two standard errors of chance.

    Of few samples two standard errors are much, so a tenth of the way to 1 is the most.

    accuracy: on the test split, 0 to 1
    chance: the accuracy there of always naming the most frequent class
    num_samples: of the test split; 0: not known, and the error counts as 0
    """
    if accuracy is None or chance is None or chance >= 1:  # one class
        return False
    error = math.sqrt(chance * (1 - chance) / num_samples) if num_samples else 0.0
    return accuracy <= chance + min(2 * error, 0.1 * (1 - chance))


def format_interval(interval: Interval, digits: int) -> str:
    """`1.2 [0.6, 1.9]` with at least `digits` decimals; `1.2` without bounds, `-` without a value.

    The number of decimals follows the width of the interval, and a number or a bound that is not 0
    is not shown as 0. Very small and very large numbers have an exponent.
    """
    if interval.estimate is None:
        return "-"
    bounds = [] if interval.low is None or interval.high is None else [interval.low, interval.high]
    values = [interval.estimate, *bounds]
    style = f"z.{_digits_of(min(bounds or values), max(bounds or values), digits)}f"
    if not (size := max(map(abs, values))) < LARGE or NOISE < size < SMALL:
        style = ".2e"
    estimate, *ends = (f"{x:{style}}" for x in values)
    return f"{estimate} [{', '.join(ends)}]" if ends else estimate


def signed(gap: Interval, metric: Metric) -> str:
    """`+1.2 [0.6, 1.9]`: a difference; `-` without a value."""
    shown = format_interval(gap, metric.digits)
    return shown if shown.startswith("-") else f"+{shown}"


def format_mean(interval: Interval, metric: Metric, seeds: Collection[float] = ()) -> str:
    """`96.0 [95.2, 96.7]`, or of a few seeds `96.0 (95.8, 96.2)`.

    Every mean of a metric has the same decimals, and one more where the interval has no width.
    """
    if interval.estimate is None:
        return "-"
    digits = metric.digits
    if interval.low is None or interval.high is None:
        shown = f"{interval.estimate:z.{digits}f}"
        known = ", ".join(f"{value:z.{digits}f}" for value in sorted(seeds))
        return f"{shown} ({known})" if 1 < len(seeds) <= FEW_SEEDS else shown
    values = (interval.estimate, interval.low, interval.high)
    if not SMALL < max(map(abs, values)) < LARGE:
        return format_interval(interval, digits)
    digits += interval.high - interval.low < 10**-digits
    return "{} [{}, {}]".format(*(f"{value:z.{digits}f}" for value in values))


def _digits_of(low: float, high: float, digits: int) -> int:
    half_width = (high - low) / 2
    has_width = half_width > 1e-9 * max(abs(low), abs(high))  # else only floating-point noise
    wanted = max(digits, math.ceil(-math.log10(half_width))) if has_width else digits
    excludes_zero = low > 0 or high < 0
    nearest = min(abs(low), abs(high))
    while excludes_zero and nearest > NOISE and wanted < MAX_DIGITS and not round(nearest, wanted):
        wanted += 1
    return min(wanted, MAX_DIGITS)
