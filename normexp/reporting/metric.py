"""What a metric is called on an axis, which way is better, and which difference is small."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from normexp.errors import UserError

# The first of these that a setting has is its main metric.
PREFERRED = (
    "test/accuracy",
    "test/bits_per_byte",
    "test/loss",
    "val/accuracy",
    "val/bits_per_byte",
    "val/loss",
)
LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity", "error")


@dataclass(frozen=True)
class Metric:
    """A metric as reports show it: values are multiplied by `scale`.

    label: axis title with its unit
    unit: the word behind a difference
    tolerance: a difference within it, in `unit`, is called a tie
    digits: decimals at least
    """

    name: str
    label: str
    unit: str
    scale: float
    higher_is_better: bool
    tolerance: float
    digits: int

    @property
    def tolerance_words(self) -> str:
        """`1 point`, `0.05 nats`."""
        unit = self.unit.removesuffix("s") if self.tolerance == 1 else self.unit
        return f"{self.tolerance:g} {unit}".strip()

    @property
    def selection_name(self) -> str:
        """The metric on which a learning rate may be chosen: never one on test."""
        split, _, rest = self.name.partition("/")
        return f"val/{rest.partition('@')[0]}" if split == "test" else self.name


def describe_metric(name: str, tolerance: float | None = None) -> Metric:
    """Label, unit and direction of a metric by its name; `tolerance` overrides the default."""
    path, _, statistics = name.partition("@")
    split, _, kind = path.rpartition("/")
    words = f"{split} {kind.replace('_', ' ')}".strip()
    suffix = f", {statistics} statistics" if statistics else ""
    higher = not any(word in kind for word in LOWER_IS_BETTER)
    known = {
        "accuracy": (f"{words} (%)", "points", 100.0, 1.0, 1),
        "loss": (f"{words} (nats)", "nats", 1.0, 0.05, 3),
        "bits_per_byte": (words, "bits per byte", 1.0, 0.02, 3),
    }
    label, unit, scale, default, digits = known.get(kind, (words, "", 1.0, 0.0, 3))
    limit = default if tolerance is None else tolerance
    return Metric(name, label + suffix, unit, scale, higher, limit, digits)


def choose_metric(available: Collection[str], asked: str | None) -> str | None:
    """The metric of a setting: the one asked for, else the first preferred one it has."""
    if asked is not None:
        return asked if asked in available else None
    return next((name for name in PREFERRED if name in available), None)


def require_metric(asked: str | None, available: Collection[str]) -> None:
    """UserError with the nearest names where no run at all has the metric asked for."""
    if asked is None or asked in available:
        return
    nearest = difflib.get_close_matches(asked, available, n=3, cutoff=0.4) or sorted(available)[:6]
    names = ", ".join(nearest) or "none at all"
    raise UserError(f"metric={asked}: no run has it; these are there: {names}")
